"""`Server`: sockets, signals, loading, draining. `serve` runs one until it is told to stop."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import signal
import socket
import ssl
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any, NoReturn

from aiohttp import web

from paellapy.instrument.errors import PaellaError
from paellapy.scheduler.core.errors import DeadlineError, EngineAwayError, EngineFailedError, ModelError
from paellapy.scheduler.engine.callbacks import Pulse
from paellapy.scheduler.engine.engine import Engine
from paellapy.scheduler.engine.remote import RemoteEngine
from paellapy.scheduler.models.model import Model
from paellapy.serving.access import Key, is_loopback
from paellapy.serving.app import ACCESS, create_app
from paellapy.serving.build import build_entries, build_keys, build_policy, build_tls, load_certificates
from paellapy.serving.config import Config, ServerConfig, Source
from paellapy.serving.errors import ConfigError
from paellapy.serving.fast_path.connection import FastConnection
from paellapy.serving.fast_path.inference import ShortWay
from paellapy.serving.listening import Connection, Runner, Site, listen, stop_listening, url_of
from paellapy.serving.loading import load_models
from paellapy.serving.logs import configure, log
from paellapy.serving.middleware import SERVICE
from paellapy.serving.preflight import (
    born,
    is_alive,
    keep_memory,
    loop_factory,
    share_interpreter,
    spare_objects,
    stop_sparing,
)
from paellapy.serving.registry import Catalogue, Registry, code_number
from paellapy.serving.service import Service

# Notices an engine that hangs: its core is asked for signs of life, and requests are answered without it.
#
# The core reads messages that front ends post to rings in shared memory. Every worker posts one now and then and checks
# that it was read. While it is not, the worker enforces deadlines itself; after DOUBTFUL_S the server is not ready and
# refuses new requests; after `engine_timeout_s` the engine is given up.


TICK_S = 0.25
DOUBTFUL_S = 2.0  # seconds without a sign of life until the server is not ready and refuses requests
SILENT = "the engine does not respond; try again later"


class Heartbeat:
    """Watches one engine. `give_up` is called once when the engine has not responded for `timeout_s`."""

    def __init__(self, service: Service, timeout_s: float, give_up: Callable[[], None]) -> None:
        self._service, self._timeout_s, self._give_up = service, timeout_s, give_up
        self._pulse = Pulse(service.engine)
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
        if self._pulse.beats():
            if service.silent:
                log.warning("the engine responds again")
            self._silent_s, self._given_up, service.silent = 0.0, False, False
            return
        self._silent_s += TICK_S
        for work in list(service.live):
            if work.is_past_deadline():
                work.abandon(DeadlineError(f"model {work.name!r}: the deadline passed while the engine was silent"))
        if self._silent_s >= DOUBTFUL_S and not service.silent:
            service.silent = True
            log.error("the engine does not respond", extra={"fields": {"s": self._silent_s}})
        if self._silent_s >= (DOUBTFUL_S if service.draining else self._timeout_s) and not self._given_up:
            self._given_up = True
            for work in list(service.live):
                work.abandon(EngineAwayError(SILENT))
            self._give_up()


# A running server applies its changed configuration: on SIGHUP, or after `paellapy reload config.toml`.
#
# Models, keys, certificates and the policy can change. Settings that need a restart are reported and stay as they are.


GONE = "it was removed from the configuration"
PATIENCE_S = 120.0
FIXED = ("device", "quantum_us", "max_active", "sm_partitions", "memory_bytes", "host_bytes", "max_queue", "server",
         "tenants")  # fmt: skip


def check_file(config: Config, source: Source) -> None:
    """Raises PaellaError for a file that `Reloader` would refuse."""
    if config.models:
        build_entries(config, source)
    build_policy(config, source)
    check_secrets(config, source)


def check_secrets(config: Config, source: Source) -> None:
    """Raises PaellaError for keys and certificates that cannot be read."""
    build_keys(config, source)
    build_tls(config, source)


class Reloader:
    """Applies a new configuration to a registry. `again` of the source reads the file."""

    def __init__(self, registry: Registry, config: Config, source: Source) -> None:
        self._registry, self._config, self._source = registry, config, source
        self._at_start = config
        self._authorities = _authorities(config, source)
        names = [name for name, entry in registry.entries.items() if entry.factory]
        self._models = dict(zip(names, config.models, strict=True))  # each model's settings in the file
        self._reloading = threading.Lock()

    def reload(self) -> dict[str, Any]:
        """Applies the file, blocking while models load, and reports the changes. A wrong file changes nothing. Calls
        from several threads wait for each other.
        """
        with self._reloading:
            try:
                return self._reload()
            except Exception as e:  # else `paellapy reload` would wait for an outcome
                log.error("the reload failed", exc_info=e)
                return self._note({"error": f"the reload failed: {type(e).__name__}: {e}"})

    def _reload(self) -> dict[str, Any]:
        told: dict[str, Any] = {}
        try:
            config, source = self._source.again()
            entries = {each.name: each for each in build_entries(config, source)} if config.models else {}
            policy = build_policy(config, source) if config.policy != self._config.policy else None
            check_secrets(config, source)
        except PaellaError as e:
            log.error("not reloaded", extra={"fields": {"error": str(e)}})
            return self._note({"error": str(e)})
        if needs := self._needs_restart(config, source):
            told["needs a restart"] = needs
        if policy is not None:
            self._registry.engine.set_policy(policy)
            told["policy"] = policy.name
        before = self._models
        after = dict(zip(entries, config.models, strict=True))
        for name in before.keys() - after.keys():
            told.setdefault("unloaded", []).append(name)
            entry = self._registry.find(name)
            entry.make = _gone
            self._registry.unload(name)
            entry.reason = GONE
        for name, made in entries.items():
            known = self._registry.entries.get(name)
            if known is not None and before.get(name) == after[name] and known.code == code_number(made.factory):
                continue
            if known is None:
                self._registry.add(made)
            else:
                known.make, known.factory = made.make, made.factory
            if made.wanted or (known is not None and known.model is not None):
                self._load(name, told)
        self._config, self._source, self._models = config, source, after
        self._registry.tell()
        log.info("reloaded", extra={"fields": told})
        return self._note(told)

    def _needs_restart(self, config: Config, source: Source) -> list[str]:
        """The settings of the file that this server does not have, and does not get by a reload."""
        start = self._at_start
        needs = [name for name in FIXED if getattr(config, name) != getattr(start, name)]
        needs += [name for name in ("keys", "tls") if bool(getattr(config, name)) != bool(getattr(start, name))]
        if config.tls is not None and start.tls is not None and _authorities(config, source) != self._authorities:
            needs.append("tls.client_ca")  # authorities that are gone stay trusted
        return needs

    def _load(self, name: str, told: dict[str, Any]) -> None:
        try:
            self._registry.load(name)
            told.setdefault("loaded", []).append(name)
        except PaellaError as e:
            told.setdefault("could not be loaded", {})[name] = str(e)

    def _note(self, told: dict[str, Any]) -> dict[str, Any]:
        if self._source.name:
            try:
                write_outcome(self._source.name, told)
            except (OSError, ConfigError) as e:
                log.warning("`paellapy reload` will not hear of this", extra={"fields": {"error": str(e)}})
        return told


def _authorities(config: Config, source: Source) -> bytes | None:
    """The authorities of clients' certificates, as their file has them."""
    if config.tls is None or config.tls.client_ca is None:
        return None
    with contextlib.suppress(OSError):
        return (source.folder / config.tls.client_ca).read_bytes()
    return b""


def _gone() -> Model:
    raise ModelError(GONE)


# -- which process serves which file


def _path(file: str | Path, suffix: str) -> Path:
    given = os.environ.get("XDG_RUNTIME_DIR", "")  # inherited from another session, it may name a folder that is gone
    folder = Path(given if os.path.isdir(given) else tempfile.gettempdir()) / f"paellapy-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.stat().st_uid != os.getuid():
        raise ConfigError(f"{folder} belongs to another user: set XDG_RUNTIME_DIR to a folder of your own")
    return folder / f"{sha256(str(Path(file).resolve()).encode()).hexdigest()[:16]}.{suffix}"


@contextlib.contextmanager
def noted(source: Source) -> Iterator[None]:
    """Notes, while inside, that this process serves the file, so that `ask_to_reload` finds it."""
    if not source.name:
        yield
        return
    note, path = json.dumps([os.getpid(), born(os.getpid())]), None
    try:
        path = _path(source.name, "pid")
        path.write_text(note)
    except (OSError, ConfigError) as e:
        log.warning("`paellapy reload` will not find this server", extra={"fields": {"error": str(e)}})
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            if path is not None and path.read_text() == note:  # else a newer server has the file
                path.unlink()


def write_outcome(file: str, told: dict[str, Any]) -> None:
    path = _path(file, "said")
    new = path.with_suffix(".new")
    new.write_text(json.dumps(told))
    os.replace(new, path)


def ask_to_reload(file: Path) -> dict[str, Any]:
    """Makes the server of a file reload it; returns the changes. ConfigError: no server has it, or none answers."""
    try:
        pid, since = json.loads(_path(file, "pid").read_text())
        running = is_alive(pid, since)
    except (OSError, ValueError):
        running = False
    if not running:
        raise ConfigError(f"no server of this user uses {file}: start one with `paellapy serve {file}`")
    said = _path(file, "said")
    said.unlink(missing_ok=True)
    os.kill(pid, signal.SIGHUP)
    end = time.monotonic() + PATIENCE_S
    while time.monotonic() < end:
        if said.exists():
            found: dict[str, Any] = json.loads(said.read_text())
            return found
        time.sleep(0.05)
    raise ConfigError(f"the server (process {pid}) has not answered for {PATIENCE_S:.0f} s: look into its log")


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
    ) -> None:
        """A worker gives its `service` and `listening`, a socket that listens already."""
        self.registry, self.options, self.tls = registry, options or ServerConfig(), tls
        o = self.options
        self.app = create_app(
            registry,
            admission=o.admission,
            keys=keys or {},
            client_header=o.client_header,
            max_body_bytes=o.max_body_bytes,
            body_timeout_s=o.body_timeout_s,
            access_log=o.access_log,
            hosts=[o.host, *o.hosts],
            model_control=is_loopback(o.host) if o.model_control is None else o.model_control,
            service=service,
        )
        self.service.held.most_bytes = round(o.held_mb * 1e6)
        self._listening, self._keys = listening, bool(keys)
        self._heartbeat: asyncio.Task[None] | None = None
        self._reloading: asyncio.Task[None] | None = None
        self._to_reload = False
        self.source: Source | None = None  # of the configuration, if there is a file
        self.reloader: Reloader | None = None  # if this process loads the models
        self._runner: web.AppRunner | None = None
        self.url = ""

    @property
    def service(self) -> Service:
        return self.app[SERVICE]

    async def start(self) -> None:
        """Begins to listen, and sets `url`."""
        o = self.options
        connection: Callable[..., Connection] = Connection
        if not self._keys and not o.access_log:  # keys and access logs need aiohttp's middleware
            connection = partial(FastConnection, way=ShortWay(self.service, o.client_header))
        self._runner = Runner(
            self.app,
            connection,
            most_bytes=self.service.max_body_bytes,
            most_unsent_bytes=self.service.held.most_bytes,
            header_timeout_s=o.header_timeout_s,
            send_timeout_s=o.send_timeout_s,
            log_rejected=o.access_log,
            access_log=None,
            auto_decompress=False,  # infer.read does it, once the key is checked, and within limits
            handler_cancellation=True,
            shutdown_timeout=o.drain_s,
            keepalive_timeout=o.keepalive_s,
            max_line_size=o.max_header_bytes,
            max_field_size=o.max_header_bytes,
        )
        await self._runner.setup()
        try:
            sockets = listen(o.host, o.port) if self._listening is None else [self._listening]
        except PaellaError:
            await self._runner.cleanup()
            raise
        for each in sockets:
            await Site(self._runner, each, self.tls, handshake_s=o.header_timeout_s).start()
        timeout_s = o.engine_timeout_s or (VIRTUAL_TIMEOUT_S if self._is_virtual() else TIMEOUT_S)
        self._heartbeat = asyncio.create_task(Heartbeat(self.service, timeout_s, self.give_up).run())
        self.url = url_of(self._runner.addresses[0], self.tls is not None)

    def _is_virtual(self) -> bool:
        """On a virtual GPU the host computes the data, which takes longer."""
        return isinstance(self.registry.engine, Engine) and self.registry.engine.device.name.startswith("virtual")

    def give_up(self) -> None:
        """The engine does not respond: `run` ends the server, so that its supervisor can restart it."""
        self.service.hung = True

    async def load(self) -> None:
        """Loads the models that the configuration wants at the start."""
        assert isinstance(self.registry, Registry)
        await load_models(self.registry, lambda: self.service.draining)

    def hang_up(self) -> None:
        """SIGHUP: applies the changed configuration. If that is under way, it is done once more afterwards."""
        self._to_reload = True
        if self._reloading is None or self._reloading.done():
            self._reloading = asyncio.create_task(self._reload_while_asked())

    async def _reload_while_asked(self) -> None:
        while self._to_reload:
            self._to_reload = False
            await self.reload()

    async def reload(self) -> None:
        """Applies keys and certificates to new connections, and models and policy if this process loads them."""
        if self.source is not None:
            try:
                config, source = self.source.again()
                await asyncio.to_thread(check_file, config, source)  # a wrong file changes nothing
                if self._keys:
                    keys = build_keys(config, source)
                    if not keys:
                        raise ConfigError("the file has no [keys] any more: only a restart opens this server to all")
                    self.app[ACCESS].set_keys(keys)
                if self.tls is not None and config.tls is not None:
                    load_certificates(self.tls, config.tls, source)
            except PaellaError as e:
                log.error("keys and certificates are unchanged", extra={"fields": {"error": str(e)}})
        if self.reloader is not None:
            await asyncio.to_thread(self.reloader.reload)

    async def stop(self) -> None:
        """Stops being ready, then stops listening, then finishes the requests in flight."""
        self.service.draining = True
        if self._runner is not None:
            await asyncio.sleep(self.options.grace_s)
            await stop_listening(self._runner)
            await self._runner.cleanup()
            self._runner = None
        if self._heartbeat is not None:
            self._heartbeat.cancel()


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
        server.service.draining = True
        stop.set()
        if heard is not None:
            heard()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stopping)
    loop.add_signal_handler(signal.SIGHUP, server.hang_up)
    await server.start()
    log.log(level, "listening", extra={"fields": {"url": server.url}})
    loading = asyncio.create_task(server.load())
    stopped = asyncio.create_task(stop.wait())
    failed = asyncio.create_task(failure_of(server.registry.engine, server.service))
    try:
        await asyncio.wait((loading, stopped, failed), return_when=asyncio.FIRST_COMPLETED)
        if loading.done():
            loading.result()
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
        if not await ends(loading, max(0.0, began + server.options.drain_s - loop.time())):
            end_now(code)
    log.log(level, "stopped")


async def ends(loading: asyncio.Task[None], within_s: float) -> bool:
    """Waits up to `within_s` for a load that a stop signal interrupted."""
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
    configure(options.log_format, options.log_level)
    keep_memory()
    share_interpreter()

    async def main() -> None:
        try:
            await run(server(), announce)
        finally:
            await asyncio.to_thread(engine.close)

    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        runner.run(main())
