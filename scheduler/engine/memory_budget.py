"""The budget of GPU memory: parts taken permanently, for instances and for loads, while weights come and go in the
rest.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from paellapy.scheduler.core import codes
from paellapy.scheduler.core.errors import MemoryPlanError
from paellapy.scheduler.core.residency import needed_bytes, release_arena, reserve_arena
from paellapy.scheduler.core.state import State
from paellapy.scheduler.engine.core_loop import CoreLoop
from paellapy.scheduler.models.memory import Arena, Arenas, Need, readable_bytes
from paellapy.scheduler.models.model import Model

LOOK_S = 0.0005
ORDER_S = 600.0  # longest wait for models in use that are to be evicted
SHARED = ""  # the owner's name for arenas, which belong to no single model


@dataclass(slots=True)
class Placing:
    """The weights of a model that is being loaded. `keep`: see codes.STAYS."""

    name: str
    nbytes: int
    priority: int
    keep: int


class Budget:
    def __init__(self, core: CoreLoop, nbytes: int) -> None:
        self._core, self._state, self.nbytes = core, core.state, nbytes
        # bytes that models hold permanently: instances, and weights while they are loaded
        self.taken: dict[str, int] = {}
        self.lost_bytes = 0  # of unloaded models whose memory could not be freed
        self.placing: Placing | None = None
        self.why_stuck: Callable[[], str] = str  # says why the latest eviction failed

    def place(self, name: str, nbytes: int, priority: int, keep: int) -> None:
        """Takes memory for the weights of a model that is being loaded; a second call takes more for the same model."""
        before = 0 if self.placing is None else self.placing.nbytes
        self.placing = Placing(name, before + nbytes, priority, keep)
        what = f"weights of model {name!r} of {readable_bytes(nbytes)}"
        self._check_fit(name, 0, what)
        self._take(name, name, nbytes, priority, what)

    def keep_placed(self) -> None:
        """The model that is being loaded stays on the GPU, whatever its user said; MemoryPlanError if that is too
        much.
        """
        if self.placing is not None:
            self.placing.keep = codes.PINNED
            name = self.placing.name
            why = "which must stay on the GPU because the model changes them,"
            self._check_fit(name, 0, f"weights of model {name!r}, {why}")

    def claim(self, name: str, nbytes: int, priority: int) -> None:
        """Takes memory for a model's weights out of the budget permanently, evicting models if needed."""
        self._claim(name, name, nbytes, priority, "weights")

    def claim_instances(self, model: str, nbytes: int) -> None:
        """Takes memory for an arena, which the model is the first to use, as `claim` does."""
        self._claim(SHARED, model, nbytes, codes.NEVER, "instances")

    def _claim(self, owner: str, model: str, nbytes: int, priority: int, kind: str) -> None:
        what = f"{kind} of model {model!r} of {readable_bytes(nbytes)}"
        self._check_fit(model, nbytes, what)
        self._take(owner, model, nbytes, priority, what)

    def _check_fit(self, model: str, more: int, what: str) -> None:
        needed = self.needed_bytes()
        if needed + more > self.nbytes:
            raise MemoryPlanError(
                f"{what} do not fit: of the engine's {readable_bytes(self.nbytes)} instances take "
                f"{readable_bytes(self.instance_bytes)}, and the weights that must be there at once "
                f"{readable_bytes(needed - self.instance_bytes)}: weights that stay on the GPU, weights of higher "
                "priority than another model's, and the largest of the others. Unload a model, use fewer instances or "
                "smaller batches, or give the engine more memory_bytes.", model=model, needed_bytes=needed + more,
                limit_bytes=self.nbytes,
            )  # fmt: skip

    def _take(self, owner: str, model: str, nbytes: int, priority: int, what: str) -> None:
        r = self._state.residency[0]

        def ask() -> None:
            r["load_priority"], r["load_since_ns"], r["load_granted"], r["load_bytes"] = priority, 0.0, 0, nbytes
            r["pending"] = 1

        def take() -> None:
            r["budget_bytes"] -= nbytes
            r["held_bytes"] -= nbytes
            r["load_bytes"] = r["load_granted"] = 0

        def drop() -> None:
            if r["load_granted"] <= 0:  # otherwise the core granted the memory at the last moment
                r["load_bytes"] = r["load_granted"] = 0
                r["pending"] = 1

        self._core.run(ask)
        end = time.monotonic() + ORDER_S
        while not r["load_granted"] and time.monotonic() < end:
            self._core.check_open()
            time.sleep(LOOK_S)
        if r["load_granted"] <= 0:
            why = self.why_stuck() if r["load_granted"] else (
                f"models in use hold it since {ORDER_S:.0f} s. Load the model while they have fewer requests, give it "
                "their priority, unload one of them, or give the engine more memory_bytes."
            )  # fmt: skip
            self._core.run(drop)
            if not r["load_granted"]:
                raise MemoryPlanError(
                    f"{what} get no memory: {why}", model=model, needed_bytes=nbytes, limit_bytes=self.nbytes
                )
        self._core.run(take)
        self.taken[owner] = self.taken.get(owner, 0) + nbytes

    def give(self, name: str, nbytes: int | None = None) -> None:
        """Returns bytes to the budget; without a number, all bytes of the model."""
        back = self.taken.get(name, 0) if nbytes is None else nbytes

        def put() -> None:
            self._state.residency["budget_bytes"][0] += back
            self._state.residency["pending"][0] = 1

        self._core.run(put)
        self.taken[name] = self.taken.get(name, 0) - back
        if not self.taken[name]:
            del self.taken[name]

    def needed_bytes(self) -> int:
        """The least memory with which every model can run: instances, and the weights that must be there at once."""
        w, m, new = self._state.weights, self._state.model, self.placing
        there = m["state"] != codes.ABSENT
        found = list(zip(*(column[there].tolist() for column in (m["priority"], w["bytes"], w["keep"])), strict=True))
        if new is not None:
            found.append((new.priority, new.nbytes, new.keep))
        taken = sum(nbytes for name, nbytes in self.taken.items() if new is None or name != new.name)
        return needed_bytes(found) + taken + self.lost_bytes

    @property
    def free_bytes(self) -> int:
        """Memory that neither instances nor weights hold."""
        r = self._state.residency[0]
        return int(r["budget_bytes"] - r["held_bytes"])

    @property
    def claimed_bytes(self) -> int:
        """Memory of weights that do not come and go: they stay, or their model is being loaded."""
        return sum(nbytes for name, nbytes in list(self.taken.items()) if name != SHARED)

    @property
    def instance_bytes(self) -> int:
        return self.taken.get(SHARED, 0)


# The arenas of an engine: which ones a model's instances share, and memory in which to capture while the instances
# serve.


INSTANCES = 2  # default number of instances: in shared memory, more instances would only wait
ARENA_SHARE = 0.25  # fraction of the budget up to which further arenas are made although existing ones could be shared
APART_SHARE = 0.35  # the same, if models of different priority would share them


class InstanceArenas(Arenas):
    def __init__(self, core: CoreLoop, budget: Budget) -> None:
        super().__init__(
            core.backend.arena,
            lambda nbytes: budget.claim_instances(self._loading, nbytes),
            lambda nbytes: budget.give(SHARED, nbytes),
        )
        self._core, self._state, self._budget = core, core.state, budget
        self._loading = ""  # name of the model that gets instances

    def instances_for(self, model: Model, nbytes: int, foreign_bytes: int, wanted: int) -> list[Arena]:
        """The arenas in which the model's instances run, taking turns with instances of other models."""
        self._loading = model.name
        count = model.instances or min(wanted, INSTANCES)
        most = max(wanted, count)
        own = 1 if model.stateful else count  # only one instance of a stateful model runs at a time
        need = Need(model.name, nbytes, foreign_bytes, own, model.priority)
        return count // own * self.choose(need, most, self._can_spare)

    def _can_spare(self, more: int, apart: bool) -> bool:
        share = APART_SHARE if apart else ARENA_SHARE
        within = self.held_bytes + more <= share * self._budget.nbytes
        return within and self._budget.needed_bytes() + more <= self._budget.nbytes

    @contextlib.contextmanager
    def kept(self, arenas: Sequence[Arena]) -> Iterator[None]:
        """Keeps instances out of these arenas, because loading a model writes to them."""
        numbers = sorted({each.index for each in arenas})

        def change(what: Callable[[State, int], None]) -> None:
            for each in numbers:
                what(self._state, each)

        self._core.run(lambda: change(reserve_arena))
        try:
            while self._state.arena[numbers].any():
                self._core.check_open()
                time.sleep(LOOK_S)
            yield
        finally:
            self._core.run(lambda: change(release_arena))

    @contextlib.contextmanager
    def beside(self, model: Model, arena: Arena) -> Iterator[Arena]:
        """Memory like that of an instance in service, to capture in: an arena apart if it is free, otherwise the
        instance's own arena, which no instance gets meanwhile. No weights leave for it.
        """
        self._loading = model.name
        free = self._budget.free_bytes >= arena.total_bytes and self._can_spare(arena.total_bytes, False)
        made = self.make_apart(arena.nbytes, arena.foreign_bytes) if free else None
        if made is None:
            with self.kept([arena]):
                yield arena
            return
        try:
            yield made
        finally:
            self.free_apart(made)
