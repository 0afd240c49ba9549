"""Requests to an engine: submitted with checked inputs, and answered with outputs.

`Requester` is the part of an engine that its callers use for every request. The engine is in this process
(`paellapy.scheduler.engine.engine`) or in another one (`paellapy.scheduler.engine.remote`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Hashable, Mapping
from typing import Any

from numpy.typing import NDArray

from paellapy.scheduler.core.manage import want_weights
from paellapy.scheduler.engine.answers import AsyncAnswer, Outputs, SyncAnswer
from paellapy.scheduler.engine.front_end import Entry, Loaded, Pending
from paellapy.scheduler.engine.gpu_use import GpuUse, occupancy
from paellapy.scheduler.engine.request_checks import Inputs, check_inputs
from paellapy.scheduler.engine.slots import Reserving
from paellapy.scheduler.engine.submitting import submit_one
from paellapy.scheduler.engine.uninterrupted import Uninterrupted
from paellapy.scheduler.engine.waiters import thread_waiter


class Requester(Reserving):
    """The request side of an engine: takes requests, returns results."""

    async def infer(
        self,
        name: str,
        inputs: Inputs,
        deadline_ms: float | None = None,
        priority: int | None = None,
        client: Hashable = None,
    ) -> Outputs:
        """Runs one request: arrays by name, without the batch dimension. Cancelling the task withdraws it.

        `deadline_ms` counts from now; a request that is late ends with `DeadlineError`. `priority`: larger goes first,
        under policies that read it. `client`: the name of the client, for policies that are fair between clients.
        """
        loaded = self._find(name)
        return await self._run(loaded, check_inputs(loaded.model, inputs), deadline_ms, priority, client)

    def want_weights(self, row: int) -> None:
        """Has a model's weights brought for its next requests, if they are not on the GPU. Returns at once."""
        if want_weights(self.state, row):
            self._front.nudge()  # the core's loop may be asleep

    async def _run(
        self,
        loaded: Loaded,
        inputs: Mapping[str, NDArray[Any]],
        deadline_ms: float | None,
        priority: int | None,
        client: Hashable,
    ) -> Outputs:
        """Runs one item whose inputs are in the model's order."""
        loop = asyncio.get_running_loop()
        front = self._front
        front.attach(loop)
        future: asyncio.Future[Outputs] = loop.create_future()
        pending = self._submit(loaded, inputs, deadline_ms, priority, client, AsyncAnswer(self, future, loop))
        try:
            return await future
        except asyncio.CancelledError:
            front.cancel(pending)
            raise

    def infer_sync(
        self,
        name: str,
        inputs: Inputs,
        deadline_ms: float | None = None,
        priority: int | None = None,
        client: Hashable = None,
    ) -> Outputs:
        """As `infer`; blocks this thread until the answer is there."""
        loaded = self._find(name)
        arrays = check_inputs(loaded.model, inputs)
        waiter = thread_waiter()
        answer = SyncAnswer(self, waiter)
        pending: Pending | None = None
        try:
            with Uninterrupted():
                pending = self._submit(loaded, arrays, deadline_ms, priority, client, answer)
        except KeyboardInterrupt:  # came meanwhile
            answer.leave()
            if pending is not None:
                self._front.cancel(pending)
            raise
        return self._block(pending, answer, waiter)

    def _submit(
        self,
        loaded: Loaded,
        inputs: Mapping[str, NDArray[Any]],
        deadline_ms: float | None,
        priority: int | None,
        client: Hashable,
        finish: Callable[[Entry], None],
    ) -> Pending:
        terms = self._terms(loaded, deadline_ms, priority, client)
        return submit_one(self._front, loaded, inputs, terms, finish)

    def occupancy(self) -> GpuUse:
        """The GPU's occupancy by the engine's launches: each resource, and where the jobs are."""
        return occupancy(self.state)
