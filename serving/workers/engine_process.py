"""The engine's process: an engine with its models, which gives each worker its part of the shared memory.

Workers hear of every model that is loaded. When a worker ends, its requests are cancelled.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import threading
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from paellapy.instrument.errors import PaellaError
from paellapy.scheduler.backends.base import LoadedModel
from paellapy.scheduler.core.processes import name_process
from paellapy.scheduler.engine.remote import Producers
from paellapy.scheduler.models.model import Model
from paellapy.scheduler.policies.policy import Policy, PolicyError, find_policy, policy_names
from paellapy.serving.build import build_engine, build_entries, build_policy, has_room_twice
from paellapy.serving.config import Config, Source
from paellapy.serving.loading import load_models, warm_up
from paellapy.serving.logs import configure, log
from paellapy.serving.preflight import spare_objects, stop_sparing
from paellapy.serving.registry import READY, Entry, Registry, entry_of
from paellapy.serving.reload import FIXED, Reloader, check_secrets
from paellapy.serving.rpc import STEP, Calls
from paellapy.serving.server import end_now, ends, failure_of
from paellapy.serving.tensors import told_specs
from paellapy.serving.workers.channel import (
    CALL,
    HELLO,
    MOST_DESCRIPTORS,
    STATE,
    WANT_LENGTH,
    WITHDRAWN,
    Channel,
    Message,
)
from paellapy.serving.workers.supervisor import (
    CONFIGURATION_TAKEN,
    IS_READY,
    IS_STOPPING,
    MODELS_CHANGED,
    Tell,
)
from paellapy.serving.workers.texts import CANCEL, GENERATE, WorkersTexts, language_model_facts


class _State(msgspec.Struct):
    policy: str
    wanted: dict[str, bool]
    tried_ns: dict[str, float] = {}


class SavedState:
    """Wanted models, policy and durations of full batches, in a file: the next engine process starts with them."""

    def __init__(self, path: Path) -> None:
        self._path, self._lock = path, threading.Lock()
        self._last: _State | None = None

    def restore(self, registry: Registry) -> str:
        """Sets which models are wanted; returns the policy to switch to, "" if it is the configured one."""
        try:
            kept = msgspec.json.decode(self._path.read_bytes(), type=_State)
        except FileNotFoundError:  # nothing has been changed yet
            return ""
        registry.tried_ns = kept.tried_ns
        changed: dict[str, Any] = {}
        for name, entry in registry.entries.items():
            wanted = kept.wanted.get(name, entry.wanted)
            if wanted != entry.wanted:
                entry.wanted = wanted
                if not wanted:
                    entry.reason = "unloaded"
                changed.setdefault("loaded" if wanted else "unloaded", []).append(name)
        policy = "" if kept.policy == registry.engine.policy else kept.policy
        if policy:
            changed["policy"] = policy
        if changed:
            log.info("restored changes that were made while the server ran", extra={"fields": changed})
        return policy

    def save(self, registry: Registry) -> None:
        """Saves the state; called after every change, in the thread that made it."""
        with self._lock:
            entries = registry.entries.values()
            tried_ns = {e.name: registry.engine.tried_ns(e.name) for e in entries if e.state == READY and e.model}
            now = _State(registry.engine.policy, {e.name: e.wanted for e in entries}, tried_ns)
            if now == self._last:
                return
            new = self._path.with_suffix(".new")
            try:
                new.write_bytes(msgspec.json.encode(now))
                os.replace(new, self._path)  # atomic: a process killed meanwhile leaves the old file intact
            except OSError as e:
                fields = {"error": str(e)}
                log.warning("a restart of the engine will undo this change", extra={"fields": fields})
            else:
                self._last = now


def describe_model(entry: Entry, loaded: LoadedModel) -> dict[str, Any]:
    """All facts that a worker needs to write inputs and read outputs. The instances' memory is sent separately."""
    model = loaded.model
    return {
        "inputs": told_specs(model.inputs),
        "outputs": told_specs(model.outputs),
        "takes": told_specs(model.takes),
        "gives": told_specs(model.gives),
        "task": model.task,
        "steps": [model.before is not None, model.after is not None],
        "lengths": None if model.lengths is None else asdict(model.lengths),
        "batch": list(model.batch),
        "target_ms": model.target_ms,
        "priority": model.priority,
        "share": model.share,
        **_describe_memory(loaded),
    }


def _describe_memory(loaded: LoadedModel) -> dict[str, Any]:
    return {
        "length": loaded.model.length,
        "row": loaded.row,
        "generation": loaded.generation,
        "instances": list(loaded.instance_of),
        "plan": asdict(loaded.instances[0].plan),
        "memory_bytes": loaded.reservation.total_bytes,
    }


class _Worker:
    """One connection."""

    def __init__(self) -> None:
        self.channel: Channel | None = None
        self.texts: WorkersTexts | None = None
        self.producer = 0
        self.knows: set[tuple[int, int]] = set()  # rows and generations whose memory it has
        self.steps: dict[int, asyncio.Task[None]] = {}  # calls of functions before and after models, by their numbers


class EngineHost:
    """Serves one engine to workers. Per request, only the core runs in its process."""

    def __init__(self, registry: Registry, path: Path, saved: SavedState, configuration: str) -> None:
        """`configuration`: the digest of its file."""
        self._saved, self._configuration, self._taken = saved, configuration, 0
        self._registry, self._engine, self._path = registry, registry.engine, path
        self._producers = Producers(self._engine)
        self._calls = Calls(registry)
        self._workers: set[_Worker] = set()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._gone = asyncio.Event()
        self._settled = False
        self._loop = asyncio.get_running_loop()
        self._listening: socket.socket | None = None

    async def restore(self) -> None:
        """Restores changes that were made while the previous process ran. To be called first."""
        if policy := self._saved.restore(self._registry):
            # Set after the configured policy, so that one can switch back to that.
            try:
                await asyncio.to_thread(self._calls.set_policy, policy)
            except PolicyError as e:  # of a file that has changed since
                log.error("the policy is the configured one again", extra={"fields": {"error": str(e)}})

    def start(self) -> None:
        """Listens for workers."""
        self._path.unlink(missing_ok=True)
        self._listening = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
        self._listening.bind(str(self._path))
        self._listening.listen(64)
        self._listening.setblocking(False)
        self._loop.add_reader(self._listening.fileno(), self._accept)
        self._registry.changed += [partial(self._saved.save, self._registry), self._changed]
        self._engine.loaded_models.on_length.append(self._changed)

    def warm_up(self) -> None:
        """Compiles the code that runs when a worker ends."""
        self._producers.warm_up()

    def note_configuration(self, digest: str) -> None:
        """Lets the workers take a new configuration. Called in any thread."""
        self._configuration, self._taken = digest, self._taken + 1
        self._changed()

    def settle(self) -> None:
        """Notes that every model of the start is loaded, or could not be."""
        self._settled = True
        self._tell_all()

    async def stop(self) -> None:
        """Waits until every worker is gone, since an engine that has ended answers nobody."""
        while self._workers:
            self._gone.clear()
            await self._gone.wait()
        if self._listening is not None:
            self._loop.remove_reader(self._listening.fileno())
            self._listening.close()
        for task in self._tasks:
            task.cancel()
        self._calls.close()

    def _keep(self, work: Any) -> asyncio.Task[None]:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _accept(self) -> None:
        assert self._listening is not None
        try:
            connection, _ = self._listening.accept()
        except OSError:
            return
        worker = _Worker()
        worker.channel = Channel(
            connection, lambda message, fds: self._message(worker, message, fds), lambda: self._lost(worker)
        )
        worker.texts = WorkersTexts(self._registry, worker.channel)
        self._workers.add(worker)

    def _message(self, worker: _Worker, message: Message, descriptors: list[int]) -> None:
        for fd in descriptors:
            os.close(fd)
        if message.kind == CALL:
            task = self._keep(self._answer(worker, message))
            if message.name == STEP:  # a model is loaded though nobody waits
                worker.steps[message.number] = task
                task.add_done_callback(lambda _: worker.steps.pop(message.number, None))
        elif message.name == WITHDRAWN:
            if (step := worker.steps.get(message.number)) is not None:
                step.cancel()
        elif message.name == CANCEL and worker.texts is not None:
            worker.texts.cancel(message.data)
        elif message.name == WANT_LENGTH:
            name, size = message.data
            loaded = self._engine.core.models.by_name.get(name)
            if loaded is not None:
                loaded.want_length(size)

    async def _answer(self, worker: _Worker, call: Message) -> None:
        channel = worker.channel
        assert channel is not None
        try:
            if call.name == HELLO:
                self._hello(worker, call)
                return
            if call.name == GENERATE and worker.texts is not None:
                channel.answer(call, await worker.texts.begin(call.data))
                return
            found = await self._calls.call(call.name, call.data)
            if not channel.closed:
                channel.answer(call, found)
        except PaellaError as e:
            if not channel.closed:
                channel.refuse(call, e)
        except Exception as e:
            log.error("a call failed", exc_info=e, extra={"fields": {"call": call.name}})
            if not channel.closed:
                channel.refuse(call, PaellaError(f"{call.name}: {type(e).__name__}: {e}"))

    def _hello(self, worker: _Worker, call: Message) -> None:
        channel = worker.channel
        assert channel is not None
        producer = int(call.data["producer"])
        wake_fd, stage = self._producers.attach(producer)
        worker.producer = producer
        engine = self._engine
        channel.answer(
            call,
            {
                "limits": asdict(engine.limits),
                "stage_address": stage.address,
                "device": engine.device.name,
                "title": engine.device.title,
                "pid": os.getpid(),
            },
            [self._producers.state.fd, engine.core.bell.fd, wake_fd, stage.fd],
        )
        self._tell(worker)

    def _lost(self, worker: _Worker) -> None:
        for step in worker.steps.values():
            step.cancel()
        self._keep(self._take_back(worker))

    async def _take_back(self, worker: _Worker) -> None:
        if worker.texts is not None:
            worker.texts.close()
        if worker.producer:
            had = await asyncio.to_thread(self._producers.detach, worker.producer)
            if had:
                log.warning("a worker is gone", extra={"fields": {"worker": worker.producer, "requests": had}})
        self._workers.discard(worker)
        self._gone.set()

    # -- loaded models

    def _changed(self) -> None:
        self._loop.call_soon_threadsafe(self._tell_all)

    def _tell_all(self) -> None:
        for worker in list(self._workers):
            if worker.producer and worker.channel is not None and not worker.channel.closed:
                self._tell(worker)

    def _tell(self, worker: _Worker) -> None:
        """Sends the registry's present state. The first message about an instance also carries its memory."""
        loaded = self._engine.loaded_rows()
        entries, descriptors = [], list[int]()
        known: set[tuple[int, int]] = set()
        for entry in list(self._registry.entries.values()):
            found: dict[str, Any] = {
                "name": entry.name, "wanted": entry.wanted, "state": entry.state, "reason": entry.reason,
            }  # fmt: skip
            if entry.state == READY and entry.language_model is not None:
                found["language_model"] = language_model_facts(entry.language_model)
            ours = loaded.get(entry.row)
            if entry.state == READY and ours is not None and ours.model is entry.model:
                found["model"] = describe_model(entry, ours)
                shorter = [each for each in ours.by_length.values() if each is not ours]
                about = [found["model"], *map(_describe_memory, shorter)]
                for each, told in zip((ours, *shorter), about, strict=True):
                    key = (each.row, each.generation)
                    blocks = [instance.memory.block for instance in each.instance_of.values()]
                    new = key not in worker.knows
                    if new and len(descriptors) + len(blocks) > MOST_DESCRIPTORS:
                        break
                    told["mapped"] = len(blocks) if new else 0
                    descriptors += [block.fd for block in blocks if block is not None and new]
                    known.add(key)
                sent = [told for told in about if "mapped" in told]
                found["model"]["shorter"] = sent[1:]
                if len(sent) < len(about):  # the others come with the next message
                    self._loop.call_soon(self._tell, worker)
                if not sent:
                    found["state"], found["reason"] = "LOADING", ""
                    del found["model"]
            entries.append(found)
        worker.knows = known
        assert worker.channel is not None
        if worker.channel.closed:
            return
        memory = {"budget_bytes": self._engine.memory.budget_bytes, "held_bytes": self._engine.memory.held_bytes}
        data = {"entries": entries, "policy": self._engine.policy, "memory": memory, "settled": self._settled,
                "configuration": self._configuration, "taken": self._taken}  # fmt: skip
        worker.channel.event(STATE, data, descriptors)


SAVED = "saved_state"  # the file's name


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
            check_secrets(config, source, self._first[0])
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
        tell(IS_READY)
        tell.wait_for_call()
        name_process("paellapy-engine")
        return self.main(tell)

    async def _called(self, tell: Tell) -> None:
        await tell.called()
        name_process("paellapy-engine")
        self._log_as("engine")

    def _log_as(self, process: str, level: str | None = None) -> None:
        options = self.latest.config.server
        configure(options.log_format, level or options.log_level, process, options.log_file)

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

        async def life() -> int:
            return await _Life(registry, config, source, tell, self.path).main(called)

        code = asyncio.run(life())
        engine.close()
        return code


class _Life:
    """The life of one engine in this process, from its first model to its end."""

    def __init__(self, registry: Registry, config: Config, source: Source, tell: Tell, path: Path) -> None:
        self._registry, self._engine = registry, registry.engine
        self._tell, self._drain_s = tell, config.server.drain_s
        self._host = EngineHost(registry, path, SavedState(path.with_name(SAVED)), source.digest)
        self._reloader = Reloader(registry, config, source, self._taken)
        self._stop = asyncio.Event()
        self._reloads: list[asyncio.Future[Any]] = []

    def _taken(self, config: Config, source: Source) -> None:
        """A new configuration holds: only now the workers and the supervisor take it too."""
        self._host.note_configuration(source.digest)
        self._tell(CONFIGURATION_TAKEN)

    def _stopping(self) -> None:
        self._tell(IS_STOPPING)
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
            for work in (loading, *self._reloads):
                if not await ends(work, self._drain_s):
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

        def hang_up() -> None:
            unfinished = [each for each in self._reloads if not each.done()]
            self._reloads = [*unfinished, loop.run_in_executor(None, self._reloader.reload)]

        loop.add_signal_handler(signal.SIGHUP, hang_up)

    async def _settle(self, loading: asyncio.Task[None]) -> None:
        """Waits for the load to end. Its errors have already been logged."""
        await asyncio.wait((loading,))
        loading.result()
        await asyncio.to_thread(spare_objects)
        self._host.settle()
        self._registry.changed.append(lambda: self._tell(MODELS_CHANGED))
        self._tell(IS_READY)
