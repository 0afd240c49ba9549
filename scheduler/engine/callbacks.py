"""`CallbackClient`: requests for callers that are called back, such as a server. No thread waits, no output is copied.

`RequestClient.infer` gives every request a future and a copy of its outputs. Here, a request of one item is answered
from the engine's own memory, in the thread that reads its completion.
"""

from __future__ import annotations

import asyncio
from collections.abc import Hashable, Mapping
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from paellapy.scheduler.core import codes
from paellapy.scheduler.core.errors import EngineFailedError, SuspectError
from paellapy.scheduler.core.tenants import tenant_numbers
from paellapy.scheduler.engine.client import Outputs, Pieces, RequestClient, pieces_of, submit, submit_one
from paellapy.scheduler.engine.ring_calls import E_INSTANCE, E_MODEL, E_SLOT, E_STATUS
from paellapy.scheduler.engine.ring_client import Entry, Loaded, Pending, RingClient, Terms
from paellapy.scheduler.models.memory import Instance
from paellapy.scheduler.models.model import TensorSpec


class Caller(Protocol):
    """The receiver of an answer. One of the methods is called, once, in the thread that reads the completion."""

    def done_in(self, instance: Instance, slot: int) -> None:
        """A request of one item succeeded: its outputs are in this slot, which is the engine's again on return."""

    def done(self, outputs: Outputs) -> None:
        """A request of several items succeeded: the outputs are [items, …]."""

    def failed(self, error: Exception) -> None: ...


class CallbackClient:
    """Submits requests to one engine, which is in this process or in another one."""

    def __init__(self, client: RequestClient) -> None:
        self._client = client
        self._tenants: dict[str, int] = {}
        self._attached: tuple[RingClient, asyncio.AbstractEventLoop] | None = None

    def free_places(self) -> int:
        return self._client.core.ring.free_places

    def as_sent_from(self, client: str, address: str) -> Hashable:
        """A client whose name nobody vouches for: a tenant, or else the client of that name at this address."""
        state = self._client.core.state
        if (count := int(state.client["tenant"].sum())) != len(self._tenants):  # a tenant stays one
            self._tenants = tenant_numbers(state) if count else {}
        return client if client in self._tenants else (client, address)

    def is_limited(self, client: Hashable) -> bool:
        """Whether the client is a tenant with a limit, which may hold its requests back for as long as it takes."""
        core = self._client.core
        if client is None or not core.state.core["limited"][0]:
            return False
        return bool(core.state.client["limit"][core.ring.client_number(client)] > 0.0)

    def submit(
        self,
        name: str,
        inputs: Mapping[str, NDArray[Any]],
        items: int,
        deadline_ms: float | None,
        priority: int | None,
        client: Hashable,
        caller: Caller,
        length: int = 0,
    ) -> ItemCall | Call | StepsCall:
        """Submits [items, …] that fit the model: all items run, or none. Must be called inside an asyncio loop.
        `length`: of inputs that are padded to the model's largest.

        Errors that are known at once are raised here; the caller is told of all later ones.
        """
        loaded = self._client.asked(name)
        if length:
            lengths, loaded = loaded.model.lengths, self._client.for_length(loaded, length)
            inputs = lengths.at(inputs, loaded.model.length)
        ring = self._client.core.ring
        ring.attach(asyncio.get_running_loop())
        terms = self._client.terms(loaded, deadline_ms, priority, client)
        if loaded.model.has_steps:
            return StepsCall(self._client, loaded, inputs, items, terms, caller)
        pieces = [pieces_of(inputs[key][k] for key in loaded.model.inputs) for k in range(items)]
        if items == 1:
            one = ItemCall(self._client, loaded, caller)
            one.length = length
            submit_one(ring, one, pieces[0], terms)
            return one
        call = Call(self._client, items, length, caller)
        each = [_Item(call, loaded, k) for k in range(items)]
        try:
            submit(ring, each, pieces, terms)
            call.pending = each
        except Exception:
            if call.over:  # an item has failed already, so the caller has its answer
                return call
            call.over = True  # completions of withdrawn items mean nothing
            raise
        if call.has_failed:  # before the others could be withdrawn
            for pending in call.pending:
                ring.cancel(pending)
        return call

    def submit_bytes(
        self,
        name: str,
        pieces: Pieces,
        deadline_ms: float | None,
        priority: int | None,
        client: Hashable,
        caller: Caller,
        loop: asyncio.AbstractEventLoop,
    ) -> ItemCall:
        """As `submit`, for one item whose inputs are bytes: in the model's order, each as long as its tensor. `loop`
        is the running one.
        """
        loaded = self._client.find(name)
        ring = self._client.core.ring
        if self._attached is None or self._attached[0] is not ring or self._attached[1] is not loop:
            ring.attach(loop)
            self._attached = ring, loop
        call = ItemCall(self._client, loaded, caller)
        submit_one(ring, call, pieces, self._client.terms(loaded, deadline_ms, priority, client))
        return call


class Watchdog:
    """Checks that a core reads its submission rings: posts a message, and looks later whether it was read."""

    def __init__(self, client: RequestClient) -> None:
        self._client = client
        self._ring: RingClient | None = None
        self._posted = 0

    def responds(self) -> bool:
        """Whether the core has read the message posted by the last call; if so, posts another one.

        True also where there is no engine (requests are then refused with that reason), and before the core's first
        step: the core may still be compiling, which is no reason to end it.
        """
        ring = self._client.core.ring
        if ring.closed or not ring.state.core["steps"][0]:
            return True
        words = ring.state.ring[ring.producer]
        if ring is self._ring and int(words[codes.SUBMIT_HEAD, 0]) < self._posted:
            return False
        ring.nudge()
        self._ring, self._posted = ring, int(words[codes.SUBMIT_TAIL, 0])
        return True


class ItemCall(Pending):
    """A request of one item. `over`: the caller has its answer, or has withdrawn the request."""

    __slots__ = ("_caller", "_client", "entry", "over")

    def __init__(self, client: RequestClient, loaded: Loaded, caller: Caller) -> None:
        super().__init__(loaded)
        self._client, self._caller, self.over = client, caller, False
        self.entry: Entry | None = None  # its completion

    def finish(self, entry: Entry) -> None:
        if self.over:
            return
        self.entry = entry
        if entry[E_STATUS] != codes.OK:
            found = self._client.result(entry)
            assert isinstance(found, Exception)
            self.fail(found)
            return
        self.over = True
        if self.length:
            found = self._client.result(entry, self.length)
            assert not isinstance(found, Exception)
            self._caller.done({key: array[np.newaxis] for key, array in found.items()})
            return
        loaded = self._client.core.models.by_row[entry[E_MODEL]]
        self._caller.done_in(loaded.instance_of[entry[E_INSTANCE]], entry[E_SLOT])

    def fail(self, error: Exception) -> None:
        if not self.over:
            self.cancel()
            self._caller.failed(error)

    def cancel(self) -> None:
        """Withdraws the request if it has not run. The caller is told nothing more."""
        if not self.over:
            self.over = True
            self._client.core.ring.cancel(self)


class Call:
    """A request of several items. `over`: the caller has its answer, or has withdrawn the request."""

    __slots__ = ("_caller", "_client", "_items", "_left", "_length", "_lost", "_results", "entry", "over", "pending")

    def __init__(self, client: RequestClient, items: int, length: int, caller: Caller) -> None:
        self._client, self._length, self._caller = client, length, caller
        self._items = self._left = items
        self._results: Outputs | None = None
        self._lost: dict[int, EngineFailedError] = {}  # by item: those that ended because the GPU failed
        self.pending: list[_Item] = []  # once all are posted
        self.entry: Entry | None = None  # the latest completion
        self.over = False

    @property
    def has_failed(self) -> bool:
        return self.over and self._left > 0

    def cancel(self) -> None:
        """Withdraws the items that have not run. The caller is told nothing more."""
        if not self.over:
            self.over = True
            for each in self.pending:
                self._client.core.ring.cancel(each)

    def fail(self, error: Exception) -> None:
        """An item failed, or the engine's process is gone."""
        if not self.over:
            self.cancel()
            self._caller.failed(_of_all(self._lost) if self._lost else error)

    def finish(self, k: int, entry: Entry) -> None:
        """Handles the completion of one item."""
        if self.over:
            return
        self.entry = entry
        found = self._client.result(entry, self._length)
        if isinstance(found, EngineFailedError):  # of every item that is left
            self._lost[k] = found
            if len(self._lost) < self._left:
                return
        if isinstance(found, Exception):
            self.fail(found)
            return
        if self._results is None:
            self._results = {key: np.empty((self._items, *a.shape), a.dtype) for key, a in found.items()}
        for key, array in found.items():
            self._results[key][k] = array
        self._left -= 1
        if self._left == 0:
            self.over = True
            self._caller.done(self._results)


AT_ONCE = 32  # items of one request; beginning more in one turn of the event loop would keep others waiting


class StepsCall:
    """A request of a model with functions before or after it. Its items are answered together."""

    def __init__(
        self, client: RequestClient, loaded: Loaded, inputs: Mapping[str, NDArray[Any]], items: int, terms: Terms,
        caller: Caller,
    ) -> None:  # fmt: skip
        self._caller, self.over = caller, False
        self._task = asyncio.create_task(self._run(client, loaded, inputs, items, terms))

    async def _run(
        self, client: RequestClient, loaded: Loaded, inputs: Mapping[str, NDArray[Any]], items: int, terms: Terms
    ) -> None:
        answers: list[dict[str, Any]] = [{}] * items
        left = iter(range(items))

        async def some() -> None:
            for k in left:
                item = {key: _item(array[k]) for key, array in inputs.items()}
                answers[k] = await client.infer_with_steps(loaded, item, terms)

        tasks = [asyncio.create_task(some()) for _ in range(min(items, AT_ONCE))]
        try:
            await asyncio.gather(*tasks)
            outputs = {key: stacked(spec, [each[key] for each in answers]) for key, spec in loaded.model.gives.items()}
        except Exception as e:
            if not self.over:
                self.over = True
                self._caller.failed(e)
            return
        finally:
            for task in tasks:
                task.cancel()
        if not self.over:
            self.over = True
            self._caller.done(outputs)

    def cancel(self) -> None:
        """Withdraws the request. The caller is told nothing more."""
        if not self.over:
            self.over = True
            self._task.cancel()


def _item(value: Any) -> Any:
    return value.tolist() if isinstance(value, np.ndarray) and value.dtype == object else value


def stacked(spec: TensorSpec, values: list[Any]) -> NDArray[Any]:
    """The values of several items as one array [items, …]."""
    shape = spec.shape if spec.is_text else np.shape(values[0])  # an output's length may vary
    found = np.empty((len(values), *shape), object if spec.is_text else spec.dtype)
    for k, value in enumerate(values):
        found[k] = value
    return found


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


class _Item(Pending):
    __slots__ = ("_call", "_k")

    def __init__(self, call: Call, loaded: Loaded, k: int) -> None:
        super().__init__(loaded)
        self._call, self._k = call, k

    def finish(self, entry: Entry) -> None:
        self._call.finish(self._k, entry)

    def fail(self, error: Exception) -> None:
        self._call.fail(error)
