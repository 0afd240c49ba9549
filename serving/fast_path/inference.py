"""One inference on the short way (fast_path/connection.py) while the engine has it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from paellapy.scheduler.core import codes
from paellapy.scheduler.core.errors import DeadlineError, UnknownModelError
from paellapy.scheduler.engine.front_calls import E_LANE, E_MODEL, E_SLOT, E_STATUS
from paellapy.scheduler.engine.front_end import Entry, FrontEnd, Pending
from paellapy.scheduler.engine.requests import Outputs
from paellapy.scheduler.models.model import Model
from paellapy.serving.admission import Ticket
from paellapy.serving.fast_path.head import Head
from paellapy.serving.protocol import Request, encode
from paellapy.serving.registry import VERSION
from paellapy.serving.service import met_unload

if TYPE_CHECKING:
    from paellapy.serving.fast_path.connection import FastConnection


class Work:
    """One request that the engine has: its items, and what to do when they are done."""

    __slots__ = ("client", "connection", "front", "head", "left", "model", "number", "over", "pending", "request",
                 "results", "started_ns", "ticket")  # fmt: skip

    def __init__(self, connection: FastConnection, head: Head, started_ns: int) -> None:
        self.connection, self.head, self.started_ns = connection, head, started_ns
        self.number = ""
        self.over = False
        self.model: Model
        self.request: Request
        self.front: FrontEnd
        self.ticket: Ticket | None = None
        self.pending: list[Pending] = []
        self.results: dict[str, NDArray[Any]] | None = None
        self.left = 1

    def __call__(self, entry: Entry) -> None:
        """The completion of the only item, wherever they are read. Its outputs are its own until this returns."""
        if self.over:
            return
        engine = self.connection.lane.service.engine
        if entry[E_STATUS] != codes.OK:
            self.answer(engine._result(entry))
            return
        loaded = engine._row(entry[E_MODEL])
        assert loaded is not None
        slot = entry[E_SLOT]
        outputs = loaded.lane_of[entry[E_LANE]].outputs
        self.finish({key: array[slot : slot + 1] for key, array in outputs.items()})

    def answer(self, result: Outputs | Exception) -> None:
        """The engine is away, or the request failed."""
        if self.over:
            return
        assert isinstance(result, Exception)
        if isinstance(result, UnknownModelError):
            result = met_unload(self.model.name)
        for each in self.pending:
            self.front.cancel(each)
        self._leave(answered=isinstance(result, DeadlineError))
        self.connection.failed(self, result)

    def item(self, k: int, entry: Entry) -> None:
        """As a call, for one of several items."""
        if self.over:
            return
        engine = self.connection.lane.service.engine
        found = engine._result(entry)
        if isinstance(found, Exception):
            self.answer(found)
            return
        if self.results is None:
            specs = self.model.outputs
            self.results = {key: np.empty((self.request.items, *s.shape), s.dtype) for key, s in specs.items()}
        for key, array in found.items():
            self.results[key][k] = array
        self.left -= 1
        if self.left == 0:
            self.finish(self.results)

    def finish(self, results: dict[str, NDArray[Any]]) -> None:
        self._leave(answered=True)
        self.connection.done(self, *encode(self.model, VERSION, self.request, results))

    def cancel(self) -> None:
        """The client has left."""
        if not self.over:
            for each in self.pending:
                self.front.cancel(each)
            self._leave(answered=False)

    def _leave(self, answered: bool) -> None:
        self.over = True
        if self.ticket is not None:
            self.ticket.leave(answered)


class Item:
    __slots__ = ("k", "work")

    def __init__(self, work: Work, k: int) -> None:
        self.work, self.k = work, k

    def __call__(self, entry: Entry) -> None:
        self.work.item(self.k, entry)

    def answer(self, result: Outputs | Exception) -> None:
        self.work.answer(result)
