"""`--workers N`: a supervisor, one process with the engine, and N processes that speak HTTP, on one port.

The supervisor only starts and restarts processes and passes on the signal to stop. It forks them, so that models that
exist only as Python objects reach the engine, and a restart imports nothing. For that it must stay clean: it opens no
device and starts no event loop and no thread.

Every worker has its own listening socket on the same port (SO_REUSEPORT: the kernel spreads connections over them). The
supervisor keeps the sockets open: connections that wait in the queue of a worker that died are served by its successor.
A worker that dies repeatedly leaves the port until its restart, so that the others get its connections.

A standby is a second engine process that has done the slow part of a start and waits. It takes over when the engine
ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import math
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
from paellapy.scheduler.core.processes import die_with_parent, name_process
from paellapy.serving.listening import Shares, notify
from paellapy.serving.logs import LOG_SIGNALS, heed, hung_up, log

# Messages of a process: it is ready; it has heard that it must stop; the engine hangs though its process lives; the
# models have changed, so that a standby is out of date; the engine has taken a new configuration.
IS_READY, IS_STOPPING, ENGINE_HUNG, MODELS_CHANGED = "ready", "stopping", "hung", "changed"
CONFIGURATION_TAKEN = "taken"
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
        for number in LOG_SIGNALS:
            signal.signal(number, heed)
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


STANDBY_AFTER_S = 2.0  # pause after a start or a change, so that starting a standby does not slow loading
STOP_MARGIN_S = 5.0


class Supervisor:
    """Runs processes until it is told to stop: then it stops those in `first`, and after them those in `then`."""

    def __init__(
        self,
        first: list[Process],
        then: list[Process],
        shares: Shares,
        drain_s: float,
        hung_up: Callable[[], None] | None = None,
        standby: Process | None = None,
    ) -> None:
        """`hung_up` is called when a new configuration holds; `standby` takes over from the first of `then`."""
        self._on_hang_up = hung_up
        self._first, self._then, self._shares, self._drain_s = first, then, shares, drain_s
        self._processes = [*then, *first]  # the engine is started first and stopped last
        self._standby = standby
        if standby is not None:
            standby.start_at = math.inf  # started once all others are ready
            self._processes.append(standby)
        self._signals = 0
        self._open: set[int] = set()  # descriptors that children must close
        self._outdated = False  # whether the standby misses a change
        self._leaving: list[int] = []  # processes that have ended but are still being cleaned up by the system

    def run(self, ready: Callable[[], None]) -> None:
        """Blocks. `ready` is called once, when all processes are ready; PaellaError if one cannot start."""
        told = False
        # Freeze existing objects: otherwise each process's first full collection would copy the memory they share.
        gc.collect()
        gc.freeze()
        wake_read, wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._open |= {wake_read, wake_write}
        before = {number: signal.signal(number, self._signalled) for number in (signal.SIGTERM, signal.SIGINT)}
        before[signal.SIGHUP] = signal.signal(signal.SIGHUP, self._hung_up)
        if hung_up.is_set():
            hung_up.clear()
            self._hung_up(signal.SIGHUP, None)
        before |= {number: signal.signal(number, self._pass_on) for number in LOG_SIGNALS}
        old_fd = signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
        try:
            while True:
                self._start_those_due()
                self._wait(wake_read)
                if not told and not self._stopping and all(p.ready for p in (*self._first, *self._then)):
                    told = True
                    ready()
                    self._renew_standby()
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
            gc.unfreeze()
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
        """Lets the engine read the new configuration; the others take what it has taken. If none is ready, the next
        one begins with it.
        """
        if not self._then[0].ready:
            self._take_configuration()
        self._signal(self._then, signal.SIGHUP)

    def _take_configuration(self) -> None:
        if self._on_hang_up is not None:
            self._on_hang_up()
        self._outdated = True

    def _pass_on(self, number: int, frame: object) -> None:
        """Heeds a signal that concerns the logs of all processes."""
        heed(number)
        self._signal(self._processes, signal.Signals(number))

    # -- starting

    def _start_those_due(self) -> None:
        now = time.monotonic()
        if self._outdated:
            self._outdated = False
            self._renew_standby()
        for each in self._processes:
            if each.pid == 0 and now >= each.start_at and not self._stopping:
                if each is self._then[0] and self._standby is not None:
                    self._start_engine(each, self._standby)
                else:
                    self._start(each)

    def _start_engine(self, engine: Process, standby: Process) -> None:
        if self._can_take_over():
            engine.take_over(standby)
            log.info("the standby takes over", extra={"fields": {"process": engine.name, "pid": engine.pid}})
        else:
            self._start(engine)
        # A new standby may be needed soon, but must not slow an engine that is still loading.
        standby.start_at = 0.0 if engine.ready else math.inf

    def _can_take_over(self) -> bool:
        return self._standby is not None and self._standby.pid != 0 and not self._standby.unwanted

    def _renew_standby(self) -> None:
        """Replaces the standby after a pause: it does not know the latest changes."""
        standby = self._standby
        if standby is not None and not self._stopping:
            if standby.pid:
                standby.unwanted = True
                self._signal([standby], signal.SIGKILL)
            standby.start_at = time.monotonic() + STANDBY_AFTER_S

    def _start(self, process: Process) -> None:
        own = set[int]()
        if process.share >= 0:
            try:
                own = self._shares.descriptors_of(process.share)
            except OSError as e:  # another program took the port while nobody listened
                process.start_at = time.monotonic() + LONGEST_PAUSE_S
                log.error("cannot listen", extra={"fields": {"process": process.name, "error": str(e)}})
                return
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
        supervisor = os.getpid()
        with warnings.catch_warnings():
            # Python warns of threads at a fork. The only threads here are BLAS's, which restarts them after it.
            warnings.simplefilter("ignore", DeprecationWarning)
            pid = os.fork()
        if pid == 0:
            others = (self._open | self._shares.descriptors()) - own - {theirs.fileno()}
            become(process, supervisor, theirs, others | {ours.fileno()})
        theirs.close()
        ours.setblocking(False)
        process.pid, process.pidfd, process.status_fd = pid, os.pidfd_open(pid), ours.detach()
        process.began, process.ready, process.said = time.monotonic(), False, ""
        process.stopping = process.unwanted = process.gone = False
        process.started += 1
        self._open |= {process.pidfd, process.status_fd}
        if process.started > 1 and process is not self._standby:
            log.info("the process was restarted", extra={"fields": {"process": process.name, "pid": pid}})

    # -- watching

    def _wait(self, wake_fd: int) -> None:
        poll = select.poll()
        poll.register(wake_fd, select.POLLIN)
        for each in self._processes:
            if each.pid:
                poll.register(each.pidfd, select.POLLIN)
                if not each.gone:
                    poll.register(each.status_fd, select.POLLIN)
        self._leaving = [pid for pid in self._leaving if os.waitpid(pid, os.WNOHANG)[0] == 0]
        waiting = [each.start_at for each in self._processes if each.pid == 0 and each.start_at < math.inf]
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
                process.gone = True
                return
            event, text = msgspec.json.decode(packet, type=tuple[str, str])
            if event == IS_READY:
                process.ready = True
                self._is_ready(process)
            elif event == MODELS_CHANGED:
                self._outdated = True
            elif event == CONFIGURATION_TAKEN:
                self._take_configuration()
            elif event == IS_STOPPING:
                process.stopping = True
            elif event == ENGINE_HUNG:
                self._end_hung(int(text))
            else:
                process.said = text

    def _is_ready(self, process: Process) -> None:
        if process is self._standby:
            log.info("a standby is ready", extra={"fields": {"pid": process.pid}})
        elif self._standby is not None and process is self._then[0]:
            self._standby.start_at = min(self._standby.start_at, time.monotonic() + STANDBY_AFTER_S)

    def _end_hung(self, pid: int) -> None:
        """Ends a hanging engine. All workers report the same one, and its successor may already run."""
        hung = [each for each in self._then if each.pid == pid]
        if hung:
            log.error("the engine did not respond to a worker and is killed", extra={"fields": {"pid": pid}})
            self._signal(hung, signal.SIGKILL)

    def _look(self, process: Process) -> None:
        """Checks whether the process has ended, and acts on it."""
        pid, status = os.waitpid(process.pid, os.WNOHANG)
        if pid == 0:
            if not process.gone or process is not self._then[0] or not self._can_take_over():
                return
            # The system takes seconds to free its real GPU's memory, which the standby does not need.
            self._leaving.append(process.pid)
        self._listen(process)
        for fd in (process.pidfd, process.status_fd):
            self._open.discard(fd)
            os.close(fd)
        process.pid, process.pidfd, process.status_fd = 0, -1, -1
        lived_s = time.monotonic() - process.began
        if self._stopping or process.unwanted:
            if status and not process.unwanted:
                log.warning("ended in error", extra={"fields": {"process": process.name, "how": how_ended(status)}})
            process.unwanted = False
            return
        pause_s = process.pause_s(lived_s)
        if process is self._standby:  # nobody waits for it
            pause_s = LONGEST_PAUSE_S
        elif self._standby is not None and process is self._then[0] and self._standby.ready and self._can_take_over():
            pause_s = 0.0  # its successor has been started already
        process.start_at = time.monotonic() + pause_s
        fields = {"process": process.name, "how": how_ended(status) if pid else "killed", "lived_s": round(lived_s, 1)}
        if process.said:
            fields["why"] = process.said
        if pause_s:
            fields["again_in_s"] = pause_s
            if process.share >= 0:
                self._shares.leave(process.share)
        log.error("a process ended and is being restarted", extra={"fields": fields})

    # -- stopping

    def _stop(self) -> None:
        """Stops the first processes, then the others; a second signal kills all at once."""
        self._signals = max(1, self._signals)
        notify("STOPPING=1")
        asked = self._signals
        if self._standby is not None and self._standby.pid:
            self._standby.unwanted = True
            self._signal([self._standby], signal.SIGKILL)
        for group in (self._first, self._then):
            self._signal(group, signal.SIGTERM)
            began = time.monotonic()
            while any(each.pid for each in group) and self._signals == asked:
                heard = all(each.stopping for each in group if each.pid)
                # A process that has not reacted hangs
                if time.monotonic() - began > STOP_MARGIN_S + self._drain_s * heard:
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
                with contextlib.suppress(OSError):  # a signal handler may find a process that is just being taken away
                    signal.pidfd_send_signal(each.pidfd, number)
