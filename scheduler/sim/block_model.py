"""Simulated time at the level of blocks: the dispatcher core drives the SM model, segment by segment."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from paellapy.instrument.device.virtual import VirtualDevice
from paellapy.instrument.env import versions
from paellapy.instrument.gpu_model.commands import Kernel, Program
from paellapy.instrument.gpu_model.costs import BlockCost
from paellapy.instrument.gpu_model.model import SmModel
from paellapy.instrument.gpu_model.parts import WARP, Part, Timing
from paellapy.instrument.numba_ext.link import compiled
from paellapy.instrument.records import BLOCK, LAUNCH, WARP_SHIFT
from paellapy.instrument.traces.trace import DeviceFacts
from paellapy.scheduler.backends.virtual import VirtualBackend
from paellapy.scheduler.backends.virtual_launches import Piece, PieceTracer
from paellapy.scheduler.core import codes
from paellapy.scheduler.core import state as st
from paellapy.scheduler.core.atomics import store_at
from paellapy.scheduler.core.profiles import Capacity, ModelProfile, SegmentProfile
from paellapy.scheduler.core.step import step
from paellapy.scheduler.engine.engine import Engine
from paellapy.scheduler.engine.trace import EngineTrace, TracedEngine, fill_engine_trace
from paellapy.scheduler.sim.segment_model import MOST_IN_VAIN
from paellapy.scheduler.sim.tables import SimGpu, load_until, more_records, next_news, note_warps, record_batch


@compiled
def _store(address: int, value: int) -> None:
    store_at(np.uint64(address), np.uint64(value))


def kernels_of(segment: SegmentProfile, timing: Timing, part: Part) -> list[Kernel]:
    """A segment's kernels, all equal, which together take its time alone and hold its footprint."""
    each_ns = max(segment.time_ns / segment.kernels - timing.graph_gap_ns, 1.0)
    warps = max(1, round(segment.warps / segment.blocks))
    registers = min(255, max(16, segment.registers // (segment.blocks * warps * WARP)))
    shared = segment.shared_bytes // segment.blocks
    if segment.bytes:
        # Memory traffic at shared rates, after a latency that makes up the rest of the time alone.
        moved = segment.bytes / segment.kernels
        cost, duration = BlockCost(bytes=moved / segment.blocks), None
        per_sm = timing.sm_bytes_per_clock * part.clock_mhz / 1000
        # GB/s is bytes/ns
        rate = min(part.bandwidth_gbps * timing.bandwidth_efficiency, min(segment.blocks, part.sms) * per_sm)
        latency = max(each_ns - moved / rate, 1.0)
    else:
        cost, duration, latency = None, each_ns, None
    kernel = Kernel(segment.blocks, min(warps, 32) * WARP, registers, shared, cost, duration, latency)
    return [kernel] * segment.kernels


class BlocksGpu:
    """The SM model as the GPU of a simulation. The load, the records and the request rows are those of `SimGpu`."""

    def __init__(self, part: Part, models: Sequence[ModelProfile], f: SimGpu, state: st.State, seed: int) -> None:
        timing = Timing.for_part(part)
        self.f = f
        self.s = state
        # Where the core assigns streams, every job has its own queue; where the hardware decides, jobs share queues.
        queues = int(f.sim["queues"][0]) if state.core["whole_always"][0] else 0
        self.sim = SmModel(
            part, seed, timing=timing, history=1 << 14, false_dependencies=queues > 0, connections=queues or None
        )
        self._streams = [self.sim.stream() for _ in range(codes.OF_PARTITIONS)]
        self.segments: dict[tuple[int, int, int], Program] = {}
        for m, model in enumerate(models):
            for k, program in enumerate(model.sizes.values()):
                kernels = [kernels_of(each, timing, part) for each in program]
                for i, each in enumerate(kernels):
                    self.segments[m, k, i] = self.sim.program(each)
                self.segments[m, k, codes.WHOLE] = self.sim.program([kernel for each in kernels for kernel in each])
        self.words: dict[int, int] = {}  # handle of a launch → its completion word
        self.capacity = Capacity.of(part.sms, part.sm, timing)
        self.resident = 0.0

    def run(self) -> SimGpu:
        """Runs until no more requests come and nothing is running."""
        in_vain = 0
        while in_vain <= MOST_IN_VAIN:
            now = self.sim.now_ns
            self._load(now)
            step(self.s, int(now))
            self._launch()
            self._collect()
            more = self.f.sim["next_arrival"][0] < len(self.f.arrivals) or self.f.sim["timers"][0] > 0
            in_vain = 0 if self.words or more else in_vain + 1
            following = next_news(self.f, self.s)
            if not self.words and following == np.inf:
                return self.f
            self.sim.run(None if following == np.inf else max(following, now), stop_on_completion=True)
            self._note(now)
            for handle in self.sim.completed():
                word = self.words.pop(int(handle), 0)
                if word:
                    self.f.sim["events"][0] += 1
                    _store(word, 1)
        return self.f

    def _load(self, now: float) -> None:
        while not load_until(self.f, self.s, now):
            self.f = more_records(self.f)

    def _launch(self) -> None:
        s = self.s
        for out in s.out[: s.core["out"][0]]:
            instance = int(out["instance"])
            self.words[self._start(instance, out)] = int(out["word"])
        s.core["out"][0] = 0

    def _start(self, instance: int, out: Any) -> int:
        """Puts the core's launch on the instance's stream; returns the handle of its last command."""
        program = self.segments[int(self.s.instance["model"][instance]), int(out["size"]), int(out["segment"])]
        return self.sim.launch_program(self.stream_of(instance), program, trace=False)

    def stream_of(self, instance: int) -> int:
        return self._streams[int(self.s.instance["stream_at"][instance])]

    def _collect(self) -> None:
        while n := record_batch(self.f, self.s):
            for entry in self.f.taken[:n]:
                self._ended(entry)

    def _ended(self, entry: Any) -> None:
        """A hook for subclasses: called with the completion of a request."""

    def _note(self, since: float) -> None:
        """Adds the time since then to the occupancy, with the warps that were resident at its beginning."""
        share = self.resident / self.capacity.warps
        note_warps(self.f, since, self.sim.now_ns - since, share, len(self.words))
        lines = self.sim.lines
        self.resident = float(((lines["started"] - lines["ended"]) >> np.uint64(WARP_SHIFT)).sum())


# -- with the models' own kernels: every block on its SM, as in an engine's trace


@dataclass(frozen=True, slots=True, eq=False)
class OwnKernels:
    """The kernels of loaded models, for a simulation of their profiles in the same order."""

    device: VirtualDevice
    pieces: dict[tuple[int, int, int], Piece]  # by model, size, and segment or WHOLE

    @classmethod
    def of(cls, engine: Engine, names: Sequence[str]) -> OwnKernels:
        backend = engine.backend
        assert isinstance(backend, VirtualBackend)
        loaded = {each.model.name: each for each in engine.loaded_rows().values()}
        pieces = {}
        for m, name in enumerate(names):
            for k, launches in enumerate(loaded[name].launches[0]):  # as in `engine.model_profile`
                for i, handle in [*enumerate(launches.handles), (codes.WHOLE, launches.whole)]:
                    pieces[m, k, i] = _copied(backend.launches.pieces[handle])
        return cls(backend.device, pieces)


def _copied(piece: Piece) -> Piece:
    """A copy for another SM model: a program stores where its costs are in the tables of one model."""
    return Piece(
        piece.items,
        [replace(s, commands=s.commands.copy(), epoch=-1) if isinstance(s, Program) else s for s in piece.steps],
    )


class TracedGpu(BlocksGpu):
    """The SM model in a simulation that launches the models' own kernels and records every block."""

    def __init__(
        self, part: Part, models: Sequence[ModelProfile], f: SimGpu, state: st.State, seed: int, own: OwnKernels
    ) -> None:
        super().__init__(part, (), f, state, seed)
        self._own, self._models = own, models
        self._tracer = PieceTracer(own.device)
        self._entries: list[Any] = []

    def _start(self, instance: int, out: Any) -> int:
        piece = self._own.pieces[int(self.s.instance["model"][instance]), int(out["size"]), int(out["segment"])]
        now = self.sim.now_ns
        order = (instance, int(out["size"]), int(out["segment"]))
        first_id = self._tracer.note(order, piece, int(now), self.stream_of(instance))
        return piece.place(self.sim, self.stream_of(instance), now, first_id).last

    def _ended(self, entry: Any) -> None:
        self._entries.append(entry.copy())

    def trace(self, policy: str) -> EngineTrace:
        """The trace of the run, once `run` is done."""
        device = self._own.device
        facts = DeviceFacts(device.title, device.sm_ids, device.limits.warps, device.capability, versions())
        found = EngineTrace(np.zeros(0, BLOCK), np.zeros(0, LAUNCH), (), facts)
        recorded = self._tracer.finish(self.sim.blocks())
        models = dict(enumerate(self._models))
        instances = {instance: int(row) for instance, row in enumerate(self.s.instance["model"]) if row != codes.NONE}
        whole = bool(self.s.core["whole_always"][0])
        simulation = TracedEngine(models, instances, int, policy, whole, simulated=True)
        fill_engine_trace(found, recorded, self._entries, simulation)
        return found
