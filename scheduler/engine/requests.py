"""Requests to an engine: submitted with checked inputs, and answered with outputs.

`Requester` is the part of an engine that its callers use for every request. The engine is in this process
(`paellapy.scheduler.engine.engine`) or in another one (`paellapy.scheduler.engine.remote`).
"""

from __future__ import annotations

import asyncio
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Mapping, Sequence
from hashlib import blake2b
from typing import Any, Self, TypeVar

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
from paellapy.scheduler.core.residency import want_weights
from paellapy.scheduler.core.state import State
from paellapy.scheduler.engine.ring_calls import (
    E_ARRIVAL_NS,
    E_ERROR,
    E_FINISH_NS,
    E_INSTANCE,
    E_MODEL,
    E_SLOT,
    E_STATUS,
)
from paellapy.scheduler.engine.ring_client import (
    Entry,
    Loaded,
    Pending,
    RingClient,
    Staged,
    Terms,
    Uninterrupted,
    Waiter,
    thread_waiter,
)
from paellapy.scheduler.engine.stats import GpuUse, occupancy
from paellapy.scheduler.models.model import Model

# Checks of a request: its model, inputs, deadline and priority; and the number that identifies its inputs.


Inputs = Mapping[str, Any]
AnyModel = TypeVar("AnyModel")


def find_model(loaded: Mapping[str, AnyModel], name: str) -> AnyModel:
    """The loaded model of this name."""
    found = loaded.get(name)
    if found is None:
        raise UnknownModelError(f"no model named {name!r} is loaded; loaded: {', '.join(loaded) or 'none'}")
    return found


def request_times(deadline_ms: float | None) -> tuple[int, int]:
    """Arrival and deadline (ns) of a request that arrives now."""
    now = time.monotonic_ns()
    if deadline_ms is None:
        return now, codes.NEVER
    try:
        if not deadline_ms > 0:
            raise DeadlineError(f"deadline_ms={deadline_ms}: the deadline counts from now and must be above 0")
        return now, min(codes.NEVER, now + int(min(deadline_ms, 1e12) * 1e6))
    except (TypeError, ValueError):
        raise InputError(
            f"deadline_ms={deadline_ms!r}: the deadline must be a number of milliseconds from now, or None"
        ) from None


def request_rank(priority: int) -> int:
    """A request's own priority, as a number that the core can hold."""
    try:
        rank = int(priority)
    except (TypeError, ValueError, OverflowError):
        rank = codes.NEVER
    if not -codes.NEVER < rank < codes.NEVER:
        raise InputError(
            f"priority={priority!r}: the priority must be an integer between -2⁶² and 2⁶², or None for the model's own"
        )
    return rank


def check_inputs(model: Model, inputs: Inputs) -> dict[str, NDArray[Any]]:
    """The inputs in the model's order; an InputError says what is wrong with them."""
    try:
        given = inputs.keys()
    except AttributeError:
        raise InputError(
            f"model {model.name!r} takes a dict of arrays ({', '.join(model.inputs)}), not a {type(inputs).__name__}"
        ) from None
    if given != model.inputs.keys():
        missing, extra = sorted(model.inputs.keys() - given), sorted(map(str, given - model.inputs.keys()))
        problem = [f"no {', '.join(missing)}"] * bool(missing) + [f"unknown {', '.join(extra)}"] * bool(extra)
        raise InputError(
            f"model {model.name!r} takes {', '.join(model.inputs)}; the request has {' and '.join(problem)}"
        )
    arrays = {}
    for key, spec in model.inputs.items():
        try:
            array = np.asarray(inputs[key])
        except (TypeError, ValueError) as e:
            raise InputError(f"model {model.name!r}, input {key!r} cannot be converted to an array: {e}") from e
        if array.shape != spec.shape:
            raise InputError(
                f"model {model.name!r}, input {key!r} has shape {array.shape}; it must be {spec.shape}, without the "
                "batch dimension"
            )
        if array.dtype != spec.dtype:
            raise InputError(f"model {model.name!r}, input {key!r} is {array.dtype.name}; it must be {spec.dtype.name}")
        arrays[key] = array
    if model.ranges:
        check_ranges(model, arrays)
    return arrays


def check_ranges(model: Model, arrays: Mapping[str, NDArray[Any]]) -> None:
    """Checks the values of inputs that have a range; an InputError names the first value outside it."""
    for key, spec in model.ranges.items():
        if (wrong := spec.outside(arrays[key])) is not None:
            text = f"model {model.name!r}, input {key!r} {wrong}"
            raise InputError(text, model=model.name, field=key, limit=(spec.low, spec.high))


def digest_of(name: str, inputs: Mapping[str, NDArray[Any]]) -> int:
    """A number that identifies one item of a model: equal inputs have equal numbers."""
    digest = blake2b(name.encode("utf-8", "surrogatepass"), digest_size=8)
    for array in inputs.values():
        digest.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
    return int.from_bytes(digest.digest(), "little") or 1


def digest_of_all(digests: Sequence[int]) -> int:
    """A number that identifies a request of these items, in this order."""
    if len(digests) == 1:
        return digests[0]
    joined = b"".join(each.to_bytes(8, "little") for each in digests)
    return int.from_bytes(blake2b(joined, digest_size=8).digest(), "little") or 1


# Answers to requests: a completion becomes outputs or an error, for the task or the thread that waits for it.


Outputs = dict[str, NDArray[Any]]


class Answering(ABC):
    """The part of an engine that reads completions."""

    _producer: RingClient
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
        instance = None if loaded is None else loaded.instance_of.get(entry[E_INSTANCE])
        if loaded is None or instance is None:
            return failed
        inputs = {key: array[entry[E_SLOT]] for key, array in instance.inputs.items()}
        core = self.state.core[0]
        others, failure = int(core["suspects"]) - 1, int(core["lost_ns"])
        error = SuspectError(str(failed), (digest_of(loaded.model.name, inputs),), others, failure)
        error.__cause__ = failed.__cause__
        return error

    def _faulted(self, name: str, instance: int, slot: int) -> RequestFailedError:
        """The error for a request on whose values the model failed."""
        return RequestFailedError(f"model {name!r} failed on the values of this request; the engine's log says why")

    def _block(self, pending: Pending, answer: SyncAnswer, waiter: Waiter) -> Outputs:
        try:
            self._producer.wait(waiter)
        except BaseException:  # for example KeyboardInterrupt
            answer.leave()
            self._producer.cancel(pending)
            raise
        return answer.result()

    def _result(self, entry: Entry) -> Outputs | Exception:
        """The outputs or the error that a completion stands for."""
        status = entry[E_STATUS]
        loaded = self._row(entry[E_MODEL])
        if status == codes.OK:
            assert loaded is not None
            slot = entry[E_SLOT]
            return {key: array[slot].copy() for key, array in loaded.instance_of[entry[E_INSTANCE]].outputs.items()}
        name = "?" if loaded is None else loaded.model.name
        if status == codes.EXPIRED:
            late_ms = (entry[E_FINISH_NS] - entry[E_ARRIVAL_NS]) * 1e-6
            return DeadlineError(f"model {name!r}: the deadline passed after {late_ms:.1f} ms")
        if status == codes.FAILED:
            return self._failed(entry[E_ERROR])
        if status == codes.SUSPECTED:
            return self._suspected(loaded, entry)
        if status == codes.FAULTED:
            return self._faulted(name, entry[E_INSTANCE], entry[E_SLOT])
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
        self.answer(self.engine._result(entry))  # read the result now: the instance is released after this call

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


# Submitting requests: each gets a row and a slot, or staged memory for its inputs, and is posted to the core.


Place = tuple[int, int]  # instance and slot
_SHORT_BYTES = 4096  # of shorter arrays, one more copy takes less time than two views


def submit(
    producer: RingClient,
    loaded: Loaded,
    items: Sequence[Mapping[str, NDArray[Any]]],
    terms: Terms,
    finishes: Sequence[Callable[[Entry], None]],
) -> list[Pending]:
    """Submits the items of one request, which run as one batch if the engine is idle and they fit into one: all claim a
    slot before the first is posted, and those without a slot are posted together. On an error, no item runs.
    """
    if len(finishes) == 1:
        return [submit_one(producer, loaded, items[0], terms, finishes[0])]
    pending: list[Pending] = []
    try:
        for finish in finishes:
            pending.append(Pending(loaded, finish))
            producer.take_row(pending[-1], terms[0])
    except (QueueFullError, EngineClosedError):
        for each in pending[:-1]:
            producer.give_back(each)
        raise
    claims = [producer.claim(loaded, terms[0]) for _ in pending]
    staged: list[Staged] = []
    written, posted = 0, False
    try:
        for each, claimed, inputs in zip(pending, claims, items, strict=True):
            if claimed is None:
                staged.append(_stage(producer, each, inputs))
        if staged:
            posted = True
            producer.post_staged(staged, *terms)
        for written, (each, claimed, inputs) in enumerate(zip(pending, claims, items, strict=True)):  # noqa: B007
            if claimed is not None:
                write(producer, each, claimed, inputs, terms)
    except Exception:
        _withdraw(producer, pending, claims, [] if posted else staged, written, terms, posted)
        raise
    return pending


def submit_one(
    producer: RingClient,
    loaded: Loaded,
    inputs: Mapping[str, NDArray[Any]],
    terms: Terms,
    finish: Callable[[Entry], None],
) -> Pending:
    """As `submit`, for one item: most requests have no more, and need no lists."""
    pending = Pending(loaded, finish)
    producer.take_row(pending, terms[0])
    claimed = producer.claim(loaded, terms[0])
    staged: list[Staged] = []
    try:
        if claimed is None:
            staged.append(_stage(producer, pending, inputs))
            producer.post_staged(staged, *terms)
        else:
            write(producer, pending, claimed, inputs, terms)
    except Exception:
        _withdraw(producer, [pending], [claimed], [], 0, terms, bool(staged))
        raise
    return pending


def submit_bytes(producer: RingClient, pending: Pending, pieces: Sequence[memoryview], terms: Terms) -> None:
    """As `submit_one`, for inputs that are bytes, in the model's order and of its sizes."""
    producer.take_row(pending, terms[0])
    claimed = producer.claim(pending.loaded, terms[0])
    staged: list[Staged] = []
    try:
        if claimed is None:
            staged.append(_stage_bytes(producer, pending, pieces))
            producer.post_staged(staged, *terms)
            return
        instance = pending.loaded.instance_of.get(claimed[0])
        if instance is not None:  # as in `write`
            for slot, piece in zip(instance.slot_bytes(claimed[1])[0], pieces, strict=True):
                slot[:] = piece
        producer.post_written(pending, *claimed, *terms)
    except Exception:
        _withdraw(producer, [pending], [claimed], [], 0, terms, bool(staged))
        raise


def _withdraw(
    producer: RingClient, pending: Sequence[Pending], claims: Sequence[Place | None], staged: Sequence[Staged],
    written: int, terms: Terms, posted: bool,
) -> None:  # fmt: skip
    """Withdraws items. Before the item `written`, claimed slots are posted; the others are posted now, because their
    instance waits for them. If items without a slot were `posted`, their completions free rows and staged memory.
    """
    for _, _, keep in staged:
        producer.stage.give(keep)
    for k, (each, claimed) in enumerate(zip(pending, claims, strict=True)):
        if claimed is None and not posted:
            producer.give_back(each)
            continue
        if claimed is not None and k >= written:
            producer.post_written(each, *claimed, *terms)
        producer.cancel(each)


def _stage(producer: RingClient, pending: Pending, inputs: Mapping[str, NDArray[Any]]) -> Staged:
    """Copies the inputs to memory from which the core takes them later."""
    size = 0
    for array in inputs.values():
        size += array.nbytes
    staged, source, keep = producer.stage.take(size)
    memory, at = staged.data, 0
    for array in inputs.values():
        end = at + array.nbytes
        if array.nbytes <= _SHORT_BYTES:
            memory[at:end] = array.tobytes()
        else:
            staged[at:end] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        at = end
    return pending, source, keep


def _stage_bytes(producer: RingClient, pending: Pending, pieces: Sequence[memoryview]) -> Staged:
    staged, source, keep = producer.stage.take(sum(map(len, pieces)))
    memory, at = staged.data, 0
    for piece in pieces:
        memory[at : at + len(piece)] = piece
        at += len(piece)
    return pending, source, keep


def write(
    producer: RingClient, pending: Pending, claimed: Place, inputs: Mapping[str, NDArray[Any]], terms: Terms
) -> None:
    """Writes the inputs to the claimed slot, and posts the request."""
    instance = pending.loaded.instance_of.get(claimed[0])
    if instance is not None:
        # If the instance is not this model's, its row holds another model by now, and the core refuses the request.
        slots = instance.inputs
        for key, array in inputs.items():
            slots[key][claimed[1]] = array
    producer.post_written(pending, *claimed, *terms)


# Slots: memory for one request's inputs, reserved, written in place by the caller, and submitted.


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
        """Reserves memory for one request's inputs, to be written in place: without a copy if an instance is open.

        Write and submit without delay: the batch that the slot belongs to waits for it.
        """
        return Slot(self, self._find(name), deadline_ms, priority, client)

    def _terms(self, loaded: Loaded, deadline_ms: float | None, priority: int | None, client: Hashable) -> Terms:
        """Raises for a deadline, a priority or a client that is refused: before anything is taken."""
        arrival_ns, deadline_ns = request_times(deadline_ms)
        number = 0 if client is None else self._producer.client_number(client)
        rank = loaded.model.priority if priority is None else request_rank(priority)
        return number, rank, arrival_ns, deadline_ns


class Slot:
    """One request that is being written: fill `inputs`, then `await slot.submit()` or `slot.submit_sync()`."""

    def __init__(
        self, engine: Reserving, loaded: Loaded, deadline_ms: float | None, priority: int | None, client: Hashable,
        in_turn: bool = False,
    ) -> None:  # fmt: skip
        """`in_turn`: place the request behind all earlier requests of the model. In an open instance, it could overtake
        a request that the core has not read yet.
        """
        self._loaded, self._terms = loaded, engine._terms(loaded, deadline_ms, priority, client)
        self._engine, self._producer = engine, engine._producer
        with Uninterrupted():
            self._take(in_turn)

    def _take(self, in_turn: bool) -> None:
        """Takes a row, and a slot of an instance or staged memory."""
        model = self._loaded.model
        # Not a method of the slot: the pending request must not keep a forgotten slot alive.
        self._early = _Early()
        self._pending = Pending(self._loaded, self._early)
        self._producer.take_row(self._pending, self._terms[0])
        self._open = True
        self._engine._slots.add(self)
        self._place = None if in_turn else self._producer.claim(self._loaded, self._terms[0])
        if self._place is not None:
            instance, slot = self._place
            self._producer.post_claimed(self._pending, instance, slot, *self._terms)
            ours = self._loaded.instance_of.get(instance)
            if ours is not None:
                self.inputs = {key: ours.inputs[key][slot, ...] for key in model.inputs}
            else:  # the row holds another model by now, and the core refuses the request
                self.inputs = {key: np.zeros(spec.shape, spec.dtype) for key, spec in model.inputs.items()}
        else:
            nbytes = sum(spec.nbytes for spec in model.inputs.values())
            try:
                staged, self._source, self._keep = self._producer.stage.take(nbytes)
            except QueueFullError:
                self._open = False
                self._producer.give_back(self._pending)
                raise
            self.inputs, at = {}, 0
            for key, spec in model.inputs.items():
                self.inputs[key] = staged[at : at + spec.nbytes].view(spec.dtype).reshape(spec.shape)
                at += spec.nbytes

    async def submit(self) -> Outputs:
        """Runs the request, once its inputs are written."""
        loop = asyncio.get_running_loop()
        if self._open:
            self._producer.attach(loop)
        future: asyncio.Future[Outputs] = loop.create_future()
        self._go(AsyncAnswer(self._engine, future, loop))
        try:
            return await future
        except asyncio.CancelledError:
            self._producer.cancel(self._pending)
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
            self._producer.cancel(self._pending)
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
            self._producer.cancel(self._pending)
            self._producer.ready(*self._place)
        else:
            self._producer.give_back(self._pending)
            self._producer.stage.give(self._keep)

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
        with self._producer.answering:
            early, self._pending.finish = self._early.entry, finish
            gone = self._producer.closed
        if gone and early is None:
            raise EngineAwayError("the engine's process ended before the request was submitted; try again")
        if self._place is not None:
            self._producer.ready(*self._place)
        elif early is None:
            try:
                self._engine._check_open()
            except BaseException:  # the engine would wait for a request that was never posted
                self._producer.give_back(self._pending)
                self._producer.stage.give(self._keep)
                raise
            self._producer.post_staged([(self._pending, self._source, self._keep)], *self._terms)
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
            self._producer.nudge()  # the core's loop may be asleep

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
        producer = self._producer
        producer.attach(loop)
        future: asyncio.Future[Outputs] = loop.create_future()
        pending = self._submit(loaded, inputs, deadline_ms, priority, client, AsyncAnswer(self, future, loop))
        try:
            return await future
        except asyncio.CancelledError:
            producer.cancel(pending)
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
                self._producer.cancel(pending)
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
        return submit_one(self._producer, loaded, inputs, terms, finish)

    def occupancy(self) -> GpuUse:
        """The GPU's occupancy by the engine's launches: each resource, and where the jobs are."""
        return occupancy(self.state)
