"""The front end of the core in this process: requests in through the submission ring, results out of the completions.

Any thread may submit. Completions wake whoever waits: an asyncio loop through its reader on the engine's eventfd, a
thread through an eventfd of its own. Whoever wakes first empties the ring for all.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Hashable, Iterable
from typing import Any

import numpy as np

from instrument.device.heaps import compiled
from scheduler import core_rings as rings
from scheduler import state as st
from scheduler.atomics import exchange_at, load_at, store_at
from scheduler.errors import QueueFullError
from scheduler.loader import LoadedModel
from scheduler.loop import notice_edits
from scheduler.state import State, Table, Words

_DRAIN = 256  # completions read at once


@compiled
def claim_slot(filling: Words, lane_word: Words, model: int) -> int:
    """A slot of the lane that is open to front ends: lane · SLOTS + slot, or STAGED. Post it, whatever comes."""
    opened = load_at(rings.address(filling, model))
    if opened == 0:
        return rings.STAGED
    lane = int(opened & np.uint64(0xFFFF_FFFF)) - 1
    slot = rings.reserve(lane_word, lane, int(opened >> np.uint64(32)))
    return rings.STAGED if slot < 0 else lane * rings.SLOTS + slot


@compiled
def post_slot(
    ring: Words, submit: Table, request: int, serial: int, model: int, lane: int, slot: int, client: int, priority: int,
    arrival_ns: int, deadline_ns: int,
) -> bool:  # fmt: skip
    """Hand a request with a claimed slot to the core; False when the ring is full."""
    tail = rings.address(ring, st.SUBMIT_TAIL)
    mask = np.uint64(submit.shape[0] - 1)
    while True:
        position = load_at(tail)
        cell = np.int64(position & mask)
        turn = load_at(submit[cell : cell + 1].ctypes.data)
        if turn == position:
            if exchange_at(tail, position, position + np.uint64(1)):
                break
        elif turn < position:
            return False
    row = submit[cell]
    row.kind, row.request, row.serial, row.tag = st.SUBMIT, request, np.uint64(serial), np.uint64(0)
    row.model, row.lane, row.slot, row.client, row.priority = model, lane, slot, client, priority
    row.arrival_ns, row.deadline_ns, row.source = arrival_ns, deadline_ns, np.uint64(0)
    store_at(submit[cell : cell + 1].ctypes.data, position + np.uint64(1))
    return True


notice_edits(claim_slot, post_slot)


class Pending:
    """One request on its way. `finish(status, row)` is called once, in the thread that reads the completions."""

    __slots__ = ("finish", "keep", "loaded", "row", "serial")

    def __init__(self, loaded: LoadedModel | None, finish: Callable[[Any], None]) -> None:
        self.loaded, self.finish = loaded, finish
        self.row = self.serial = -1
        self.keep: Any = None  # staged inputs


class FrontEnd:
    """Owns the request rows and the completion ring's consumer side."""

    def __init__(self, state: State, ring_bell: Callable[[], None], wake_fd: int) -> None:
        self.state, self._bell, self.wake_fd = state, ring_bell, wake_fd
        self._rows = deque(range(len(state.request)))
        self._pending: dict[int, Pending] = {}
        self._serial = 0
        self._clients: dict[Hashable, int] = {None: 0}
        self._lock = threading.Lock()
        self._draining = threading.Lock()
        self._buffer = np.zeros(_DRAIN, st.COMPLETION)
        self._closed_models: dict[int, Callable[[], None]] = {}
        self._loops: weakref.WeakSet[asyncio.AbstractEventLoop] = weakref.WeakSet()
        self.watchers: list[Callable[[Any], None]] = []  # see every completion: statistics, traces

    # -- in

    def client_number(self, client: Hashable) -> int:
        """The core keeps shares for a limited number of clients: later ones share numbers with earlier ones."""
        with self._lock:
            return self._clients.setdefault(client, len(self._clients) % len(self.state.client))

    def take_row(self, pending: Pending) -> None:
        try:
            pending.row = self._rows.popleft()
        except IndexError:
            limit = len(self.state.request)
            raise QueueFullError(f"{limit} requests are waiting or running already; try again later") from None
        with self._lock:
            self._serial += 1
            pending.serial = self._serial
        self._pending[pending.row] = pending

    def claim(self, model_row: int) -> tuple[int, int] | None:
        """A slot to write inputs into at once, or None: stage them."""
        found = claim_slot(self.state.filling, self.state.lane_word, model_row)
        return None if found < 0 else divmod(found, rings.SLOTS)

    def post_claimed(
        self, pending: Pending, lane: int, slot: int, client: int, priority: int, arrival_ns: int, deadline_ns: int
    ) -> None:
        """The request enters the queue; its lane waits for `ready`."""
        s = self.state
        assert pending.loaded is not None
        while not post_slot(s.ring, s.submit, pending.row, pending.serial, pending.loaded.row, lane, slot, client,
                            priority, arrival_ns, deadline_ns):  # fmt: skip
            self._bell()  # the ring holds twice as many entries as there are requests: the core is about to read it

    def wake(self) -> None:
        """The core has something to look at."""
        self._bell()

    def ready(self, lane: int) -> None:
        """The inputs of a claimed slot are written."""
        rings.mark_ready(self.state.lane_word, lane)
        self._bell()

    def post_staged(
        self, pending: Pending, packed: Any, client: int, priority: int, arrival_ns: int, deadline_ns: int
    ) -> None:
        """The core copies the inputs once the model has a free slot."""
        assert pending.loaded is not None
        pending.keep = packed
        self._post(st.SUBMIT, pending.row, pending.serial, pending.loaded.row, client, priority, arrival_ns,
                   deadline_ns, int(packed.ctypes.data))  # fmt: skip

    def cancel(self, pending: Pending) -> None:
        """Asks the core to drop a request; its completion still comes."""
        self._post(st.CANCEL, pending.row, pending.serial)

    def command(self, kind: int, model: int = st.NONE) -> None:
        """OPEN_MODEL, CLOSE_MODEL, DRAIN or FAIL."""
        self._post(kind, st.NONE, 0, model)

    def on_model_closed(self, model: int, then: Callable[[], None]) -> None:
        self._closed_models[model] = then

    def _post(
        self, kind: int, row: int, serial: int, model: int = st.NONE, client: int = 0, priority: int = 0,
        arrival_ns: int = 0, deadline_ns: int = st.NEVER, source: int = 0,
    ) -> None:  # fmt: skip
        s = self.state
        while rings.post(s.ring, s.submit, s.filling, s.lane_word, kind, row, serial, 0, model, client, priority,
                         arrival_ns, deadline_ns, source, False) == rings.RING_FULL:  # fmt: skip
            self._bell()
        self._bell()

    # -- out

    def drain(self) -> int:
        """Answers every completion that is there; how many."""
        total = 0
        with self._draining:
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(self.wake_fd)
            while n := rings.take_done(self.state.ring, self.state.done, self._buffer):
                total += n
                self._answer(self._buffer[:n])
        return total

    def _answer(self, entries: Table) -> None:
        for entry in entries:
            for watcher in self.watchers:
                watcher(entry)
            row = int(entry["request"])
            if row < 0:
                self._closed_models.pop(int(entry["model"]))()
                continue
            pending = self._pending.pop(row)
            pending.finish(entry)
            if entry["status"] == st.OK:
                rings.release(self.state.lane_hold, int(entry["lane"]))
            pending.keep = None
            self._rows.append(row)
        self._bell()  # lanes whose outputs are read may be used again

    @property
    def answering(self) -> threading.Lock:
        """Held while completions are answered: whoever holds it knows that none is on its way."""
        return self._draining

    def give_back(self, pending: Pending) -> None:
        """Frees a row that was never posted."""
        del self._pending[pending.row]
        self._rows.append(pending.row)

    @property
    def waiting(self) -> int:
        return len(self._pending)

    # -- who waits

    def attach(self, loop: asyncio.AbstractEventLoop) -> None:
        """Completions wake this asyncio loop from now on."""
        if loop not in self._loops:
            self._loops.add(loop)
            loop.add_reader(self.wake_fd, self.drain)

    def detach_all(self) -> None:
        for loop in list(self._loops):
            if not loop.is_closed():
                if _running_here(loop):
                    loop.remove_reader(self.wake_fd)
                else:
                    with contextlib.suppress(RuntimeError):  # it closed meanwhile
                        loop.call_soon_threadsafe(loop.remove_reader, self.wake_fd)
        self._loops.clear()

    def wait(self, waiter: Waiter, timeout_s: float | None = None) -> bool:
        """Blocks this thread until the waiter is set, answering completions meanwhile; False: the time is over."""
        poll = select.poll()
        poll.register(self.wake_fd, select.POLLIN)
        poll.register(waiter.fd, select.POLLIN)
        end = None if timeout_s is None else time.monotonic() + timeout_s
        while not waiter.done:
            left = None if end is None else max(0.0, end - time.monotonic())
            if left == 0.0:
                return False
            poll.poll(None if left is None else left * 1e3 + 1)
            self.drain()
        waiter.clear()
        return True


class Waiter:
    """What a thread sleeps on until its own request, or event, is done."""

    def __init__(self) -> None:
        self.fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self.done = False
        self._thread = threading.get_ident()
        weakref.finalize(self, os.close, self.fd)

    def set(self) -> None:
        self.done = True
        if threading.get_ident() != self._thread:
            os.eventfd_write(self.fd, 1)

    def clear(self) -> None:
        self.done = False
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self.fd)


_local = threading.local()


def thread_waiter() -> Waiter:
    """This thread's waiter: made once, an eventfd is a file descriptor."""
    waiter: Waiter | None = getattr(_local, "waiter", None)
    if waiter is None:
        waiter = _local.waiter = Waiter()
    waiter.clear()
    return waiter


def _running_here(loop: asyncio.AbstractEventLoop) -> bool:
    try:
        return asyncio.get_running_loop() is loop
    except RuntimeError:
        return False


def pack(arrays: Iterable[Any]) -> Any:
    """Inputs of one request, item after item, in memory of their own."""
    parts = [np.ascontiguousarray(a).reshape(-1).view(np.uint8) for a in arrays]
    return parts[0].copy() if len(parts) == 1 else np.concatenate(parts)
