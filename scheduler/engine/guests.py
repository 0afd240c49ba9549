"""Guests of an engine: processes whose launches wait while the engine wants the GPU for itself.

Each guest has a block of memory of its own, and can write to no other memory of the engine. A guest lasts as long as
its connection: when the process ends in any way, the guest leaves. Nothing in the engine waits for a guest.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import selectors
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from paellapy.instrument.device import gate
from paellapy.scheduler.core.shared_memory import SharedBlock
from paellapy.scheduler.core.state import State
from paellapy.scheduler.engine.greeting import LONGEST, Greeting, GreetingError
from paellapy.scheduler.engine.guest_door import listen, sweep

_log = logging.getLogger("paellapy.guests")
_BEAT_S = 0.25
_LINES = 64  # most connections: without a limit, other processes could use up this process's descriptors
_ALIVE_NS = 2_000_000_000  # a guest assumes that the engine is alive for this long after the engine's last message


class Host(Protocol):
    state: State

    def call_in_loop(self, function: Callable[[], None]) -> None: ...


@dataclass(slots=True)
class Guest:
    """Another process whose launches the engine can hold back."""

    name: str
    pid: int
    priority: int
    share: float
    row: int
    block: SharedBlock
    since_s: float

    @property
    def words(self) -> NDArray[np.uint64]:
        return self.block.array[: 8 * gate.WORDS].view(np.uint64)


class Guests:
    """All guests of one engine, and the thread that accepts them."""

    def __init__(self, host: Host) -> None:
        self._host = host
        self._lock = threading.Lock()
        self._guests: dict[socket.socket, Guest] = {}
        self._ended = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._door: socket.socket | None = None
        self.path: Path | None = None
        with contextlib.suppress(OSError):  # without a writable folder the engine has no guests
            self._door, self.path = listen()
        self._thread = threading.Thread(target=self._serve, name="paellapy-guests", daemon=True)
        if self._door is not None:
            self._thread.start()

    def stats(self) -> dict[str, Any]:
        with self._lock:
            guests = list(self._guests.values())
        return {each.name: self._stats(each) for each in guests}

    def _stats(self, guest: Guest) -> dict[str, Any]:
        words = guest.words
        row = self._host.state.gate[guest.row]
        return {
            "kind": "process",
            "state": "held" if gate.closed_at(words, time.monotonic_ns()) else "running",
            "pid": guest.pid,
            "priority": guest.priority,
            "share": guest.share,
            "launches": int(words[gate.LAUNCHES]),
            "waits": int(words[gate.WAITS]),
            "waited_ms": float(words[gate.WAITED_NS]) * 1e-6,
            "cells": int(words[gate.CELLS]),
            "closed_ms": float(row["closed_ns"]) * 1e-6,
            "closes": int(row["closes"]),
            "uptime_s": time.monotonic() - guest.since_s,
        }

    def end(self) -> None:
        """Opens every gate for good, because the engine ends. Then call `free` when the core's loop has ended."""
        if self._door is None:
            return
        os.eventfd_write(self._ended, 1)
        self._thread.join()
        self._door.close()
        if self.path is not None:
            self.path.unlink(missing_ok=True)
        for line, guest in list(self._guests.items()):
            guest.words[gate.CLOSED_UNTIL_NS] = guest.words[gate.ALIVE_UNTIL_NS] = 0
            line.close()
        self._host.call_in_loop(self._close_all)
        os.close(self._ended)
        self._door = None

    def _close_all(self) -> None:
        self._host.state.gate["word"] = 0
        self._host.state.core["gates"][0] = 0

    def free(self) -> None:
        """Frees the memory that guests share with the core, which writes to it while it finishes the last requests."""
        self._guests.clear()

    def hide(self) -> None:
        """Hides the engine from new guests until `show`."""
        sweep()
        if self.path is not None and self.path.exists():
            self.path = self.path.rename(self.path.with_name(f"hidden-{self.path.name}"))

    def show(self) -> None:
        if self.path is not None and self.path.name.startswith("hidden-"):
            self.path = self.path.rename(self.path.with_name(self.path.name.removeprefix("hidden-")))

    # -- its thread

    def _serve(self) -> None:
        assert self._door is not None
        with selectors.DefaultSelector() as waiting:
            waiting.register(self._door, selectors.EVENT_READ)
            waiting.register(self._ended, selectors.EVENT_READ)
            while True:
                ready = waiting.select(_BEAT_S if self._guests else None)
                for key, _ in ready:
                    if key.fileobj is self._ended:
                        self._dismiss(waiting)
                        return
                    self._hear(key.fileobj, waiting)
                until = np.uint64(time.monotonic_ns() + _ALIVE_NS)
                for guest in list(self._guests.values()):
                    guest.words[gate.ALIVE_UNTIL_NS] = until

    def _dismiss(self, waiting: selectors.BaseSelector) -> None:
        """Closes the lines that connected and said nothing: `end` knows only of guests."""
        for key in list(waiting.get_map().values()):
            line = key.fileobj
            if isinstance(line, socket.socket) and line is not self._door and line not in self._guests:
                line.close()

    def _hear(self, line: Any, waiting: selectors.BaseSelector) -> None:
        """Handles a message; whatever it says, the thread goes on."""
        if line is self._door:
            with contextlib.suppress(OSError):  # the guest left meanwhile
                self._accept(waiting)
            return
        try:
            said = line.recv(LONGEST)
        except BlockingIOError:
            return
        except OSError:
            said = b""
        if said and line in self._guests:
            return  # a guest has nothing more to say
        if said:
            try:
                self._greet(line, said)
                return
            except GreetingError as e:
                _refuse(line, str(e))
            except ConnectionError:
                pass  # the guest left meanwhile
            except Exception as e:
                _log.warning("a guest was turned away because of an error: %r", e)
        waiting.unregister(line)
        self._forget(line)
        line.close()

    def _accept(self, waiting: selectors.BaseSelector) -> None:
        assert self._door is not None
        came, _ = self._door.accept()
        came.setblocking(False)
        if len(waiting.get_map()) < _LINES:
            waiting.register(came, selectors.EVENT_READ)
            return
        _refuse(came, f"the engine has {_LINES} connections of guests, its maximum; end some of them first")
        came.close()

    def _greet(self, line: socket.socket, said: bytes) -> None:
        asked = Greeting.read(said)
        state = self._host.state
        with self._lock:
            free = set(range(len(state.gate))) - {each.row for each in self._guests.values()}
            if not free:
                raise GreetingError(
                    f"the engine already has {len(state.gate)} guests, its maximum; end one of them first"
                )
            taken = {each.name for each in self._guests.values()}
            names = (asked.name, *(f"{asked.name}-{k}" for k in range(2, len(taken) + 3)))
            name = next(each for each in names if each not in taken)
            block = SharedBlock(8 * gate.WORDS)
            guest = Guest(name, asked.pid, asked.priority, asked.share, min(free), block, time.monotonic())
            guest.words[gate.SHARE] = np.uint64(asked.share * gate.SHARE_UNIT)
            guest.words[gate.ALIVE_UNTIL_NS] = np.uint64(time.monotonic_ns() + _ALIVE_NS)
            self._guests[line] = guest
        self._host.call_in_loop(lambda: self._open(guest))
        socket.send_fds(line, [json.dumps({"name": name}).encode()], [block.fd])

    def _open(self, guest: Guest) -> None:
        state = self._host.state
        state.gate[guest.row] = np.zeros((), state.gate.dtype)
        state.gate["priority"][guest.row] = guest.priority
        state.gate["word"][guest.row] = guest.block.address
        state.core["gates"][0] += 1

    def _forget(self, line: socket.socket) -> None:
        with self._lock:
            guest = self._guests.get(line)
        if guest is None:
            return

        def leave() -> None:  # the block is kept until the core no longer writes to it
            state = self._host.state
            state.gate["word"][guest.row] = 0
            state.core["gates"][0] -= 1
            with self._lock:
                self._guests.pop(line, None)

        self._host.call_in_loop(leave)


def _refuse(line: socket.socket, why: str) -> None:
    with contextlib.suppress(OSError):  # the guest left meanwhile
        line.send(json.dumps({"error": why}).encode())
