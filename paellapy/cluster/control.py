"""`paellapy cluster …` on Ray: starts a cluster as applications of Ray Serve, shows it, changes it, takes it down."""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import math
import os
import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import msgspec

from paellapy.cluster.cluster_file import ClusterFile, difference, first_placement, load_cluster
from paellapy.cluster.processes import RAY_SETTINGS, ask
from paellapy.cluster.router import RouterOptions
from paellapy.instrument.env import install_line
from paellapy.instrument.errors import PaellaError
from paellapy.scheduler.core.profiles import load_profiles
from paellapy.scheduler.sim.plan import Fleet, Group, Placement, plan, regroup, steps
from paellapy.serving.logs import configure, log


class ClusterError(PaellaError):
    """The cluster is not in the required state; the message has the remedy."""


try:
    import ray
    from ray import serve

    from paellapy.cluster import replicas
except ImportError:
    raise ClusterError(f"`paellapy cluster` needs Ray: {install_line('ray')}", field="ray") from None

OLDEST, BEYOND = (2, 60), (3, 0)  # tested versions of Ray
MOST_VIRTUAL = 64
LOOK_S = 0.1
FEWEST = 100  # requests between two plans; fewer do not show the load
LEAVE_S = 60.0  # a server's drain takes up to 40
STATE = b"paellapy-cluster"
APP = "paellapy-"  # before the names of our applications
ROUTERS, PLANNER = "routers", "planner"


def check_version(version: str) -> None:
    """Raises ClusterError unless this version of Ray is supported.

    >>> check_version("2.60.0")
    """
    found = tuple(int(part) for part in re.findall(r"\d+", version)[:2])
    if not OLDEST <= found < BEYOND:
        wanted = f"{OLDEST[0]}.{OLDEST[1]} or newer, below {BEYOND[0]}"
        said = f"Ray {version} is not supported: install {wanted} ({install_line('ray')})"
        raise ClusterError(said, field="ray", given=version)


def connect(start: ClusterFile | None = None) -> bool:
    """Joins the running Ray, or starts one here for `start`; returns whether it was started."""
    check_version(ray.__version__)
    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    quiet = {"log_to_driver": False, "logging_level": "error"}
    if ray.is_initialized():
        return False
    try:
        ray.init(address="auto", **quiet)
        return False
    except ConnectionError:
        if start is None:
            said = "no Ray runs here: start one with `paellapy cluster serve FILE` or `ray start --head`"
            raise ClusterError(said, field="ray") from None
    for name, value in RAY_SETTINGS.items():
        os.environ.setdefault(name, value)
    s, is_virtual = start.settings, str(start.engine.get("device", "")).startswith("virtual")
    number = max(s.engines, MOST_VIRTUAL) if is_virtual else s.engines  # virtual GPUs cost nothing: room to scale
    own = {} if s.resource == "GPU" else {"resources": {s.resource: float(number)}}
    ray.init(include_dashboard=False, **own, **quiet)
    return True


def check_resources(file: ClusterFile, engines: int) -> None:
    resource, found = file.settings.resource, ray.cluster_resources()
    device, have = str(file.engine.get("device", "")), found.get(resource, 0.0)
    if device.startswith("cuda") and not found.get("GPU"):
        said = 'device = "cuda", but no node of Ray has a GPU: add one, or set device = "virtual:h200"'
        raise ClusterError(said, field="device", given=device)
    if have < engines:
        remedy = f"give nodes the resource, as in ray start --resources='{{\"{resource}\": 1}}'"
        if resource == "GPU":
            remedy = "add nodes, ask for fewer engines, or set device and cluster.resource to virtual ones"
        said = f"Ray has {have:g} {resource}, but {engines} engines need one each: {remedy}"
        raise ClusterError(said, field=resource, given=engines, limit=have)


class State(msgspec.Struct, kw_only=True):
    """What a cluster should be. It is in Ray's store, which outlives all our processes."""

    file: ClusterFile
    groups: list[Group]
    node: str  # address of the machine where clients reach the routers

    @property
    def engines(self) -> int:
        return sum(each.engines for each in self.groups)

    @property
    def url(self) -> str:
        s = self.file.settings
        return f"http://{'127.0.0.1' if s.host in ('0.0.0.0', '::') else s.host}:{s.port}"

    @classmethod
    def stored(cls) -> State:
        found = replicas.read(STATE)
        if not found:
            said = "no cluster is running on this Ray: start one with `paellapy cluster serve FILE`"
            raise ClusterError(said, field="cluster")
        return msgspec.json.decode(found, type=cls)

    def says(self, path: str = "/v2/cluster") -> Any:
        return json.loads(ask(self.url + path, self.file.key))


# -- applications of Ray Serve


def applications(state: State) -> dict[str, Any]:
    """An application for the routers, one for each group of engines, and one that plans. A replica starts anew only if
    its application's version changes; models of a group and numbers of engines change in place.
    """
    file, s = state.file, state.file.settings

    def application(kind: type, arguments: tuple[Any, ...], code: object = None, **options: Any) -> Any:
        version = msgspec.json.encode((arguments, code), order="sorted")
        options |= {
            "health_check_period_s": 0.5, "health_check_timeout_s": 3.0, "graceful_shutdown_wait_loop_s": 0.2,
            "graceful_shutdown_timeout_s": LEAVE_S, "version": hashlib.sha256(version).hexdigest(), "_internal": True,
        }  # fmt: skip
        return serve.deployment(kind).options(**options).bind(*arguments)

    here = {"num_cpus": 0, "resources": {f"node:{state.node}": 1e-3}}
    router = RouterOptions(
        host=s.host, port=s.port, every_ms=s.every_ms, hold_s=s.hold_s, key=file.key,
        max_held_bytes=round(s.held_mb * 1e6),
    )  # fmt: skip
    routers = asdict(router), file.models
    found = {ROUTERS: application(replicas.RouterReplica, routers, num_replicas=s.routers, ray_actor_options=here)}
    if s.replan_s:
        found[PLANNER] = application(Planner, (), ray_actor_options=here)  # it asks the front door
    task = {"config": file.engine, "names": file.models, "folder": file.folder, "hung_s": s.hung_s}
    engine = task, file.key, None if s.engine_host == "node" else s.engine_host, s.ready_s
    needs: dict[str, Any] = {"num_gpus": 1} if s.resource == "GPU" else {"resources": {s.resource: 1}}
    options: dict[str, Any] = {"ray_actor_options": {"num_cpus": 0, **needs}}
    rule = {
        "policy_function": f"{replicas.__name__}:{replicas.PredictedFinish.__name__}",
        "policy_kwargs": {"target_s": s.target_lateness_s},
    }
    for group in state.groups:
        options["user_config"] = {"models": list(group.models)}
        if s.max_engines is None:
            options["num_replicas"] = group.engines
        else:
            limits = {"min_replicas": group.engines, "max_replicas": s.max_engines}
            options["autoscaling_config"] = {**limits, "policy": rule}
        found[group.name] = application(replicas.EngineReplica, engine, file.code, **options)
    return found


def application(arguments: dict[str, str]) -> Any:
    """One of the applications of a cluster file, for configuration files of Ray Serve: `file` is its path, and `part`
    one of "routers", "planner", "engines-0" and so on. Routers run on Ray's head.
    """
    file = load_cluster(Path(arguments["file"]), os.environ.get("PAELLAPY_ROUTER_KEY"))
    groups = regroup([], first_placement(file, file.settings.engines))
    found = applications(State(file=file, groups=groups, node="__internal_head__"))
    if arguments["part"] not in found:
        said = f"the file has no part {arguments['part']!r}: choose from {', '.join(found)}"
        raise ClusterError(said, field="part", given=arguments["part"], limit=list(found))
    return found[arguments["part"]]


def _deploy(state: State) -> None:
    """Gives Serve what the cluster should be, and ends applications that are not in it."""
    wanted = applications(state)
    replicas.write(STATE, msgspec.json.encode(state))
    targets = [serve.RunTarget(each, name=APP + name, route_prefix=None) for name, each in wanted.items()]
    serve.run_many(targets, wait_for_ingress_deployment_creation=False, wait_for_applications_running=False)
    for name in set(_statuses()) - set(wanted):
        serve.delete(APP + name)


def _statuses() -> dict[str, Any]:
    found = serve.status().applications
    return {name.removeprefix(APP): each for name, each in found.items() if name.startswith(APP)}


def _wait(done: Callable[[], bool], within_s: float, what: str) -> None:
    until = time.monotonic() + within_s
    while not done():
        if failed := {name: each for name, each in _statuses().items() if each.status == "DEPLOY_FAILED"}:
            why = next(d.message for each in failed.values() for d in each.deployments.values() if d.message)
            raise ClusterError(f"the cluster cannot be started: {why}", field=next(iter(failed)))
        if time.monotonic() > until:
            said = f"{what} took longer than {within_s:g} s: see `ray logs`, or give cluster.ready_s a larger value"
            raise ClusterError(said, field="cluster.ready_s", limit=within_s)
        time.sleep(LOOK_S)


def _seen(state: State) -> Any:
    with contextlib.suppress(OSError):
        return state.says()


def _has_all(state: State) -> bool:
    seen = _seen(state)
    return seen is not None and seen["ready"] and sum(each["up"] for each in seen["engines"]) >= state.engines


# -- plans


class Planner:
    def __init__(self) -> None:
        configure("text", "info")
        self._planned_at, self._counted = time.monotonic(), Counter[str]()
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        while True:
            try:
                time.sleep(State.stored().file.settings.replan_s)
                state, counts = State.stored(), Counter[str]()
                for each in state.says("/v2/models/stats")["model_stats"]:
                    counts[each["name"]] = sum(each["inference_stats"][kind]["count"] for kind in ("success", "fail"))
                if (found := self.replan(state, counts, time.monotonic())) is not None:
                    change_placement(found, state)
            except Exception as e:  # Ray is shutting down, or no plan is possible
                log.error("planning failed", exc_info=e)
                time.sleep(1.0)

    def replan(self, state: State, counts: Mapping[str, int], now: float) -> Placement | None:
        """Another placement, if the requests since the last call ask for one. `counts`: requests so far, by model."""
        seconds, before = now - self._planned_at, self._counted
        self._planned_at, self._counted = now, Counter(counts)
        asked = {name: counts.get(name, 0) - before[name] for name in state.file.models}
        # An engine that has started anew, or has left, took its counts along
        if not before or min(asked.values()) < 0 or sum(asked.values()) < FEWEST:
            return None
        s = state.file.settings
        profiles = load_profiles(Path(state.file.folder) / str(s.profiles))
        current = tuple(each.models for each in state.groups for _ in range(each.engines))
        rates = {name: max(count / seconds, 0.01) for name, count in asked.items()}
        fleet = Fleet(profiles, rates, len(current), s.memory_gb, s.gpu_gb or math.inf)
        found = plan(fleet, current, sure=math.inf).placement
        return None if Counter(found) == Counter(current) else found


# -- commands


def bring_up(path: Path) -> tuple[str, bool]:
    """Starts a cluster and waits until it is ready. Returns its URL, and whether Ray was started for it.

    After an error nothing is left running.
    """
    file = load_cluster(path)
    started = connect(file)
    with contextlib.ExitStack() as undo:
        if started:
            undo.callback(ray.shutdown)
        check_resources(file, file.settings.engines)
        if is_up():
            said = "a cluster already runs on this Ray: take it down first with `paellapy cluster down`"
            raise ClusterError(said, field="cluster")
        serve.start(proxy_location="Disabled")
        groups = regroup([], first_placement(file, file.settings.engines))
        state = State(file=file, groups=groups, node=ray.util.get_node_ip_address())
        undo.callback(take_down)
        _deploy(state)
        _wait(lambda: _has_all(state), file.settings.ready_s, "the start of the engines")
        undo.pop_all()
    return state.url, started


def apply(path: Path, show: Callable[[list[str]], object], dry_run: bool = False) -> bool:
    """Changes a running cluster into that of another file, one engine after the other. `show` gets the difference
    before anything changes. Returns whether something has changed.
    """
    state = State.stored()
    file = load_cluster(path, state.file.key)
    changes = difference(state.file, file)
    show(changes)
    if not changes or dry_run:
        return False
    engines = file.settings.engines if file.settings.engines != state.file.settings.engines else state.engines
    check_resources(file, engines)
    state.file = file
    change_placement(first_placement(file, engines), state)
    return True


def change_placement(placement: Placement, state: State | None = None) -> None:
    """Moves models. Each is loaded at its new place before it leaves the old one."""
    state = state or State.stored()
    for groups in steps(state.groups, regroup(state.groups, placement)):
        state.groups = groups
        _deploy(state)
        time.sleep(2 * LOOK_S)  # Serve's next look
        within_s = state.file.settings.ready_s * max(1, state.engines)
        _wait(lambda: {each.status for each in _statuses().values()} == {"RUNNING"}, within_s, "the change")


def status() -> dict[str, Any]:
    """Its URL, and what its front door says of it; None: it does not answer."""
    state = State.stored()
    return {"url": state.url, "front_door": _seen(state)}


def _engines() -> list[str]:
    return sorted(replicas.engines())


def scale(engines: int) -> None:
    """Sets the number of engines. New ones are still loading when this returns; engines that leave finish first."""
    if engines < 1:
        said = f"a cluster cannot have {engines} engines: give 1 or more, or use `paellapy cluster down`"
        raise ClusterError(said, field="engines", given=engines)
    state = State.stored()
    check_resources(state.file, engines)
    state.groups = regroup(state.groups, first_placement(state.file, engines))
    _deploy(state)


def drain(engine: str) -> None:
    """Removes that engine after it has finished its requests, and lowers the number of engines by one."""
    state, known = State.stored(), _engines()
    if engine not in known:
        said = f"no engine is named {engine!r}: choose one of {', '.join(known)}"
        raise ClusterError(said, given=engine, limit=known)
    if len(known) == 1:
        said = f"{engine} is the only engine: add another first, or use `paellapy cluster down`"
        raise ClusterError(said, given=engine, limit=known)
    replicas.write(replicas.DRAINS + engine.encode(), b"1")
    _wait(lambda: engine not in _engines(), LEAVE_S, "the drain")
    scale(state.engines - 1)


def is_up() -> bool:
    try:
        State.stored()
    except ClusterError:
        return False
    return True


def take_down() -> None:
    """Ends routers first, then engines; each finishes its requests."""
    State.stored()
    for name in sorted(_statuses(), key=lambda name: name not in (ROUTERS, PLANNER)):
        serve.delete(APP + name)
    replicas.forget(STATE)
    if not serve.status().applications:
        serve.shutdown()
