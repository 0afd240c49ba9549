"""Slots: memory for one request's inputs, reserved, written in place by the caller, and submitted."""

from __future__ import annotations

import asyncio
import weakref
from abc import abstractmethod
from collections.abc import Callable, Hashable
from typing import Self

import numpy as np

from paellapy.scheduler.core.errors import EngineAwayError, InputError, QueueFullError
from paellapy.scheduler.engine.answers import Answering, AsyncAnswer, Outputs, SyncAnswer
from paellapy.scheduler.engine.front_end import Entry, Loaded, Pending
from paellapy.scheduler.engine.messages import Terms
from paellapy.scheduler.engine.request_checks import check_ranges, request_rank, request_times
from paellapy.scheduler.engine.uninterrupted import Uninterrupted
from paellapy.scheduler.engine.waiters import Waiter, thread_waiter


class Reserving(Answering):
    """The part of an engine that gives out slots."""

    _slots: weakref.WeakSet[Slot]

    @abstractmethod
    def _find(self, name: str) -> Loaded:
        """The loaded model; an UnknownModelError if there is none."""

    @abstractmethod
    def _check_open(self) -> None:
        """Raises an error if the engine takes no requests."""

    @property
    @abstractmethod
    def over(self) -> bool:
        """Whether the engine is closed, so that nothing can be released to it any more."""

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

    def _terms(self, loaded: Loaded, deadline_ms: float | None, priority: int | None, client: Hashable) -> Terms:
        """Raises for a deadline, a priority or a client that is refused: before anything is taken."""
        arrival_ns, deadline_ns = request_times(deadline_ms)
        number = 0 if client is None else self._front.client_number(client)
        rank = loaded.model.priority if priority is None else request_rank(priority)
        return number, rank, arrival_ns, deadline_ns


class Slot:
    """One request that is being written: fill `inputs`, then `await slot.submit()` or `slot.submit_sync()`."""

    def __init__(
        self, engine: Reserving, loaded: Loaded, deadline_ms: float | None, priority: int | None, client: Hashable,
        in_turn: bool = False,
    ) -> None:  # fmt: skip
        """`in_turn`: place the request behind all earlier requests of the model. In an open lane, it could overtake a
        request that the core has not read yet.
        """
        self._loaded, self._terms = loaded, engine._terms(loaded, deadline_ms, priority, client)
        self._engine, self._front = engine, engine._front
        with Uninterrupted():
            self._take(in_turn)

    def _take(self, in_turn: bool) -> None:
        """Takes a row, and a slot of a lane or staged memory."""
        model = self._loaded.model
        # Not a method of the slot: the pending request must not keep a forgotten slot alive.
        self._early = _Early()
        self._pending = Pending(self._loaded, self._early)
        self._front.take_row(self._pending, self._terms[0])
        self._open = True
        self._engine._slots.add(self)
        self._place = None if in_turn else self._front.claim(self._loaded, self._terms[0])
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
        try:
            self.begin_for(answer)
        except KeyboardInterrupt:  # came meanwhile
            answer.leave()
            self._front.cancel(self._pending)
            raise
        return lambda: self._engine._block(self._pending, answer, waiter)

    def cancel(self) -> None:
        """Gives the slot back without running the request."""
        if self._open:
            with Uninterrupted():
                self._cancel()

    def _cancel(self) -> None:
        self._open = False
        if self._place is not None:
            self._front.cancel(self._pending)
            self._front.ready(*self._place)
        else:
            self._front.give_back(self._pending)
            self._front.stage.give(self._keep)

    def _go(self, finish: Callable[[Entry], None]) -> None:
        with Uninterrupted():
            self._post(finish)

    def _post(self, finish: Callable[[Entry], None]) -> None:
        if not self._open:
            raise InputError("this slot was already submitted or cancelled; reserve another one")
        try:
            check_ranges(self._loaded.model, self.inputs)
        except InputError:
            for key, spec in self._loaded.model.ranges.items():  # the batch still runs, with the slot's contents
                self.inputs[key][...] = spec.neutral
            self._cancel()
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
            try:
                self._engine._check_open()
            except BaseException:  # the engine would wait for a request that was never posted
                self._front.give_back(self._pending)
                self._front.stage.give(self._keep)
                raise
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
