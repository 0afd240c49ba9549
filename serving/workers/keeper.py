"""A *keeper*: a process that has imported and compiled everything, and forks workers that do a task.

A worker that ends, or falls silent, is forked again at once, without the slow part of a start; keeper and workers share
their memory. The keeper's standard input is a socket to its *owner*, the process that has started it: lines of JSON
from there change its task, and its own lines say how its workers are. When its owner ends, it kills its workers and
ends; or it waits for a new owner first, while its workers go on (`alone_s`).

This module imports little, so that owners start quickly.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import wait
from multiprocessing.context import ForkProcess
from pathlib import Path
from typing import Any

import msgspec

from paellapy.scheduler.core.processes import die_with_parent
from paellapy.serving.logs import log

VARIABLE = "PAELLAPY_TASK"  # of the environment, which other users cannot read: a task may hold keys
MEET_S = 2.0
STOP_S = 40.0  # a server's own drain takes up to 30
LOOK_S = 0.2
_TAKEN = b"taken"
_ORPHANS = "paellapy-keeper-"  # addresses of keepers without an owner: abstract ones, with their process's number


class Task(msgspec.Struct, kw_only=True):
    """A keeper's task. `hung_s`: after which a silent worker is forked again; `alone_s`: for how long it waits for a
    new owner.
    """

    hung_s: float = 1.0
    alone_s: float = 0.0

    @property
    def kind(self) -> Any:
        """Equal for tasks that the same workers can do."""
        return self


class Health(msgspec.Struct, kw_only=True):
    """What a keeper says of its workers. `alive`: each was heard since it was forked."""

    pids: list[int] = []
    starts: int = 0
    alive: bool = False


class Kept:
    """A keeper, as seen by its owner; `module` runs it.

    A keeper of the same kind of task whose owner is gone is adopted with its server; `task` is then the one that it
    does. Otherwise a new one is started.
    """

    def __init__(self, task: Any, module: str, pass_fds: Sequence[int] = ()) -> None:
        self.task, self.health = task, Health()
        self.process: subprocess.Popen[bytes] | None = None
        found = _adopted(task) if task.alone_s else None
        if found is not None:
            self._line, self.task, self.pid = found
        else:
            self._line, theirs = socket.socketpair()
            with theirs:
                self.process = subprocess.Popen(
                    [sys.executable, "-m", module],
                    stdin=theirs.fileno(),
                    pass_fds=list(pass_fds),
                    env={**os.environ, VARIABLE: msgspec.json.encode(task).decode(), "PYTHONUNBUFFERED": "1"},
                    start_new_session=True,  # Ctrl-C reaches only us
                )
            self.pid = self.process.pid
        self.adopted = found is not None
        self._handle = os.pidfd_open(self.pid)
        self._listener = threading.Thread(target=self._listen, daemon=True)
        self._listener.start()

    def _listen(self) -> None:
        decode = msgspec.json.Decoder(Health).decode
        with contextlib.suppress(ConnectionError), self._line.makefile("rb") as lines:
            for line in lines:
                self.health = decode(line)

    def _waited(self, within_s: float) -> bool:
        return bool(wait([self._handle], within_s))

    @property
    def ended(self) -> bool:
        return self._waited(0.0)

    def tell(self, **changes: Any) -> None:
        with contextlib.suppress(OSError):
            self._line.sendall(msgspec.json.encode(changes) + b"\n")

    def end(self, within_s: float = STOP_S) -> None:
        """Asks it to stop, and kills it if it does not."""
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._handle, signal.SIGTERM)
            if not self._waited(within_s):
                signal.pidfd_send_signal(self._handle, signal.SIGKILL)
        if self.process is not None:
            self.process.wait()
        self._listener.join()
        self._line.close()
        os.close(self._handle)


def _orphanage() -> socket.socket:
    """A socket at which a keeper waits for its next owner."""
    found = socket.socket(socket.AF_UNIX)
    found.bind(f"\0{_ORPHANS}{os.getpid()}")
    found.listen(1)
    return found


def _is_own(line: socket.socket) -> tuple[bool, int]:
    """Whether the process at the other end is one of this user, and its number."""
    pid, user, _ = struct.unpack("3i", line.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return user == os.getuid(), pid


def _adopted(task: Task) -> tuple[socket.socket, Task, int] | None:
    known = Path("/proc/net/unix").read_text()
    for name in re.findall(rf"@({_ORPHANS}\d+)$", known, re.M):
        line = socket.socket(socket.AF_UNIX)
        line.settimeout(MEET_S)
        with contextlib.suppress(OSError, msgspec.DecodeError):
            line.connect("\0" + name)
            own, pid = _is_own(line)
            if own:
                theirs = msgspec.json.decode(line.recv(1 << 20), type=type(task))
                if theirs.kind == task.kind:
                    line.sendall(_TAKEN)
                    line.settimeout(None)
                    return line, theirs, pid
        line.close()
    return None


# -- in the keeper's process


@dataclass(slots=True)
class Worker:
    """A forked process. `heard_at`: when it was last heard; 0: not yet."""

    process: ForkProcess
    channel: socket.socket
    heard_at: float = 0.0
    unheard: int = 0


Work = Callable[[int, socket.socket], None]


class Keeper:
    """Forks workers, each of which calls `work` with its number and its channel. `is_heard` asks whether one is well.
    A late answer may have the machine's suspension as its cause, so a worker counts as silent from the second on.
    """

    def __init__(self, task: Task, work: Work, is_heard: Callable[[Worker], bool], number: int = 1) -> None:
        self._task, self._work, self._is_heard, self._number = task, work, is_heard, number
        self._workers: list[Worker] = []
        self._starts = 0
        self._line = socket.socket(fileno=os.dup(0))  # to its owner
        self._door: socket.socket | None = None  # for the next one, if that is gone

    def run(self) -> None:
        stop: list[int] = []
        signal.signal(signal.SIGTERM, lambda *_: stop.append(1))
        looked_at, alone_until = 0.0, float("inf")
        self._workers = [self._fork(k) for k in range(self._number)]
        while not stop and time.monotonic() < alone_until:
            for k, worker in enumerate(self._workers):
                if not worker.process.is_alive():
                    worker.channel.close()
                    log.error("a kept process ended and is started again")
                    self._workers[k] = self._fork(k)
            if time.monotonic() - looked_at >= LOOK_S:
                looked_at = time.monotonic()
                self._look()
                with contextlib.suppress(OSError):
                    self._line.send(msgspec.json.encode(self._health()) + b"\n", socket.MSG_DONTWAIT)
            source = self._line if self._door is None else self._door
            if source not in wait([source, *(each.process.sentinel for each in self._workers)], LOOK_S):
                continue
            if self._door is not None:
                alone_until = float("inf") if self._meet(self._door) else alone_until
            elif not self._read_changes():  # whoever has started it is gone
                alone_until, self._door = time.monotonic() + self._task.alone_s, _orphanage()
        self._end(STOP_S if stop else 0.0)

    def _meet(self, door: socket.socket) -> bool:
        """Tells a possible owner its task; returns whether it is one."""
        line, _ = door.accept()
        line.settimeout(MEET_S)
        with contextlib.suppress(OSError):
            if _is_own(line)[0]:
                line.sendall(msgspec.json.encode(self._task))
                if line.recv(len(_TAKEN)) == _TAKEN:
                    line.settimeout(None)
                    self._line, self._door = line, None
                    door.close()
                    return True
        line.close()
        return False

    def _fork(self, k: int) -> Worker:
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        process = get_context("fork").Process(target=self._begin, args=(k, theirs, os.getpid()))
        process.start()
        theirs.close()
        self._starts += 1
        return Worker(process, ours)

    def _begin(self, k: int, channel: socket.socket, keeper: int) -> None:
        die_with_parent(signal.SIGKILL)
        self._line.close()
        if self._door is not None:
            self._door.close()
        if os.getppid() == keeper:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            self._work(k, channel)

    def _look(self) -> None:
        for worker in self._workers:
            if self._is_heard(worker):
                worker.heard_at, worker.unheard = time.monotonic(), 0
            else:
                worker.unheard += 1
                silent_s = time.monotonic() - worker.heard_at
                if worker.heard_at and worker.unheard > 1 and silent_s > self._task.hung_s:
                    log.error("a kept process is silent and is started again")
                    worker.process.kill()  # a stopped process would react to nothing else

    def _health(self) -> Health:
        pids = [each.process.pid or 0 for each in self._workers]
        return Health(pids=pids, starts=self._starts, alive=all(each.heard_at for each in self._workers))

    def _read_changes(self) -> bool:
        """Takes a line of changes from its owner and passes it on; False: there will be no more."""
        data = b""
        with contextlib.suppress(ConnectionError), self._line.makefile("rb", buffering=0) as file:
            data = file.readline()
        for name, value in msgspec.json.decode(data or b"{}").items():
            setattr(self._task, name, value)
        for worker in self._workers:
            with contextlib.suppress(OSError):
                worker.channel.send(data)
        return bool(data)

    def _end(self, within_s: float) -> None:
        until = time.monotonic() + within_s
        for worker in self._workers:
            (worker.process.terminate if within_s else worker.process.kill)()
        for worker in self._workers:
            worker.process.join(max(0.0, until - time.monotonic()))
            worker.process.kill()
            worker.process.join()


def heard_over_channel(worker: Worker) -> bool:
    with contextlib.suppress(OSError):
        return bool(worker.channel.recv(1 << 16))
    return False
