"""The budget of GPU memory: parts taken permanently, for lanes and for loads, while weights come and go in the rest."""

from __future__ import annotations

import time
from collections.abc import Callable

from paellapy.scheduler.core import codes
from paellapy.scheduler.core.errors import MemoryPlanError
from paellapy.scheduler.core.state import State
from paellapy.scheduler.models.sizes import readable_bytes

LOOK_S = 0.0005
SHARED = ""  # the owner's name for berths, which belong to no single model


class Budget:
    """`in_loop` runs a function between two steps of the core and waits; `check` raises if the engine has ended."""

    def __init__(
        self, state: State, nbytes: int, in_loop: Callable[[Callable[[], None]], None], check: Callable[[], None]
    ) -> None:
        self._state, self.nbytes, self._in_loop, self._check = state, nbytes, in_loop, check
        self.taken: dict[str, int] = {}  # bytes that models hold permanently: lanes, and weights while they are loaded
        self.lost_bytes = 0  # of unloaded models whose memory could not be freed
        self.placing = 0  # bytes of the weights that are being loaded
        self.why_stuck: Callable[[], str] = str  # says why the latest eviction failed

    def claim(self, name: str, nbytes: int, priority: int, what: str, alone: bool = False) -> None:
        """Takes memory out of the budget permanently, evicting models if needed; MemoryPlanError if that fails."""
        fixed = self.fixed_bytes(priority, alone)
        if fixed + nbytes > self.nbytes:
            raise MemoryPlanError(
                f"{what} of {readable_bytes(nbytes)} do not fit: of the engine's {readable_bytes(self.nbytes)} "
                f"lanes take {readable_bytes(self.lane_bytes)}, and weights that stay on the GPU, with those of the "
                f"largest other model, {readable_bytes(fixed - self.lane_bytes)}. Unload a model, use fewer lanes or "
                "smaller batches, or give the engine more memory_bytes."
            )
        r = self._state.residency[0]

        def ask() -> None:
            r["load_priority"], r["load_since_ns"], r["load_granted"], r["load_bytes"] = priority, 0.0, 0, nbytes
            r["look"] = 1

        def take() -> None:
            r["budget_bytes"] -= nbytes
            r["held_bytes"] -= nbytes
            r["load_bytes"] = r["load_granted"] = 0

        def drop() -> None:
            r["load_bytes"] = r["load_granted"] = 0

        self._in_loop(ask)
        while not r["load_granted"]:
            self._check()
            time.sleep(LOOK_S)
        if r["load_granted"] == codes.NONE:
            self._in_loop(drop)
            raise MemoryPlanError(f"{what} of {readable_bytes(nbytes)} get no memory: {self.why_stuck()}")
        self._in_loop(take)
        self.taken[name] = self.taken.get(name, 0) + nbytes

    def give(self, name: str, nbytes: int | None = None) -> None:
        """Returns bytes to the budget; without a number, all bytes of the model."""
        back = self.taken.get(name, 0) if nbytes is None else nbytes

        def put() -> None:
            self._state.residency["budget_bytes"][0] += back
            self._state.residency["look"][0] = 1

        self._in_loop(put)
        self.taken[name] = self.taken.get(name, 0) - back
        if not self.taken[name]:
            del self.taken[name]

    def fixed_bytes(self, priority: int, alone: bool = False) -> int:
        """Bytes that cannot be freed for a model of this priority, plus room for the largest model that comes and goes,
        unless that one may also leave (`alone`).
        """
        w, m = self._state.weights, self._state.model
        loaded = m["state"] != codes.ABSENT
        stays = loaded & ((w["keep"] == codes.STAYS) | (m["priority"] > priority))
        largest = 0 if alone else max([*w["bytes"][loaded & ~stays].tolist(), self.placing])
        return self.lane_bytes + self.lost_bytes + int(w["bytes"][stays].sum()) + largest

    @property
    def lane_bytes(self) -> int:
        return self.taken.get(SHARED, 0)
