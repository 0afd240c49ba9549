"""`--workers N`: a supervisor, one process with the engine, and N processes that speak HTTP, on one port.

The supervisor does nothing but start processes, start them again, and pass on the signal to stop. It forks them: so
models that exist only as Python objects reach the engine, and a restart imports nothing. It must therefore stay clean:
no device is opened here, no loop and no thread is started.

Every worker has a listening socket of its own on the same port (SO_REUSEPORT, the kernel deals out the connections),
which the supervisor keeps open: connections that wait in the queue of a worker that died are served by the next one.
One that dies again and again leaves the port while it waits to be started, so that the others get its connections.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from paellapy.instrument.errors import PaellaError
from paellapy.scheduler.core.shared_memory import die_with_parent, name_process
from paellapy.serving.listening import Shares
from paellapy.serving.logs import log

# What a process tells: it is there; it has heard that it is to stop; the engine hangs, though its process lives.
READY, STOPPING, HUNG = "ready", "stopping", "hung"
LEAST_LIFE_S = 10.0  # who lives shorter is started again later and later
LONGEST_PAUSE_S = 30.0
STOP_MARGIN_S = 5.0

Tell = Callable[..., None]
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


class Supervisor:
    """Runs processes until it is told to stop: then `first` ones, and after them the others."""

    def __init__(
        self,
        first: list[Process],
        then: list[Process],
        shares: Shares,
        drain_s: float,
        hung_up: Callable[[], None] | None = None,
    ) -> None:
        """`hung_up` is called on SIGHUP, before the processes get it too."""
        self._on_hang_up = hung_up
        self._first, self._then, self._shares, self._drain_s = first, then, shares, drain_s
        self._processes = [*then, *first]  # the engine is started first and stopped last
        self._stopping_since = 0.0
        self._signals = 0
        self._open: set[int] = set()  # what children must not keep

    def run(self, ready: Callable[[], None]) -> None:
        """Blocks. `ready` is called once, when every process has said that it is; PaellaError: one cannot start."""
        told = False
        wake_read, wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._open |= {wake_read, wake_write}
        before = {number: signal.signal(number, self._signalled) for number in (signal.SIGTERM, signal.SIGINT)}
        before[signal.SIGHUP] = signal.signal(signal.SIGHUP, self._hung_up)
        old_fd = signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
        try:
            while True:
                self._start_those_due()
                self._wait(wake_read)
                if not told and not self._stopping and all(each.ready for each in self._processes):
                    told = True
                    ready()
                hopeless = next((p for p in self._processes if p.said and not told and not p.pid), None)
                if hopeless is not None and not self._stopping:
                    self._stop()
                    raise PaellaError(hopeless.said)
                if self._stopping:
                    self._shares.close()  # the workers have their own
                    self._stop()
                    return
        finally:
            self._kill_all()
            signal.set_wakeup_fd(old_fd)
            for number, handler in before.items():
                signal.signal(number, handler)
            os.close(wake_read)
            os.close(wake_write)

    @property
    def _stopping(self) -> bool:
        return self._signals > 0

    def _signalled(self, number: int, frame: object) -> None:
        self._signals += 1

    def _hung_up(self, number: int, frame: object) -> None:
        """Who listens takes up the configuration as it stands now; those that are being started have it."""
        if self._on_hang_up is not None:
            self._on_hang_up()
        self._signal(self._processes, signal.SIGHUP)

    # -- starting

    def _start_those_due(self) -> None:
        now = time.monotonic()
        for each in self._processes:
            if each.pid == 0 and now >= each.start_at and not self._stopping:
                self._start(each)

    def _start(self, process: Process) -> None:
        own = set[int]()
        if process.share >= 0:
            try:
                own = {self._shares[process.share].fileno()}
            except OSError as e:  # others took the port while nobody listened
                process.start_at = time.monotonic() + LONGEST_PAUSE_S
                log.error("cannot listen", extra={"fields": {"process": process.name, "error": str(e)}})
                return
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
        supervisor = os.getpid()
        with warnings.catch_warnings():
            # Python warns of threads at a fork. The only ones here are BLAS's, which stops and starts them around it.
            warnings.simplefilter("ignore", DeprecationWarning)
            pid = os.fork()
        if pid == 0:
            others = (self._open | self._shares.descriptors()) - own - {theirs.fileno()}
            _child(process, supervisor, theirs, others | {ours.fileno()})
        theirs.close()
        ours.setblocking(False)
        process.pid, process.pidfd, process.status_fd = pid, os.pidfd_open(pid), ours.detach()
        process.began, process.ready, process.said = time.monotonic(), False, ""
        process.stopping = False
        process.started += 1
        self._open |= {process.pidfd, process.status_fd}
        if process.started > 1:
            log.info("started again", extra={"fields": {"process": process.name, "pid": pid}})

    # -- watching

    def _wait(self, wake_fd: int) -> None:
        poll = select.poll()
        poll.register(wake_fd, select.POLLIN)
        for each in self._processes:
            if each.pid:
                poll.register(each.pidfd, select.POLLIN)
                poll.register(each.status_fd, select.POLLIN)
        waiting = [each.start_at for each in self._processes if each.pid == 0]
        timeout_ms = max(0.0, min(waiting) - time.monotonic()) * 1e3 + 1 if waiting else None
        poll.poll(timeout_ms)
        with contextlib.suppress(BlockingIOError):
            os.read(wake_fd, 4096)
        for each in self._processes:
            if each.pid:
                self._listen(each)
                self._look(each)

    def _listen(self, process: Process) -> None:
        while True:
            try:
                packet = os.read(process.status_fd, 1 << 16)
            except OSError:
                return
            if not packet:
                return
            event, text = msgspec.json.decode(packet, type=tuple[str, str])
            if event == READY:
                process.ready = True
            elif event == STOPPING:
                process.stopping = True
            elif event == HUNG:
                log.error("the engine is ended: a worker has had no sign of life of it")
                self._signal(self._then, signal.SIGKILL)
            else:
                process.said = text

    def _look(self, process: Process) -> None:
        """Has it ended?"""
        pid, status = os.waitpid(process.pid, os.WNOHANG)
        if pid == 0:
            return
        self._listen(process)
        for fd in (process.pidfd, process.status_fd):
            self._open.discard(fd)
            os.close(fd)
        process.pid, process.pidfd, process.status_fd = 0, -1, -1
        lived_s = time.monotonic() - process.began
        if self._stopping:
            if status:
                log.warning("ended badly", extra={"fields": {"process": process.name, "how": _how(status)}})
            return
        process.failures = 0 if lived_s >= LEAST_LIFE_S else process.failures + 1
        # The first time at once; a process that dies again and again must not take the machine with it.
        pause_s = 0.0 if process.failures <= 1 else min(LONGEST_PAUSE_S, 0.25 * 2 ** (process.failures - 1))
        process.start_at = time.monotonic() + pause_s
        fields = {"process": process.name, "how": _how(status), "lived_s": round(lived_s, 1)}
        if process.said:
            fields["why"] = process.said
        if pause_s:
            fields["again_in_s"] = pause_s
            if process.share >= 0:
                self._shares.leave(process.share)
        log.error("ended, and is started again", extra={"fields": fields})

    # -- stopping

    def _stop(self) -> None:
        """The first ones, and when they are gone the others; a second signal ends all at once."""
        self._signals = max(1, self._signals)
        asked = self._signals
        for group in (self._first, self._then):
            self._signal(group, signal.SIGTERM)
            began = time.monotonic()
            while any(each.pid for each in group) and self._signals == asked:
                heard = all(each.stopping for each in group if each.pid)
                if time.monotonic() - began > STOP_MARGIN_S + self._drain_s * heard:  # who does not hear it, hangs
                    break
                poll = select.poll()
                for each in group:
                    if each.pid:
                        poll.register(each.pidfd, select.POLLIN)
                poll.poll(100)
                for each in group:
                    if each.pid:
                        self._listen(each)
                        self._look(each)
            self._signal(group, signal.SIGKILL)

    def _kill_all(self) -> None:
        self._signals = max(1, self._signals)
        self._signal(self._processes, signal.SIGKILL)
        for each in self._processes:
            while each.pid:
                poll = select.poll()
                poll.register(each.pidfd, select.POLLIN)
                poll.poll(1000)
                self._look(each)

    def _signal(self, group: list[Process], number: signal.Signals) -> None:
        for each in group:
            if each.pid:
                signal.pidfd_send_signal(each.pidfd, number)


def _child(process: Process, supervisor: int, status: socket.socket, close: set[int]) -> None:
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

        def tell(event: str, text: str = "") -> None:
            with contextlib.suppress(OSError):
                status.send(msgspec.json.encode((event, text))[: 1 << 15])

        try:
            code = process.main(tell)
        except PaellaError as e:
            tell("error", str(e))
        except Exception as e:
            log.error("failed", exc_info=e, extra={"fields": {"process": process.name}})
            tell("error", f"{process.name}: {type(e).__name__}: {e}")
    finally:
        os._exit(code)


def _how(status: int) -> str:
    code = os.waitstatus_to_exitcode(status)
    return f"signal {-code} ({signal.Signals(-code).name})" if code < 0 else f"exit code {code}"
