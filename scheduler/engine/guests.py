"""Guests of an engine: processes whose launches wait while the engine wants the GPU for itself.

Each guest has a block of memory of its own, and can write to no other memory of the engine. A guest lasts as long as
its connection: when the process ends in any way, the guest leaves. Nothing in the engine waits for a guest.
"""

from __future__ import annotations

import contextlib
import json
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
from paellapy.scheduler.engine.guest_door import listen, sweep

_BEAT_S = 0.25
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
        """Opens every gate for good, because the engine ends."""
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
        self._guests.clear()
        os.close(self._ended)
        self._door = None

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
                    with contextlib.suppress(OSError):  # the guest left meanwhile
                        self._look(key.fileobj, waiting)
                until = np.uint64(time.monotonic_ns() + _ALIVE_NS)
                for guest in list(self._guests.values()):
                    guest.words[gate.ALIVE_UNTIL_NS] = until

    def _dismiss(self, waiting: selectors.BaseSelector) -> None:
        """Closes the lines that connected and said nothing: `end` knows only of guests."""
        for key in list(waiting.get_map().values()):
            line = key.fileobj
            if isinstance(line, socket.socket) and line is not self._door and line not in self._guests:
                line.close()

    def _look(self, line: Any, waiting: selectors.BaseSelector) -> None:
        door = self._door
        if door is not None and line is door:
            came, _ = door.accept()
            came.setblocking(False)
            waiting.register(came, selectors.EVENT_READ)
            return
        try:
            said = line.recv(4096)
        except BlockingIOError:
            return
        except OSError:
            said = b""
        if said and line not in self._guests:
            self._greet(line, said)
        elif not said:
            waiting.unregister(line)
            self._forget(line)
            line.close()

    def _greet(self, line: socket.socket, said: bytes) -> None:
        try:
            asked = json.loads(said)
            name, priority = str(asked["name"]), int(asked["priority"])
            share, pid = min(1.0, max(0.0, float(asked["share"]))), int(asked["pid"])
        except (ValueError, KeyError, TypeError) as e:
            line.send(json.dumps({"error": f"the engine could not read the guest's message: {e}"}).encode())
            return
        state = self._host.state
        with self._lock:
            free = set(range(len(state.gate))) - {each.row for each in self._guests.values()}
            if not free:
                full = f"the engine already has {len(state.gate)} guests, its maximum; end one of them first"
                line.send(json.dumps({"error": full}).encode())
                return
            taken = {each.name for each in self._guests.values()}
            name = next(n for n in (name, *(f"{name}-{k}" for k in range(2, len(taken) + 3))) if n not in taken)
            block = SharedBlock(8 * gate.WORDS)
            guest = Guest(name, pid, priority, share, min(free), block, time.monotonic())
            guest.words[gate.SHARE] = np.uint64(share * gate.SHARE_UNIT)
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
