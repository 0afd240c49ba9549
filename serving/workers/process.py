"""One process that a supervisor keeps alive: its state, its messages, and its start."""

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

# Messages of a process: it is ready; it has heard that it must stop; the engine hangs though its process lives; the
# models have changed, so that a standby is out of date.
READY, STOPPING, HUNG, CHANGED = "ready", "stopping", "hung", "changed"
_GO = b"go"
LEAST_LIFE_S = 10.0  # a process that lives shorter is restarted with growing delays
LONGEST_PAUSE_S = 30.0


class Tell:
    """A process's line to its supervisor: call it to send a message."""

    def __init__(self, line: socket.socket) -> None:
        self._line = line

    def __call__(self, event: str, text: str = "") -> None:
        with contextlib.suppress(OSError):
            self._line.send(msgspec.json.encode((event, text))[: 1 << 15])

    def wait_for_call(self) -> None:
        """Waits, as a standby, until the supervisor lets it take over."""
        self._line.recv(len(_GO))

    async def called(self) -> None:
        """Does the same in an event loop."""
        loop, came = asyncio.get_running_loop(), asyncio.Event()
        loop.add_reader(self._line.fileno(), came.set)
        try:
            await came.wait()
        finally:
            loop.remove_reader(self._line.fileno())


Main = Callable[[Tell], int]  # runs in the process, talks to the supervisor, returns the exit code


@dataclass(slots=True)
class Process:
    """A process that is kept alive. `main` runs in it."""

    name: str
    short: str  # name in `ps`
    main: Main
    share: int = -1  # index of its socket among those that share the port
    pid: int = 0
    pidfd: int = -1
    status_fd: int = -1
    began: float = 0.0
    failures: int = 0
    start_at: float = 0.0  # time to restart it, if it has ended
    ready: bool = False
    stopping: bool = False  # it has heard that it must stop
    said: str = ""  # its last error
    started: int = 0  # number of starts
    unwanted: bool = False  # it is ended on purpose
    gone: bool = False  # its end of the line is closed: it is ending

    def pause_s(self, lived_s: float) -> float:
        """Seconds before a restart: none the first time, and more each time, so that failing restarts do not load the
        machine.
        """
        self.failures = 0 if lived_s >= LEAST_LIFE_S else self.failures + 1
        return 0.0 if self.failures <= 1 else min(LONGEST_PAUSE_S, 0.25 * 2 ** (self.failures - 1))

    def take_over(self, other: Process) -> None:
        """Makes a standby take the place of this process."""
        self.pid, self.pidfd, self.status_fd = other.pid, other.pidfd, other.status_fd
        self.ready, self.said, self.stopping, self.gone = other.ready, "", False, other.gone
        self.began = time.monotonic()
        self.started += 1
        other.pid, other.pidfd, other.status_fd, other.ready = 0, -1, -1, False
        with contextlib.suppress(OSError):  # it is dead already, which is noticed next
            os.write(self.status_fd, _GO)


def become(process: Process, supervisor: int, status: socket.socket, close: set[int]) -> None:
    """Runs in the new process, and never returns."""
    code = 1
    try:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)  # until it has a handler
        # A terminal sends it to all processes; the supervisor passes it on
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        die_with_parent(signal.SIGTERM)
        name_process(f"paellapy-{process.short}")
        if os.getppid() != supervisor:  # the supervisor died before this process watched it
            os._exit(1)
        for fd in close:
            os.close(fd)
        tell = Tell(status)
        try:
            code = process.main(tell)
        except PaellaError as e:
            tell("error", str(e))
        except Exception as e:
            log.error("the process failed", exc_info=e, extra={"fields": {"process": process.name}})
            tell("error", f"{process.name}: {type(e).__name__}: {e}")
    finally:
        os._exit(code)


def how_ended(status: int) -> str:
    code = os.waitstatus_to_exitcode(status)
    return f"signal {-code} ({signal.Signals(-code).name})" if code < 0 else f"exit code {code}"
