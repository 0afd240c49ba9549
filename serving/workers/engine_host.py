"""The process of the engine, as workers see it: each gets its part of the shared memory, and hears of every model.

When a worker ends, its requests are cancelled.
"""

from __future__ import annotations

import asyncio
import os
import socket
import threading
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from paellapy.instrument.errors import PaellaError
from paellapy.scheduler.backends.base import LoadedModel
from paellapy.scheduler.engine.remote import Producers
from paellapy.scheduler.policies.policy import PolicyError
from paellapy.serving.logs import log
from paellapy.serving.registry import READY, Entry, Registry
from paellapy.serving.service import Calls
from paellapy.serving.tensors import datatype
from paellapy.serving.workers.channel import CALL, MOST_DESCRIPTORS, Channel, Message

# State that one engine process of a server hands on to the next: wanted models, policy, durations of full batches.


class _Choices(msgspec.Struct):
    policy: str
    wanted: dict[str, bool]
    tried_ns: dict[str, float] = {}


class Kept:
    """A file in the server's own folder. The next engine process starts in the state of the last one."""

    def __init__(self, path: Path) -> None:
        self._path, self._lock = path, threading.Lock()
        self._last: _Choices | None = None

    def restore(self, registry: Registry) -> str:
        """Sets which models are wanted; returns the policy to switch to, "" if it is the configured one."""
        try:
            kept = msgspec.json.decode(self._path.read_bytes(), type=_Choices)
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
            tried_ns = {e.name: registry.engine.tried_ns(e.name) for e in entries if e.state == READY}
            now = _Choices(registry.engine.policy, {e.name: e.wanted for e in entries}, tried_ns)
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


HELLO = "hello"
STATE = "state"
_REST_S = 2.0


def describe_model(entry: Entry, loaded: LoadedModel) -> dict[str, Any]:
    """All facts that a worker needs to write inputs and read outputs. The instances' memory is sent separately."""
    model = loaded.model
    return {
        "inputs": [[key, list(s.shape), datatype(s.dtype), s.low, s.high] for key, s in model.inputs.items()],
        "outputs": [[key, list(s.shape), datatype(s.dtype), None, None] for key, s in model.outputs.items()],
        "batch": list(model.batch),
        "target_ms": model.target_ms,
        "priority": model.priority,
        "share": model.share,
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
        self.producer = 0
        self.knows: set[tuple[int, int]] = set()  # rows and generations whose memory it has


class EngineHost:
    """Serves one engine to workers. Per request, only the core runs in its process."""

    def __init__(self, registry: Registry, path: Path, kept: Kept) -> None:
        self._kept = kept
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
        if policy := self._kept.restore(self._registry):
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
        self._registry.changed += [partial(self._kept.save, self._registry), self._changed]
        self._keep(self._rest())

    def warm_up(self) -> None:
        """Compiles the code that runs when a worker ends."""
        self._producers.warm_up()

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

    def _keep(self, work: Any) -> None:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _rest(self) -> None:
        while True:
            await asyncio.sleep(_REST_S)
            await asyncio.to_thread(self._calls.rest)

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
        self._workers.add(worker)

    def _message(self, worker: _Worker, message: Message, descriptors: list[int]) -> None:
        for fd in descriptors:
            os.close(fd)
        if message.kind == CALL:
            self._keep(self._answer(worker, message))

    async def _answer(self, worker: _Worker, call: Message) -> None:
        channel = worker.channel
        assert channel is not None
        try:
            if call.name == HELLO:
                self._hello(worker, call)
                return
            if call.name not in self._calls.functions:
                raise PaellaError(f"the engine has no function {call.name!r}")
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
            [self._producers.state.fd, engine.bell.fd, wake_fd, stage.fd],
        )
        self._tell(worker)

    def _lost(self, worker: _Worker) -> None:
        self._keep(self._take_back(worker))

    async def _take_back(self, worker: _Worker) -> None:
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
            ours = loaded.get(entry.row)
            if entry.state == READY and ours is not None and ours.model is entry.model:
                found["model"] = describe_model(entry, ours)
                key = (ours.row, ours.generation)
                blocks = [instance.memory.block for instance in ours.instance_of.values()]
                if key not in worker.knows and len(descriptors) + len(blocks) > MOST_DESCRIPTORS:
                    found["state"], found["reason"] = "LOADING", ""  # ready with the next message
                    del found["model"]
                    self._loop.call_soon(self._tell, worker)
                else:
                    if key not in worker.knows:
                        found["model"]["mapped"] = len(blocks)
                        descriptors += [block.fd for block in blocks if block is not None]
                    known.add(key)
            entries.append(found)
        worker.knows = known
        assert worker.channel is not None
        if worker.channel.closed:
            return
        memory = {"budget_bytes": self._engine.memory.budget_bytes, "held_bytes": self._engine.memory.held_bytes}
        data = {"entries": entries, "policy": self._engine.policy, "memory": memory, "settled": self._settled}
        worker.channel.event(STATE, data, descriptors)
