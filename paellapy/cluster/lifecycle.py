"""`paellapy cluster …` on Ray: starts a cluster, shows it, changes it, takes it down."""

from __future__ import annotations

import json
import os
import re
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import msgspec

from paellapy.cluster.cluster_file import ClusterFile, load_cluster
from paellapy.cluster.controller import CONTROLLER, NAMESPACE, STORED, Controller
from paellapy.instrument.errors import PaellaError

OLDEST, BEYOND = (2, 40), (3, 0)  # tested from Ray 2.60 on; the calls exist since 2.40

MOST_VIRTUAL = 64
# Settings for a Ray that is started here. By default its workers run at nice 15, so any other process would come
# before them on a busy CPU; and a node is declared dead only after five checks, one every 3 s.
RAY_SETTINGS = {"RAY_worker_niceness": "0", "RAY_health_check_period_ms": "1000"}
BACK_S = 60.0  # for a killed controller to return


class ClusterError(PaellaError):
    """The cluster is not in the required state; the message has the remedy."""


def import_ray() -> Any:
    try:
        import ray
    except ImportError:
        raise ClusterError("`paellapy cluster` needs Ray: pip install 'paellapy[ray]'") from None
    check_version(ray.__version__)
    return ray


def check_version(version: str) -> None:
    """Raises ClusterError unless this version of Ray is supported.

    >>> check_version("2.60.0")
    """
    found = tuple(int(part) for part in re.findall(r"\d+", version)[:2])
    if not OLDEST <= found < BEYOND:
        wanted = f"{OLDEST[0]}.{OLDEST[1]} or newer, below {BEYOND[0]}"
        raise ClusterError(f"Ray {version} is not supported: install {wanted} (pip install 'paellapy[ray]')")


def connect(start: ClusterFile | None = None) -> bool:
    """Joins the running Ray, or starts one here for `start`; returns whether it was started."""
    ray = import_ray()
    if ray.is_initialized():
        return False
    quiet: dict[str, Any] = {"namespace": NAMESPACE, "log_to_driver": False, "logging_level": "error"}
    try:
        ray.init(address="auto", **quiet)
        return False
    except ConnectionError:
        if start is None:
            said = "no Ray runs here: start one with `paellapy cluster serve FILE` or `ray start --head`"
            raise ClusterError(said) from None
    for name, value in RAY_SETTINGS.items():
        os.environ.setdefault(name, value)
    s = start.settings
    is_virtual = str(start.engine.get("device", "")).startswith("virtual")
    # Virtual GPUs cost nothing, so there is room to scale
    number = max(s.engines, MOST_VIRTUAL) if is_virtual else s.engines
    own = {} if s.resource == "GPU" else {"resources": {s.resource: float(number)}}
    ray.init(include_dashboard=False, **own, **quiet)
    return True


def _controller() -> Any:
    ray = import_ray()
    try:
        return ray.get_actor(CONTROLLER, namespace=NAMESPACE)
    except ValueError:
        raise ClusterError("no cluster is running on this Ray: start one with `paellapy cluster serve FILE`") from None


def _ask(what: str, *arguments: Any, within_s: float = BACK_S) -> Any:
    """The controller's answer. It waits while Ray restarts the controller, since every call may safely be repeated."""
    ray, until = import_ray(), time.monotonic() + within_s
    while True:
        try:
            return ray.get(getattr(_controller(), what).remote(*arguments))
        except ray.exceptions.RayActorError:
            if time.monotonic() > until:
                raise ClusterError(f"the controller did not return within {within_s:g} s: see Ray's logs") from None
            time.sleep(0.2)


def bring_up(path: Path) -> tuple[str, bool]:
    """Starts a cluster and waits until it is ready. Returns its URL, and whether Ray was started for it.

    After an error nothing is left running.
    """
    file = load_cluster(path)
    started = connect(file)
    ray = import_ray()
    try:
        check_resources(file.settings.resource, file.settings.engines)
        try:
            ray.get_actor(CONTROLLER, namespace=NAMESPACE)
        except ValueError:
            pass
        else:
            raise ClusterError("a cluster already runs on this Ray: take it down first with `paellapy cluster down`")
        from ray.experimental.internal_kv import _internal_kv_del

        _internal_kv_del(STORED)  # left by a cluster that was not taken down
        options = {
            "name": CONTROLLER, "namespace": NAMESPACE, "lifetime": "detached", "max_restarts": -1, "num_cpus": 0,
            "max_concurrency": 8,
        }  # fmt: skip
        here = ray.get_runtime_context().get_node_id()
        ray.remote(Controller).options(**options).remote(msgspec.to_builtins(file), here)
        try:
            return _wait_ready(file), started
        except BaseException:
            take_down()
            raise
    except BaseException:
        if started:
            ray.shutdown()
        raise


def check_resources(resource: str, engines: int) -> None:
    have = import_ray().cluster_resources().get(resource, 0.0)
    if have < engines:
        remedy = (
            'add nodes, ask for fewer engines, or set device = "virtual:h200" and cluster.resource = "virtual_gpu"'
            if resource == "GPU"
            else f"give nodes the resource, as in ray start --resources='{{\"{resource}\": 1}}'"
        )
        raise ClusterError(f"Ray has {have:g} {resource}, but {engines} engines need one each: {remedy}")


def _wait_ready(file: ClusterFile) -> str:
    until = time.monotonic() + file.settings.ready_s
    status: dict[str, Any] = {}
    while time.monotonic() < until:
        status = _ask("status")
        has_all = all(status["engines"].values()) and len(status["routers"]) == file.settings.routers
        if has_all and _is_placed(status, file.key):
            return str(status["url"])
        if status["why"]:
            break
        time.sleep(0.2)
    if status.get("why"):
        why = "; ".join(f"{where}: {said}" for where, said in status["why"].items())
        raise ClusterError(f"the cluster cannot be started: {why}")
    engines = status.get("engines", {})
    away = [name for name, said in engines.items() if not said]
    starts = max((said["starts"] for said in engines.values() if said), default=0)
    said = f"{', '.join(away)} found no free node" if away else f"its server was started {starts} times"
    limit_s = file.settings.ready_s
    raise ClusterError(f"an engine was not ready within {limit_s:g} s ({said}): see Ray's logs of its actor")


def _is_placed(status: dict[str, Any], key: str | None) -> bool:
    """Whether every engine has its wanted models, as seen by the front door."""
    try:
        seen = front_door(status["url"], key)
    except OSError:
        return False
    states = {each["name"]: each["models"] for each in seen["engines"] if each["up"]}
    return all(
        states.get(name, {}).get(model, {}).get("state") == "READY"
        for name, models in status["placement"].items()
        for model in models
    )


def front_door(url: str, key: str | None = None) -> dict[str, Any]:
    request = urllib.request.Request(f"{url}/v2/cluster", headers={} if key is None else {"X-API-Key": key})
    with urllib.request.urlopen(request, timeout=2.0) as answer:
        found: dict[str, Any] = json.load(answer)
        return found


def status() -> dict[str, Any]:
    """The controller's wanted state, and the state seen by the front door."""
    found: dict[str, Any] = _ask("status")
    try:
        found["front_door"] = front_door(found["url"], _ask("key"))
    except (OSError, urllib.error.URLError):
        found["front_door"] = None
    return found


def scale(engines: int) -> list[str]:
    """Sets the number of engines; returns their names. New ones are still loading; those that leave have finished."""
    if engines < 1:
        raise ClusterError(f"a cluster cannot have {engines} engines: give 1 or more, or use `paellapy cluster down`")
    check_resources(_ask("status")["resource"], engines)
    names: list[str] = _ask("scale", engines)
    return names


def drain(engine: str) -> None:
    known = _ask("status")["engines"]
    if engine not in known:
        raise ClusterError(f"no engine is named {engine!r}: choose one of {', '.join(known)}")
    if len(known) == 1:
        raise ClusterError(f"{engine} is the only engine: add another first, or use `paellapy cluster down`")
    _ask("drain", engine)


def is_up() -> bool:
    """Whether a cluster is on this Ray, even if its controller is just being restarted."""
    try:
        _controller()
    except ClusterError:
        return False
    return True


def take_down() -> None:
    """Ends routers first, then engines; each finishes its requests."""
    _ask("stop")
    import_ray().kill(_controller())
