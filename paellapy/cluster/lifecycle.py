"""`paellapy cluster …` on Ray: bring a cluster up, look at it, change it, take it down."""

from __future__ import annotations

import json
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

OLDEST, BEYOND = (2, 40), (3, 0)  # Ray's versions that were tried are from 2.60 on; the calls are there since 2.40

BACK_S = 30.0  # for a controller that was killed to be there again


class ClusterError(PaellaError):
    """The cluster is not as it should be; the message has the remedy."""


def import_ray() -> Any:
    try:
        import ray
    except ImportError:
        raise ClusterError("this needs Ray: pip install 'paellapy[ray]'") from None
    check_version(ray.__version__)
    return ray


def check_version(version: str) -> None:
    """
    >>> check_version("2.60.0")
    """
    found = tuple(int(part) for part in re.findall(r"\d+", version)[:2])
    if not OLDEST <= found < BEYOND:
        wanted = f"{OLDEST[0]}.{OLDEST[1]} or newer, below {BEYOND[0]}"
        raise ClusterError(f"Ray {version} does not fit: install one of {wanted} (pip install 'paellapy[ray]')")


def connect(start: ClusterFile | None = None) -> bool:
    """Joins the Ray that runs, or starts one here for `start`; True: it was started."""
    ray = import_ray()
    if ray.is_initialized():
        return False
    quiet: dict[str, Any] = {"namespace": NAMESPACE, "log_to_driver": False, "logging_level": "warning"}
    try:
        ray.init(address="auto", **quiet)
        return False
    except ConnectionError:
        if start is None:
            said = "no Ray runs here: `paellapy cluster serve FILE` starts one, or `ray start --head`"
            raise ClusterError(said) from None
    s = start.settings
    own = {} if s.resource == "GPU" else {"resources": {s.resource: float(s.engines)}}
    ray.init(include_dashboard=False, **own, **quiet)
    return True


def _controller() -> Any:
    ray = import_ray()
    try:
        return ray.get_actor(CONTROLLER, namespace=NAMESPACE)
    except ValueError:
        raise ClusterError("no cluster runs on this Ray: start one with `paellapy cluster serve FILE`") from None


def _ask(what: str, *arguments: Any, within_s: float = BACK_S) -> Any:
    """What the controller says. One that Ray is just starting again is waited for: all it does may be asked twice."""
    ray, until = import_ray(), time.monotonic() + within_s
    while True:
        try:
            return ray.get(getattr(_controller(), what).remote(*arguments))
        except ray.exceptions.RayActorError:
            if time.monotonic() > until:
                raise ClusterError(f"the controller does not come back within {within_s:g} s: see Ray's logs") from None
            time.sleep(0.2)


def bring_up(path: Path) -> tuple[str, bool]:
    """A cluster that is ready: its URL, and whether Ray was started for it. On an error nothing is left running."""
    file = load_cluster(path)
    started = connect(file)
    ray = import_ray()
    try:
        _check_resources(ray, file)
        try:
            ray.get_actor(CONTROLLER, namespace=NAMESPACE)
        except ValueError:
            pass
        else:
            raise ClusterError("a cluster runs on this Ray already: take it down first, with `paellapy cluster down`")
        from ray.experimental.internal_kv import _internal_kv_del

        _internal_kv_del(STORED)  # of a cluster that was not taken down
        options = {
            "name": CONTROLLER, "namespace": NAMESPACE, "lifetime": "detached", "max_restarts": -1, "num_cpus": 0,
            "max_concurrency": 8,
        }  # fmt: skip
        ray.remote(Controller).options(**options).remote(msgspec.to_builtins(file))
        try:
            return _wait_ready(file), started
        except BaseException:
            take_down()
            raise
    except BaseException:
        if started:
            ray.shutdown()
        raise


def _check_resources(ray: Any, file: ClusterFile) -> None:
    s = file.settings
    have = ray.cluster_resources().get(s.resource, 0.0)
    if have < s.engines:
        remedy = (
            'add nodes, ask for fewer engines, or set device = "virtual:h200" and cluster.resource = "virtual_gpu"'
            if s.resource == "GPU"
            else f'give nodes the resource, as in ray start --resources=\'{{"{s.resource}": 1}}\''
        )
        raise ClusterError(f"Ray has {have:g} of {s.resource}, and {s.engines} engines need one each: {remedy}")


def _wait_ready(file: ClusterFile) -> str:
    until = time.monotonic() + file.settings.ready_s
    status: dict[str, Any] = {}
    while time.monotonic() < until:
        status = _ask("status")
        if all(status["engines"].values()) and _is_placed(status):
            return str(status["url"])
        if status["why"]:
            break
        time.sleep(0.2)
    why = "; ".join(f"{where}: {said}" for where, said in status.get("why", {}).items())
    away = [name for name, said in status.get("engines", {}).items() if not said]
    starts = max((said["starts"] for said in status.get("engines", {}).values() if said), default=0)
    said = why or (f"{', '.join(away)} found no node" if away else f"its server was started {starts} times")
    limit_s = file.settings.ready_s
    raise ClusterError(f"an engine did not get ready within {limit_s:g} s ({said}): see Ray's logs of its actor")


def _is_placed(status: dict[str, Any]) -> bool:
    """Every engine has what it is to have, as the front door sees it."""
    try:
        seen = front_door(status["url"])
    except OSError:
        return False
    states = {each["name"]: each["models"] for each in seen["engines"] if each["up"]}
    return all(
        states.get(name, {}).get(model, {}).get("state") == "READY"
        for name, models in status["placement"].items()
        for model in models
    )


def front_door(url: str) -> dict[str, Any]:
    with urllib.request.urlopen(f"{url}/v2/cluster", timeout=2.0) as answer:
        found: dict[str, Any] = json.load(answer)
        return found


def status() -> dict[str, Any]:
    """What the controller wants, and what the front door sees."""
    found: dict[str, Any] = _ask("status")
    try:
        found["front_door"] = front_door(found["url"])
    except (OSError, urllib.error.URLError):
        found["front_door"] = None
    return found


def scale(engines: int) -> list[str]:
    if engines < 1:
        raise ClusterError(f"{engines} engines: give one or more, or take the cluster down")
    names: list[str] = _ask("scale", engines)
    return names


def drain(engine: str) -> None:
    known = _ask("status")["engines"]
    if engine not in known:
        raise ClusterError(f"there is no engine {engine!r}: there are {', '.join(known)}")
    _ask("drain", engine)


def take_down() -> None:
    """Routers first, then engines, each finishing what it has."""
    _ask("stop")
    import_ray().kill(_controller())
