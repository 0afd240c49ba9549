"""The processes of `--workers N`: the engine's, and each worker's."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paellapy.instrument.errors import PaellaError
from paellapy.scheduler.models.model import Model
from paellapy.serving.access import Key
from paellapy.serving.build import build_keys, build_policy, build_tls, check_fork
from paellapy.serving.config import Config, Source
from paellapy.serving.counters import Counters, Numbers, counter_table
from paellapy.serving.listening import Shares, url_of
from paellapy.serving.logs import configure, log
from paellapy.serving.machine import own_folder
from paellapy.serving.process_settings import keep_memory, loop_factory, share_interpreter
from paellapy.serving.reload import noted
from paellapy.serving.server import Announce, Server, run, warn_of_neighbours
from paellapy.serving.service import Service
from paellapy.serving.suspects import Suspects, suspect_table
from paellapy.serving.warm import import_device, warm_up
from paellapy.serving.workers.engine_link import EngineLink
from paellapy.serving.workers.engine_process import EngineProcess, Latest, Policies
from paellapy.serving.workers.process import HUNG, READY, STOPPING, Process, Tell
from paellapy.serving.workers.supervisor import Supervisor

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
    """One worker. `front` is its number, from 1."""

    front: int
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
        configure(options.log_format, options.log_level, process=f"worker {self.front}")
        keep_memory()
        share_interpreter()
        with asyncio.Runner(loop_factory=loop_factory()) as runner:
            runner.run(self._main(tell))
        return 0

    async def _main(self, tell: Tell) -> None:
        link = EngineLink(self.path, self.front, self.policies)
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
        counters = Counters(link.registry, worker.table, worker.front - 1)
        service = Service(
            link.registry, o.admission, o.max_body_bytes, o.body_timeout_s, counters, link.call, worker.since,
            Suspects(worker.suspects),
        )  # fmt: skip
        own = worker.shares[worker.front - 1]
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
