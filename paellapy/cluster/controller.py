"""The controller: an actor that keeps the wanted number of engines, tells routers of them, and moves models by the
plan.

Everything it must remember is in Ray's store (number of engines, drained engines, placement); everything else it looks
up at every tick. A restarted controller finds engines and routers by their names, so its absence has no effect.
"""

from __future__ import annotations

import contextlib
import json
import math
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec

from paellapy.cluster.actors import EngineActor, RouterActor
from paellapy.cluster.cluster_file import ClusterFile, ClusterSettings, first_placement
from paellapy.cluster.plan import Fleet, Placement, moves, plan
from paellapy.instrument.errors import PaellaError
from paellapy.scheduler.core.profiles import load_profiles
from paellapy.serving.load_report import Outlook
from paellapy.serving.logs import configure, log
from paellapy.serving.registry import READY, UNAVAILABLE

# Puts models on engines as the plan wants: loads over HTTP, and unloads only once a model is loaded elsewhere.


LOAD_S = 600.0
PLACING_LOOK_S = 1.0
MOST_ENGINES = 1024
FEWEST = 100  # requests between two plans; fewer do not show the load

Placed = Mapping[str, tuple[str, ...]]  # models of each engine

_decode = msgspec.json.Decoder(Outlook).decode


class Placer:
    """Makes one change at a time on each engine, on all engines in parallel."""

    def __init__(self, file: ClusterFile, clock: Callable[[], float] = time.monotonic) -> None:
        self._file, self._clock = file, clock
        self._pool = ThreadPoolExecutor(MOST_ENGINES)  # its threads start on demand
        self._lookers = ThreadPoolExecutor(16)  # separate, so that a check never waits for a load
        self._busy: dict[str, Future[None]] = {}
        self._planned_at, self._counted = clock(), {}  # type: ignore[var-annotated]
        self._planning: Future[dict[str, tuple[str, ...]] | None] | None = None
        self.why: dict[str, str] = {}  # errors of models that could not be loaded

    def place(self, urls: Mapping[str, str], wanted: Placed) -> None:
        states = self._lookers.map(self._states, urls.values())
        seen = {name: found for name, found in zip(urls, states, strict=True) if found is not None}
        everywhere = all(seen.get(name, {}).get(model) == READY for name, models in wanted.items() for model in models)
        for name, found in seen.items():
            if name in self._busy and not self._busy[name].done():
                continue
            hopeless = {model for model in found if f"{name}/{model}" in self.why}
            missing = [m for m in wanted.get(name, ()) if found.get(m) == UNAVAILABLE and m not in hopeless]
            extra = [m for m, state in found.items() if state == READY and m not in wanted.get(name, ())]
            if missing:
                self._busy[name] = self._pool.submit(self._change, name, urls[name], missing[0], "load")
            elif extra and everywhere:  # requests have other engines to go to
                self._busy[name] = self._pool.submit(self._change, name, urls[name], extra[0], "unload")

    def _call(self, url: str, path: str, data: bytes | None = None, within_s: float = PLACING_LOOK_S) -> bytes:
        headers = {} if self._file.key is None else {"X-API-Key": self._file.key}
        request = urllib.request.Request(url + path, data, headers, method="GET" if data is None else "POST")
        with urllib.request.urlopen(request, timeout=within_s) as answer:
            found: bytes = answer.read()
            return found

    def _states(self, url: str) -> dict[str, str] | None:
        """States of an engine's models; None: it does not answer."""
        try:
            return {model: each.state for model, each in _decode(self._call(url, "/v2/outlook")).models.items()}
        except (OSError, msgspec.DecodeError):
            return None

    def _change(self, engine: str, url: str, model: str, what: str) -> None:
        try:
            self._call(url, f"/v2/repository/models/{model}/{what}", b"{}", LOAD_S)
            log.info(f"{what}ed by the plan", extra={"fields": {"engine": engine, "model": model}})
        except urllib.error.HTTPError as e:
            said = json.loads(e.read() or b"{}").get("error", e.reason)
            if what == "load" and e.code == 400:
                self.why[f"{engine}/{model}"] = said
            log.error("a model could not be moved", extra={"fields": {"engine": engine, "model": model, "why": said}})
        except OSError as e:
            log.error("an engine did not move a model", extra={"fields": {"engine": engine, "why": str(e)}})

    def replan(self, routers: Mapping[str, Mapping[str, Any]], wanted: Placed) -> dict[str, tuple[str, ...]] | None:
        """A new placement, if the recent load calls for one. A call starts planning in the background; a later one
        returns the result.
        """
        if self._planning is not None:
            if not self._planning.done():
                return None
            found, self._planning = self._planning.result(), None
            # Engines were added or removed meanwhile
            return found if found is not None and found.keys() == wanted.keys() else None
        rates = self._rates(routers)
        if rates is not None:
            self._planning = self._pool.submit(self._plan, rates, dict(wanted))
        return None

    def _rates(self, routers: Mapping[str, Mapping[str, Any]]) -> dict[str, float] | None:
        """Requests per second of each model since the last plan; None: it is too early, or there are too few
        requests.
        """
        s, now = self._file.settings, self._clock()
        if not s.replan_s or now - self._planned_at < s.replan_s:
            return None
        total: dict[str, int] = {}
        for each in routers.values():
            for model, count in each.get("by_model", {}).items():
                total[model] = total.get(model, 0) + count
        seconds, before = now - self._planned_at, self._counted
        self._planned_at, self._counted = now, total
        rates = {model: max(0.0, count - before.get(model, 0)) / seconds for model, count in total.items()}
        return rates if before and sum(rates.values()) * seconds >= FEWEST else None

    def _plan(self, rates: Mapping[str, float], wanted: Placed) -> dict[str, tuple[str, ...]] | None:
        s, names = self._file.settings, list(wanted)
        try:
            profiles = load_profiles(Path(self._file.folder) / str(s.profiles))
            full = {model: max(rates.get(model, 0.0), 0.01) for model in self._file.models}
            fleet = Fleet(profiles, full, len(names), s.memory_gb, s.gpu_gb or math.inf)
            current = tuple(tuple(sorted(wanted[name])) for name in names)
            found = plan(fleet, current, sure=math.inf)
        except PaellaError as e:
            log.error("planning failed", extra={"fields": {"why": str(e)}})
            return None
        if found.placement == current:
            return None
        steps = moves(current, found.placement)
        after = {name: set(wanted[name]) for name in names}
        for gpu, model in steps.load:
            after[names[gpu]].add(model)
        for gpu, model in steps.unload:
            after[names[gpu]].discard(model)
        log.info("replanned", extra={"fields": {"attainment": round(found.attainment, 3), "loads": len(steps.load)}})
        return {name: tuple(sorted(models)) for name, models in after.items()}


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
