"""`RequestClient`: requests to an engine, submitted with checked inputs and answered with outputs.

The engine's core is in this process (`core_loop.CoreLoop`) or in another one (`remote.RemoteCore`).
"""

from __future__ import annotations

import asyncio
import itertools
import time
import weakref
from abc import abstractmethod
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
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
    SuspectError,
    UnknownModelError,
)
from paellapy.scheduler.core.residency import want_weights
from paellapy.scheduler.core.state import State
from paellapy.scheduler.engine.core_loop import Core
from paellapy.scheduler.engine.pipelines import BackgroundLoop, LoadedPipeline
from paellapy.scheduler.engine.request_values import check_inputs, check_ranges, check_taken, digest_of
from paellapy.scheduler.engine.ring_calls import (
    E_ARRIVAL_NS,
    E_BATCH,
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
    Place,
    RingClient,
    Staged,
    Terms,
    Uninterrupted,
    Waiter,
    is_running,
    thread_waiter,
)
from paellapy.scheduler.engine.steps import StepPools, Steps, late
from paellapy.scheduler.models.model import Model

# A request's deadline and priority.


Inputs = Mapping[str, Any]


def request_times(deadline_ms: float | None) -> tuple[int, int]:
    """Arrival and deadline (ns) of a request that arrives now."""
    now = time.monotonic_ns()
    if deadline_ms is None:
        return now, codes.NEVER
    try:
        if not deadline_ms > 0:
            raise DeadlineError(
                f"deadline_ms={deadline_ms}: the deadline counts from now and must be above 0", field="deadline_ms",
                given=deadline_ms,
            )  # fmt: skip
        return now, min(codes.NEVER, now + int(min(deadline_ms, 1e12) * 1e6))
    except (TypeError, ValueError):
        raise InputError(
            f"deadline_ms={deadline_ms!r}: the deadline must be a number of milliseconds from now, or None",
            field="deadline_ms", given=deadline_ms,
        ) from None  # fmt: skip


def request_rank(priority: int) -> int:
    """A request's own priority, as a number that the core can hold."""
    try:
        rank = int(priority)
    except (TypeError, ValueError, OverflowError):
        rank = codes.NEVER
    if not -codes.NEVER < rank < codes.NEVER:
        raise InputError(
            f"priority={priority!r}: the priority must be an integer between -2⁶² and 2⁶², or None for the model's own",
            field="priority", given=priority, limit=codes.NEVER,
        )  # fmt: skip
    return rank


# Requests that wait for their answer: each is answered once, in the thread that reads its completion.


Outputs = dict[str, NDArray[Any]]


class Request(Pending):
    """A request whose completion becomes outputs or an error."""

    __slots__ = ("_client",)

    def __init__(self, client: RequestClient, loaded: Loaded) -> None:
        super().__init__(loaded)
        self._client = client

    @abstractmethod
    def answer(self, result: Outputs | Exception) -> None: ...

    def finish(self, entry: Entry) -> None:
        # read the result now: the instance is released after this call
        self.answer(self._client.result(entry, self.length))

    def fail(self, error: Exception) -> None:
        self.answer(error)


class AsyncRequest(Request):
    """Completes an asyncio future, from any thread that reads the completion."""

    __slots__ = ("_loop", "future")

    def __init__(self, client: RequestClient, loaded: Loaded, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(client, loaded)
        self._loop = loop
        self.future: asyncio.Future[Outputs] = loop.create_future()

    def answer(self, result: Outputs | Exception) -> None:
        if is_running(self._loop):
            _set(self.future, result)
        elif not self._loop.is_closed():
            self._loop.call_soon_threadsafe(_set, self.future, result)


def _set(future: asyncio.Future[Outputs], result: Outputs | Exception) -> None:
    if future.done():  # its task was cancelled meanwhile
        return
    if isinstance(result, Exception):
        future.set_exception(result)
    else:
        future.set_result(result)


class SyncRequest(Request):
    """Wakes a thread through its waiter."""

    __slots__ = ("_left", "_result", "_waiter")

    def __init__(self, client: RequestClient, loaded: Loaded, waiter: Waiter) -> None:
        super().__init__(client, loaded)
        self._waiter, self._left = waiter, False
        self._result: Outputs | Exception = {}

    def answer(self, result: Outputs | Exception) -> None:
        self._result = result
        if not self._left:
            self._waiter.set()

    def leave(self) -> None:
        """Withdraws the request. Nobody waits any more: the waiter is that of its thread's next request."""
        self._left = True
        if self.row >= 0:
            self._client.core.ring.cancel(self)

    def wait(self) -> Outputs:
        """Blocks this thread until the answer is there."""
        try:
            self._client.core.ring.wait(self._waiter)
        except BaseException:  # for example KeyboardInterrupt
            self.leave()
            raise
        if isinstance(self._result, Exception):
            raise self._result
        return self._result


class _Uncollected(Pending):
    """One of several requests whose outputs nobody reads. The last to end wakes their thread."""

    __slots__ = ("_left", "_waiter")

    def __init__(self, loaded: Loaded, waiter: Waiter, left: Iterator[int]) -> None:
        super().__init__(loaded)
        self._waiter, self._left = waiter, left

    def finish(self, entry: Entry) -> None:
        if next(self._left) == 0:
            self._waiter.set()

    def fail(self, error: Exception) -> None:
        self._waiter.set()


# Submitting requests: each gets a row and a slot, or staged memory for its inputs, and is posted to the core.


_SHORT_BYTES = 4096  # of shorter arrays, one more copy takes less time than two views
Pieces = Sequence[bytes | memoryview]  # the inputs of one item, in the model's order


def pieces_of(arrays: Iterable[NDArray[Any]]) -> Pieces:
    """The bytes of the arrays."""
    return [
        array.tobytes()
        if array.nbytes <= _SHORT_BYTES
        else np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
        for array in arrays
    ]


def submit_one(ring: RingClient, pending: Pending, pieces: Pieces, terms: Terms) -> None:
    """As `submit`, for one item: most requests have no more, and need no lists."""
    ring.take_row(pending, terms[0])
    claimed = ring.claim(pending.loaded, terms[0])
    posted = False
    try:
        if claimed is None:
            staged = _stage(ring, pending, pieces)
            posted = True
            ring.post_staged([staged], *terms)
        else:
            write(ring, pending, claimed, pieces, terms)
    except Exception:
        _withdraw(ring, [(pending, claimed)], 0, terms, posted)
        raise


def submit(ring: RingClient, pending: Sequence[Pending], items: Sequence[Pieces], terms: Terms) -> None:
    """Submits the items of one request, which run as one batch if the engine is idle and they fit into one: all claim a
    slot before the first is posted, and those without a slot are posted together. On an error, no item runs.
    """
    for k, each in enumerate(pending):
        try:
            ring.take_row(each, terms[0])
        except (QueueFullError, EngineClosedError):
            for earlier in pending[:k]:
                ring.give_back(earlier)
            raise
    placed = [(each, ring.claim(each.loaded, terms[0])) for each in pending]
    staged: list[Staged] = []
    written, posted = 0, False
    try:
        for (each, claimed), pieces in zip(placed, items, strict=True):
            if claimed is None:
                staged.append(_stage(ring, each, pieces))
        if staged:
            posted = True
            ring.post_staged(staged, *terms)
        for written, ((each, claimed), pieces) in enumerate(zip(placed, items, strict=True)):  # noqa: B007
            if claimed is not None:
                write(ring, each, claimed, pieces, terms)
    except Exception:
        if not posted:
            for _, _, keep in staged:
                ring.stage.give(keep)
        _withdraw(ring, placed, written, terms, posted)
        raise


def _withdraw(
    ring: RingClient, placed: Sequence[tuple[Pending, Place | None]], written: int, terms: Terms, posted: bool
) -> None:
    """Withdraws items. Before the item `written`, claimed slots are posted; the others are posted now, because their
    instance waits for them. If items without a slot were `posted`, their completions free rows and staged memory.
    """
    for k, (each, claimed) in enumerate(placed):
        if claimed is None and not posted:
            ring.give_back(each)
            continue
        if claimed is not None and k >= written:
            ring.post_written(each, *claimed, *terms)
        ring.cancel(each)


def _stage(ring: RingClient, pending: Pending, pieces: Pieces) -> Staged:
    """Copies the inputs to memory from which the core takes them later."""
    staged, source, keep = ring.stage.take(sum(map(len, pieces)))
    memory, at = staged.data, 0
    for piece in pieces:
        memory[at : at + len(piece)] = piece
        at += len(piece)
    return pending, source, keep


def write(ring: RingClient, pending: Pending, claimed: Place, pieces: Pieces, terms: Terms) -> None:
    """Writes the inputs to the claimed slot, and posts the request."""
    instance = pending.loaded.instance_of.get(claimed[0])
    if instance is not None:
        # If the instance is not this model's, its row holds another model by now, and the core refuses the request.
        for slot, piece in zip(instance.slot_bytes(claimed[1])[0], pieces, strict=True):
            slot[:] = piece
    ring.post_written(pending, *claimed, *terms)


# Slots: memory for one request's inputs, reserved, written in place by the caller, and submitted.


class Slot:
    """One request that is being written: fill `inputs`, then `await slot.submit()` or `slot.submit_sync()`."""

    def __init__(
        self, client: RequestClient, loaded: Loaded, terms: Terms, in_turn: bool = False, items: int = 0
    ) -> None:
        """`in_turn`: place the request behind all earlier requests of the model. In an open instance, it could overtake
        a request that the core has not read yet. `items`: of a whole batch. Its inputs have room for the largest
        batch; the program of the next larger size also reads rows behind the items.
        """
        self._client, self._ring, self._loaded, self._terms = client, client.core.ring, loaded, terms
        self._items = items
        with Uninterrupted():
            self._take(in_turn)

    def _take(self, in_turn: bool) -> None:
        """Takes a row, and a slot of an instance or staged memory."""
        model = self._loaded.model
        # Not the slot itself: the pending request must not keep a forgotten slot alive.
        self._pending = _Unsubmitted(self._loaded)
        self._ring.take_row(self._pending, self._terms[0])
        self._open = True
        self._client.slots.add(self)
        self._place = None if in_turn or self._items else self._ring.claim(self._loaded, self._terms[0])
        if self._place is not None:
            instance, slot = self._place
            self._ring.post_claimed(self._pending, instance, slot, *self._terms)
            ours = self._loaded.instance_of.get(instance)
            if ours is not None:
                self.inputs = {key: ours.inputs[key][slot, ...] for key in model.inputs}
            else:  # the row holds another model by now, and the core refuses the request
                self.inputs = {key: np.zeros(spec.shape, spec.dtype) for key, spec in model.inputs.items()}
        else:
            slot_items = model.slot_items
            nbytes = sum(spec.nbytes for spec in model.inputs.values()) * slot_items
            try:
                staged, self._source, self._keep = self._ring.stage.take(nbytes)
            except QueueFullError:
                self._open = False
                self._ring.give_back(self._pending)
                raise
            self.inputs, at = {}, 0
            for key, spec in model.inputs.items():
                array = staged[at : at + spec.nbytes * slot_items].view(spec.dtype).reshape(slot_items, *spec.shape)
                self.inputs[key] = array if self._items else array[0]
                at += spec.nbytes * slot_items

    async def submit(self) -> Outputs:
        """Runs the request, once its inputs are written."""
        loop = asyncio.get_running_loop()
        if self._open:
            self._ring.attach(loop)
        request = AsyncRequest(self._client, self._loaded, loop)
        self.begin_for(request)
        try:
            return await request.future
        except asyncio.CancelledError:
            self._ring.cancel(request)
            raise

    def submit_sync(self) -> Outputs:
        """As `submit`; blocks this thread."""
        return self.begin()()

    def begin(self, waiter: Waiter | None = None) -> Callable[[], Outputs]:
        """Runs the request, once its inputs are written. The returned function waits for the answer, in this thread.

        If this thread has several requests in flight, each needs a waiter of its own.
        """
        request = SyncRequest(self._client, self._loaded, thread_waiter() if waiter is None else waiter)
        try:
            self.begin_for(request)
        except KeyboardInterrupt:  # came meanwhile
            request.leave()
            raise
        return request.wait

    def begin_for(self, request: Pending) -> None:
        """Runs the request, once its inputs are written, and has this object answered."""
        with Uninterrupted():
            self._post(request)

    def cancel(self) -> None:
        """Gives the slot back without running the request."""
        if self._open:
            with Uninterrupted():
                self._cancel()

    def _cancel(self) -> None:
        self._open = False
        if self._place is not None:
            self._ring.cancel(self._pending)
            self._ring.ready(*self._place)
        else:
            self._ring.give_back(self._pending)
            self._ring.stage.give(self._keep)

    def _post(self, request: Pending) -> None:
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
        request.items = max(self._items, 1)
        early: Entry | None = None
        if not self._ring.hand_over(self._pending, request):
            early = self._pending.entry
            if early is None:
                raise EngineAwayError("the engine's process ended before the request was submitted; try again")
        if self._place is not None:
            self._ring.ready(*self._place)
        elif early is None:
            try:
                self._client.core.check_open()
            except BaseException:  # the engine would wait for a request that was never posted
                self._ring.give_back(request)
                self._ring.stage.give(self._keep)
                raise
            self._ring.post_staged([(request, self._source, self._keep)], *self._terms)
        if early is not None:
            request.finish(early)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.cancel()

    def __del__(self) -> None:
        if getattr(self, "_open", False) and not self._client.core.over:
            self.cancel()


class _Unsubmitted(Pending):
    """The request of a slot until it is submitted. `entry`: it has ended already, expired or with the GPU's failure."""

    __slots__ = ("entry",)

    def __init__(self, loaded: Loaded) -> None:
        super().__init__(loaded)
        self.entry: Entry | None = None

    def finish(self, entry: Entry) -> None:
        self.entry = entry

    def fail(self, error: Exception) -> None:
        """`submit` finds that the engine's process is gone."""


# Where the lengths of requests vary: what a model's next batch holds, and what one more item costs.


def waiting_items(state: State, row: int) -> int:
    """Items of a model that wait to run."""
    model = state.model[row]
    filling = int(model["filling"])
    return int(model["queued"]) + (int(state.instance["taken"][filling]) if filling >= 0 else 0)


def added_ns(state: State, row: int, items: int) -> float:
    """Time alone on the GPU that one more item adds to the last of the batches that wait."""
    sizes = [size for size in state.size[row, : int(state.model["n_sizes"][row])] if size["segments"]]
    batch = items % int(sizes[-1]["batch"])

    def total_ns(count: int) -> float:
        return next((float(size["total_ns"]) for size in sizes if size["batch"] >= count), 0.0) if count else 0.0

    return total_ns(batch + 1) - total_ns(batch)


class RequestClient:
    """The request side of an engine, in this process or in another one: takes requests, returns results."""

    def __init__(self, core: Core, steps: Steps | None = None) -> None:
        """`steps` runs the functions before and after models; None: this process does."""
        self.core = core
        self.steps: Steps = StepPools() if steps is None else steps
        self.pipelines: dict[str, LoadedPipeline] = {}
        self._background = BackgroundLoop()
        self.slots: weakref.WeakSet[Slot] = weakref.WeakSet()  # reserved, and perhaps not submitted yet

    def find(self, name: str) -> Any:
        """The loaded model; an UnknownModelError if there is none."""
        self.core.check_open()
        return self.core.models.find(name)

    def asked(self, name: str) -> Any:
        """The pipeline or the loaded model of this name."""
        return self.pipelines.get(name) or self.find(name)

    def _fitted(
        self, loaded: Loaded, arrays: Mapping[str, NDArray[Any]]
    ) -> tuple[Any, Mapping[str, NDArray[Any]], int]:
        """The model at the size that takes these inputs, the inputs at that size, and their length before."""
        model = loaded.model
        if model.lengths is None:
            return loaded, arrays, 0
        padded, length = model.lengths.padded(model.name, model.inputs, arrays)
        chosen = self.for_length(loaded, length)
        return chosen, model.lengths.at(padded, chosen.model.length), length

    def for_length(self, loaded: Loaded, length: int) -> Any:
        """The model at the size for a request of this length: the smallest that is captured, or a larger one in whose
        next batch the request takes less of the GPU's time. A size that is not captured is wanted from now on.
        """
        lengths, state = loaded.model.lengths, self.core.state
        fitting = [each for size, each in loaded.by_length.items() if size >= length]
        if lengths is None or not fitting:
            return loaded
        smallest = next(size for size in lengths.sizes if size >= length)
        if fitting[0].model.length > smallest:
            loaded.want_length(smallest)
        waiting = [waiting_items(state, each.row) for each in fitting]
        # Where a whole batch waits at its own size, others will fill the next one too.
        if not any(waiting[1:]) or waiting[0] >= fitting[0].model.max_batch:
            return fitting[0]
        added = [added_ns(state, each.row, items) for each, items in zip(fitting, waiting, strict=True)]
        return fitting[added.index(min(added))]

    def terms(self, loaded: Loaded, deadline_ms: float | None, priority: int | None, client: Hashable) -> Terms:
        """Raises for a deadline, a priority or a client that is refused: before anything is taken."""
        arrival_ns, deadline_ns = request_times(deadline_ms)
        number = 0 if client is None else self.core.ring.client_number(client)
        rank = loaded.model.priority if priority is None else request_rank(priority)
        return number, rank, arrival_ns, deadline_ns

    async def infer(
        self, name: str, inputs: Inputs, deadline_ms: float | None, priority: int | None, client: Hashable
    ) -> Outputs:
        """See `Engine.infer`."""
        loaded = self.asked(name)
        if loaded.model.has_steps:
            values = check_taken(loaded.model, inputs)
            return await self.infer_with_steps(loaded, values, self.terms(loaded, deadline_ms, priority, client))
        arrays = check_inputs(loaded.model, inputs)
        return await self._run(loaded, arrays, self.terms(loaded, deadline_ms, priority, client))

    async def _run(self, loaded: Loaded, given: Mapping[str, NDArray[Any]], terms: Terms) -> Outputs:
        loaded, arrays, length = self._fitted(loaded, given)
        loop = asyncio.get_running_loop()
        ring = self.core.ring
        ring.attach(loop)
        request = AsyncRequest(self, loaded, loop)
        request.length = length
        submit_one(ring, request, pieces_of(arrays.values()), terms)
        try:
            return await request.future
        except asyncio.CancelledError:
            ring.cancel(request)
            raise

    async def infer_given(self, loaded: Loaded, values: Mapping[str, Any], terms: Terms) -> dict[str, Any]:
        """Runs one request whose values are checked."""
        run = self.infer_with_steps if loaded.model.has_steps else self._run
        return await run(loaded, values, terms)

    async def infer_with_steps(self, loaded: Loaded, values: Mapping[str, Any], terms: Terms) -> dict[str, Any]:
        """Runs one request with the functions before and after the model. It has what the model takes, or the model's
        own inputs.
        """
        if isinstance(loaded, LoadedPipeline):
            return await loaded.run(self, values, terms)
        model: Model = loaded.model
        deadline_ns = terms[3]
        left_s = None if deadline_ns == codes.NEVER else max(0.0, (deadline_ns - time.monotonic_ns()) * 1e-9)
        steps = self.steps.of(model)
        with steps.request():
            try:
                async with asyncio.timeout(left_s):
                    if model.before is not None and values.keys() == model.takes.keys():
                        values = await steps.run("before", values, deadline_ns)
                    check_ranges(model, values)
                    outputs = await self._run(loaded, values, terms)
                    return outputs if model.after is None else await steps.run("after", outputs, deadline_ns)
            except DeadlineError:
                raise
            except TimeoutError:
                raise late(model.name) from None

    def infer_sync(
        self, name: str, inputs: Inputs, deadline_ms: float | None, priority: int | None, client: Hashable
    ) -> Outputs:
        """See `Engine.infer_sync`."""
        if name in self.pipelines:
            found: Outputs = self._background.call(self.infer(name, inputs, deadline_ms, priority, client))
            return found
        loaded = self.find(name)
        model: Model = loaded.model
        if not model.has_steps:
            arrays = check_inputs(model, inputs)
            return self._run_sync(loaded, arrays, self.terms(loaded, deadline_ms, priority, client))
        values: Mapping[str, Any] = check_taken(model, inputs)
        terms = self.terms(loaded, deadline_ms, priority, client)
        steps = self.steps.of(model)
        with steps.request():
            if model.before is not None:
                values = steps.run_sync("before", values, terms[3])
                check_ranges(model, values)
            outputs = self._run_sync(loaded, values, terms)
            return outputs if model.after is None else steps.run_sync("after", outputs, terms[3])

    def _run_sync(self, loaded: Loaded, given: Mapping[str, NDArray[Any]], terms: Terms) -> Outputs:
        loaded, arrays, length = self._fitted(loaded, given)
        request = SyncRequest(self, loaded, thread_waiter())
        request.length = length
        try:
            with Uninterrupted():
                submit_one(self.core.ring, request, pieces_of(arrays.values()), terms)
        except KeyboardInterrupt:  # came meanwhile
            request.leave()
            raise
        return request.wait()

    def reserve(
        self, loaded: Loaded, deadline_ms: float | None = None, priority: int | None = None, client: Hashable = None,
        in_turn: bool = False, items: int = 0,
    ) -> Slot:  # fmt: skip
        """See `Engine.reserve`. `in_turn` and `items`: see `Slot`."""
        return Slot(self, loaded, self.terms(loaded, deadline_ms, priority, client), in_turn, items)

    def run_all(self, loaded: Loaded, items: Sequence[Pieces]) -> None:
        """Runs these items of a model as one request, and drops their outputs."""
        waiter, left = thread_waiter(), itertools.count(len(items) - 1, -1)
        submit(self.core.ring, [_Uncollected(loaded, waiter, left) for _ in items], items,
               self.terms(loaded, None, None, None))  # fmt: skip
        self.core.ring.wait(waiter)

    def cancel_slots(self) -> None:
        """Gives back the slots that were not submitted: their instances would wait for ever."""
        for slot in list(self.slots):
            slot.cancel()
        self._background.close()

    def want_weights(self, row: int) -> None:
        """Has a model's weights brought for its next requests, if they are not on the GPU. Returns at once."""
        if want_weights(self.core.state, row):
            self.core.ring.nudge()  # the core's loop may be asleep

    def result(self, entry: Entry, length: int = 0) -> Outputs | Exception:
        """The outputs or the error that a completion stands for; of padded inputs, the outputs up to their length."""
        core, status = self.core, entry[E_STATUS]
        loaded = core.models.by_row.get(entry[E_MODEL])
        if status == codes.OK:
            assert loaded is not None
            slot, outputs = entry[E_SLOT], loaded.instance_of[entry[E_INSTANCE]].outputs
            if loaded.model.whole_batches:
                return {key: array[: entry[E_BATCH]].copy() for key, array in outputs.items()}
            found = {key: array[slot] for key, array in outputs.items()}
            if length:
                found = loaded.model.lengths.cut(found, length, loaded.model.length)
            return {key: array.copy() for key, array in found.items()}
        name = "?" if loaded is None else loaded.model.base or loaded.model.name
        if status == codes.EXPIRED:
            late_ms = (entry[E_FINISH_NS] - entry[E_ARRIVAL_NS]) * 1e-6
            return DeadlineError(f"model {name!r}: the deadline passed after {late_ms:.1f} ms", model=name)
        if status == codes.FAILED:
            return core.failed(entry[E_ERROR])
        if status == codes.SUSPECTED:
            return self._suspected(loaded, entry)
        if status == codes.FAULTED:
            return core.faulted(name, entry[E_INSTANCE], entry[E_SLOT])
        if status == codes.QUEUE_FULL:
            return QueueFullError(f"model {name!r} has reached its limit of waiting requests; try again later",
                                  model=name)  # fmt: skip
        if status == codes.NO_MODEL:
            return UnknownModelError(f"model {name!r} was unloaded before the request could run", model=name)
        if status == codes.NO_WEIGHTS:
            return core.no_weights(entry[E_MODEL], name)
        return EngineClosedError(f"the request for model {name!r} was not run: {codes.STATUS[status]}", model=name)

    def _suspected(self, loaded: Loaded | None, entry: Entry) -> Exception:
        """The error for a request that was on the GPU when it failed. Its inputs are still in its slot."""
        failed = self.core.failed(entry[E_ERROR])
        instance = None if loaded is None else loaded.instance_of.get(entry[E_INSTANCE])
        if loaded is None or instance is None:
            return failed
        model = loaded.model
        inputs = {key: array[entry[E_SLOT]] for key, array in instance.inputs.items()}
        if model.lengths is not None:  # as the request was digested, at the largest size
            inputs = model.lengths.padded(model.name, model.inputs, inputs)[0]
        core = self.core.state.core[0]
        others, failure = int(core["suspects"]) - 1, int(core["lost_ns"])
        error = SuspectError(str(failed), (digest_of(model.base or model.name, inputs),), others, failure)
        error.__cause__ = failed.__cause__
        return error
