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
from paellapy.instrument.gpu_model.costs import BlockCost
from paellapy.instrument.gpu_model.model import SmModel
from paellapy.scheduler.backends.base import Backend, Bounds, Launches, LoadedModel, TracedBlocks
from paellapy.scheduler.backends.virtual_launches import (
    Piece,
    PieceTracer,
    ProgramCosts,
    Step,
    VirtualLaunches,
    segment_shares,
)
from paellapy.scheduler.backends.virtual_loop import VirtualThread
from paellapy.scheduler.backends.virtual_memory import VirtualMemory, VirtualWeights, moved, needed_end, record
from paellapy.scheduler.core import codes
from paellapy.scheduler.core.rings import Bell
from paellapy.scheduler.core.state import State
from paellapy.scheduler.models.memory import Instance, InstancePlan
from paellapy.scheduler.models.model import Model
from paellapy.scheduler.models.program import Cuts, Marks, Program
from paellapy.scheduler.models.tensors import Arrays
from paellapy.scheduler.models.weights import COPY_BYTES, Layout, WeightRange

# Times on the virtual GPU: of nodes, of segments, and of programs that run at once, each on an SM model of its own.


StepsOf = Callable[
    [Program, int, int, int], list[Step]
]  # of a program's nodes from one to before another, in a partition


def node_times_ns(model: SmModel, program: Program, costs: Sequence[BlockCost | None]) -> list[float]:
    """The time of each node, when nodes run one after the other."""
    stream, graph = model.stream(), model.graph()
    handles = []
    for item, cost in zip(program.body, costs, strict=True):
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


def segment_times_ns(
    model: SmModel, launches: Launches, steps: StepsOf, partition: int
) -> tuple[list[float], float, float]:
    """The time of each segment, of the whole program, and of the whole program inside a partition (0: not confined)."""
    times = []
    whole = (0, len(launches.program.nodes))
    confined = [(*whole, partition)] if partition else []
    for first, end, number in [*((a, b, 0) for a, b in (*launches.bounds, whole)), *confined]:
        piece = Piece(launches.program.body[first:end], steps(launches.program, first, end, number))
        stream = model.stream()
        before = piece.place(model, stream, model.now_ns).last
        last = piece.place(model, stream, model.now_ns).last
        model.run()
        # Queued behind another launch, as in a busy engine: the gap between two launches is included.
        times.append(model.finish_ns(last) - model.finish_ns(before))
    n = len(launches.bounds)
    return times[:n], times[n], times[n + 1] if confined else 0.0


def saturated_ns(model: SmModel, instances: Sequence[Launches], rounds: int, steps: StepsOf) -> float:
    """Time per run when all instances launch their whole programs repeatedly and at once, each on all SMs."""
    program = instances[0].program
    piece = Piece(program.body, steps(program, 0, len(program.nodes), 0))
    streams = [model.stream() for _ in instances]
    for _ in range(rounds):
        for stream in streams:
            piece.place(model, stream, 0.0)
    model.run()
    return float(model.now_ns) / (rounds * len(instances))


_LEVELS = 5  # stream priorities above the default; there are none below
_HISTORY = 1 << 12  # finished commands that the SM model keeps: none is read here, and each takes 240 bytes


class VirtualBackend(Backend):
    device: VirtualDevice
    computes_in_python = True
    shares_are_free = True

    def __init__(self, device: VirtualDevice) -> None:
        self.device = device
        self.sm = SmModel(device.part, timing=device.model.timing, history=_HISTORY)
        self._costs = ProgramCosts()
        self.launches = VirtualLaunches(self.sm, self._costs)
        self._ranges: list[tuple[int, int]] = []  # first SM and number of SMs of each partition
        self._partitions: list[int] = []  # their numbers in the SM model
        self._pools: dict[int, int] = {}  # rows of streams, by priority
        self._thread = VirtualThread(self.sm, self.launches)
        self._weight_stream: int | None = None

    def default_memory_bytes(self) -> int:
        return int(self.device.part.memory_bytes * 0.9)

    def fingerprint(self) -> str:
        how = f"partitions {self.partitions} of {self.partition_share}"
        return f"{self.device.title} {self.device.part!r} {self.sm.timing!r} {self.device.costs.factors!r} {how}"

    def open_partitions(self, count: int, share: float) -> list[set[int]]:
        self.partitions, self.partition_share, sms = count, share, self.device.sm_count
        self._ranges = [(round(k * sms / count), math.ceil(share * sms)) for k in range(count)]
        self._partitions = self._add_partitions(self.sm)
        return [{(first + k) % sms for k in range(n)} for first, n in self._ranges]

    def _add_partitions(self, model: SmModel) -> list[int]:
        return [model.partition(first, n) for first, n in self._ranges]

    def _new_model(self) -> SmModel:
        """A separate SM model for measurements."""
        model = SmModel(self.device.part, timing=self.sm.timing)
        self._add_partitions(model)
        return model

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

    def run_segment(self, launches: Launches, k: int) -> None:
        with self._thread.pause(), np.errstate(all="ignore"):
            self.launches.pieces[launches.handles[k]].run()

    def queue(self, nbytes: int, word: int) -> None:
        """Copies weights to the GPU on their own stream, in small pieces, and then sets the word."""
        with self._thread.pause() as sm:
            if self._weight_stream is None:
                self._weight_stream = sm.stream()
            at = max(sm.now_ns, self._thread.host_ns())
            for first in range(0, nbytes, COPY_BYTES):
                n = min(COPY_BYTES, nbytes - first)
                last = sm.copy(self._weight_stream, n, "h2d", report=first + n == nbytes, submit_ns=at)
            self._thread.set_when("flight", last, word)

    # -- programs

    def capture(
        self, instance: Instance, weights: Arrays, batch: int, cuts: Cuts, marks: Marks | None = None,
        like: Program | None = None,
    ) -> Program:  # fmt: skip
        return record(self.device, instance, weights, batch, cuts, marks or {})

    def captured_again(self, program: Program, of: Instance, instance: Instance, marks: Marks) -> Program | None:
        return moved(program, of, instance, marks)

    def rehearse_all(self, model: Model, weights: Arrays, sizes: Sequence[int]) -> tuple[int, int]:
        self._costs.rehearsed.clear()
        with without_collection():
            return super().rehearse_all(model, weights, sizes)

    def rehearse(self, model: Model, weights: Arrays, batch: int, ran: tuple[Arrays, Arrays] | None = None) -> int:
        self.device.noted = []
        try:
            return super().rehearse(model, weights, batch, ran)
        finally:
            self._costs.rehearsed[batch], self.device.noted = self.device.noted, None

    def node_times_ns(self, program: Program) -> list[float]:
        model = SmModel(self.device.part, timing=self.sm.timing)
        return node_times_ns(model, program, self._costs.of(program))

    def wave_blocks(self, program: Program) -> list[int]:
        device = self.device
        return [n.wave_blocks(device.limits, device.sm_count) if n.kind == "kernel" else 0 for n in program.nodes]

    def cut(self, program: Program, bounds: Bounds, instance: Instance, confine: bool = False) -> Launches:
        partitions = [self._partitions[k] for k in instance.partitions] if confine else []
        with self._thread.pause():
            return self.launches.cut(program, bounds, instance, partitions)

    def segment_times_ns(self, launches: Launches, repeats: int, alone: bool) -> tuple[list[float], float, float]:
        # The model is exact, so one run on a separate SM model is enough.
        partition = self._partitions[0] if launches.confined else 0
        return segment_times_ns(self._new_model(), launches, self.launches.steps, partition)

    def saturated_ns(self, instances: Sequence[Launches], rounds: int) -> float:
        return saturated_ns(self._new_model(), instances, rounds, self.launches.steps)

    def grant(self, word: int) -> int:
        with self._thread.pause():
            return self.launches.grant(word)

    def segment_shares(self, launches: Launches, alone_ns: Sequence[float]) -> list[tuple[float, float]]:
        costs = self._costs.of(launches.program)
        return segment_shares(self.device.part, self.sm.timing, launches, costs, alone_ns)

    def release(self, launches: Launches) -> None:
        with self._thread.pause():
            self.launches.release(launches)

    def pool(self, state: State, priority: int) -> int:
        # As many levels as an H200's driver offers; CUDA clamps priorities to this range.
        level = max(0, min(priority, _LEVELS))
        if level not in self._pools:
            row = len(self._pools)
            with self._thread.pause():
                n = codes.OF_PARTITIONS + codes.QUEUES * int(state.core["partitions"][0])
                state.stream[row, :n] = [self.sm.stream(level) for _ in range(n)]
            self._pools[level] = row
        return self._pools[level]

    # -- the loop

    def start(self, state: State, bell: Bell, failed: Callable[[BaseException], None]) -> None:
        self._bell = bell
        self._thread.start(state, bell, failed, self.on_fault)

    def stop(self) -> None:
        self._thread.stop()

    def to_trace_ns(self, host_ns: int) -> int:
        return int(host_ns - self._thread.offset_ns)

    def call(self, function: Callable[[], None]) -> None:
        self._thread.call(function)

    def sm_totals(self) -> tuple[float, Any, Any]:
        if not self._thread.compiled.is_set():
            return 0.0, np.zeros(self.device.sm_count), np.zeros(self.device.sm_count)
        with self._thread.pause():
            return self.sm.use_until(self._thread.host_ns())

    # -- traces

    def begin_trace(self, records_per_sm: int, models: list[LoadedModel]) -> None:
        with self._thread.pause():
            if self._thread.tracer is not None:
                raise TraceError("the engine is being traced already; traces cannot be nested")
            self.sm.clear_blocks()
            self._thread.tracer, self.tracing = PieceTracer(self.device), True

    def end_trace(self, models: list[LoadedModel]) -> TracedBlocks:
        with self._thread.pause():
            tracer, self._thread.tracer, self.tracing = self._thread.tracer, None, False
            assert tracer is not None
            blocks = self.sm.blocks()
            self.sm.clear_blocks()
        return tracer.finish(blocks)
