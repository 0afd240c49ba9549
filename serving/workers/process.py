"""One process that a supervisor keeps alive: what is known of it, what it tells, and how it begins."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from paellapy.instrument.errors import PaellaError
from paellapy.scheduler.core.shared_memory import die_with_parent, name_process
from paellapy.serving.logs import log

# What a process tells: it is there; it has heard that it is to stop; the engine hangs, though its process lives; other
# models than before are to be served, so that a standby is out of date.
READY, STOPPING, HUNG, CHANGED = "ready", "stopping", "hung", "changed"
_GO = b"go"
LEAST_LIFE_S = 10.0  # who lives shorter is started again later and later
LONGEST_PAUSE_S = 30.0


class Tell:
    """A process's line to its supervisor: call it to tell something."""

    def __init__(self, line: socket.socket) -> None:
        self._line = line

    def __call__(self, event: str, text: str = "") -> None:
        with contextlib.suppress(OSError):
            self._line.send(msgspec.json.encode((event, text))[: 1 << 15])

    def wait_for_call(self) -> None:
        """Of a standby: until the supervisor has it take over."""
        self._line.recv(len(_GO))

    async def called(self) -> None:
        """The same in a loop."""
        loop, came = asyncio.get_running_loop(), asyncio.Event()
        loop.add_reader(self._line.fileno(), came.set)
        try:
            await came.wait()
        finally:
            loop.remove_reader(self._line.fileno())


Main = Callable[[Tell], int]  # of a process: tells the supervisor, and returns its exit code


@dataclass(slots=True)
class Process:
    """One that is kept alive. `main` runs in it."""

    name: str
    short: str  # in `ps`
    main: Main
    share: int = -1  # of the sockets that share the port: which one is its own
    pid: int = 0
    pidfd: int = -1
    status_fd: int = -1
    began: float = 0.0
    failures: int = 0
    start_at: float = 0.0  # when it ended: the time to start it again
    ready: bool = False
    stopping: bool = False  # it has heard that it is to stop
    said: str = ""  # why it could not go on
    started: int = 0  # times
    unwanted: bool = False  # it is ended on purpose
    gone: bool = False  # its end of the line is closed: it is ending

    def pause_s(self, lived_s: float) -> float:
        """Before it is started again. The first time none; one that dies again and again must not take the machine."""
        self.failures = 0 if lived_s >= LEAST_LIFE_S else self.failures + 1
        return 0.0 if self.failures <= 1 else min(LONGEST_PAUSE_S, 0.25 * 2 ** (self.failures - 1))

    def take_over(self, other: Process) -> None:
        """A standby becomes this process."""
        self.pid, self.pidfd, self.status_fd = other.pid, other.pidfd, other.status_fd
        self.ready, self.said, self.stopping, self.gone = other.ready, "", False, other.gone
        self.began = time.monotonic()
        self.started += 1
        other.pid, other.pidfd, other.status_fd, other.ready = 0, -1, -1, False
        with contextlib.suppress(OSError):  # it is dead already, which is seen next
            os.write(self.status_fd, _GO)


def become(process: Process, supervisor: int, status: socket.socket, close: set[int]) -> None:
    """In the new process: never returns."""
    code = 1
    try:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)  # until it knows what to do
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to all; the supervisor passes it on
        die_with_parent(signal.SIGTERM)
        name_process(f"paellapy-{process.short}")
        if os.getppid() != supervisor:  # it died before it was watched
            os._exit(1)
        for fd in close:
            os.close(fd)
        tell = Tell(status)
        try:
            code = process.main(tell)
        except PaellaError as e:
            tell("error", str(e))
        except Exception as e:
            log.error("failed", exc_info=e, extra={"fields": {"process": process.name}})
            tell("error", f"{process.name}: {type(e).__name__}: {e}")
    finally:
        os._exit(code)


def how_ended(status: int) -> str:
    code = os.waitstatus_to_exitcode(status)
    return f"signal {-code} ({signal.Signals(-code).name})" if code < 0 else f"exit code {code}"
