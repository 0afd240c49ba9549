"""`Service`: one engine behind HTTP. Everything a handler needs, and the way of an inference through it."""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from typing import Any

import numpy as np
from numpy.typing import NDArray

from instrument.errors import PaellaError
from scheduler.errors import DeadlineError
from scheduler.model import Model
from scheduler.requests import Outputs, Slot
from serving.admission import Admission, Mode
from serving.counters import Counters
from serving.errors import status_of
from serving.protocol import Request
from serving.registry import READY, Registry

REMEMBERED_CLIENTS = 4096


class Clients:
    """Numbers for clients' names. A name is the client's own choice, so only so many are remembered."""

    def __init__(self, numbers: int) -> None:
        self._numbers, self._next = numbers, 0
        self._known: OrderedDict[str, int] = OrderedDict()

    def number(self, name: str) -> int:
        found = self._known.get(name)
        if found is None:
            found = self._next = self._next % (self._numbers - 1) + 1  # 0 is nobody in particular
            self._known[name] = found
            if len(self._known) > REMEMBERED_CLIENTS:
                self._known.popitem(last=False)
        return found


class Service:
    """`registry` says what may be served; `draining` is set once the server is about to stop."""

    def __init__(
        self, registry: Registry, admission: Mode, max_body_bytes: int, body_timeout_s: float | None
    ) -> None:
        self.registry, self.engine = registry, registry.engine
        self.max_body_bytes, self.body_timeout_s = max_body_bytes, body_timeout_s
        self.counters = Counters(registry)
        self.admission = Admission(self.engine, admission)
        self.clients = Clients(self.engine.limits.clients)
        self.draining = False
        self.in_flight = 0  # inference requests
        self.since = time.time()

    @property
    def ready(self) -> bool:
        """Every model that is wanted is loaded, and the server is not about to stop."""
        return (
            not self.draining
            and self.engine.failure is None
            and all(e.state == READY for e in self.registry.entries.values() if e.wanted)
        )

    async def infer(self, model: Model, request: Request, client: str) -> dict[str, NDArray[Any]]:
        """Runs a checked request: every item goes into a slot of the engine's own. Outputs are [items, …]."""
        row = self.registry.entries[model.name].row
        deadline_ms = None if request.timeout_us is None else request.timeout_us * 1e-3
        ticket = self.admission.enter(model, row, request.priority, deadline_ms)
        try:
            results = await self._run(model, request, client, deadline_ms)
        except BaseException as e:
            if ticket is not None:
                ticket.leave(answered=isinstance(e, DeadlineError))
            raise
        if ticket is not None:
            ticket.leave(answered=True)
        if len(results) == 1:
            return {key: array[np.newaxis] for key, array in results[0].items()}
        return {key: np.stack([each[key] for each in results]) for key in model.outputs}

    async def _run(self, model: Model, request: Request, client: str, deadline_ms: float | None) -> list[Outputs]:
        number = None if not client else self.clients.number(client)
        slots: list[Slot] = []
        try:
            for item in range(request.items):
                slot = self.engine.reserve(model.name, deadline_ms, request.priority, number)
                slots.append(slot)
                for key, array in request.inputs.items():
                    slot.inputs[key][...] = array[item]
            return [await slots[0].submit()] if len(slots) == 1 else await _together(slots)
        finally:
            for slot in slots:
                slot.cancel()  # those that were not submitted

    def note_failure(self, name: str, error: BaseException, elapsed_ns: int) -> None:
        if name not in self.registry.entries:
            return  # names of clients' invention are not counted one by one
        reason = status_of(error)[1] if isinstance(error, PaellaError) else None
        self.counters.of(name).note_failure(elapsed_ns, reason)

    def note_left(self, name: str) -> None:
        """The client went away before its answer."""
        if name in self.registry.entries:
            self.counters.of(name).left += 1

    def close(self) -> None:
        self.counters.close()


async def _together(slots: list[Slot]) -> list[Outputs]:
    """All of them, or none: when one fails, or the client leaves, the others are taken back."""
    tasks = [asyncio.create_task(slot.submit()) for slot in slots]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
