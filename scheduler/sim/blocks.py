"""Simulated time at the grain of blocks: the dispatcher core drives the SM model, segment by segment."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from paellapy.instrument.device.heaps import heap_pop, heap_push
from paellapy.instrument.device.jit import compiled
from paellapy.instrument.device.parts import WARP, Part
from paellapy.instrument.device.sm_costs import BlockCost
from paellapy.instrument.device.sm_model import SmModel
from paellapy.instrument.device.sm_program import Kernel, Program
from paellapy.instrument.device.timing import Timing
from paellapy.instrument.records import WARP_SHIFT
from paellapy.scheduler.core import codes
from paellapy.scheduler.core import state as st
from paellapy.scheduler.core.atomics import store_at
from paellapy.scheduler.core.models import ModelProfile, SegmentProfile
from paellapy.scheduler.core.rings import post, take_done
from paellapy.scheduler.core.step import step
from paellapy.scheduler.sim import fluid_state as fluid
from paellapy.scheduler.sim.fluid import occupy


@compiled
def _store(address: int, value: int) -> None:
    store_at(np.uint64(address), np.uint64(value))


def kernels_of(segment: SegmentProfile, timing: Timing) -> list[Kernel]:
    """A segment's kernels, all alike: those that take its time alone and hold its footprint."""
    each_ns = max(segment.time_ns / segment.kernels - timing.graph_gap_ns, 1.0)
    warps = max(1, round(segment.warps / segment.blocks))
    registers = min(255, max(16, segment.registers // (segment.blocks * warps * WARP)))
    shared = segment.shared_bytes // segment.blocks
    if segment.bytes:
        # Traffic at shared rates, after the latency that makes up the rest of the time alone.
        traffic = segment.bytes / segment.kernels / segment.blocks
        cost, duration, latency = BlockCost(bytes=traffic), None, each_ns / 2
    else:
        cost, duration, latency = None, each_ns, None
    kernel = Kernel(segment.blocks, min(warps, 32) * WARP, registers, shared, cost, duration, latency)
    return [kernel] * segment.kernels


class BlocksGpu:
    """The SM model as the GPU of a simulation. The load, the records and the request rows are those of `Fluid`."""

    def __init__(
        self, part: Part, timing: Timing, models: Sequence[ModelProfile], f: fluid.Fluid, state: st.State, seed: int
    ) -> None:
        self.f = f
        self.s = state
        # Where the core hands out streams, every job has a queue of its own; where the hardware decides, they share.
        queues = int(f.sim["queues"][0]) if state.core["whole_always"][0] else 0
        self.sim = SmModel(
            part, seed, timing=timing, history=1 << 14, false_dependencies=queues > 0, connections=queues or None
        )
        self._streams = [self.sim.stream() for _ in range(codes.OF_WINDOWS)]
        self.segments: dict[tuple[int, int, int], Program] = {}
        for m, model in enumerate(models):
            for k, program in enumerate(model.sizes.values()):
                kernels = [kernels_of(each, timing) for each in program]
                for i, each in enumerate(kernels):
                    self.segments[m, k, i] = self.sim.program(each)
                self.segments[m, k, codes.WHOLE] = self.sim.program([kernel for each in kernels for kernel in each])
        self.words: dict[int, int] = {}  # handle of a launch → its completion word
        self.capacity = part.sms * part.sm.warps
        self.resident = 0.0

    def run(self) -> fluid.Fluid:
        """Until nothing is left to come and nothing runs."""
        while True:
            now = self.sim.now_ns
            self._load(now)
            step(self.s, int(now))
            self._launch()
            self._collect()
            following = self._next_arrival()
            if not self.words and following == np.inf:
                return self.f
            self.sim.run(None if following == np.inf else max(following, now), stop_on_completion=True)
            self._note(now)
            for handle in self.sim.completed():
                word = self.words.pop(int(handle), 0)
                if word:
                    self.f.sim["events"][0] += 1
                    _store(word, 1)

    def _next_arrival(self) -> float:
        """When the load or a deadline comes next, or the core has something to do."""
        f = self.f
        at = min(f.timer[0] if f.sim["timers"][0] else np.inf, self.s.core["room_at_ns"][0])
        if self.s.core["due"][0]:
            at = min(at, self.s.request["deadline_ns"][self.s.due[0]])
        if f.sim["next_arrival"][0] < len(f.arrivals):
            at = min(at, f.arrivals["time_ns"][f.sim["next_arrival"][0]])
        return float(at)

    def _load(self, now: float) -> None:
        f = self.f
        while f.sim["next_arrival"][0] < len(f.arrivals):
            a = f.arrivals[f.sim["next_arrival"][0]]
            if a["time_ns"] > now:
                break
            f.sim["next_arrival"][0] += 1
            who = (int(a["model"]), int(a["client"]), int(a["priority"]))
            self._arrive(*who, int(a["deadline_ns"]), int(a["time_ns"]), codes.NONE)
        while f.sim["timers"][0] and f.timer[0] <= now:
            at, who_id = int(f.timer[0]), int(f.timer_id[0])
            heap_pop.py_func(f.timer, f.timer_id, 0, f.sim["timers"][0])  # type: ignore[attr-defined]
            f.sim["timers"][0] -= 1
            c = f.clients[who_id]
            self._arrive(int(c["model"]), int(c["client"]), int(c["priority"]), codes.NEVER, at, who_id)

    def _arrive(self, model: int, client: int, priority: int, deadline: int, at: int, source: int) -> None:
        if self.f.sim["records"][0] == len(self.f.records):
            self.f = self.f._replace(records=np.concatenate([self.f.records, np.zeros_like(self.f.records)]))
        f, s = self.f, self.s
        n = int(f.sim["records"][0])
        record = f.records[n]
        record["model"], record["client"], record["priority"], record["source"] = model, client, priority, source
        record["status"], record["batch"] = codes.QUEUE_FULL, 0
        record["arrival_ns"], record["deadline_ns"] = at, deadline
        record["started_ns"], record["finish_ns"] = codes.NEVER, at
        f.sim["records"][0] += 1
        if f.sim["free"][0] == 0:
            self._back(source, at)
            return
        f.sim["free"][0] -= 1
        row = int(f.free[f.sim["free"][0]])
        post(
            s.ring[0], s.submit[0], s.filling, s.lane_word, s.slot_front,
            codes.SUBMIT, row, n, n, model, client, priority, at, deadline, 0, False,
        )  # fmt: skip

    def _back(self, source: int, at: int) -> None:
        f = self.f
        if source >= 0:
            again = at + max(int(f.clients["think_ns"][source]), 1)
            if again < f.sim["horizon_ns"][0]:
                heap_push.py_func(f.timer, f.timer_id, 0, f.sim["timers"][0], float(again), source)  # type: ignore[attr-defined]
                f.sim["timers"][0] += 1

    def _launch(self) -> None:
        s = self.s
        for out in s.out[: s.core["out"][0]]:
            lane = int(out["lane"])
            self.words[self._start(lane, out)] = int(out["word"])
        s.core["out"][0] = 0

    def _start(self, lane: int, out: Any) -> int:
        """Puts what the core launches on the lane's stream; the handle whose completion ends it."""
        program = self.segments[int(self.s.lane["model"][lane]), int(out["size"]), int(out["segment"])]
        return self.sim.launch_program(self.stream_of(lane), program, trace=False)

    def stream_of(self, lane: int) -> int:
        return self._streams[int(self.s.lane["stream_at"][lane])]

    def _collect(self) -> None:
        f, s = self.f, self.s
        while n := take_done(s.ring[0], s.done[0], f.taken):
            for entry in f.taken[:n]:
                self._ended(entry)
                record = f.records[int(entry["tag"])]
                for name in ("batch", "status", "started_ns", "finish_ns"):
                    record[name] = entry[name]
                f.free[f.sim["free"][0]] = entry["request"]
                f.sim["free"][0] += 1
                self._back(int(record["source"]), int(entry["finish_ns"]))

    def _ended(self, entry: Any) -> None:
        """For those who want to know: the completion of a request."""

    def _note(self, since: float) -> None:
        """Add the time since then to the occupancy, with the warps that were resident when it began."""
        part = self.resident / self.capacity
        occupy.py_func(self.f, since, self.sim.now_ns - since, part, 0.0, 0.0, len(self.words))  # type: ignore[attr-defined]
        lines = self.sim.lines
        self.resident = float(((lines["started"] - lines["ended"]) >> np.uint64(WARP_SHIFT)).sum())
