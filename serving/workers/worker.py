"""`--workers N`: starts the processes; and a worker, a server whose engine is in another process.

A worker's link mirrors the registry of the engine's process, and reconnects after a restart.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import ssl
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paellapy.instrument.errors import PaellaError
from paellapy.scheduler.core.admission import predict_finish
from paellapy.scheduler.core.errors import EngineAwayError
from paellapy.scheduler.core.processes import SharedBlock
from paellapy.scheduler.core.state import Limits
from paellapy.scheduler.engine.pipelines import Served
from paellapy.scheduler.engine.remote import AWAY, Link, RemoteEngine, RemoteModel
from paellapy.scheduler.models.lengths import Lengths
from paellapy.scheduler.models.model import Model
from paellapy.scheduler.policies.policy import Policy
from paellapy.serving.access import Key, clients_of
from paellapy.serving.build import build_keys, build_policy, build_tls, check_fork
from paellapy.serving.config import Config, Source
from paellapy.serving.counters import Counters, Numbers, counter_table
from paellapy.serving.listening import Shares, url_of
from paellapy.serving.loading import import_device, warm_up
from paellapy.serving.logs import configure, log
from paellapy.serving.preflight import keep_memory, loop_factory, own_folder, share_interpreter
from paellapy.serving.quarantine import Quarantine, quarantine_table
from paellapy.serving.registry import LOADING, READY, Catalogue, Entry, TextModel
from paellapy.serving.reload import noted
from paellapy.serving.rpc import STEP
from paellapy.serving.server import Announce, Server, run, warn_of_neighbours
from paellapy.serving.service import Service
from paellapy.serving.tensors import packed, specs_told, unpacked
from paellapy.serving.workers.channel import HELLO, STATE, WANT_LENGTH, Channel, Message
from paellapy.serving.workers.engine_process import EngineProcess, Latest, Policies
from paellapy.serving.workers.supervisor import ENGINE_HUNG, IS_READY, IS_STOPPING, Process, Supervisor, Tell
from paellapy.serving.workers.texts import PIECES, RemoteGeneration, RemoteLanguageModel, RemoteTexts

if TYPE_CHECKING:  # they need packages that only language models need
    pass

_AGAIN_S = 0.05  # between two attempts to connect to the engine's process
_STATE_BELONGS_ELSEWHERE = "the model's function is in the engine's process"


def _elsewhere(*_: Any) -> None:
    raise RuntimeError(_STATE_BELONGS_ELSEWHERE)


class RemoteRegistry(Catalogue):
    """The models that the engine's process may serve or has loaded."""

    engine: RemoteEngine

    def __init__(
        self, engine: RemoteEngine, call: Callable[[str, Any], Any], tell: Callable[[str, Any], None]
    ) -> None:
        super().__init__()
        self.engine, self._call = engine, call
        self._tell = tell
        self.texts = RemoteTexts(call, tell)

    def _want_length(self, name: str, size: int) -> None:
        self._tell(WANT_LENGTH, [name, size])

    async def load_async(self, name: str) -> float:
        return float(await self._call("load", name))

    async def unload_async(self, name: str) -> None:
        await self._call("unload", name)

    async def generate(
        self, name: str, tokens: Sequence[int], options: Mapping[str, Any], sampling: Mapping[str, Any]
    ) -> RemoteGeneration:
        return await self.texts.generate(name, tokens, options, sampling)

    def find(self, name: str, version: str | None = None) -> Entry:
        if not self.entries:
            raise EngineAwayError(AWAY)  # the models are not known yet
        return super().find(name, version)

    def ready(self, name: str, version: str | None = None) -> Served:
        self._check_link(name, version)
        return super().ready(name, version)

    def language_model(self, name: str, version: str | None = None) -> TextModel:
        self._check_link(name, version)
        return super().language_model(name, version)

    def _check_link(self, name: str, version: str | None) -> None:
        if self.engine.link is None:
            self.find(name, version)  # says of an unknown model that it is unknown
            raise EngineAwayError(AWAY)

    def update(self, told: list[dict[str, Any]], descriptors: list[int]) -> None:
        """Replaces the whole registry."""
        before = {(m.row, m.generation): m for m in self.engine.loaded_rows().values()}
        models: dict[str, RemoteModel] = {}
        entries: dict[str, Entry] = {}
        for number, each in enumerate(told):
            name = each["name"]
            entry = self.entries.get(name) or Entry(name, _no_factory, number=number)
            entry.wanted, entry.state, entry.reason = each["wanted"], each["state"], each["reason"]
            facts = each.get("language_model")
            if facts is None:
                entry.language_model = None
            elif entry.language_model is None:
                entry.language_model = RemoteLanguageModel.of(name, facts)
            found = each.get("model")
            entry.model = None
            if found is not None:
                model = before.get((found["row"], found["generation"]))
                if model is None:
                    model = RemoteModel.over(_model(name, found), found, _blocks(found, descriptors))
                    model.ask_length = partial(self._want_length, name)
                    # Compiles it before a request needs it
                    predict_finish(self.engine.state, model.row, time.monotonic_ns())
                if model.model.lengths is not None:
                    by_length = {model.model.length: model}
                    for size in found["shorter"]:
                        by_length[size["length"]] = before.get((size["row"], size["generation"])) or RemoteModel.over(
                            model.model.at_length(size["length"]), size, _blocks(size, descriptors)
                        )
                    model.by_length = dict(sorted(by_length.items()))
                models[name] = model
                entry.model, entry.row = model.model, model.row
            entries[name] = entry
        for fd in descriptors:
            os.close(fd)
        self.entries = entries
        self.by_row = {each.row: each.model for each in models.values()}
        self.engine.set_models(models)
        self.tell()

    def lost(self) -> None:
        """Marks all models as not loaded until the next process reports them."""
        for entry in self.entries.values():
            if entry.state == READY:
                entry.state, entry.model, entry.language_model = LOADING, None, None
        self.by_row = {}
        self.texts.lost()


def _no_factory() -> Model:
    raise RuntimeError(_STATE_BELONGS_ELSEWHERE)


def _model(name: str, told: dict[str, Any]) -> Model:
    before, after = (_elsewhere if has else None for has in told["steps"])
    model = Model(
        name,
        _elsewhere,
        inputs=specs_told(told["inputs"]),
        outputs=specs_told(told["outputs"]),
        takes=specs_told(told["takes"]),
        gives=specs_told(told["gives"]),
        before=before,
        after=after,
        batch=tuple(told["batch"]),
        target_ms=told["target_ms"],
        priority=told["priority"],
        share=told["share"],
        instances=len(told["instances"]),
    )
    if told["lengths"] is not None:
        model.lengths = Lengths(**{**told["lengths"], "sizes": tuple(told["lengths"]["sizes"])})
        model.length = model.lengths.longest
    model.task = told["task"]
    return model


def _blocks(told: dict[str, Any], descriptors: list[int]) -> list[SharedBlock]:
    """The memory of a model's instances; takes their descriptors."""
    blocks = [SharedBlock.of(descriptors.pop(0)) for _ in range(told["mapped"])]
    for block in blocks:
        block.close_descriptor()
    return blocks


@dataclass(frozen=True, slots=True)
class _RemoteSteps:
    """Has the engine's process run the functions before and after models."""

    call: Callable[[str, Any], Awaitable[Any]]

    def of(self, model: Model) -> _RemoteRunner:
        return _RemoteRunner(self.call, model.name)


@dataclass(frozen=True, slots=True)
class _RemoteRunner:
    call: Callable[[str, Any], Awaitable[Any]]
    name: str

    def request(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    async def run(self, step: str, values: Mapping[str, Any], deadline_ns: int) -> dict[str, Any]:
        return unpacked(await self.call(STEP, [self.name, step, packed(values), deadline_ns]))

    def run_sync(self, step: str, values: Mapping[str, Any], deadline_ns: int) -> dict[str, Any]:
        raise NotImplementedError("requests of workers are answered in their event loop")


class EngineLink:
    """Keeps a worker connected to the engine's process, across restarts."""

    def __init__(self, path: Path, producer: int, policies: Callable[[str], Policy]) -> None:
        self._path, self._producer, self._policies = path, producer, policies
        self.engine = RemoteEngine(_RemoteSteps(self.call))
        self.registry = RemoteRegistry(self.engine, self.call, self.tell)
        self._channel: Channel | None = None
        self._ended = asyncio.Event()
        self._news = asyncio.Event()
        self._closing = False
        self.pid = 0  # of the engine's process
        self._policy = ""  # its policy, as it was told last
        self.settled = False  # every model of the start is loaded, or could not be
        self.configuration = ""  # the digest of the file that the engine has taken last
        self._taken = 0, 0  # the engine's process, and how often it took a file
        self.on_configuration: Callable[[], None] = lambda: None  # called when it may have taken another one

    async def call(self, name: str, data: Any = None) -> Any:
        """Calls the engine's process; EngineAwayError while there is none."""
        if self._channel is None or self.engine.link is None:
            raise EngineAwayError(AWAY)
        return await self._channel.call(name, data)

    def tell(self, name: str, data: Any) -> None:
        """Sends an event to the engine's process, if there is one."""
        if self._channel is not None and not self._channel.closed:
            self._channel.event(name, data)

    async def run(self) -> None:
        """Runs until `close`."""
        while not self._closing:
            try:
                await self._connect()
            except (OSError, PaellaError):  # not listening yet, or this worker's predecessor is not signed off yet
                if self._channel is not None:
                    self._channel.close()
                await asyncio.sleep(_AGAIN_S)
                continue
            await self._ended.wait()

    def close(self) -> None:
        self._closing = True
        if self._channel is not None:
            self._channel.close()

    def poke(self) -> None:
        """Wakes those who wait for changes."""
        self._news.set()

    async def changed(self) -> None:
        """Waits until the engine's process reports a change or is gone."""
        self._news.clear()
        await self._news.wait()

    async def _connect(self) -> None:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
        try:
            connection.connect(str(self._path))
        except OSError:
            connection.close()
            raise
        self._ended.clear()
        early: list[tuple[Message, list[int]]] = []  # messages that arrive before they can be read

        def message(each: Message, fds: list[int]) -> None:
            if self.engine.link is None:
                early.append((each, fds))
            else:
                self._told(each, fds)

        channel = self._channel = Channel(connection, message, self._lost)
        data, fds = await channel.call(HELLO, {"producer": self._producer})
        if channel.closed:
            for fd in fds:
                os.close(fd)
            raise EngineAwayError(AWAY)
        try:
            state, stage = SharedBlock.of(fds.pop(0)), SharedBlock.of(fds.pop())
        except OSError:
            for fd in fds:
                os.close(fd)
            raise
        bell_fd, wake_fd = fds
        link = Link(
            Limits(**data["limits"]),
            self._producer,
            state,
            bell_fd,
            wake_fd,
            stage,
            data["stage_address"],
            self._policies(""),
            data["device"],
            data["title"],
        )
        self.pid = int(data["pid"])
        self.engine.attach(link)
        for each, more in early:
            self._told(each, more)

    def _told(self, message: Message, descriptors: list[int]) -> None:
        if message.name == PIECES:
            self.registry.texts.told(message.data)
            return
        if message.name == STATE:
            data = message.data
            self._policy = data["policy"]
            self.follow_policy()
            self.engine.facts = {"memory": data["memory"]}
            self.settled = self.settled or data["settled"]
            taken, before = (self.pid, data["taken"]), (self._taken, self.configuration)
            self._taken, self.configuration = taken, data["configuration"]
            if (taken, self.configuration) != before:
                self.on_configuration()
            self.registry.update(data["entries"], descriptors)
        self._news.set()

    def follow_policy(self) -> None:
        """Takes the engine's policy for predictions, as far as this process knows it."""
        if self.engine.link is not None and self._policy != self.engine.policy:
            self.engine.set_policy(self._policies(self._policy))

    def _lost(self) -> None:
        """The process has ended: first tells everybody who waits."""
        link = self.engine.link
        if link is not None:
            self.engine.lose()
            self.registry.lost()
            os.close(link.bell_fd)
            os.close(link.wake_fd)
            if not self._closing:
                log.warning("the engine's process has ended")
        self._ended.set()
        self._news.set()


SOCKET = "engine"
ENGINE_PATIENCE_S = 10.0  # a worker without an engine answers 503 after this time


def serve_workers(config: Config, source: Source, models: Sequence[Model], announce: Announce | None = None) -> None:
    """Runs until SIGTERM or SIGINT."""
    options = config.server
    configure(options.log_format, options.log_level, file=options.log_file)
    keys, tls = build_keys(config, source), build_tls(config, source)
    policies = Policies(build_policy(config, source))  # compiled before the fork, so that all processes have it
    warn_of_neighbours(options, keys)
    check_fork(config)
    warm_up(policies.configured)
    import_device(config.device)
    shares = Shares(options.host, options.port, options.workers, options.admin_port)
    url = url_of(shares.address, tls is not None)
    table, quarantine, since = counter_table(options.workers), quarantine_table(), time.time()
    with own_folder() as folder:
        path = folder / SOCKET
        workers = [
            Process(
                f"worker {k}",
                f"work{k}",
                _Worker(k, config, source, keys, tls, policies, path, table, quarantine, shares, since).main,
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
        fields = {"url": url, "workers": options.workers}
        if shares.admin is not None:
            fields["admin_url"] = url_of(shares.admin.getsockname(), tls is not None)
        log.info("listening", extra={"fields": fields})

        def ready() -> None:
            if announce is not None:
                announce(url)

        with noted(source, config):
            supervisor.run(ready)
    log.info("stopped")


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
    quarantine: Any  # its table
    shares: Shares
    since: float  # start of the server

    def main(self, tell: Tell) -> int:
        options = self.config.server
        configure(options.log_format, options.log_level, f"worker {self.producer}", options.log_file)
        keep_memory()
        share_interpreter()
        with asyncio.Runner(loop_factory=loop_factory()) as runner:
            runner.run(self._main(tell))
        return 0

    async def _main(self, tell: Tell) -> None:
        link = EngineLink(self.path, self.producer, self.policies)
        server = _WorkerServer(link, self, lambda: tell(ENGINE_HUNG, str(link.pid)))
        linked = asyncio.create_task(link.run())
        try:
            await run(server, lambda _: tell(IS_READY), aloud=False, heard=lambda: tell(IS_STOPPING))
        finally:
            link.close()
            linked.cancel()


class _WorkerServer(Server):
    """A server whose models another process loads."""

    def __init__(self, link: EngineLink, worker: _Worker, give_up: Callable[[], None]) -> None:
        """`give_up` asks the supervisor for a new engine."""
        o = worker.config.server
        clients = {*clients_of(worker.keys), *worker.config.tenants}
        counters = Counters(link.registry, worker.table, worker.producer - 1, clients)
        service = Service(
            link.registry, o.admission, o.limits, link.call, counters, worker.since,
            Quarantine(worker.quarantine), vouched=bool(worker.keys),
        )  # fmt: skip
        own, admin = worker.shares[worker.producer - 1], worker.shares.admin
        super().__init__(
            link.registry, o, worker.keys, worker.tls, service=service, listening=own,
            admin=None if admin is None else admin.dup(),
        )  # fmt: skip
        self._link, self._give_up, self._worker = link, give_up, worker
        link.on_configuration = self._follow
        self._began = False  # the start has its configuration
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

    def _follow(self) -> None:
        """Takes the configuration that the engine has. At the start both have the same one, unless this worker was
        started again.
        """
        if self._began or self._link.configuration != self._worker.source.digest:
            self.hang_up()
        self._began = True

    async def reload(self) -> None:
        """Takes keys, certificates and the policy of the file that the engine has taken."""
        with contextlib.suppress(PaellaError):  # the engine's process has logged it
            config, source = self._worker.source.again()
            if source.digest == self._link.configuration:
                self.take_secrets(config, source)
                self._worker.policies.add(await asyncio.to_thread(build_policy, config, source))
                self._link.follow_policy()

    async def load(self) -> None:
        while not self._link.settled and not self.service.draining:
            await self._link.changed()

    async def stop(self) -> None:
        self.service.draining = True
        self._link.poke()
        await super().stop()
