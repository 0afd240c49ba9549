"""The virtual GPU behind the engine: recorded launches, computed data, and an SM model whose time follows real time.

A segment's data are computed when it is launched, in the order of launches. Its blocks enter the SM model, and its
completion word is set once the model's clock, which follows the host's, has passed their end. Where computing takes
longer than the modelled GPU would, time goes on meanwhile, as with a slow host. The core chooses the next launch when
the data of the one before are computed (`core.one_by_one`), so a request waits for one launch and not for all that the
GPU could hold.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from paellapy.instrument.device.virtual import VirtualDevice
from paellapy.instrument.env import without_collection
from paellapy.instrument.errors import TraceError
from paellapy.instrument.gpu_model.commands import Kernel
from paellapy.instrument.gpu_model.model import SmModel
from paellapy.scheduler.backends.base import Backend, Launches, LoadedModel, TracedBlocks
from paellapy.scheduler.backends.virtual_launches import (
    Piece,
    PieceTracer,
    ProgramCosts,
    VirtualLaunches,
    moved,
    needed_end,
    record,
    segment_shares,
)
from paellapy.scheduler.backends.virtual_loop import VirtualLoop
from paellapy.scheduler.backends.virtual_memory import VirtualMemory, VirtualWeights
from paellapy.scheduler.core import codes
from paellapy.scheduler.core.rings import Bell
from paellapy.scheduler.core.state import State
from paellapy.scheduler.models.memory import Instance, InstancePlan
from paellapy.scheduler.models.model import Model
from paellapy.scheduler.models.program import Cuts, Marks, Program
from paellapy.scheduler.models.tensors import Arrays
from paellapy.scheduler.models.weights import COPY_BYTES, Bounds, Layout, WeightRange

_LEVELS = 5  # stream priorities above the default, as many as an H200's driver offers; there are none below
_HISTORY = 1 << 12  # finished commands that the SM model keeps: none is read here, and each takes 240 bytes


class VirtualBackend(Backend):
    device: VirtualDevice
    computes_in_python = True
    shares_are_free = True

    def __init__(self, device: VirtualDevice) -> None:
        self.device = device
        self.sm = SmModel(device.part, timing=device.model.timing, history=_HISTORY)
        self.costs = ProgramCosts()
        self.launches = VirtualLaunches(self.sm, self.costs)
        self._ranges: list[tuple[int, int]] = []  # first SM and number of SMs of each partition
        self._partitions: list[int] = []  # their numbers in the SM model
        self._pools: dict[int, int] = {}  # rows of streams, by priority
        self._loop = VirtualLoop(self.sm, self.launches)
        self._weight_stream: int | None = None

    def default_memory_bytes(self) -> int:
        return int(self.device.part.memory_bytes * 0.9)

    def fingerprint(self) -> str:
        how = f"partitions {self.partitions} of {self.partition_share}"
        return f"{self.device.title} {self.device.part!r} {self.sm.timing!r} {self.device.costs.factors!r} {how}"

    def open_partitions(self, count: int, share: float) -> list[set[int]]:
        self.partitions, self.partition_share, sms = count, share, self.device.sm_count
        self._ranges = [(round(k * sms / count), math.ceil(share * sms)) for k in range(count)]
        self._partitions = [self.sm.partition(first, n) for first, n in self._ranges]
        return [{(first + k) % sms for k in range(n)} for first, n in self._ranges]

    # -- memory

    def instance_memory(self, plan: InstancePlan, arena: Any = None) -> VirtualMemory:
        return VirtualMemory(plan.device_bytes, plan.host_bytes, self.shared_slots, arena)

    def arena(self, nbytes: int) -> VirtualMemory:
        return VirtualMemory(nbytes, 0)

    def upload(self, model: Model) -> Arrays:
        return model.place(self.device)

    def weight_range(self, layout: Layout, chunk_bytes: int, map_bytes: int) -> VirtualWeights:
        return VirtualWeights(layout, chunk_bytes, self)

    def host_block(self, nbytes: int) -> VirtualMemory:
        return VirtualMemory(0, max(1, nbytes))

    def weight_ends(self, program: Program, weights: WeightRange) -> list[tuple[int, int]]:
        return [(end, end) for end in (needed_end(item, weights) for item in program.body)]

    def queue(self, nbytes: int, word: int) -> None:
        """Copies weights to the GPU on their own stream, in small pieces, and then sets the word."""
        with self._loop.pause() as sm:
            if self._weight_stream is None:
                self._weight_stream = sm.stream()
            at = max(sm.now_ns, self._loop.host_ns())
            for first in range(0, nbytes, COPY_BYTES):
                n = min(COPY_BYTES, nbytes - first)
                last = sm.copy(self._weight_stream, n, "h2d", report=first + n == nbytes, submit_ns=at)
            self._loop.set_when("flight", last, word)

    # -- programs

    def warm_up_all(self, model: Model, weights: Arrays, sizes: Sequence[int]) -> tuple[int, int]:
        self.costs.warm_ups.clear()
        with without_collection():
            return super().warm_up_all(model, weights, sizes)

    def warm_up(self, model: Model, weights: Arrays, batch: int, ran: tuple[Arrays, Arrays] | None = None) -> int:
        self.device.noted = []
        try:
            return super().warm_up(model, weights, batch, ran)
        finally:
            self.costs.warm_ups[batch], self.device.noted = self.device.noted, None

    def capture(
        self, instance: Instance, weights: Arrays, batch: int, cuts: Cuts, marks: Marks | None = None,
        like: Program | None = None,
    ) -> Program:  # fmt: skip
        return record(self.device, instance, weights, batch, cuts, marks or {})

    def copied(self, program: Program, of: Instance, instance: Instance, marks: Marks) -> Program | None:
        return moved(program, of, instance, marks)

    def cut(self, program: Program, bounds: Bounds, instance: Instance, confine: bool = False) -> Launches:
        partitions = [self._partitions[k] for k in instance.partitions] if confine else []
        with self._loop.pause():
            return self.launches.cut(program, bounds, instance, partitions)

    def launch_first(self, launches: Launches, wholes: bool, wait: bool = True) -> None:
        program = launches.program
        if program.instance == 0 and program.batch == program.model.batch[0]:  # the others share what this one makes
            for k in range(len(launches.handles)):
                self.run_segment(launches, k)

    def run_segment(self, launches: Launches, k: int) -> None:
        with self._loop.pause(), np.errstate(all="ignore"):
            self.launches.pieces[launches.handles[k]].run()

    def grant(self, word: int) -> int:
        with self._loop.pause():
            return self.launches.grant(word)

    def release(self, launches: Launches) -> None:
        with self._loop.pause():
            self.launches.release(launches)

    # -- measurements: each on an SM model of its own, which is exact, so one run is enough

    def _new_model(self) -> SmModel:
        model = SmModel(self.device.part, timing=self.sm.timing)
        for first, n in self._ranges:
            model.partition(first, n)
        return model

    def node_times_ns(self, program: Program) -> list[float]:
        model = self._new_model()
        stream, graph = model.stream(), model.graph()
        handles = []
        for item, cost in zip(program.body, self.costs.of(program), strict=True):
            node = item.node
            if cost is None:
                handles.append(model.copy(stream, node.nbytes, node.kind))
            else:
                takes = (node.blocks, node.threads, node.registers, node.shared_bytes)
                kernel = Kernel(*takes, cost=cost, cluster=node.cluster)
                handles.append(model.launch(stream, kernel, graph=graph, trace=False))
        model.run()
        ends = np.array([model.start_ns(handles[0]), *(model.finish_ns(h) for h in handles)])
        return [float(t) for t in np.diff(ends)]

    def segment_times_ns(self, launches: Launches, repeats: int, alone: bool) -> tuple[list[float], float, float]:
        model, whole, times = self._new_model(), (0, len(launches.program.nodes)), []
        confined = [(*whole, self._partitions[0])] if launches.confined else []
        for first, end, partition in [*((a, b, 0) for a, b in (*launches.bounds, whole)), *confined]:
            steps = self.launches.steps(launches.program, first, end, partition)
            piece, stream = Piece(launches.program.body[first:end], steps), model.stream()
            before = piece.place(model, stream, model.now_ns).last
            last = piece.place(model, stream, model.now_ns).last
            model.run()
            # Queued behind another launch, as in a busy engine: the gap between two launches is included.
            times.append(model.finish_ns(last) - model.finish_ns(before))
        n = len(launches.bounds)
        return times[:n], times[n], times[n + 1] if confined else 0.0

    def saturated_ns(self, instances: Sequence[Launches], rounds: int) -> float:
        model, program = self._new_model(), instances[0].program
        piece = Piece(program.body, self.launches.steps(program, 0, len(program.nodes), 0))
        streams = [model.stream() for _ in instances]
        for _ in range(rounds):
            for stream in streams:
                piece.place(model, stream, 0.0)
        model.run()
        return float(model.now_ns) / (rounds * len(instances))

    def segment_shares(self, launches: Launches, alone_ns: Sequence[float]) -> list[tuple[float, float]]:
        costs = self.costs.of(launches.program)
        return segment_shares(self.device.part, self.sm.timing, launches, costs, alone_ns)

    # -- the loop

    def pool(self, state: State, priority: int) -> int:
        level = max(0, min(priority, _LEVELS))  # CUDA clamps priorities too
        if level not in self._pools:
            row = len(self._pools)
            with self._loop.pause():
                n = codes.OF_PARTITIONS + codes.QUEUES * int(state.core["partitions"][0])
                state.stream[row, :n] = [self.sm.stream(level) for _ in range(n)]
            self._pools[level] = row
        return self._pools[level]

    def start(self, state: State, bell: Bell, failed: Callable[[BaseException], None]) -> None:
        self._bell = bell
        self.device.count_too(self.sm.lines)
        self._loop.start(state, bell, failed, self.on_fault)

    def call(self, function: Callable[[], None]) -> None:
        self._loop.call(function)

    def stop(self) -> None:
        self._loop.stop()
        self.device.count_no_more(self.sm.lines)

    def sm_totals(self) -> tuple[float, Any, Any]:
        if not self._loop.compiled.is_set():
            return 0.0, np.zeros(self.device.sm_count), np.zeros(self.device.sm_count)
        with self._loop.pause():
            return self.sm.use_until(self._loop.host_ns())

    # -- traces

    def begin_trace(self, records_per_sm: int, models: list[LoadedModel]) -> None:
        with self._loop.pause():
            if self._loop.tracer is not None:
                raise TraceError("the engine is being traced already; traces cannot be nested")
            self.sm.clear_blocks()
            self._loop.tracer, self.tracing = PieceTracer(self.device), True
            self.device.count_no_more(self.sm.lines)  # traced kernels write records instead
            self.device.count_anew()

    def end_trace(self, models: list[LoadedModel]) -> TracedBlocks:
        with self._loop.pause():
            tracer, self._loop.tracer, self.tracing = self._loop.tracer, None, False
            assert tracer is not None
            self.device.count_too(self.sm.lines)
            blocks = self.sm.blocks()
            self.sm.clear_blocks()
        return tracer.finish(blocks)

    def to_trace_ns(self, host_ns: int) -> int:
        return int(host_ns - self._loop.offset_ns)
