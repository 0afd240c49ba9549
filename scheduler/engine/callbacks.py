"""`Door`: requests for callers that are called back, such as a server. No thread waits and no output is copied.

`Requester.infer` gives every request a future and a copy of its outputs. Through the door, a request of one item is
answered from the engine's own memory, in the thread that reads its completion.
"""

from __future__ import annotations

import asyncio
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from paellapy.scheduler.core import codes
from paellapy.scheduler.core.errors import EngineFailedError, SuspectError
from paellapy.scheduler.engine.requests import Outputs, Requester, submit, submit_bytes
from paellapy.scheduler.engine.ring_calls import E_INSTANCE, E_MODEL, E_SLOT, E_STATUS
from paellapy.scheduler.engine.ring_client import Entry, Loaded, Pending, RingClient
from paellapy.scheduler.models.memory import Instance
from paellapy.scheduler.models.model import Model


class Caller(Protocol):
    """The receiver of an answer. One of the two methods is called, once, in the thread that reads the completion."""

    def done(self, outputs: Outputs) -> None:
        """The request succeeded; outputs are [items, …]. Their memory is the engine's again when this returns."""

    def failed(self, error: Exception) -> None: ...


class ByteCaller(Protocol):
    """The receiver of an answer to a request of bytes."""

    def done_in(self, instance: Instance, slot: int) -> None:
        """The request succeeded: its outputs are in this slot. The slot is the engine's again when this returns."""

    def failed(self, error: Exception) -> None: ...


class Door:
    """The door of one engine, which is in this process or in another one."""

    def __init__(self, engine: Requester) -> None:
        self._engine = engine
        self._attached: tuple[RingClient, asyncio.AbstractEventLoop] | None = None

    def is_limited(self, client: Hashable) -> bool:
        """Whether the client is a tenant with a limit, which may hold its requests back for as long as it takes."""
        state = self._engine.state
        if client is None or not state.core["limited"][0]:
            return False
        return bool(state.client["limit"][self._engine._producer.client_number(client)] > 0.0)

    def submit(
        self,
        name: str,
        inputs: Mapping[str, NDArray[Any]],
        items: int,
        deadline_ms: float | None,
        priority: int | None,
        client: Hashable,
        caller: Caller,
    ) -> Call:
        """Submits [items, …] that fit the model: all items run, or none. Must be called inside an asyncio loop.

        Errors that are known at once are raised here; the caller is told of all later ones.
        """
        engine = self._engine
        loaded = engine._find(name)
        producer = engine._producer
        producer.attach(asyncio.get_running_loop())
        model = loaded.model
        call = Call(engine, producer, model, items, caller)
        if items == 1:
            first = {key: inputs[key][0] for key in model.inputs}
            call.pending.append(engine._submit(loaded, first, deadline_ms, priority, client, call))
            return call
        each = [{key: inputs[key][k] for key in model.inputs} for k in range(items)]
        finishes = [_Item(call, k) for k in range(items)]
        try:
            terms = engine._terms(loaded, deadline_ms, priority, client)
            call.pending += submit(producer, loaded, each, terms, finishes)
        except Exception:
            if call.over:  # an item has failed already, so the caller has its answer
                return call
            call.over = True  # completions of withdrawn items mean nothing
            raise
        if call.failed:  # before the others could be withdrawn
            for pending in call.pending:
                producer.cancel(pending)
        return call

    def submit_bytes(
        self,
        name: str,
        pieces: Sequence[memoryview],
        deadline_ms: float | None,
        priority: int | None,
        client: Hashable,
        caller: ByteCaller,
        loop: asyncio.AbstractEventLoop,
    ) -> ByteCall:
        """As `submit`, for one item whose inputs are bytes: in the model's order, each as long as its tensor. `loop`
        is the running one.
        """
        engine = self._engine
        loaded = engine._find(name)
        producer = engine._producer
        if self._attached is None or self._attached[0] is not producer or self._attached[1] is not loop:
            producer.attach(loop)
            self._attached = producer, loop
        call = ByteCall(engine, producer, loaded, caller)
        submit_bytes(producer, call, pieces, engine._terms(loaded, deadline_ms, priority, client))
        return call


class Pulse:
    """Checks that an engine's core reads its submission rings: posts a message, and looks later whether it was read."""

    def __init__(self, engine: Requester) -> None:
        self._engine = engine
        self._producer: RingClient | None = None
        self._posted = 0

    def beats(self) -> bool:
        """Whether the core has read the message posted by the last call; if so, posts another one.

        True also where there is no engine (requests are then refused with that reason), and before the core's first
        step: the core may still be compiling, which is no reason to end it.
        """
        producer = self._engine._producer
        if producer.closed or not producer.state.core["steps"][0]:
            return True
        ring = producer.state.ring[producer.producer]
        if producer is self._producer and int(ring[codes.SUBMIT_HEAD, 0]) < self._posted:
            return False
        producer.nudge()
        self._producer, self._posted = producer, int(ring[codes.SUBMIT_TAIL, 0])
        return True


class Call:
    """A request that has not been answered. `over`: the caller has its answer, or has withdrawn the request."""

    __slots__ = ("_caller", "_engine", "_items", "_left", "_lost", "_model", "_producer", "_results", "over", "pending")

    def __init__(self, engine: Requester, producer: RingClient, model: Model, items: int, caller: Caller) -> None:
        self._engine, self._producer, self._model, self._caller = engine, producer, model, caller
        self._items = self._left = items
        self._results: Outputs | None = None
        self._lost: dict[int, EngineFailedError] = {}  # by item: those that ended because the GPU failed
        self.pending: list[Pending] = []
        self.over = False

    def cancel(self) -> None:
        """Withdraws the items that have not run. The caller is told nothing more."""
        if not self.over:
            self.over = True
            for each in self.pending:
                self._producer.cancel(each)

    @property
    def failed(self) -> bool:
        return self.over and self._left > 0

    def __call__(self, entry: Entry) -> None:
        """Handles the completion of a request of one item."""
        if self.over:
            return
        if entry[E_STATUS] != codes.OK:
            self.answer(self._engine._result(entry))
            return
        loaded = self._engine._row(entry[E_MODEL])
        assert loaded is not None
        slot = entry[E_SLOT]
        outputs = loaded.instance_of[entry[E_INSTANCE]].outputs
        self.over = True
        self._caller.done({key: array[slot : slot + 1] for key, array in outputs.items()})

    def answer(self, result: Outputs | Exception) -> None:
        """Fails the request: its item failed, or the engine's process is gone."""
        assert isinstance(result, Exception)
        if not self.over:
            self.cancel()
            self._caller.failed(_of_all(self._lost) if self._lost else result)

    def item(self, k: int, entry: Entry) -> None:
        """Handles the completion of one of several items."""
        if self.over:
            return
        found = self._engine._result(entry)
        if isinstance(found, EngineFailedError):  # of every item that is left
            self._lost[k] = found
            if len(self._lost) < self._left:
                return
        if isinstance(found, Exception):
            self.answer(found)
            return
        if self._results is None:
            specs = self._model.outputs
            self._results = {key: np.empty((self._items, *s.shape), s.dtype) for key, s in specs.items()}
        for key, array in found.items():
            self._results[key][k] = array
        self._left -= 1
        if self._left == 0:
            self.over = True
            self._caller.done(self._results)


def _of_all(lost: dict[int, EngineFailedError]) -> EngineFailedError:
    """The error of a request whose items ended with the GPU. Its own items do not count as others beside it."""
    on_gpu = [each for _, each in sorted(lost.items()) if isinstance(each, SuspectError)]
    if not on_gpu:
        return next(iter(lost.values()))
    first = on_gpu[0]
    digests = tuple(digest for each in on_gpu for digest in each.digests)
    error = SuspectError(str(first), digests, first.others - (len(on_gpu) - 1), first.failure)
    error.__cause__ = first.__cause__
    return error


class ByteCall(Pending):
    """A request of bytes that has not been answered: as `Call`, and its pending request too."""

    __slots__ = ("_caller", "_engine", "_producer", "over")

    def __init__(self, engine: Requester, producer: RingClient, loaded: Loaded, caller: ByteCaller) -> None:
        self._engine, self._producer, self._caller = engine, producer, caller
        self.loaded, self.keep, self.over = loaded, None, False

    def finish(self, entry: Entry) -> None:
        if self.over:
            return
        if entry[E_STATUS] != codes.OK:
            found = self._engine._result(entry)
            assert isinstance(found, Exception)
            self.answer(found)
            return
        loaded = self._engine._row(entry[E_MODEL])
        assert loaded is not None
        self.over = True
        self._caller.done_in(loaded.instance_of[entry[E_INSTANCE]], entry[E_SLOT])

    def answer(self, error: Exception) -> None:
        """Fails the request: it failed, or the engine's process is gone."""
        if not self.over:
            self.cancel()
            self._caller.failed(error)

    def cancel(self) -> None:
        """Withdraws the request if it has not run. The caller is told nothing more."""
        if not self.over:
            self.over = True
            self._producer.cancel(self)


class _Item:
    __slots__ = ("_call", "_k")

    def __init__(self, call: Call, k: int) -> None:
        self._call, self._k = call, k

    def __call__(self, entry: Entry) -> None:
        self._call.item(self._k, entry)

    def answer(self, result: Outputs | Exception) -> None:
        self._call.answer(result)
