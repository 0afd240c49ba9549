"""Answers to requests: a completion becomes outputs or an error, for the task or the thread that waits for it."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from typing import Any

from numpy.typing import NDArray

from paellapy.scheduler.core import codes
from paellapy.scheduler.core.errors import (
    DeadlineError,
    EngineClosedError,
    QueueFullError,
    RequestFailedError,
    SuspectError,
    UnknownModelError,
    WeightsError,
)
from paellapy.scheduler.core.state import State
from paellapy.scheduler.engine.front_calls import E_ARRIVAL_NS, E_ERROR, E_FINISH_NS, E_LANE, E_MODEL, E_SLOT, E_STATUS
from paellapy.scheduler.engine.front_end import Entry, FrontEnd, Loaded, Pending
from paellapy.scheduler.engine.request_checks import digest_of
from paellapy.scheduler.engine.waiters import Waiter

Outputs = dict[str, NDArray[Any]]


class Answering(ABC):
    """The part of an engine that reads completions."""

    _front: FrontEnd
    state: State

    @abstractmethod
    def _row(self, row: int) -> Loaded | None:
        """The model in this row of the core."""

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
        core = self.state.core[0]
        others, failure = int(core["suspects"]) - 1, int(core["lost_ns"])
        error = SuspectError(str(failed), (digest_of(loaded.model.name, inputs),), others, failure)
        error.__cause__ = failed.__cause__
        return error

    def _faulted(self, name: str, lane: int, slot: int) -> RequestFailedError:
        """The error for a request on whose values the model failed."""
        return RequestFailedError(f"model {name!r} failed on the values of this request; the engine's log says why")

    def _block(self, pending: Pending, answer: SyncAnswer, waiter: Waiter) -> Outputs:
        try:
            self._front.wait(waiter)
        except BaseException:  # for example KeyboardInterrupt
            answer.leave()
            self._front.cancel(pending)
            raise
        return answer.result()

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


class AsyncAnswer:
    """Completes an asyncio future, from any thread that reads the completion."""

    __slots__ = ("engine", "future", "loop")

    def __init__(self, engine: Answering, future: asyncio.Future[Outputs], loop: asyncio.AbstractEventLoop) -> None:
        self.engine, self.future, self.loop = engine, future, loop

    def __call__(self, entry: Entry) -> None:
        self.answer(self.engine._result(entry))  # read the result now: the lane is released after this call

    def answer(self, result: Outputs | Exception) -> None:
        if _this_loop() is self.loop:
            _set(self.future, result)
        elif not self.loop.is_closed():
            self.loop.call_soon_threadsafe(_set, self.future, result)


class SyncAnswer:
    __slots__ = ("_left", "_result", "engine", "waiter")

    def __init__(self, engine: Answering, waiter: Waiter) -> None:
        self.engine, self.waiter, self._left = engine, waiter, False
        self._result: Outputs | Exception = {}

    def __call__(self, entry: Entry) -> None:
        self.answer(self.engine._result(entry))

    def answer(self, result: Outputs | Exception) -> None:
        self._result = result
        if not self._left:
            self.waiter.set()

    def leave(self) -> None:
        """Nobody waits any more: the waiter is that of its thread's next request."""
        self._left = True

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
