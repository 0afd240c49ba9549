"""Requests to an engine: checked inputs, a slot to write them into, an answer to wait for.

`Requester` is the part of an engine that its callers use for every request. The engine is in this process
(`paellapy.scheduler.engine.engine`) or in another one (`paellapy.scheduler.engine.remote`).
"""

from __future__ import annotations

import asyncio
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Mapping
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from paellapy.scheduler.core import codes
from paellapy.scheduler.core.errors import (
    DeadlineError,
    EngineAwayError,
    EngineClosedError,
    InputError,
    QueueFullError,
    RequestFailedError,
    SuspectError,
    UnknownModelError,
    WeightsError,
)
from paellapy.scheduler.core.state import State
from paellapy.scheduler.engine.front_calls import E_ARRIVAL_NS, E_ERROR, E_FINISH_NS, E_LANE, E_MODEL, E_SLOT, E_STATUS
from paellapy.scheduler.engine.front_end import Entry, FrontEnd, Loaded, Pending
from paellapy.scheduler.engine.gpu_use import GpuUse, occupancy
from paellapy.scheduler.engine.request_checks import (
    Inputs,
    check_inputs,
    check_ranges,
    digest_of,
    request_rank,
    request_times,
)
from paellapy.scheduler.engine.submitting import Terms, submit
from paellapy.scheduler.engine.waiters import Waiter, thread_waiter

Outputs = dict[str, NDArray[Any]]


class Requester(ABC):
    """The request side of an engine: takes requests, returns results."""

    _front: FrontEnd
    _slots: weakref.WeakSet[Slot]
    state: State

    @abstractmethod
    def _find(self, name: str) -> Loaded:
        """The loaded model; an UnknownModelError if there is none."""

    @abstractmethod
    def _row(self, row: int) -> Loaded | None:
        """The model in this row of the core."""

    @abstractmethod
    def _check_open(self) -> None:
        """Raises an error if the engine takes no requests."""

    @abstractmethod
    def _failed(self, status: int) -> Exception:
        """The error for callers whose requests end because the GPU failed."""

    def _no_weights(self, row: int, name: str) -> Exception:
        """The error for callers whose model's weights could not be brought to the GPU."""
        return WeightsError(f"the weights of model {name!r} could not be brought to the GPU; the engine's log says why")

    def _suspected(self, loaded: Loaded | None, entry: Entry) -> Exception:
        """The error for a request that was on the GPU when it failed. Its inputs are still in its slot."""
        failed = self._failed(entry[E_ERROR])
        lane = None if loaded is None else loaded.lane_of.get(entry[E_LANE])
        if loaded is None or lane is None:
            return failed
        inputs = {key: array[entry[E_SLOT]] for key, array in lane.inputs.items()}
        error = SuspectError(
            str(failed), digest_of(loaded.model.name, inputs), int(self.state.core["suspects"][0]) - 1
        )
        error.__cause__ = failed.__cause__
        return error

    def _faulted(self, name: str, lane: int, slot: int) -> RequestFailedError:
        """The error for a request on whose values the model failed."""
        return RequestFailedError(f"model {name!r} failed on the values of this request; the engine's log says why")

    @property
    @abstractmethod
    def over(self) -> bool:
        """Whether the engine is closed, so that nothing can be released to it any more."""

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
        pending = self._submit(loaded, arrays, deadline_ms, priority, client, answer)
        return self._block(pending, answer, waiter)

    def _block(self, pending: Pending, answer: SyncAnswer, waiter: Waiter) -> Outputs:
        try:
            self._front.wait(waiter)
        except BaseException:  # for example KeyboardInterrupt
            self._front.cancel(pending)
            raise
        return answer.result()

    def reserve(
        self,
        name: str,
        deadline_ms: float | None = None,
        priority: int | None = None,
        client: Hashable = None,
    ) -> Slot:
        """Reserves memory for one request's inputs, to be written in place: without a copy if a lane is open.

        Write and submit without delay: the batch that the slot belongs to waits for it.
        """
        return Slot(self, self._find(name), deadline_ms, priority, client)

    def _submit(
        self,
        loaded: Loaded,
        inputs: Mapping[str, NDArray[Any]],
        deadline_ms: float | None,
        priority: int | None,
        client: Hashable,
        finish: Callable[[Entry], None],
    ) -> Pending:
        return submit(self._front, loaded, [inputs], self._terms(loaded, deadline_ms, priority, client), [finish])[0]

    def _terms(self, loaded: Loaded, deadline_ms: float | None, priority: int | None, client: Hashable) -> Terms:
        """Raises for a deadline, a priority or a client that is refused: before anything is taken."""
        arrival_ns, deadline_ns = request_times(deadline_ms)
        number = 0 if client is None else self._front.client_number(client)
        rank = loaded.model.priority if priority is None else request_rank(priority)
        return Terms(number, rank, arrival_ns, deadline_ns)

    def occupancy(self) -> GpuUse:
        """The GPU's occupancy by the engine's launches: each resource, and where the jobs are."""
        return occupancy(self.state)

    def _result(self, entry: Entry) -> Outputs | Exception:
        """The outputs or the error that a completion stands for."""
        status = entry[E_STATUS]
        loaded = self._row(entry[E_MODEL])
        if status == codes.OK:
            assert loaded is not None
            slot = entry[E_SLOT]
            return {key: array[slot].copy() for key, array in loaded.lane_of[entry[E_LANE]].outputs.items()}
        name = "?" if loaded is None else loaded.model.name
        if status == codes.EXPIRED:
            late_ms = (entry[E_FINISH_NS] - entry[E_ARRIVAL_NS]) * 1e-6
            return DeadlineError(f"model {name!r}: the deadline passed after {late_ms:.1f} ms")
        if status == codes.FAILED:
            return self._failed(entry[E_ERROR])
        if status == codes.SUSPECTED:
            return self._suspected(loaded, entry)
        if status == codes.FAULTED:
            return self._faulted(name, entry[E_LANE], entry[E_SLOT])
        if status == codes.QUEUE_FULL:
            return QueueFullError(f"model {name!r} has reached its limit of waiting requests; try again later")
        if status == codes.NO_MODEL:
            return UnknownModelError(f"model {name!r} was unloaded before the request could run")
        if status == codes.NO_WEIGHTS:
            return self._no_weights(entry[E_MODEL], name)
        return EngineClosedError(f"the request for model {name!r} was not run: {codes.STATUS[status]}")


class Slot:
    """One request that is being written: fill `inputs`, then `await slot.submit()` or `slot.submit_sync()`."""

    def __init__(
        self, engine: Requester, loaded: Loaded, deadline_ms: float | None, priority: int | None, client: Hashable,
        in_turn: bool = False,
    ) -> None:  # fmt: skip
        """`in_turn`: place the request behind all earlier requests of the model. In an open lane, it could overtake a
        request that the core has not read yet.
        """
        self._loaded, self._terms = loaded, engine._terms(loaded, deadline_ms, priority, client)
        self._engine, self._front = engine, engine._front
        model = self._loaded.model
        # Not a method of the slot: the pending request must not keep a forgotten slot alive.
        self._early = _Early()
        self._pending = Pending(self._loaded, self._early)
        self._front.take_row(self._pending)
        self._open = True
        engine._slots.add(self)
        self._place = None if in_turn else self._front.claim(self._loaded, self._terms.client)
        if self._place is not None:
            lane, slot = self._place
            self._front.post_claimed(self._pending, lane, slot, *self._terms)
            ours = self._loaded.lane_of.get(lane)
            if ours is not None:
                self.inputs = {key: ours.inputs[key][slot, ...] for key in model.inputs}
            else:  # the row holds another model by now, and the core refuses the request
                self.inputs = {key: np.zeros(spec.shape, spec.dtype) for key, spec in model.inputs.items()}
        else:
            nbytes = sum(spec.nbytes for spec in model.inputs.values())
            try:
                staged, self._source, self._keep = self._front.stage.take(nbytes)
            except QueueFullError:
                self._open = False
                self._front.give_back(self._pending)
                raise
            self.inputs, at = {}, 0
            for key, spec in model.inputs.items():
                self.inputs[key] = staged[at : at + spec.nbytes].view(spec.dtype).reshape(spec.shape)
                at += spec.nbytes

    async def submit(self) -> Outputs:
        """Runs the request, once its inputs are written."""
        loop = asyncio.get_running_loop()
        if self._open:
            self._front.attach(loop)
        future: asyncio.Future[Outputs] = loop.create_future()
        self._go(AsyncAnswer(self._engine, future, loop))
        try:
            return await future
        except asyncio.CancelledError:
            self._front.cancel(self._pending)
            raise

    def submit_sync(self) -> Outputs:
        """As `submit`; blocks this thread."""
        return self.begin()()

    def begin_for(self, finish: Callable[[Entry], None]) -> None:
        """Runs the request, once its inputs are written. `finish` is called with its completion, in any thread."""
        self._go(finish)

    def begin(self, waiter: Waiter | None = None) -> Callable[[], Outputs]:
        """Runs the request, once its inputs are written. The returned function waits for the answer, in this thread.

        If this thread has several requests in flight, each needs a waiter of its own.
        """
        waiter = thread_waiter() if waiter is None else waiter
        answer = SyncAnswer(self._engine, waiter)
        self.begin_for(answer)
        return lambda: self._engine._block(self._pending, answer, waiter)

    def cancel(self) -> None:
        """Gives the slot back without running the request."""
        if self._open:
            self._open = False
            if self._place is not None:
                self._front.cancel(self._pending)
                self._front.ready(*self._place)
            else:
                self._front.give_back(self._pending)
                self._front.stage.give(self._keep)

    def _go(self, finish: Callable[[Entry], None]) -> None:
        if not self._open:
            raise InputError("this slot was already submitted or cancelled; reserve another one")
        try:
            check_ranges(self._loaded.model, self.inputs)
        except InputError:
            for key, spec in self._loaded.model.ranges.items():  # the batch still runs, with the slot's contents
                self.inputs[key][...] = spec.neutral
            self.cancel()
            raise
        self._open = False
        with self._front.answering:
            early, self._pending.finish = self._early.entry, finish
            gone = self._front.closed
        if gone and early is None:
            raise EngineAwayError("the engine's process ended before the request was submitted; try again")
        if self._place is not None:
            self._front.ready(*self._place)
        elif early is None:
            self._engine._check_open()
            self._front.post_staged([(self._pending, self._source, self._keep)], *self._terms)
        if early is not None:
            finish(early)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.cancel()

    def __del__(self) -> None:
        if getattr(self, "_open", False) and not self._engine.over:
            self.cancel()


class _Early:
    """The result of a slot that ended before it was submitted: it expired, or the engine failed. `submit` raises it."""

    __slots__ = ("entry",)

    def __init__(self) -> None:
        self.entry: Entry | None = None

    def __call__(self, entry: Entry) -> None:
        self.entry = entry


class AsyncAnswer:
    """Completes an asyncio future, from any thread that reads the completion."""

    __slots__ = ("engine", "future", "loop")

    def __init__(self, engine: Requester, future: asyncio.Future[Outputs], loop: asyncio.AbstractEventLoop) -> None:
        self.engine, self.future, self.loop = engine, future, loop

    def __call__(self, entry: Entry) -> None:
        self.answer(self.engine._result(entry))  # read the result now: the lane is released after this call

    def answer(self, result: Outputs | Exception) -> None:
        if _this_loop() is self.loop:
            _set(self.future, result)
        elif not self.loop.is_closed():
            self.loop.call_soon_threadsafe(_set, self.future, result)


class SyncAnswer:
    __slots__ = ("_result", "engine", "waiter")

    def __init__(self, engine: Requester, waiter: Waiter) -> None:
        self.engine, self.waiter = engine, waiter
        self._result: Outputs | Exception = {}

    def __call__(self, entry: Entry) -> None:
        self.answer(self.engine._result(entry))

    def answer(self, result: Outputs | Exception) -> None:
        self._result = result
        self.waiter.set()

    def result(self) -> Outputs:
        if isinstance(self._result, Exception):
            raise self._result
        return self._result


def _this_loop() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None


def _set(future: asyncio.Future[Outputs], result: Outputs | Exception) -> None:
    if future.done():  # its task was cancelled meanwhile
        return
    if isinstance(result, Exception):
        future.set_exception(result)
    else:
        future.set_result(result)
