"""`--workers N`: a supervisor, one process with the engine, and N processes that speak HTTP, on one port.

The supervisor does nothing but start processes, start them again, and pass on the signal to stop. It forks them: so
models that exist only as Python objects reach the engine, and a restart imports nothing. It must therefore stay clean:
no device is opened here, no loop and no thread is started.

Every worker has a listening socket of its own on the same port (SO_REUSEPORT, the kernel deals out the connections),
which the supervisor keeps open: connections that wait in the queue of a worker that died are served by the next one.
One that dies again and again leaves the port while it waits to be started, so that the others get its connections.

A standby is a second process of the engine that has done what takes time and waits. It takes over when the engine ends.
"""

from __future__ import annotations

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

import msgspec

from paellapy.instrument.errors import PaellaError
from paellapy.serving.listening import Shares
from paellapy.serving.logs import log
from paellapy.serving.workers.process import CHANGED, HUNG, LONGEST_PAUSE_S, READY, STOPPING, Process, become, how_ended

STANDBY_AFTER_S = 2.0  # of rest after a start or a change: a standby is not to slow what is being loaded
STOP_MARGIN_S = 5.0


class Supervisor:
    """Runs processes until it is told to stop: then `first` ones, and after them the others."""

    def __init__(
        self,
        first: list[Process],
        then: list[Process],
        shares: Shares,
        drain_s: float,
        hung_up: Callable[[], None] | None = None,
        standby: Process | None = None,
    ) -> None:
        """`hung_up` is called on SIGHUP, before the processes get it too; `standby` takes over from `then`'s first."""
        self._on_hang_up = hung_up
        self._first, self._then, self._shares, self._drain_s = first, then, shares, drain_s
        self._processes = [*then, *first]  # the engine is started first and stopped last
        self._standby = standby
        if standby is not None:
            standby.start_at = math.inf  # when all else is there
            self._processes.append(standby)
        self._signals = 0
        self._open: set[int] = set()  # what children must not keep
        self._outdated = False  # the standby is
        self._leaving: list[int] = []  # processes that have ended but for what the system does for them

    def run(self, ready: Callable[[], None]) -> None:
        """Blocks. `ready` is called once, when every process has said that it is; PaellaError: one cannot start."""
        told = False
        # What is there now stays: else the first full collection of each process copies all that they share.
        gc.collect()
        gc.freeze()
        wake_read, wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._open |= {wake_read, wake_write}
        before = {number: signal.signal(number, self._signalled) for number in (signal.SIGTERM, signal.SIGINT)}
        before[signal.SIGHUP] = signal.signal(signal.SIGHUP, self._hung_up)
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
        """Who listens takes up the configuration as it stands now; those that are being started have it."""
        if self._on_hang_up is not None:
            self._on_hang_up()
        self._signal([*self._first, *self._then], signal.SIGHUP)
        self._outdated = True

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
        # The next one may be needed soon; but it does not slow an engine that is still loading.
        standby.start_at = 0.0 if engine.ready else math.inf

    def _can_take_over(self) -> bool:
        return self._standby is not None and self._standby.pid != 0 and not self._standby.unwanted

    def _renew_standby(self) -> None:
        """After a rest. What was ready to take over does not know of what has changed since."""
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
            become(process, supervisor, theirs, others | {ours.fileno()})
        theirs.close()
        ours.setblocking(False)
        process.pid, process.pidfd, process.status_fd = pid, os.pidfd_open(pid), ours.detach()
        process.began, process.ready, process.said = time.monotonic(), False, ""
        process.stopping = process.unwanted = process.gone = False
        process.started += 1
        self._open |= {process.pidfd, process.status_fd}
        if process.started > 1 and process is not self._standby:
            log.info("started again", extra={"fields": {"process": process.name, "pid": pid}})

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
            if event == READY:
                process.ready = True
                self._is_ready(process)
            elif event == CHANGED:
                self._outdated = True
            elif event == STOPPING:
                process.stopping = True
            elif event == HUNG:
                self._end_hung(int(text))
            else:
                process.said = text

    def _is_ready(self, process: Process) -> None:
        if process is self._standby:
            log.info("a standby is there", extra={"fields": {"pid": process.pid}})
        elif self._standby is not None and process is self._then[0]:
            self._standby.start_at = min(self._standby.start_at, time.monotonic() + STANDBY_AFTER_S)

    def _end_hung(self, pid: int) -> None:
        """Every worker says so of the same one, and the next one may be there already."""
        hung = [each for each in self._then if each.pid == pid]
        if hung:
            log.error("the engine is ended: a worker has had no sign of life of it", extra={"fields": {"pid": pid}})
            self._signal(hung, signal.SIGKILL)

    def _look(self, process: Process) -> None:
        """Has it ended?"""
        pid, status = os.waitpid(process.pid, os.WNOHANG)
        if pid == 0:
            if not process.gone or process is not self._then[0] or not self._can_take_over():
                return
            # What it has of a real GPU takes seconds to be given back, and the standby does not need it.
            self._leaving.append(process.pid)
        self._listen(process)
        for fd in (process.pidfd, process.status_fd):
            self._open.discard(fd)
            os.close(fd)
        process.pid, process.pidfd, process.status_fd = 0, -1, -1
        lived_s = time.monotonic() - process.began
        if self._stopping or process.unwanted:
            if status and not process.unwanted:
                log.warning("ended badly", extra={"fields": {"process": process.name, "how": how_ended(status)}})
            process.unwanted = False
            return
        pause_s = process.pause_s(lived_s)
        if process is self._standby:  # nobody waits for it
            pause_s = LONGEST_PAUSE_S
        process.start_at = time.monotonic() + pause_s
        fields = {"process": process.name, "how": how_ended(status) if pid else "killed", "lived_s": round(lived_s, 1)}
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
        if self._standby is not None and self._standby.pid:
            self._standby.unwanted = True
            self._signal([self._standby], signal.SIGKILL)
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
