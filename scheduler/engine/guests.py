"""Guests of an engine: processes whose launches wait while the engine wants the GPU for itself.

Each guest has a block of memory of its own, and can write to no other memory of the engine. A guest lasts as long as
its connection: when the process ends in any way, the guest leaves. Nothing in the engine waits for a guest.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import os
import selectors
import socket
import tempfile
import threading
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from paellapy.instrument.device import launch_hook
from paellapy.instrument.device.launch_hook import LEAST_SHARE
from paellapy.instrument.errors import PaellaError
from paellapy.scheduler.core.processes import SharedBlock
from paellapy.scheduler.core.profiles import checked_priority
from paellapy.scheduler.core.values import shortened
from paellapy.scheduler.engine.core_loop import CoreLoop

# How other processes find an engine: a socket in a folder of this user's, named after the engine's process.


_numbers = itertools.count()


class NoEngineError(PaellaError):
    """No engine was found that accepts guests."""


def runtime_folder() -> Path:
    """The folder $PAELLAPY_RUNTIME_DIR, or a private folder of this user."""
    given = os.environ.get("PAELLAPY_RUNTIME_DIR")
    base = os.environ.get("XDG_RUNTIME_DIR")
    folder = Path(given) if given else Path(base or tempfile.gettempdir()) / f"paellapy-{os.getuid()}"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if folder.stat().st_uid != os.getuid():
        raise NoEngineError(f"{folder} belongs to another user: set PAELLAPY_RUNTIME_DIR to a folder that you own")
    return folder


def listen() -> tuple[socket.socket, Path]:
    """A socket on which guests reach an engine of this process."""
    path = runtime_folder() / f"engine-{os.getpid()}-{next(_numbers)}.sock"
    path.unlink(missing_ok=True)
    door = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        door.bind(str(path))
        path.chmod(0o600)
        door.listen(16)
    except OSError:
        door.close()
        raise
    return door, path


def sweep() -> None:
    """Removes the sockets of processes that ended without removing them."""
    for path in runtime_folder().glob("*engine-*.sock"):
        pid = path.name.partition("engine-")[2].partition("-")[0]
        if pid.isdigit() and not Path("/proc", pid).exists():
            path.unlink(missing_ok=True)


def engines() -> list[Path]:
    """The sockets of engines, newest first."""
    found = []
    for path in runtime_folder().glob("engine-*.sock"):
        with contextlib.suppress(OSError):  # the engine left meanwhile
            found.append((path.stat().st_mtime_ns, path))
    return [path for _, path in sorted(found, reverse=True)]


def knock(engine: str | None = None) -> socket.socket:
    """A connection to an engine: the newest one, the engine of a given process, or the engine at a given path."""
    if engine is None:
        candidates = engines()
    elif "/" in engine:
        candidates = [Path(engine)]
    else:
        candidates = [path for path in engines() if path.name.split("-")[1] == engine]
    for path in candidates:
        line = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            line.connect(str(path))
            return line
        except OSError:
            line.close()
            if engine is None or "/" not in engine:
                with contextlib.suppress(OSError):
                    path.unlink()  # left behind by an engine that did not close
    which = "of this user" if engine is None else f"at {engine!r}"
    raise NoEngineError(
        f"no engine {which} runs on this machine: start one (pp.Engine, paellapy serve), or name its process or socket "
        "with --engine"
    )


# The first message of a guest to an engine: its name, priority, share and process, checked by both of them.


LONGEST = 4096  # bytes of a message
_LONGEST_NAME = 255  # characters, as in a file's name
_LAST_PID = (1 << 31) - 1
_FIELDS = ("name", "priority", "share", "pid")


class GreetingError(PaellaError):
    """A guest has a name, priority or share that an engine cannot use."""


@dataclass(frozen=True, slots=True)
class Greeting:
    """A guest as it describes itself.

    >>> Greeting.read(Greeting("train", -1, 0.5, 17).message()).share
    0.5
    """

    name: str
    priority: int
    share: float
    pid: int

    def __post_init__(self) -> None:
        name, share, pid = self.name, self.share, self.pid
        if not isinstance(name, str) or not 0 < len(name) <= _LONGEST_NAME or not name.isprintable():
            raise GreetingError(
                f"name={shortened(name)}; the name must be 1 to {_LONGEST_NAME} printable characters: give another "
                "with --name"
            )
        try:
            object.__setattr__(self, "priority", checked_priority(self.priority))
        except ValueError as e:
            raise GreetingError(str(e)) from None
        if isinstance(share, bool) or not isinstance(share, int | float) or not LEAST_SHARE <= share <= 1:
            raise GreetingError(f"share={shortened(share)}; the share must be a number from {LEAST_SHARE} to 1")
        if isinstance(pid, bool) or not isinstance(pid, int) or not 0 < pid <= _LAST_PID:
            raise GreetingError(f"pid={shortened(pid)}; the process id must be an integer from 1 to {_LAST_PID}")

    def message(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @classmethod
    def read(cls, said: bytes) -> Self:
        """The greeting in a message; GreetingError for any other message."""
        try:
            found: Any = json.loads(said)
        except (ValueError, RecursionError):
            found = None
        if not isinstance(found, Mapping) or not set(_FIELDS) <= found.keys():
            raise GreetingError(f"a greeting must be a JSON object of {', '.join(_FIELDS)}, in at most {LONGEST} bytes")
        return cls(*(found[name] for name in _FIELDS))


_log = logging.getLogger("paellapy.guests")
_BEAT_S = 0.25
_LINES = 64  # most connections: without a limit, other processes could use up this process's descriptors
_ALIVE_NS = 2_000_000_000  # a guest assumes that the engine is alive for this long after the engine's last message


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
        return self.block.array[: 8 * launch_hook.WORDS].view(np.uint64)


class Guests:
    """All guests of one engine, and the thread that accepts them."""

    def __init__(self, core: CoreLoop) -> None:
        self._core, self._gates = core, core.state.gate
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
        row = self._gates[guest.row]
        return {
            "kind": "process",
            "state": "held" if launch_hook.closed_at(words, time.monotonic_ns()) else "running",
            "pid": guest.pid,
            "priority": guest.priority,
            "share": guest.share,
            "launches": int(words[launch_hook.LAUNCHES]),
            "waits": int(words[launch_hook.WAITS]),
            "waited_ms": float(words[launch_hook.WAITED_NS]) * 1e-6,
            "cells": int(words[launch_hook.CELLS]),
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
            guest.words[launch_hook.CLOSED_UNTIL_NS] = guest.words[launch_hook.ALIVE_UNTIL_NS] = 0
            line.close()
        self._core.call(self._close_all)
        os.close(self._ended)
        self._door = None

    def _close_all(self) -> None:
        self._gates["word"] = 0
        self._core.state.core["gates"][0] = 0

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
                    guest.words[launch_hook.ALIVE_UNTIL_NS] = until

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
        state = self._core.state
        with self._lock:
            free = set(range(len(state.gate))) - {each.row for each in self._guests.values()}
            if not free:
                raise GreetingError(
                    f"the engine already has {len(state.gate)} guests, its maximum; end one of them first"
                )
            taken = {each.name for each in self._guests.values()}
            names = (asked.name, *(f"{asked.name}-{k}" for k in range(2, len(taken) + 3)))
            name = next(each for each in names if each not in taken)
            block = SharedBlock(8 * launch_hook.WORDS)
            guest = Guest(name, asked.pid, asked.priority, asked.share, min(free), block, time.monotonic())
            guest.words[launch_hook.SHARE] = np.uint64(asked.share * launch_hook.SHARE_UNIT)
            guest.words[launch_hook.ALIVE_UNTIL_NS] = np.uint64(time.monotonic_ns() + _ALIVE_NS)
            self._guests[line] = guest
        self._core.call(lambda: self._open(guest))
        socket.send_fds(line, [json.dumps({"name": name}).encode()], [block.fd])

    def _open(self, guest: Guest) -> None:
        state = self._core.state
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
            state = self._core.state
            state.gate["word"][guest.row] = 0
            state.core["gates"][0] -= 1
            with self._lock:
                self._guests.pop(line, None)

        self._core.call(leave)


def _refuse(line: socket.socket, why: str) -> None:
    with contextlib.suppress(OSError):  # the guest left meanwhile
        line.send(json.dumps({"error": why}).encode())
