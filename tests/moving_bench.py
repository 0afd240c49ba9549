"""The core's bench with weights that move: a mover and a link driven by hand, which check every order."""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np
from core_bench import LIMITS, Bench

from paellapy.scheduler.core import codes
from paellapy.scheduler.core.profiles import install, open_model
from paellapy.scheduler.core.residency import attach_moves
from paellapy.scheduler.core.tuning import Tuning

CHUNK = 1000  # bytes


class MovingBench(Bench):
    """`resident` gives each model's setting. All weights begin on the host."""

    def __init__(self, models: list[Any], budget: int, resident: Any = (), policy: Any = "srpt", **more: Any) -> None:
        self.budget, self.keep = budget, list(resident) or [codes.AUTO] * len(models)
        self.on_gpu: dict[int, int] = {}  # model → chunks that have come
        self.link: deque[int] = deque()  # models whose chunks come, one model after the other
        self.brought: list[int] = []
        self.evicted: list[int] = []
        self.broken: set[int] = set()  # models that cannot be brought
        self.stuck: set[int] = set()  # models that cannot leave
        self.words = np.zeros((LIMITS.models, 16), np.uint64)
        self.head = 0
        self._about = models
        super().__init__(models, policy, **more)

    def __post_init__(self) -> None:
        models, self.models = self.models, []
        super().__post_init__()
        self.models = models
        s = self.state
        ours = {"chunk_bytes": CHUNK, "map_ns": 100.0, "patience": 4.0, "cold_lead_ns": 0.0, "cold_stretch": 1.0}
        s.tuning[:] = Tuning.for_part("h200", ours).row()
        s.residency["budget_bytes"], s.residency["ns_per_byte"] = self.budget, 1.0
        for each in models:
            row, _ = install(s, each)
            s.weights["word"][row] = self.words[row].ctypes.data
            s.weights["location"][row], s.weights["keep"][row] = codes.OFF_GPU, self.keep[row]
            if self.keep[row] == codes.PINNED:
                s.weights["prefetch"][row] = s.residency["pending"][0] = 1
            open_model(s, row)
        attach_moves(s)
        s.residency["managed"] = 1
        self.step()

    def step(self, ns: int = 0) -> list[int]:
        before = {m: self.uses(m) for m in range(len(self._about))}
        finished = super().step(ns)
        self.take_orders(before)
        return finished

    def uses(self, m: int) -> bool:
        instances = [instance for instance in self.running if self.state.instance["model"][instance] == m]
        return bool(instances)

    def take_orders(self, used: dict[int, bool]) -> None:
        s, unfreed = self.state, False
        while self.head < int(s.move_ring[codes.MOVE_TAIL, 0]):
            cell = s.move[self.head % len(s.move)]
            m = int(cell["model"])
            self.head += 1
            if cell["kind"] == codes.EVICT:
                assert not self.uses(m), "weights were taken from under what runs"
                assert self.keep[m] != codes.PINNED
                if m in self.stuck:
                    s.moved[m, 0], unfreed = codes.MOVE_FAILED, True
                    continue
                del self.on_gpu[m]
                self.evicted.append(m)
                s.moved[m, 0] = codes.EVICTED
            elif m in self.broken or unfreed:
                s.moved[m, 0] = codes.MOVE_FAILED
            else:
                assert m not in self.on_gpu
                self.on_gpu[m] = 0
                self.brought.append(m)
                self.link.append(m)
            assert sum(self._about[k].weight_bytes for k in self.on_gpu) <= self.budget

    def chunk(self) -> None:
        """The link copies one chunk."""
        if self.link:
            m = self.link[0]
            self.words[m, self.on_gpu[m]] = 1
            self.on_gpu[m] += 1
            if self.on_gpu[m] * CHUNK >= self._about[m].weight_bytes:
                self.link.popleft()

    def order(self, m: int, **flags: int) -> None:
        for name, value in flags.items():
            self.state.weights[name][m] = value
        self.state.residency["pending"][0] = 1

    def location(self, m: int) -> int:
        return int(self.state.weights["location"][m])

    def settle(self, limit: int = 3000) -> None:
        """Runs until nothing waits, runs or moves."""
        for _ in range(limit):
            moving = self.state.residency["loading"][0] + self.state.residency["evicting"][0]
            if not self.rows and not self.running and not moving and not self.state.residency["pending"][0]:
                return
            while self.unready:
                self.write()
            for instance in self.running:
                self.finish_segment(instance)
            self.chunk()
            self.step(CHUNK)
        raise AssertionError(f"still waiting for {sorted(self.rows)}")
