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
import ssl
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from paellapy.instrument.errors import PaellaError
from paellapy.scheduler.models.model import Model
from paellapy.serving.access import Key
from paellapy.serving.admission import Suspects, suspect_table
from paellapy.serving.build import build_keys, build_policy, build_tls, check_fork
from paellapy.serving.config import Config, Source
from paellapy.serving.counters import Counters, Numbers, counter_table
from paellapy.serving.listening import Shares, url_of
from paellapy.serving.loading import import_device, warm_up
from paellapy.serving.logs import configure, log
from paellapy.serving.preflight import keep_memory, loop_factory, own_folder, share_interpreter
from paellapy.serving.server import Announce, Server, noted, run, warn_of_neighbours
from paellapy.serving.service import Service
from paellapy.serving.workers.channel import (
    CHANGED,
    HUNG,
    LONGEST_PAUSE_S,
    READY,
    STOPPING,
    Process,
    Tell,
    become,
    how_ended,
)
from paellapy.serving.workers.engine_link import EngineLink
from paellapy.serving.workers.engine_process import EngineProcess, Latest, Policies

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
        """`hung_up` is called on SIGHUP, before the processes get it; `standby` takes over from the first of `then`."""
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
        """Passes SIGHUP on to running processes; those being started read the new configuration anyway."""
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
                own = {self._shares[process.share].fileno()}
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


# The processes of `--workers N`: the engine's, and each worker's.


SOCKET = "engine"
ENGINE_PATIENCE_S = 10.0  # a worker without an engine answers 503 after this time


def serve_workers(config: Config, source: Source, models: Sequence[Model], announce: Announce | None = None) -> None:
    """Runs until SIGTERM or SIGINT."""
    options = config.server
    configure(options.log_format, options.log_level)
    keys, tls = build_keys(config, source), build_tls(config, source)
    policies = Policies(build_policy(config, source))  # compiled before the fork, so that all processes have it
    warn_of_neighbours(options, keys)
    check_fork(config)
    warm_up(policies.configured)
    import_device(config.device)
    shares = Shares(options.host, options.port, options.workers)
    url = url_of(shares.address, tls is not None)
    table, suspects, since = counter_table(options.workers), suspect_table(), time.time()
    with own_folder() as folder:
        path = folder / SOCKET
        workers = [
            Process(
                f"worker {k}",
                f"work{k}",
                _Worker(k, config, source, keys, tls, policies, path, table, suspects, shares, since).main,
                share=k - 1,
            )
            for k in range(1, options.workers + 1)
        ]
        latest = Latest(config, source)
        made_from = EngineProcess(latest, models, policies, path)
        engine = Process("engine", "engine", made_from.main)
        standby = None if options.standby == "off" else Process("standby", "spare", made_from.stand_by)
        drain_s = options.grace_s + options.drain_s
        supervisor = Supervisor(workers, [engine], shares, drain_s, latest.read_again, standby)
        log.info("listening", extra={"fields": {"url": url, "workers": options.workers}})

        def ready() -> None:
            if announce is not None:
                announce(url)

        with noted(source):
            supervisor.run(ready)
    log.info("stopped")


# -- a worker


@dataclass(frozen=True, slots=True)
class _Worker:
    """One worker. `producer` is its number, from 1."""

    producer: int
    config: Config
    source: Source
    keys: Mapping[str, Key]
    tls: ssl.SSLContext | None
    policies: Policies
    path: Path
    table: Numbers
    suspects: Any
    shares: Shares
    since: float  # start of the server

    def main(self, tell: Tell) -> int:
        options = self.config.server
        configure(options.log_format, options.log_level, process=f"worker {self.producer}")
        keep_memory()
        share_interpreter()
        with asyncio.Runner(loop_factory=loop_factory()) as runner:
            runner.run(self._main(tell))
        return 0

    async def _main(self, tell: Tell) -> None:
        link = EngineLink(self.path, self.producer, self.policies)
        server = _WorkerServer(link, self, lambda: tell(HUNG, str(link.pid)))
        linked = asyncio.create_task(link.run())
        try:
            await run(server, lambda _: tell(READY), aloud=False, heard=lambda: tell(STOPPING))
        finally:
            link.close()
            linked.cancel()


class _WorkerServer(Server):
    """A server whose models another process loads."""

    def __init__(self, link: EngineLink, worker: _Worker, give_up: Callable[[], None]) -> None:
        """`give_up` asks the supervisor for a new engine."""
        o = worker.config.server
        counters = Counters(link.registry, worker.table, worker.producer - 1)
        service = Service(
            link.registry, o.admission, o.max_body_bytes, o.body_timeout_s, counters, link.call, worker.since,
            Suspects(worker.suspects),
        )  # fmt: skip
        own = worker.shares[worker.producer - 1]
        super().__init__(link.registry, o, worker.keys, worker.tls, service=service, listening=own)
        self._link, self._give_up, self._worker, self.source = link, give_up, worker, worker.source
        self._virtual = worker.config.device.startswith("virtual")

    def _is_virtual(self) -> bool:
        link = self._link.engine.link
        return self._virtual or (link is not None and link.device.startswith("virtual"))

    def give_up(self) -> None:
        self._give_up()

    async def start(self) -> None:
        """Listens once the engine is known, or has not come in time; until then connections wait in the
        kernel's queue.
        """
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(ENGINE_PATIENCE_S):
                while not self._link.registry.entries:
                    await self._link.changed()
        await super().start()

    async def reload(self) -> None:
        await super().reload()
        with contextlib.suppress(PaellaError):  # has been logged
            config, source = self._worker.source.again()
            self._worker.policies.add(await asyncio.to_thread(build_policy, config, source))
            self._link.follow_policy()

    async def load(self) -> None:
        while not self._link.settled and not self.service.draining:
            await self._link.changed()

    async def stop(self) -> None:
        self.service.draining = True
        self._link.poke()
        await super().stop()
