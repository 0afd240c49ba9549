"""One request on its way through an engine: checked inputs, a slot to write them into, an answer to wait for."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Hashable, Mapping
from typing import TYPE_CHECKING, Any, Self

import numpy as np
from numpy.typing import NDArray

from scheduler import state as st
from scheduler.errors import DeadlineError, InputError
from scheduler.frontend import Pending, Waiter, thread_waiter
from scheduler.model import Model

if TYPE_CHECKING:
    from scheduler.engine import Engine

Inputs = Mapping[str, Any]
Outputs = dict[str, NDArray[Any]]


def request_times(deadline_ms: float | None) -> tuple[int, int]:
    """Arrival and deadline of a request that comes now."""
    now = time.monotonic_ns()
    if deadline_ms is None:
        return now, st.NEVER
    if not deadline_ms > 0:
        raise DeadlineError(f"deadline_ms={deadline_ms}: the deadline is past already; it counts from now")
    return now, min(st.NEVER, now + int(min(deadline_ms, 1e12) * 1e6))


def check_inputs(model: Model, inputs: Inputs) -> dict[str, NDArray[Any]]:
    """The inputs in the model's order, or what is wrong with them."""
    if inputs.keys() != model.inputs.keys():
        missing, extra = sorted(model.inputs.keys() - inputs.keys()), sorted(inputs.keys() - model.inputs.keys())
        problem = [f"no {', '.join(missing)}"] * bool(missing) + [f"unknown {', '.join(extra)}"] * bool(extra)
        raise InputError(f"model {model.name!r} takes {', '.join(model.inputs)}; given: {' and '.join(problem)}")
    arrays = {}
    for key, spec in model.inputs.items():
        array = np.asarray(inputs[key])
        if array.shape != spec.shape:
            raise InputError(
                f"model {model.name!r}, input {key!r} has shape {array.shape}; it takes {spec.shape}, without the batch"
            )
        if array.dtype != spec.dtype:
            raise InputError(f"model {model.name!r}, input {key!r} is {array.dtype.name}; it takes {spec.dtype.name}")
        arrays[key] = array
    return arrays


class Slot:
    """One request being written: fill `inputs`, then `await slot.submit()` or `slot.submit_sync()`."""

    def __init__(
        self, engine: Engine, name: str, deadline_ms: float | None, priority: int | None, client: Hashable
    ) -> None:
        self._arrival_ns, self._deadline_ns = request_times(deadline_ms)
        self._engine, self._front = engine, engine._front
        self._loaded = engine._find(name)
        model = self._loaded.model
        self._client = 0 if client is None else self._front.client_number(client)
        self._priority = model.priority if priority is None else int(priority)
        # Not a method of the slot: a slot that is forgotten must not be kept alive by what it waits for.
        self._early = _Early()
        self._pending = Pending(self._loaded, self._early)
        self._front.take_row(self._pending)
        self._open = True
        engine._slots.add(self)
        self._place = self._front.claim(self._loaded.row)
        if self._place is not None:
            lane, slot = self._place
            self._front.post_claimed(
                self._pending, lane, slot, self._client, self._priority, self._arrival_ns, self._deadline_ns
            )
            self._front.wake()  # it may expire before it is ready
            arrays = self._loaded.lane(lane).inputs
            self.inputs = {key: arrays[key][slot, ...] for key in model.inputs}
        else:
            self._staged = np.zeros(sum(spec.nbytes for spec in model.inputs.values()), np.uint8)
            self.inputs, at = {}, 0
            for key, spec in model.inputs.items():
                self.inputs[key] = self._staged[at : at + spec.nbytes].view(spec.dtype).reshape(spec.shape)
                at += spec.nbytes

    async def submit(self) -> Outputs:
        """The inputs are written: run the request."""
        loop = asyncio.get_running_loop()
        if self._open:
            self._front.attach(loop)
        future: asyncio.Future[Outputs] = loop.create_future()
        self._go(AsyncAnswer(self._engine, future, loop))
        return await self._engine._await(self._pending, future)

    def submit_sync(self) -> Outputs:
        """As `submit`, blocking this thread."""
        waiter = thread_waiter()
        answer = SyncAnswer(self._engine, waiter)
        self._go(answer)
        return self._engine._block(self._pending, answer, waiter)

    def cancel(self) -> None:
        """Gives the slot back without running it."""
        if self._open:
            self._open = False
            if self._place is not None:
                self._front.cancel(self._pending)
                self._front.ready(self._place[0])
            else:
                self._front.give_back(self._pending)

    def _go(self, finish: Callable[[Any], None]) -> None:
        if not self._open:
            raise InputError("this slot has been submitted or cancelled already; reserve another")
        self._open = False
        with self._front.answering:
            early, self._pending.finish = self._early.entry, finish
        if self._place is not None:
            self._front.ready(self._place[0])
        elif early is None:
            self._engine._check_open()
            self._front.post_staged(
                self._pending, self._staged, self._client, self._priority, self._arrival_ns, self._deadline_ns
            )
        if early is not None:
            finish(early)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.cancel()

    def __del__(self) -> None:
        if getattr(self, "_open", False) and not self._engine._closed:
            self.cancel()


class _Early:
    """A slot that ended before it was submitted: it expired, or the engine failed. Its owner hears of it on submit."""

    __slots__ = ("entry",)

    def __init__(self) -> None:
        self.entry: Any = None

    def __call__(self, entry: Any) -> None:
        self.entry = entry.copy()


class AsyncAnswer:
    """Completes an asyncio future, from whichever thread reads the completion."""

    __slots__ = ("engine", "future", "loop")

    def __init__(self, engine: Engine, future: asyncio.Future[Outputs], loop: asyncio.AbstractEventLoop) -> None:
        self.engine, self.future, self.loop = engine, future, loop

    def __call__(self, entry: Any) -> None:
        result = self.engine._result(entry)  # now: the lane is released after this call
        if _this_loop() is self.loop:
            _set(self.future, result)
        elif not self.loop.is_closed():
            self.loop.call_soon_threadsafe(_set, self.future, result)


class SyncAnswer:
    __slots__ = ("_result", "engine", "waiter")

    def __init__(self, engine: Engine, waiter: Waiter) -> None:
        self.engine, self.waiter = engine, waiter
        self._result: Outputs | Exception = {}

    def __call__(self, entry: Any) -> None:
        self._result = self.engine._result(entry)
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
