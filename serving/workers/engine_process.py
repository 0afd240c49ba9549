"""The engine's process: an engine, its models, and their host for workers."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import msgspec

from paellapy.instrument.errors import PaellaError
from paellapy.scheduler.core.rings import name_process
from paellapy.scheduler.models.model import Model
from paellapy.scheduler.policies.policy import Policy, find_policy, policy_names
from paellapy.serving.build import build_engine, build_entries, build_policy, has_room_twice
from paellapy.serving.config import Config, Source
from paellapy.serving.loading import load_models, warm_up
from paellapy.serving.logs import configure, log
from paellapy.serving.preflight import spare_objects, stop_sparing
from paellapy.serving.registry import Entry, Registry, entry_of
from paellapy.serving.server import FIXED, Reloader, check_secrets, end_now, ends, failure_of
from paellapy.serving.workers.channel import CHANGED, READY, STOPPING, Tell
from paellapy.serving.workers.engine_host import EngineHost, Kept

KEPT = "kept"


class Policies:
    """The configured policy, those of files that were read later, and the package's policies by name."""

    def __init__(self, configured: Policy) -> None:
        self.configured = configured
        self._later: dict[str, Policy] = {}

    def add(self, policy: Policy) -> None:
        self._later[policy.name] = policy

    def __call__(self, name: str) -> Policy:
        """The policy of that name; "", or a name that is not known: the configured one."""
        if name in self._later:
            return self._later[name]
        known = name and name != self.configured.name and name in policy_names()
        return find_policy(name) if known else self.configured


class Latest:
    """The latest valid configuration, with which the next engine process starts."""

    def __init__(self, config: Config, source: Source) -> None:
        self._first = config, source
        self.config, self.source = config, source

    @property
    def policy_at_start(self) -> str:
        return self._first[0].policy

    def read_again(self) -> None:
        """Reads the file again. Settings that need a restart stay: the workers have the old ones too. Errors are
        reported by the process that applies the file.
        """
        with contextlib.suppress(PaellaError):
            config, source = self.source.again()
            check_secrets(config, source)
            self.source = source
            self.config = msgspec.structs.replace(config, **{name: getattr(self._first[0], name) for name in FIXED})

    def entries(self) -> list[Entry]:
        """The file's models; if they cannot be imported any more, those of the start."""
        try:
            return build_entries(self.config, self.source)
        except PaellaError as e:
            if self.config is self._first[0]:
                raise
            log.error("using the configuration of the server's start instead", extra={"fields": {"error": str(e)}})
            self.config, self.source = self._first
            return build_entries(self.config, self.source)


@dataclass(frozen=True, slots=True)
class EngineProcess:
    """Everything an engine is made from. `main` and `stand_by` run in processes of their own."""

    latest: Latest
    models: Sequence[Model]
    policies: Policies
    path: Path

    def main(self, tell: Tell) -> int:
        self._log_as("engine")
        return self._run(tell, called=None)

    def stand_by(self, tell: Tell) -> int:
        """Does the slow part of a start, waits until it is called, and then becomes the engine.

        If the GPU's memory cannot hold the models twice, it only imports modules and compiles code.
        """
        config = self.latest.config
        self._log_as("standby", "warning")
        if config.server.standby == "loaded" or (config.server.standby is None and has_room_twice(config)):
            return self._run(tell, called=partial(self._called, tell))
        self._entries()
        warm_up(self.policies.configured)
        tell(READY)
        tell.wait_for_call()
        name_process("paellapy-engine")
        return self.main(tell)

    async def _called(self, tell: Tell) -> None:
        await tell.called()
        name_process("paellapy-engine")
        self._log_as("engine")

    def _log_as(self, process: str, level: str | None = None) -> None:
        options = self.latest.config.server
        configure(options.log_format, level or options.log_level, process=process)

    def _entries(self) -> list[Entry]:
        entries = [entry_of(model) for model in self.models]
        if self.latest.config.models or not entries:
            entries += self.latest.entries()
        return entries

    def _policy(self) -> Policy:
        """The policy of the latest file. The server has compiled that of its start."""
        if self.latest.config.policy != self.latest.policy_at_start:
            try:
                return build_policy(self.latest.config, self.latest.source)
            except PaellaError as e:
                log.error("using the policy of the server's start instead", extra={"fields": {"error": str(e)}})
        return self.policies.configured

    def _run(self, tell: Tell, called: Callable[[], Awaitable[None]] | None) -> int:
        entries = self._entries()
        config, source = self.latest.config, self.latest.source
        engine = build_engine(config, source, self._policy())
        registry = Registry(engine, entries)
        if called is not None:
            engine.guests.hide()
        reloader = Reloader(registry, config, source)

        async def life() -> int:
            return await _Life(registry, reloader, tell, self.path, config.server.drain_s).main(called)

        code = asyncio.run(life())
        engine.close()
        return code


class _Life:
    """The life of one engine in this process, from its first model to its end."""

    def __init__(self, registry: Registry, reloader: Reloader, tell: Tell, path: Path, drain_s: float) -> None:
        self._registry, self._engine, self._reloader = registry, registry.engine, reloader
        self._tell, self._drain_s = tell, drain_s
        self._host = EngineHost(registry, path, Kept(path.with_name(KEPT)))
        self._stop = asyncio.Event()

    def _stopping(self) -> None:
        self._tell(STOPPING)
        self._stop.set()

    async def main(self, called: Callable[[], Awaitable[None]] | None) -> int:
        """Runs the engine. If `called` is given, no worker is served before it returns."""
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, self._stopping)
        await self._host.restore()
        if called is None:
            self._open()
        else:
            self._registry.tried_ns = {}  # nobody waits for a standby: it tries its models itself
        loading = asyncio.create_task(load_models(self._registry, self._stop.is_set, self._host.warm_up))
        settled = asyncio.create_task(self._settle(loading))
        stopped, failed = asyncio.create_task(self._stop.wait()), asyncio.create_task(failure_of(self._engine))
        calling = None if called is None else asyncio.ensure_future(called())
        try:
            if calling is not None:
                await asyncio.wait((calling, stopped, failed), return_when=asyncio.FIRST_COMPLETED)
                if stopped.done():
                    return 0
                self._open()
            await asyncio.wait((settled, stopped, failed), return_when=asyncio.FIRST_COMPLETED)
            if settled.done():
                settled.result()
                await asyncio.wait((stopped, failed), return_when=asyncio.FIRST_COMPLETED)
            if failed.done():
                raise failed.result()
            await self._host.stop()
            if not await ends(loading, self._drain_s):
                end_now(0)
        finally:
            stop_sparing()
            for task in (stopped, failed, calling):
                if task is not None:
                    task.cancel()
        return 0

    def _open(self) -> None:
        """Lets workers connect."""
        self._host.start()
        self._engine.guests.show()
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGHUP, lambda: loop.run_in_executor(None, self._reloader.reload))

    async def _settle(self, loading: asyncio.Task[None]) -> None:
        """Waits for the load to end. Its errors have already been logged."""
        await asyncio.wait((loading,))
        loading.result()
        await asyncio.to_thread(spare_objects)
        self._host.settle()
        self._registry.changed.append(lambda: self._tell(CHANGED))
        self._tell(READY)
