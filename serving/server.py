"""`Server`: sockets, signals, loading, the drain. `serve` runs one until it is told to stop."""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import Callable, Mapping
from signal import SIGINT, SIGTERM

from aiohttp import web

from instrument.errors import PaellaError
from scheduler.engine import Engine
from serving.app import create_app
from serving.config import ServerConfig
from serving.connections import Runner
from serving.logs import configure, log
from serving.middleware import SERVICE
from serving.registry import Registry
from serving.service import Service

Announce = Callable[[str], None]

PATIENCE_S = 10.0  # between signs of life while a model is loaded


class Server:
    """An application on a socket. It listens at once, and is ready when its models are loaded."""

    def __init__(
        self,
        registry: Registry,
        options: ServerConfig | None = None,
        keys: Mapping[str, str] | None = None,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self.registry, self.options, self.tls = registry, options or ServerConfig(), tls
        o = self.options
        self.app = create_app(
            registry,
            admission=o.admission,
            keys=keys,
            client_header=o.client_header,
            max_body_bytes=o.max_body_bytes,
            body_timeout_s=o.body_timeout_s,
            access_log=o.access_log,
        )
        self._runner: web.AppRunner | None = None
        self.url = ""

    @property
    def service(self) -> Service:
        return self.app[SERVICE]

    async def start(self) -> None:
        """Listens; `url` says where."""
        o = self.options
        self._runner = Runner(
            self.app,
            header_timeout_s=o.header_timeout_s,
            access_log=None,
            handler_cancellation=True,
            shutdown_timeout=o.drain_s,
            keepalive_timeout=o.keepalive_s,
            max_line_size=o.max_header_bytes,
            max_field_size=o.max_header_bytes,
        )
        await self._runner.setup()
        site = web.TCPSite(self._runner, o.host, o.port, ssl_context=self.tls, backlog=1024)
        try:
            await site.start()
        except OSError as e:
            await self._runner.cleanup()
            raise PaellaError(f"{o.host}:{o.port} cannot be listened on: {e.strerror}; choose another port") from None
        host, port = self._runner.addresses[0][:2]
        self.url = f"{'https' if self.tls else 'http'}://{f'[{host}]' if ':' in host else host}:{port}"

    async def load(self) -> None:
        """Loads the models that are to be there from the start, one after the other.

        The server goes on without one that cannot be loaded, and is not ready; without any it is of no use.
        """
        failure: PaellaError | None = None
        for entry in self.registry.entries.values():
            if entry.wanted and entry.model is None and not self.service.draining:
                began = time.monotonic()
                log.info("loading", extra={"fields": {"model": entry.name, "device": self.registry.engine.device.name}})
                task = asyncio.create_task(asyncio.to_thread(self.registry.load, entry.name))
                while not (await asyncio.wait((task,), timeout=PATIENCE_S))[0]:
                    so_far = {"model": entry.name, "s": round(time.monotonic() - began)}
                    log.info("still loading: the first start on a machine compiles", extra={"fields": so_far})
                try:
                    took = {"model": entry.name, "s": round(time.monotonic() - began, 2), "alone_ms": task.result()}
                except PaellaError as e:
                    failure = e
                    log.error("could not be loaded", extra={"fields": {"model": entry.name, "error": str(e)}})
                else:
                    log.info("loaded", extra={"fields": took})
        if failure is not None and not any(entry.model for entry in self.registry.entries.values()):
            raise failure

    async def stop(self) -> None:
        """Not ready, then nothing new, then what is in flight is finished."""
        self.service.draining = True
        if self._runner is not None:
            await asyncio.sleep(self.options.grace_s)
            await self._runner.cleanup()
            self._runner = None


async def run(server: Server, announce: Announce | None = None) -> None:
    """Until SIGTERM or SIGINT; a second one stops at once."""
    loop, stop = asyncio.get_running_loop(), asyncio.Event()

    def stopping() -> None:
        for signal in (SIGINT, SIGTERM):
            loop.remove_signal_handler(signal)
        log.info("stopping: not ready, finishing what is in flight")
        server.service.draining = True
        stop.set()

    for signal in (SIGINT, SIGTERM):
        loop.add_signal_handler(signal, stopping)
    await server.start()
    log.info("listening", extra={"fields": {"url": server.url}})
    loading = asyncio.create_task(server.load())
    stopped = asyncio.create_task(stop.wait())
    try:
        await asyncio.wait((loading, stopped), return_when=asyncio.FIRST_COMPLETED)
        if loading.done():
            loading.result()
            if announce is not None and not stop.is_set():
                announce(server.url)
            await stopped
    finally:
        stopped.cancel()
        await server.stop()
        await asyncio.gather(loading, return_exceptions=True)
    log.info("stopped")


def run_server(
    engine: Engine, server: Callable[[], Server], options: ServerConfig, announce: Announce | None = None
) -> None:
    """A loop of its own, uvloop where it is installed; the engine is closed at the end."""
    configure(options.log_format, options.log_level)

    async def main() -> None:
        try:
            await run(server(), announce)
        finally:
            await asyncio.to_thread(engine.close)

    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        runner.run(main())


def loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """uvloop where it is installed."""
    try:
        import uvloop
    except ImportError:  # Windows, or left out
        return None
    return uvloop.new_event_loop
