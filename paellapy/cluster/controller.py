"""The controller: an actor that keeps the wanted number of engines, tells routers of them, and moves models by the
plan.

Everything it must remember is in Ray's store (number of engines, drained engines, placement); everything else it looks
up at every tick. A restarted controller finds engines and routers by their names, so its absence has no effect.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Sequence
from typing import Any

import msgspec

from paellapy.cluster.cluster_file import ClusterFile, ClusterSettings, first_placement
from paellapy.cluster.engine_actor import EngineActor
from paellapy.cluster.placing import Placer
from paellapy.cluster.plan import Placement
from paellapy.cluster.router_actor import RouterActor
from paellapy.serving.logs import configure, log

NAMESPACE, CONTROLLER, STORED = "paellapy", "paellapy-controller", b"paellapy-cluster"
LOOK_S = 0.5
PATIENCE_S = 2.0  # for an actor's answer
GONE = "gone"


class Memory(msgspec.Struct):
    """State that outlives the controller."""

    engines: list[str]
    next_number: int
    placement: dict[str, list[str]] = {}  # if a plan has changed it


class Controller:
    def __init__(self, file: dict[str, Any], door_node: str) -> None:
        """`door_node` is the node for routers as long as it exists, since clients know its address."""
        configure("text", "info")
        self._door_node = door_node
        self._file = msgspec.convert(file, ClusterFile)
        self._settings: ClusterSettings = self._file.settings
        self._lock = threading.RLock()
        self._memory = self._remembered()
        self._seen: dict[str, dict[str, Any]] = {}  # latest answers of engines
        self._routers: dict[str, dict[str, Any]] = {}
        self._placer = Placer(self._file)
        self._stop = threading.Event()
        self._leaving: set[str] = set()
        threading.Thread(target=self._run, daemon=True).start()

    # -- memory

    def _remembered(self) -> Memory:
        from ray.experimental.internal_kv import _internal_kv_get

        kept = _internal_kv_get(STORED)
        if kept:
            return msgspec.json.decode(kept, type=Memory)
        n = self._settings.engines
        return Memory([f"engine-{k}" for k in range(n)], n)

    def _remember(self) -> None:
        from ray.experimental.internal_kv import _internal_kv_put

        _internal_kv_put(STORED, msgspec.json.encode(self._memory), overwrite=True)

    def _wanted(self) -> dict[str, tuple[str, ...]]:
        """Models of each engine."""
        names = self._memory.engines
        dealt: Placement = first_placement(self._file, max(1, len(names)))
        return {name: tuple(self._memory.placement.get(name, dealt[k])) for k, name in enumerate(names)}

    # -- the control loop

    def _run(self) -> None:
        self._remember()
        while not self._stop.wait(LOOK_S):
            try:
                with self._lock:
                    self.look()
            except Exception as e:  # Ray is shutting down, or a node has just left
                log.error("a tick of the controller failed", exc_info=e)

    def look(self) -> None:
        """One tick: asks all engines, updates routers and models. A silent actor delays no other, and keeps its last
        answer.
        """
        wanted = self._wanted()
        told = _ask_all({name: (self._engine(name, models).info, models) for name, models in wanted.items()})
        for name, said in told.items():
            if said is GONE:
                self._seen.pop(name, None)
            elif said is not None:
                self._seen[name] = said
        members = [(name, self._seen[name]["url"]) for name in wanted if name in self._seen]
        routers = [f"router-{k}" for k in range(self._settings.routers)]
        told = _ask_all({name: (self._router(name).set_members, members) for name in routers})
        self._routers.update({name: said for name, said in told.items() if said not in (None, GONE)})
        self._placer.place(dict(members), wanted)
        if changed := self._placer.replan(self._routers, wanted):
            self._memory.placement = {name: list(models) for name, models in changed.items()}
            self._remember()

    def _engine(self, name: str, models: tuple[str, ...]) -> Any:
        s = self._settings
        f = self._file
        task = {"config": f.engine, "names": f.models, "loaded": list(models), "folder": f.folder}
        needs: dict[str, Any] = {"num_gpus": 1} if s.resource == "GPU" else {"resources": {s.resource: 1}}
        host = None if s.engine_host == "node" else s.engine_host
        return _actor(name, EngineActor, (name, task, host, s.hung_s, s.standby), needs)

    def _router(self, name: str) -> Any:
        s = self._settings
        options = {
            "host": s.host, "port": s.port, "every_ms": s.every_ms, "hold_s": s.hold_s, "key": self._file.key,
            "max_held_bytes": round(s.held_mb * 1e6),
        }  # fmt: skip
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        where = {"scheduling_strategy": NodeAffinitySchedulingStrategy(self._door_node, soft=True)}
        return _actor(name, RouterActor, (name, options, self._file.models), where)

    # -- calls

    def status(self) -> dict[str, Any]:
        return {
            "pid": _pid(), "resource": self._settings.resource, "url": f"http://{self._settings.host}:{self._settings.port}",
            "engines": {name: self._seen.get(name) for name in self._memory.engines},
            "routers": self._routers, "placement": {k: list(v) for k, v in self._wanted().items()},
            "why": {**self._placer.why, **{name: r["why"] for name, r in self._routers.items() if r["why"]}},
        }  # fmt: skip

    def key(self) -> str | None:
        """The key for the front door, if clients need keys. It is not part of the status, which is printed."""
        return self._file.key

    def scale(self, engines: int) -> list[str]:
        """Sets the number of engines. Engines that leave are drained first, the newest first."""
        with self._lock:
            names = self._memory.engines
            leaving = names[engines:]
            del names[engines:]
            while len(names) < engines:
                names.append(f"engine-{self._memory.next_number}")
                self._memory.next_number += 1
            self._memory.placement = {}
            self._remember()
            self.look()
        self._see_off(leaving)
        return list(names)

    def drain(self, name: str) -> None:
        """Removes that engine and lowers the number of engines by one."""
        with self._lock:
            if name in self._memory.engines:  # otherwise it was asked before and gave no answer
                self._memory.engines.remove(name)
            self._memory.placement = {}
            self._remember()
            self.look()
        self._see_off([name])

    def move(self, placement: dict[str, list[str]]) -> None:
        """Sets another placement. A model is loaded at its new place before it is unloaded elsewhere."""
        with self._lock:
            self._memory.placement = placement
            self._remember()
            self.look()

    def _see_off(self, names: list[str]) -> None:
        """Stops engines. Routers already know that they leave."""
        for name in names:
            self._seen.pop(name, None)
        end_actors(names)

    def stop(self) -> None:
        self._stop.set()
        with self._lock:
            end_actors([f"router-{k}" for k in range(self._settings.routers)])
            end_actors(self._memory.engines)
        from ray.experimental.internal_kv import _internal_kv_del

        _internal_kv_del(STORED)


def _pid() -> int:
    import os

    return os.getpid()


def _actor(name: str, kind: type, arguments: tuple[Any, ...], needs: dict[str, Any]) -> Any:
    """The actor of that name, created if there is none."""
    import ray

    try:
        return ray.get_actor(name, namespace=NAMESPACE)
    except ValueError:
        pass
    options = {
        "name": name, "namespace": NAMESPACE, "lifetime": "detached", "get_if_exists": True, "max_restarts": -1,
        "num_cpus": 0, "max_concurrency": 4, **needs,
    }  # fmt: skip
    return ray.remote(kind).options(**options).remote(*arguments)


def _ask_all(questions: dict[str, tuple[Any, ...]]) -> dict[str, Any]:
    """Answers of actors, all asked at once. None: no answer in time; GONE: Ray is restarting the actor."""
    import ray

    asked = {name: method.remote(*arguments) for name, (method, *arguments) in questions.items()}
    done, _ = ray.wait(list(asked.values()), num_returns=len(asked), timeout=PATIENCE_S)
    found: dict[str, Any] = {}
    for name, answer in asked.items():
        try:
            found[name] = ray.get(answer) if answer in done else None
        except ray.exceptions.RayError:
            found[name] = GONE
    return found


def end_actors(names: Sequence[str], within_s: float = 45.0) -> None:
    """Stops all actors at once, first gracefully, then for good."""
    import ray

    actors = {}
    for name in names:
        with contextlib.suppress(ValueError):
            actors[name] = ray.get_actor(name, namespace=NAMESPACE)
    stopping = {name: actor.stop.remote() for name, actor in actors.items()}
    until = time.monotonic() + within_s
    for name, actor in actors.items():
        try:
            ray.get(stopping[name], timeout=max(0.1, until - time.monotonic()))
        except (ray.exceptions.RayError, TimeoutError) as e:
            log.warning("an actor did not stop gracefully", extra={"fields": {"actor": name, "why": str(e)[:200]}})
        ray.kill(actor)
    while any(map(_exists, actors)):
        time.sleep(0.02)


def _exists(name: str) -> bool:
    import ray

    try:
        ray.get_actor(name, namespace=NAMESPACE)
    except ValueError:
        return False
    return True
