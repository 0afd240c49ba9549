"""`Server`: sockets, signals, loading, draining. `serve` runs one until it is told to stop."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import ssl
import sys
from collections import deque
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NoReturn
from weakref import WeakSet

from paellapy.instrument.errors import PaellaError
from paellapy.scheduler.core.errors import EngineAwayError, EngineFailedError
from paellapy.scheduler.engine.callbacks import Watchdog
from paellapy.scheduler.engine.engine import Engine
from paellapy.scheduler.engine.pipelines import Served
from paellapy.scheduler.engine.remote import RemoteEngine
from paellapy.serving.access import Key, is_loopback
from paellapy.serving.app import ACCESS, create_app
from paellapy.serving.config import Config, ServerConfig, Source
from paellapy.serving.errors import RequestError
from paellapy.serving.fast_path.connection import FastConnection
from paellapy.serving.fast_path.inference import FastHandler
from paellapy.serving.listening import (
    Connections,
    Runner,
    Site,
    listen,
    listen_admin,
    notify,
    stop_listening,
    url_of,
)
from paellapy.serving.loading import load_models, walk_http
from paellapy.serving.logs import Seldom, configure, hung_up, log
from paellapy.serving.preflight import keep_memory, loop_factory, share_interpreter, spare_objects, stop_sparing
from paellapy.serving.registry import READY, Catalogue, Registry
from paellapy.serving.reload import Reloader, take_secrets
from paellapy.serving.service import SELDOM_S, SERVICE, Service

# Notices an engine that hangs: its core is asked for signs of life, and requests are answered without it.
#
# The core reads messages that front ends post to rings in shared memory. Every worker posts one now and then and checks
# that it was read. If it is not for DOUBTFUL_S, the server is not ready and refuses new requests; after
# `engine_timeout_s` the engine is given up.

TICK_S = 0.25
DOUBTFUL_S = 2.0  # seconds without a sign of life until the server is not ready and refuses requests
LAG_S = 10.0  # the time whose largest lag is shown
LATE_S = 0.25  # a lag that is logged
SILENT = "the engine does not respond; try again later"


class Heartbeat:
    """Watches one engine. `give_up` is called once when the engine has not responded for `timeout_s`."""

    def __init__(self, service: Service, timeout_s: float, give_up: Callable[[], None]) -> None:
        self._service, self._timeout_s, self._give_up = service, timeout_s, give_up
        self._watchdog = Watchdog(service.engine.client)
        self._silent_s, self._given_up = 0.0, False

    async def run(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            self.look()

    def look(self) -> None:
        """One tick. Ticks are counted instead of time: while this process was suspended, the engine may have
        been too.
        """
        service = self._service
        if self._watchdog.responds():
            if service.silent:
                log.warning("the engine responds again")
            self._silent_s, self._given_up, service.silent = 0.0, False, False
            return
        self._silent_s += TICK_S
        if self._silent_s >= DOUBTFUL_S and not service.silent:
            service.silent = True
            log.error("the engine does not respond", extra={"fields": {"s": self._silent_s}})
        if self._silent_s >= (DOUBTFUL_S if service.draining else self._timeout_s) and not self._given_up:
            self._given_up = True
            for work in list(service.live):
                work.abandon(EngineAwayError(SILENT))
            self._give_up()


class Gauges:
    """Measures, now and then, what this process holds, and by how much its event loop is late."""

    def __init__(self, service: Service, runner: Runner) -> None:
        self._service, self._runner, self._seldom = service, runner, Seldom(SELDOM_S)
        self._lags_s: deque[float] = deque(maxlen=round(LAG_S / TICK_S))

    async def run(self) -> None:
        loop, ticks = asyncio.get_running_loop(), 0
        while True:
            due_s = loop.time() + TICK_S
            await asyncio.sleep(TICK_S)
            self._lags_s.append(loop.time() - due_s)
            if self._lags_s[-1] > LATE_S and self._seldom.due("lag"):
                fields = {"s": round(self._lags_s[-1], 3)}
                log.info("the event loop was held up", extra={"fields": fields})
            self._measure()
            if ticks % round(LAG_S / TICK_S) == 0:
                found = await asyncio.to_thread(os.listdir, "/proc/self/fd")
                self._service.counters.set_gauges(descriptors=len(found))
            ticks += 1

    def _measure(self) -> None:
        server = self._runner.server
        assert isinstance(server, Connections)
        self._service.counters.set_gauges(
            connections=len(server.connections),
            held_bytes=self._service.held.nbytes,
            unsent_bytes=self._service.unsent.nbytes,
            loop_lag_ns=round(max(self._lags_s) * 1e9),
        )


Announce = Callable[[str], None]

LOOK_S = 0.25
TIMEOUT_S, VIRTUAL_TIMEOUT_S = 10.0, 60.0  # where engine_timeout_s is not set


class Server:
    """An application on a socket. It listens at once, and is ready when its models are loaded."""

    def __init__(
        self,
        registry: Catalogue,
        options: ServerConfig | None = None,
        keys: Mapping[str, str | Key] | None = None,
        tls: ssl.SSLContext | None = None,
        *,
        service: Service | None = None,
        listening: socket.socket | None = None,
        admin: socket.socket | None = None,
    ) -> None:
        """A worker gives its `service`, and `listening` and `admin`, sockets that listen already."""
        self.registry, self.options, self.tls = registry, options or ServerConfig(), tls
        o = self.options
        self.app = create_app(
            registry,
            admission=o.admission,
            keys=keys or {},
            client_header=o.client_header,
            max_body_bytes=o.max_body_bytes,
            body_timeout_s=o.body_timeout_s,
            max_held_bytes=o.limits.max_held_bytes,
            access_log=o.access_log,
            hosts=[o.host, *o.hosts],
            model_control=is_loopback(o.host) if o.model_control is None else o.model_control,
            local=is_loopback(o.host),
            service=service,
        )
        self._listening, self._admin, self._keys = listening, admin, bool(keys)
        self._watching: list[asyncio.Task[None]] = []
        self.reloading: asyncio.Task[None] | None = None  # as SIGHUP asked
        self._to_reload = False
        self.reloader: Reloader | None = None  # if this process loads the models
        self._runner: Runner | None = None
        self._walked: WeakSet[Served] = WeakSet()
        registry.changed.append(self._walk_http)
        self.url = self.admin_url = ""

    @property
    def service(self) -> Service:
        return self.app[SERVICE]

    async def start(self) -> None:
        """Begins to listen, and sets `url`."""
        o = self.options
        handler = FastHandler(self.service, self.app[ACCESS], o.client_header, o.access_log)
        self._runner = Runner(
            self.app,
            partial(FastConnection, handler=handler),
            o.limits,
            log_rejected=o.access_log,
            drain_s=o.drain_s,
            held=self.service.held,
            unsent=self.service.unsent,
            note=self._note_answer,
        )
        await self._runner.setup()
        try:
            sockets = listen(o.host, o.port) if self._listening is None else [self._listening]
            if o.admin_port is not None:
                admin = self._admin or listen_admin(o.host, o.admin_port)
                self.app[ACCESS].admin_port = admin.getsockname()[1]
                self.admin_url = url_of(admin.getsockname(), self.tls is not None)
                sockets.append(admin)
        except PaellaError:
            await self._runner.cleanup()
            raise
        for each in sockets:
            await Site(self._runner, each, self.tls).start()
        timeout_s = o.engine_timeout_s or (VIRTUAL_TIMEOUT_S if self._is_virtual() else TIMEOUT_S)
        self._watching = [
            asyncio.create_task(Heartbeat(self.service, timeout_s, self.give_up).run()),
            asyncio.create_task(Gauges(self.service, self._runner).run()),
        ]
        self.url = url_of(self._runner.addresses[0], self.tls is not None)

    def _note_answer(self, status: int, said: str, peer: str | None) -> None:
        self.service.counters.note_status(status)
        self.service.note_refusal(status, RequestError(said), "", peer)

    def _is_virtual(self) -> bool:
        """On a virtual GPU the host computes the data, which takes longer."""
        return isinstance(self.registry.engine, Engine) and self.registry.engine.device.name.startswith("virtual")

    def give_up(self) -> None:
        """The engine does not respond: `run` ends the server, so that its supervisor can restart it."""
        self.service.hung = True

    def _walk_http(self) -> None:
        """Walks through the HTTP path for each model that has been loaded, so that no client's request is the first."""
        for entry in list(self.registry.entries.values()):
            if entry.state == READY and entry.model is not None and entry.model not in self._walked:
                self._walked.add(entry.model)
                walk_http(entry.model)

    async def load(self) -> None:
        """Loads the models that the configuration wants at the start."""
        assert isinstance(self.registry, Registry)
        await load_models(self.registry, lambda: self.service.draining)

    def hang_up(self) -> None:
        """SIGHUP: applies the changed configuration. If that is under way, it is done once more afterwards."""
        self._to_reload = True
        if self.reloading is None or self.reloading.done():
            self.reloading = asyncio.create_task(self._reload_while_asked())

    async def _reload_while_asked(self) -> None:
        while self._to_reload:
            self._to_reload = False
            await self.reload()

    async def reload(self) -> None:
        """Applies the configuration, if this process loads the models."""
        if self.reloader is not None:
            await asyncio.to_thread(self.reloader.reload)

    def take_secrets(self, config: Config, source: Source) -> None:
        """Applies keys and certificates, which have been checked."""
        take_secrets(config, source, self.app[ACCESS], self.tls)

    async def stop(self) -> None:
        """Stops being ready, then stops listening, then finishes the requests in flight."""
        self.service.draining = True
        if self._runner is not None:
            await asyncio.sleep(self.options.grace_s)
            await stop_listening(self._runner)
            await self._runner.cleanup()
            self._runner = None
        for each in self._watching:
            each.cancel()


async def failure_of(engine: Engine | RemoteEngine, service: Service | None = None) -> BaseException:
    """Waits until the engine's GPU fails or the engine is given up; then a new process is needed."""
    while engine.failure is None:
        if service is not None and service.hung:
            return EngineFailedError("the engine did not respond for too long")
        await asyncio.sleep(LOOK_S)
    if not isinstance(engine, Engine):
        return engine.failure
    error = EngineFailedError(engine.failure_text)
    error.__cause__ = engine.failure
    return error


async def run(
    server: Server, announce: Announce | None = None, aloud: bool = True, heard: Callable[[], None] | None = None
) -> None:
    """Runs until SIGTERM or SIGINT; a second signal stops at once. Raises EngineFailedError if the GPU fails.

    `aloud` logs start and stop at level info. `heard` is called when the server is told to stop.
    """
    loop, stop, level = asyncio.get_running_loop(), asyncio.Event(), logging.INFO if aloud else logging.DEBUG

    def stopping() -> None:
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)
        log.log(level, "stopping: not ready any more; finishing requests in flight")
        if aloud:
            notify("STOPPING=1")
        server.service.draining = True
        stop.set()
        if heard is not None:
            heard()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stopping)
    loop.add_signal_handler(signal.SIGHUP, hung_up.set)
    await server.start()
    fields = {"url": server.url, **({"admin_url": server.admin_url} if server.admin_url else {})}
    log.log(level, "listening", extra={"fields": fields})
    loading = asyncio.create_task(server.load())
    stopped = asyncio.create_task(stop.wait())
    failed = asyncio.create_task(failure_of(server.registry.engine, server.service))
    try:
        await asyncio.wait((loading, stopped, failed), return_when=asyncio.FIRST_COMPLETED)
        if loading.done():
            loading.result()
            loop.add_signal_handler(signal.SIGHUP, server.hang_up)
            if hung_up.is_set():
                hung_up.clear()
                server.hang_up()
            await asyncio.to_thread(spare_objects)
            if announce is not None and not stop.is_set():
                announce(server.url)
            await asyncio.wait((stopped, failed), return_when=asyncio.FIRST_COMPLETED)
        if failed.done():
            log.error("the GPU failed", extra={"fields": {"error": str(failed.result())}})
            raise EngineFailedError(
                f"the GPU failed, and the server has stopped: {failed.result()}. Start it again; with --workers 1 the "
                "engine runs in a process of its own, which is restarted automatically"
            )
    finally:
        began, code = loop.time(), int(failed.done())
        stopped.cancel()
        failed.cancel()
        stop_sparing()
        await server.stop()
        if server.service.hung:
            end_now(code, "stopped without closing the engine, which does not respond")
        for work in (loading, server.reloading):
            if work is not None and not await ends(work, max(0.0, began + server.options.drain_s - loop.time())):
                end_now(code)
    log.log(level, "stopped")


async def ends(loading: asyncio.Future[Any], within_s: float) -> bool:
    """Waits up to `within_s` for a load or a reload that a stop signal interrupted."""
    await asyncio.wait((loading,), timeout=min(within_s, LOOK_S))
    if not loading.done():
        log.info("waiting for a model that is being loaded", extra={"fields": {"at_most_s": round(within_s, 1)}})
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # it would wait for the load too
            signal.signal(signal.SIGINT, signal.SIG_DFL)
        await asyncio.wait((loading,), timeout=within_s)
    if not loading.done():
        return False
    if not loading.cancelled():
        loading.exception()  # marks the exception as seen; it has been logged
    return True


def end_now(code: int, said: str = "stopped while a model was being loaded") -> NoReturn:
    """Ends the process: a thread that compiles or hangs cannot be interrupted, and Python would wait for it."""
    log.warning(said)
    sys.stdout.flush()
    os._exit(code)


def warn_of_neighbours(options: ServerConfig, keys: Mapping[str, Any]) -> None:
    """Warns at the start if anybody on the network may use the server."""
    if not keys and not is_loopback(options.host):
        said = "everybody who reaches this port can use it: give clients keys under [keys], or listen on 127.0.0.1"
        log.warning(said, extra={"fields": {"host": options.host}})


def run_server(
    engine: Engine, server: Callable[[], Server], options: ServerConfig, announce: Announce | None = None
) -> None:
    """Runs a server in a new event loop, uvloop's if it is installed, and closes the engine at the end."""
    configure(options.log_format, options.log_level, file=options.log_file)
    keep_memory()
    share_interpreter()

    async def main() -> None:
        try:
            await run(server(), announce)
        finally:
            await asyncio.to_thread(engine.close)

    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        runner.run(main())
