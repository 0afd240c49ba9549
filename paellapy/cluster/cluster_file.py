"""The cluster file: the settings of `paellapy serve`, and a table `[cluster]` with those of several engines.

device = "cuda"                # "virtual:h200" with resource = "virtual_gpu"
[cluster]
engines = 4
port = 8000
[cluster.replicas]             # number of engines with the model; others are on every engine
mlp = 2
[[models]]
factory = "paellapy.demo:load"
arguments = { name = "mlp" }
"""

from __future__ import annotations

import hashlib
import inspect
import ipaddress
import secrets
import sys
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from paellapy.cluster.processes import free_port
from paellapy.cluster.router import HELD_BYTES
from paellapy.instrument.errors import PaellaError
from paellapy.instrument.gpu_model.parts import part
from paellapy.scheduler.core.profiles import load_profiles
from paellapy.scheduler.sim.plan import Placement
from paellapy.serving.access import Key
from paellapy.serving.build import build_entries, build_keys, build_policy
from paellapy.serving.config import Config, NotNegative, Positive, Source, load_config
from paellapy.serving.errors import ConfigError

Count = Annotated[int, Meta(ge=1)]
OWN_KEY = "paellapy-cluster"


class ClusterSettings(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    engines: Count = 1
    routers: Count = 1
    host: str = "127.0.0.1"  # address of the front door
    port: Annotated[int, Meta(ge=1, le=65535)] = 8000
    engine_host: str = "node"  # "node": engines listen on their node's address; "127.0.0.1" if all run on one machine
    resource: str = "GPU"  # Ray resource of which each engine takes one: GPU, or a name of your own
    replicas: dict[str, Count] = {}
    ready_s: Positive = 300.0  # limit of an engine's start
    hung_s: Positive = 5.0  # an engine silent this long is restarted; routers avoid it after 0.6 s
    max_engines: Count | None = None  # engines are added up to this number while predictions are above the target
    target_lateness_s: Positive = 0.05  # predicted time of a new request
    every_ms: Positive = 5.0
    hold_s: Positive = 20.0
    held_mb: Positive = HELD_BYTES / 1e6  # limit of each router, for all requests that are not answered yet
    replan_s: NotNegative = 0.0  # interval at which placement follows the load; 0: never. Needs profiles
    profiles: str | None = None  # file with the models' profiles, for plans
    gpu_gb: Positive | None = None
    memory_gb: dict[str, float] = {}


class ClusterFile(msgspec.Struct, kw_only=True):
    settings: ClusterSettings
    engine: dict[str, Any]  # settings in the form of `paellapy serve`
    models: list[str]
    folder: str
    key: str | None = None  # used by the cluster's own parts to reach engines, if clients need keys
    code: dict[str, str] = {}  # digest of each factory's module, which shows that a model has changed


def load_cluster(path: Path, key: str | None = None) -> ClusterFile:
    """Reads a cluster file and imports every model's factory once, so that a wrong file starts nothing. Errors name the
    file and the allowed values. `key`: the own key of the cluster that the file is for, if it runs.
    """
    try:
        text = path.read_text(encoding="utf-8")
        tree = tomllib.loads(text)
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as e:
        raise ConfigError(f"{path} cannot be read: {e}") from None
    try:
        settings = msgspec.convert(tree.pop("cluster", {}), ClusterSettings)
        config, _ = load_config(options=tree)
    except (msgspec.ValidationError, ConfigError) as e:
        raise ConfigError(f"{path}: {'' if isinstance(e, ConfigError) else 'under [cluster]: '}{e}") from None
    source = Source(str(path), text)
    build_policy(config, source)
    models = [each.name for each in build_entries(config, source)]
    keys = build_keys(config, source)
    own = (key or secrets.token_urlsafe(32)) if keys else None
    _check(path, settings, config, models, keys)
    if own is not None:
        keys[OWN_KEY] = Key(own)
    # Read from the environment here: other nodes have another environment.
    tree["keys"] = {name: {"key": k.secret, "roles": sorted(k.roles), "tenant": k.tenant} for name, k in keys.items()}
    code = {each.factory: _digest(each.factory) for each in config.models if each.factory}
    folder = str(path.resolve().parent)
    return ClusterFile(settings=settings, engine=tree, models=models, folder=folder, key=own, code=code)


def _digest(factory: str) -> str:
    module = sys.modules.get(factory.partition(":")[0])
    try:
        return hashlib.sha256(inspect.getsource(module).encode()).hexdigest()[:12] if module else ""
    except (OSError, TypeError):  # no Python source
        return ""


def _check(path: Path, s: ClusterSettings, config: Config, models: list[str], keys: Mapping[str, Key]) -> None:
    def wrong(field: str, given: object, said: str) -> ConfigError:
        return ConfigError(f"{path}: {field} = {given!r}: {said}", field=field, given=given)

    for field, named in (("cluster.replicas", s.replicas), ("cluster.memory_gb", s.memory_gb)):
        if unknown := sorted(set(named) - set(models)):
            raise wrong(field, unknown, f"there are no such models: choose from {', '.join(models)}")
    if config.tls is not None:
        said = "routers do not support TLS: remove [tls], and put a proxy with TLS in front"
        raise wrong("tls", config.tls.certificate, said)
    if OWN_KEY in keys:
        raise wrong("keys", OWN_KEY, "this name is reserved for the cluster's own key: choose another")
    if config.device.startswith("virtual:"):
        try:
            part(config.device.partition(":")[2])
        except PaellaError as e:
            raise wrong("device", config.device, str(e)) from None
    if s.engine_host != "node":
        try:
            ipaddress.ip_address(s.engine_host)
            free_port(s.engine_host)
        except (OSError, ValueError):
            said = 'engines cannot listen there: give "node", or an address of this machine if all run on it'
            raise wrong("cluster.engine_host", s.engine_host, said) from None
    if s.max_engines is not None and (s.max_engines < s.engines or s.replicas or s.replan_s):
        said = f"give at least the {s.engines} engines, and neither replicas nor replan_s"
        raise wrong("cluster.max_engines", s.max_engines, said)
    if s.profiles is None:
        if s.replan_s:
            raise wrong("cluster.replan_s", s.replan_s, "it needs cluster.profiles, a file written by pp.save_profiles")
        return
    try:
        known = {each.name for each in load_profiles(path.resolve().parent / s.profiles)}
    except (PaellaError, OSError) as e:
        raise wrong("cluster.profiles", s.profiles, str(e)) from None
    if missing := sorted(set(models) - known):
        raise wrong("cluster.profiles", s.profiles, f"it has no profile of {', '.join(missing)}")


def first_placement(file: ClusterFile, engines: int) -> Placement:
    """Every engine has every model, except models with `replicas`, which are distributed in turn."""
    placed: list[list[str]] = [[] for _ in range(engines)]
    turn = 0
    for name in file.models:
        wanted = min(engines, file.settings.replicas.get(name, engines))
        for k in range(wanted):
            placed[(turn + k) % engines].append(name)
        turn += wanted % engines
    return tuple(tuple(sorted(each)) for each in placed)


def difference(old: ClusterFile, new: ClusterFile) -> list[str]:
    """What changes from one file to another, a line each; keys are not shown.

    >>> a = ClusterFile(settings=ClusterSettings(), engine={"policy": "paella"}, models=[], folder="")
    >>> difference(a, ClusterFile(settings=ClusterSettings(engines=2), engine={"policy": "srpt"}, models=[], folder=""))
    ['cluster.engines: 1 -> 2', 'policy: "paella" -> "srpt"']
    """
    before, after = (
        _flat({"cluster": msgspec.to_builtins(each.settings), "code": each.code, **each.engine}) for each in (old, new)
    )
    changed = {
        name: f"{before.get(name, 'none')} -> {after.get(name, 'none')}"
        for name in sorted({*before, *after})
        if before.get(name) != after.get(name)
    }
    return [f"{name}: {'changed' if name.startswith('keys.') else each}" for name, each in changed.items()]


def _flat(tree: Any, name: str = "") -> dict[str, str]:
    if not isinstance(tree, dict | list):
        return {name.removeprefix("."): msgspec.json.encode(tree, enc_hook=str).decode()}
    each = tree.items() if isinstance(tree, dict) else enumerate(tree)
    inner = "{}.{}" if isinstance(tree, dict) else "{}[{}]"
    return {leaf: text for key, value in each for leaf, text in _flat(value, inner.format(name, key)).items()}
