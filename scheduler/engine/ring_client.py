"""A producer of the core: requests enter through its submission ring, results leave through its completion ring.

The core is in this process, or in another one that shares its tables. Any thread may submit. A completion wakes every
waiter: an asyncio loop through its reader on the producer's eventfd, a thread through an eventfd of its own. The first
one to wake empties the ring for all.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import importlib
import itertools
import os
import select
import signal
import struct
import threading
import time
import weakref
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from types import FrameType
from typing import Any, Protocol

import numpy as np

from paellapy.scheduler.core import codes
from paellapy.scheduler.core.codes import SUBMIT
from paellapy.scheduler.core.errors import EngineClosedError, InputError, QueueFullError, TooManyRequestsError
from paellapy.scheduler.core.rings import SLOTS, Bell, Message
from paellapy.scheduler.core.state import Limits, State, producer_rows
from paellapy.scheduler.core.tables import COMPLETION, SUBMISSION
from paellapy.scheduler.core.tenants import client_key, find_client
from paellapy.scheduler.engine import ring_calls as calls
from paellapy.scheduler.engine.input_staging import OwnStage, Stage
from paellapy.scheduler.engine.ring_calls import E_INSTANCE, E_MODEL, E_REQUEST, E_SLOT, E_STATUS
from paellapy.scheduler.models.memory import Instance
from paellapy.scheduler.models.model import Model

# Messages of requests to the core: one for each thread, filled in for every request, and copied when it is posted.


_KINDS = [SUBMISSION[name].kind for name in SUBMISSION.names or ()]
# One call fills in a whole message, in a third of the time that as many assignments take.
_fill = struct.Struct("=" + "".join("Q" if kind == "u" else "q" for kind in _KINDS)).pack_into


# What a message says of a request besides its place: client, priority, arrival_ns, deadline_ns. Making a named tuple
# takes as long as ten calls.
Terms = tuple[int, int, int, int]


class Messages(threading.local):
    """The message of each thread."""

    def __init__(self) -> None:
        self._memory = np.zeros(1, SUBMISSION)
        self._one = self._memory.view(np.uint8).data, int(self._memory.ctypes.data)

    def fill(self, request: Pending, instance: int, slot: int, source: int, terms: Terms) -> int:
        """Fills in this thread's message, and returns its address."""
        memory, address = self._one
        loaded = request.loaded
        client, priority, arrival_ns, deadline_ns = terms
        _fill(memory, 0, 0, SUBMIT, request.row, request.serial, 0, loaded.row, instance, slot, client, priority,
              arrival_ns, deadline_ns, source, loaded.generation, request.items)  # fmt: skip
        return address


# Request rows of one producer, divided among its clients: however many one of them wants, others find a free row.

# A client with requests gets another row only while it has fewer than 8 for each free row but the last. So one client
# gets about 8 of 9 rows, and k clients about 8 of 8 k + 1 each: the more of them flood the engine, the less each has.
PER_FREE = 8
MOST_TEXTS = 4096  # that one language model may have to write; clients share them by the same rule


def no_client(given: object) -> InputError:
    said = f"client={given!r}: a client is named by a string, a number or a tuple of these"
    return InputError(said, field="client", given=given)


def refusal_of_part(client: bool, n: int, total: int, clients: int, what: str) -> QueueFullError | None:
    """The refusal of a client that has its part of all places; None: it has less than an equal part, since there are
    many clients. `client`: it has a name.
    """
    if not client:
        return QueueFullError(
            f"clients without a name already have {n} of {what}, and the others are kept for clients with a name; try "
            "again later, or name the client", given=n, limit=total,
        )  # fmt: skip
    if n * (clients + 1) <= total:
        return None
    return TooManyRequestsError(
        f"this client already has {n} of {what}, and the others are kept for other clients; wait for answers before "
        "you send more", given=n, limit=total,
    )  # fmt: skip


class Rows:
    """Free rows, and the rows of each client. Any thread may take and give: every change is one operation on a deque
    or a set.
    """

    def __init__(self, state: State, rows: Iterable[int]) -> None:
        self._state = state
        self._free = deque(rows)
        self.total = len(self._free)
        self._of: list[set[int]] = [set() for _ in range(len(state.client))]

    def take(self, client: int) -> int:
        """A free row for a request of the client of this number."""
        mine = self._of[client]
        n = len(mine)
        if n and n >= PER_FREE * (len(self._free) - 1) and (client or self._has_names()):
            raise self._refusal(client, n)
        try:
            row = self._free.popleft()
        except IndexError:
            raise self._full() from None
        mine.add(row)
        return row

    @property
    def free(self) -> int:
        return len(self._free)

    def give(self, client: int, row: int) -> None:
        self._of[client].discard(row)
        self._free.append(row)

    def _has_names(self) -> bool:
        """Whether any client has a name. If none has, the clients without one need not leave rows free."""
        return bool(self._state.client_key.any())

    def _full(self) -> QueueFullError:
        return QueueFullError(
            f"the engine already holds {self.total} requests, its maximum; try again later", limit=self.total
        )

    def _refusal(self, client: int, n: int) -> QueueFullError:
        clients, what = sum(map(bool, self._of)), f"the engine's {self.total} requests"
        return refusal_of_part(client != 0, n, self.total, clients, what) or self._full()


# Waiters: objects on which threads sleep until their own request or event is done.


class Waiter:
    """An object that a thread sleeps on until its own request or event is done."""

    def __init__(self) -> None:
        self.fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self.done = self._rung = False
        self._thread = threading.get_ident()
        weakref.finalize(self, os.close, self.fd)

    def set(self) -> None:
        self.done = True
        if threading.get_ident() != self._thread:
            os.eventfd_write(self.fd, 1)
            self._rung = True

    def clear(self) -> None:
        self.done = False
        if self._rung:  # else reading would be a system call and an error
            self._rung = False
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(self.fd)


_local = threading.local()


def thread_waiter() -> Waiter:
    """This thread's waiter. It is created once, because its eventfd takes a file descriptor."""
    waiter: Waiter | None = getattr(_local, "waiter", None)
    if waiter is None:
        waiter = _local.waiter = Waiter()
    waiter.clear()
    return waiter


# Ctrl-C waits while a request is submitted or answered: half of either would hold an instance of its model for ever.

# The functions behind those of `signal`, which take a twentieth of their time: every request passes here.
_signal: Any = importlib.import_module("_signal")
_get, _set, _raises = _signal.getsignal, _signal.signal, signal.default_int_handler
_SIGINT = int(signal.SIGINT)
_main = threading.main_thread()


class Uninterrupted:
    """A block in which SIGINT does not raise KeyboardInterrupt. If the signal came, the end of the block raises it.

    Python calls handlers in the main thread only. In another thread this does nothing, nor where the handler is not
    Python's own: those of event loops raise nothing.
    """

    __slots__ = ("_came", "_set")

    def __enter__(self) -> None:
        self._came = False
        self._set = threading.get_ident() == _main.ident and _get(_SIGINT) is _raises  # neither is it so when nested
        if self._set:
            _set(_SIGINT, self._note)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._came = True

    def __exit__(self, *_: object) -> None:
        if self._set:
            _set(_SIGINT, _raises)
            if self._came:
                raise KeyboardInterrupt


_DRAIN = 256  # completions read at once
# A request that finds no open instance has completions read once this many are pending. Fewer would cost throughput and
# make batches small; so fewer are read only where nothing is batched, or once a request has waited for this long.
_MANY, _STARVED_NS = 16, 500_000
_REMEMBERED_CLIENTS = 4096
# A thread that waits for its request spins this long before it sleeps, one thread at a time: waking up takes about as
# long as a small model.
SPIN_NS = 1_000_000

ENGINE_CLOSED = "the engine is closed; create a new one to submit requests"

Entry = list[int]  # a completion: see ring_calls.E_…
Place = tuple[int, int]  # instance and slot


class Loaded(Protocol):
    """The parts of a loaded model that a producer uses."""

    @property
    def model(self) -> Model: ...
    @property
    def row(self) -> int: ...
    @property
    def generation(self) -> int: ...
    @property
    def instance_of(self) -> dict[int, Instance]: ...
    @property
    def by_length(self) -> Mapping[int, Any]: ...
    def want_length(self, size: int) -> None: ...


class Pending(ABC):
    """A request that has not completed. One of its two methods is called, once."""

    __slots__ = ("client", "items", "keep", "length", "loaded", "row", "serial")

    def __init__(self, loaded: Loaded) -> None:
        self.loaded = loaded
        self.items = 1  # more only for a model whose requests are whole batches
        self.length = 0  # of its inputs before they were padded, where lengths vary
        self.row = self.serial = self.client = -1
        self.keep: Any = None  # keeps staged inputs alive

    @abstractmethod
    def finish(self, entry: Entry) -> None:
        """Called with the completion, in the thread that reads it."""

    @abstractmethod
    def fail(self, error: Exception) -> None:
        """No completion will come."""


Staged = tuple[Pending, int, Any]  # a request, the address of its inputs for the core, and the token of their memory


class RingClient:
    """Owns request rows, and reads a completion ring."""

    def __init__(
        self, state: State, limits: Limits, producer: int, bell: Bell, wake_fd: int, stage: Stage | None = None
    ) -> None:
        self.state, self.producer, self.bell, self.wake_fd = state, producer, bell, wake_fd
        self.stage = stage or OwnStage()
        self._held_line = calls.Line(state, producer, bell.fd)
        self._line = self._held_line.address
        self._messages = Messages()
        self._ring: Any = state.ring[producer].data  # reading a memoryview costs a fraction of indexing an array
        rows = producer_rows(limits, producer)
        self._rows, self._first_row = Rows(state, rows), rows.start
        self._pending: dict[int, Pending] = {}
        self._serials = itertools.count(1)
        self._clients: dict[Hashable, tuple[int, int]] = {}
        self._draining = threading.Lock()
        self._numbers = np.zeros((_DRAIN, calls.COMPLETION_WORDS), np.int64)
        self._entries = self._numbers.view(COMPLETION).reshape(_DRAIN)
        self._closed_models: dict[int, Callable[[], None]] = {}
        self._loops: weakref.WeakSet[asyncio.AbstractEventLoop] = weakref.WeakSet()
        self.watchers: list[Callable[[Any], None]] = []
        self.counters: list[Callable[[Any], None]] = []
        self._failed: Exception | None = None  # an error raised while a completion was answered, not yet reported
        self._starved_ns = 0  # when a request found no open instance, if no completion was read since; else 0
        self.closed = False  # the core is gone: nothing may be posted any more
        self.ending = False  # the engine closes, and waits only for requests that have a row
        self.spin_ns = 0  # set where a spinning thread takes nothing from the core's loop
        self._spinning, self._spin_scratch = threading.Lock(), np.zeros(2, np.int64)

    # -- in

    def client_number(self, client: Hashable) -> int:
        """The client's number in the core. Numbers are limited, so clients that come later may share one."""
        try:
            known = self._clients.get(client)
        except TypeError:
            raise no_client(client) from None
        if known is not None and self.state.client_key[known[0]] == known[1]:
            return known[0]
        key = client_key(client)
        number = find_client(self.state.client_key, self.state.client, key)
        if len(self._clients) >= _REMEMBERED_CLIENTS:
            self._clients.clear()
        self._clients[client] = (number, key)
        return number

    def is_client(self, number: int, client: Hashable) -> bool:
        """Whether the number belongs to this client alone."""
        return int(self.state.client_key[number]) == client_key(client)

    def take_row(self, pending: Pending, client: int) -> None:
        """Raises a QueueFullError if all rows are in use, or the client has its part of them; an EngineClosedError
        while the engine closes.
        """
        pending.row = self._rows.take(client)
        pending.client = client
        pending.serial = next(self._serials)
        self._pending[pending.row] = pending
        if self.ending:  # looked at after the row is taken: `close` sees the row, or the request sees `ending`
            self.give_back(pending)
            raise EngineClosedError(ENGINE_CLOSED)

    def claim(self, loaded: Loaded, client: int) -> Place | None:
        """Claims a slot whose inputs can be written at once. None: the inputs must be staged."""
        found = calls.claim(self._line, loaded.row, client)
        if found >= 0 and not self._starved_ns:
            return divmod(found, SLOTS)
        now = time.monotonic_ns()
        self._starved_ns = self._starved_ns or now
        size = loaded.model.max_batch
        at_once = size == 1 or now - self._starved_ns >= _STARVED_NS
        if self._read_now(1 if at_once else min(_MANY, len(loaded.instance_of) * size)):
            if found < 0:
                found = calls.claim(self._line, loaded.row, client)
            self._starved_ns = now if found < 0 else 0
        return None if found < 0 else divmod(found, SLOTS)

    def post_claimed(
        self, pending: Pending, instance: int, slot: int, client: int, priority: int, arrival_ns: int, deadline_ns: int
    ) -> None:
        """Puts the request into the queue, where it may expire; its instance waits for `ready`."""
        self._post(self._messages.fill(pending, instance, slot, 0, (client, priority, arrival_ns, deadline_ns)))

    def post_written(
        self, pending: Pending, instance: int, slot: int, client: int, priority: int, arrival_ns: int, deadline_ns: int
    ) -> None:
        """`post_claimed` and `ready` in one call."""
        message = self._messages.fill(pending, instance, slot, 0, (client, priority, arrival_ns, deadline_ns))
        while not calls.post_written(self._line, message, instance, slot):
            self._yield()

    def ready(self, instance: int, slot: int) -> None:
        """Marks the inputs of a claimed slot as written."""
        if not self.closed:
            calls.ready(self._line, instance, slot)

    def post_staged(
        self, staged: Sequence[Staged], client: int, priority: int, arrival_ns: int, deadline_ns: int
    ) -> None:
        """Posts requests with staged inputs, which the core copies once the model has free slots. The core takes them
        in one step, so an idle engine does not run the first of them alone.
        """
        terms = client, priority, arrival_ns, deadline_ns
        if len(staged) == 1:
            pending, source, keep = staged[0]
            pending.keep = keep
            self._post(self._messages.fill(pending, codes.NONE, codes.NONE, source, terms))
            return
        run = np.empty(len(staged), SUBMISSION)
        for k, (pending, source, keep) in enumerate(staged):
            pending.keep = keep
            message = self._messages.fill(pending, codes.NONE, codes.NONE, source, terms)
            ctypes.memmove(run.ctypes.data + k * SUBMISSION.itemsize, message, SUBMISSION.itemsize)
        while not calls.post_all(self._line, run.ctypes.data, len(staged)):
            self._yield()

    def cancel(self, pending: Pending) -> None:
        """Asks the core to drop a request. The request still gets a completion."""
        if not self.closed:
            self._send(Message(kind=codes.CANCEL, request=pending.row, serial=pending.serial))

    def nudge(self) -> None:
        """Posts a message without effect, a cancellation of no request, to see whether the core reads it."""
        self._send(Message(kind=codes.CANCEL, request=self._first_row))

    def command(self, kind: int, model: int = codes.NONE) -> None:
        """Posts one of OPEN_MODEL, CLOSE_MODEL, DRAIN and FAIL."""
        self._send(Message(kind=kind, request=codes.NONE, model=model))

    def on_model_closed(self, model: int, then: Callable[[], None]) -> None:
        self._closed_models[model] = then

    def _send(self, message: Message) -> None:
        self._post(message.address)

    def _post(self, message: int) -> None:
        # The ring holds twice as many entries as there are requests. A full ring means that the core is about to read
        # it.
        while not calls.post(self._line, message):
            self._yield()

    def _yield(self) -> None:
        if self.closed:
            raise QueueFullError("the engine's process has ended; try again later")
        os.sched_yield()

    # -- out

    def watch(self, watcher: Callable[[Any], None]) -> Callable[[], None]:
        """Calls `watcher` with every completion of this producer (COMPLETION); the returned function ends that."""
        self.watchers.append(watcher)
        return lambda: self.watchers.remove(watcher)

    def count(self, counter: Callable[[Any], None]) -> Callable[[], None]:
        """As `watch`, with several completions at a time."""
        self.counters.append(counter)
        return lambda: self.counters.remove(counter)

    def drain(self) -> int:
        """Answers all completions in the ring and returns their number."""
        with self._draining:
            total = 0
            try:
                with contextlib.suppress(BlockingIOError):
                    os.eventfd_read(self.wake_fd)
                while not self.closed and (n := calls.take(self._line, self._numbers)):
                    total += n
                    self._answer(n)
            except BaseException:  # such as KeyboardInterrupt: nobody would be woken for the rest
                os.eventfd_write(self.wake_fd, 1)
                raise
            self._starved_ns = 0
            failed, self._failed = self._failed, None
            if failed is not None:
                raise failed
            return total

    def _read_now(self, many: int) -> bool:
        """Answers completions if at least `many` are pending, when a request, or one before it, found no open instance.

        Unread answers may hold all instances of a model: an event loop with many connections reads completions only
        after it has served the connections, and the GPU is idle meanwhile. Nothing is done while a completion is being
        answered, because its answer may have made this call.
        """
        ring = self._ring
        if ring[codes.DONE_TAIL, 0] - ring[codes.DONE_HEAD, 0] < many or not self._draining.acquire(blocking=False):
            return False
        try:
            n = 0 if self.closed else calls.take_early(self._line, self._numbers)
            self._answer(n)
        except Exception as e:
            self._failed = e
        finally:
            self._draining.release()
        if self._failed is not None:  # unrelated to the caller's request: the next call of `drain` raises it
            os.eventfd_write(self.wake_fd, 1)
        return n > 0

    def _answer(self, n: int) -> None:
        entries = self._entries[:n]
        for counter in self.counters:
            counter(entries)
        for watcher in self.watchers:
            for each in entries:
                watcher(each)
        for entry in self._numbers[:n].tolist():
            row = entry[E_REQUEST]
            if row < 0:
                self._closed_models.pop(entry[E_MODEL])()
                continue
            pending = self._pending.pop(row)
            try:
                pending.finish(entry)
            except Exception as e:  # an error in one answer must not keep the instance or the later answers waiting
                self._failed = e
            if entry[E_STATUS] == codes.OK:
                calls.release(self._line, entry[E_INSTANCE], entry[E_SLOT])
            if pending.keep is not None:
                self.stage.give(pending.keep)
                pending.keep = None
            self._rows.give(pending.client, row)
        calls.ring_read(self._line)

    def abandon(self) -> list[Pending]:
        """For a core whose process is gone: the requests whose answers will never come."""
        with self._draining:
            self.closed = True
            left = list(self._pending.values())
            self._pending.clear()
        return left

    def hand_over(self, pending: Pending, to: Pending) -> bool:
        """Has another object answered in place of this request; False if the request has ended already."""
        with self._draining:
            if self._pending.get(pending.row) is not pending:
                return False
            to.row, to.serial, to.client = pending.row, pending.serial, pending.client
            self._pending[to.row] = to
            return True

    def give_back(self, pending: Pending) -> None:
        """Frees the row of a request that was never posted."""
        if self._pending.pop(pending.row, None) is not None:
            self._rows.give(pending.client, pending.row)

    @property
    def waiting(self) -> int:
        return len(self._pending)

    @property
    def free_places(self) -> int:
        """Requests that could be taken now."""
        return self._rows.free

    def pending(self) -> list[Pending]:
        """The requests that wait for their completion."""
        return list(self._pending.values())

    # -- waiting

    def attach(self, loop: asyncio.AbstractEventLoop) -> None:
        """Lets completions wake this asyncio loop from now on."""
        if loop not in self._loops:
            self._loops.add(loop)
            loop.add_reader(self.wake_fd, self.drain)

    def detach_all(self) -> None:
        for loop in list(self._loops):
            if not loop.is_closed():
                if is_running(loop):
                    loop.remove_reader(self.wake_fd)
                else:
                    with contextlib.suppress(RuntimeError):  # the loop was closed meanwhile
                        loop.call_soon_threadsafe(loop.remove_reader, self.wake_fd)
        self._loops.clear()

    def wait(self, waiter: Waiter, timeout_s: float | None = None) -> bool:
        """Blocks this thread until the waiter is set, answering completions meanwhile; False after the timeout."""
        if self.spin_ns and timeout_s is None:
            self._spin(waiter)
        if waiter.done:
            waiter.clear()
            return True
        poll = select.poll()
        poll.register(self.wake_fd, select.POLLIN)
        poll.register(waiter.fd, select.POLLIN)
        end = None if timeout_s is None else time.monotonic() + timeout_s
        while not waiter.done:
            left = None if end is None else max(0.0, end - time.monotonic())
            if left == 0.0:
                return False
            poll.poll(None if left is None else left * 1e3 + 1)
            with Uninterrupted():
                self.drain()
        waiter.clear()
        return True


    def _spin(self, waiter: Waiter) -> None:
        """Answers completions until the waiter is set, or none has come for `spin_ns`. Nobody has to be woken for them:
        completions stay announced as they were.
        """
        if not self._spinning.acquire(blocking=False):
            return
        try:
            while not waiter.done and calls.await_any(self._line, self.spin_ns, self._spin_scratch):
                with Uninterrupted():
                    if not self._read_now(1):  # another thread is about to answer
                        return
        finally:
            self._spinning.release()


def is_running(loop: asyncio.AbstractEventLoop) -> bool:
    """Whether this event loop runs in this thread."""
    try:
        return asyncio.get_running_loop() is loop
    except RuntimeError:
        return False
