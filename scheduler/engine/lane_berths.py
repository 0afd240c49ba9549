"""The berths of an engine: which ones a model's lanes share, and memory in which to capture while the lanes serve."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence

from paellapy.scheduler.backends.base import Backend
from paellapy.scheduler.core import codes
from paellapy.scheduler.core.manage import keep_berth, open_berth
from paellapy.scheduler.core.state import State
from paellapy.scheduler.engine.budget import LOOK_S, SHARED, Budget
from paellapy.scheduler.models.berths import Berth, Berths, Need
from paellapy.scheduler.models.model import Model

LANES = 2  # default number of lanes: in shared memory, more lanes would only wait
BERTH_SHARE = 0.25  # fraction of the budget up to which further berths are made although existing ones could be shared
APART_SHARE = 0.35  # the same, if models of different priority would share them


class LaneBerths(Berths):
    """`in_loop` runs a function between two steps of the core and waits; `check` raises if the engine has ended."""

    def __init__(
        self, backend: Backend, state: State, budget: Budget, in_loop: Callable[[Callable[[], None]], None],
        check: Callable[[], None],
    ) -> None:  # fmt: skip
        super().__init__(
            backend.berth,
            lambda nbytes: budget.claim(SHARED, nbytes, codes.NEVER, f"lanes of model {self._loading!r}"),
            lambda nbytes: budget.give(SHARED, nbytes),
        )
        self._state, self._budget, self._in_loop, self._check = state, budget, in_loop, check
        self._loading = ""  # name of the model that gets lanes

    def lanes_for(self, model: Model, nbytes: int, foreign_bytes: int, wanted: int) -> list[Berth]:
        """The berths in which the model's lanes run, taking turns with lanes of other models."""
        self._loading = model.name
        count = model.lanes or min(wanted, LANES)
        most = max(wanted, count)
        own = 1 if model.stateful else count  # only one lane of a stateful model runs at a time
        need = Need(model.name, nbytes, foreign_bytes, own, model.priority)
        return count // own * self.choose(need, most, self._can_spare)

    def _can_spare(self, more: int, apart: bool) -> bool:
        share = APART_SHARE if apart else BERTH_SHARE
        within = self.held_bytes + more <= share * self._budget.nbytes
        return within and self._budget.needed_bytes() + more <= self._budget.nbytes

    @contextlib.contextmanager
    def kept(self, berths: Sequence[Berth]) -> Iterator[None]:
        """Keeps lanes out of these berths, because loading a model writes to them."""
        numbers = sorted({each.index for each in berths})

        def change(what: Callable[[State, int], None]) -> None:
            for each in numbers:
                what(self._state, each)

        self._in_loop(lambda: change(keep_berth))
        try:
            while self._state.berth[numbers].any():
                self._check()
                time.sleep(LOOK_S)
            yield
        finally:
            self._in_loop(lambda: change(open_berth))

    @contextlib.contextmanager
    def beside(self, model: Model, berth: Berth) -> Iterator[Berth]:
        """Memory like that of a lane in service, to capture in: a berth apart if it is free, otherwise the lane's own
        berth, which no lane gets meanwhile. No weights leave for it.
        """
        self._loading = model.name
        free = self._budget.free_bytes >= berth.total_bytes and self._can_spare(berth.total_bytes, False)
        made = self.make_apart(berth.nbytes, berth.foreign_bytes) if free else None
        if made is None:
            with self.kept([berth]):
                yield berth
            return
        try:
            yield made
        finally:
            self.free_apart(made)
