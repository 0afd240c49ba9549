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

import secrets
import tomllib
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from paellapy.cluster.plan import Placement
from paellapy.cluster.router import HELD_BYTES
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
    standby: bool = True  # a process beside every engine, ready to take over: 0.3 GB of memory, no GPU memory
    every_ms: Positive = 5.0
    hold_s: Positive = 20.0
    held_mb: Positive = HELD_BYTES / 1e6  # limit of each router, for all requests that are not answered yet
    replan_s: NotNegative = 0.0  # interval at which placement follows the load; 0: never. Needs profiles
    profiles: str | None = None  # file with the models' profiles, for plans
    gpu_gb: Positive | None = None
    memory_gb: dict[str, float] = {}


class ClusterFile(msgspec.Struct, kw_only=True):
    """All facts that engines, routers and the controller need."""

    settings: ClusterSettings
    engine: dict[str, Any]  # settings in the form of `paellapy serve`
    models: list[str]
    folder: str
    key: str | None  # used by the cluster's own parts to reach engines, if clients need keys


def load_cluster(path: Path) -> ClusterFile:
    """Reads a cluster file and imports every model's factory once. Errors name the file and the allowed values."""
    try:
        tree = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as e:
        raise ConfigError(f"{path} cannot be read: {e}") from None
    try:
        settings = msgspec.convert(tree.pop("cluster", {}), ClusterSettings)
    except msgspec.ValidationError as e:
        raise ConfigError(f"{path}: under [cluster]: {e}") from None
    config, source = engine_config(tree, str(path))
    build_policy(config, source)
    models = [each.name for each in build_entries(config, source)]
    for key, named in (("replicas", settings.replicas), ("memory_gb", settings.memory_gb)):
        if unknown := sorted(set(named) - set(models)):
            said = f"[cluster.{key}] names unknown models {', '.join(unknown)}: choose from {', '.join(models)}"
            raise ConfigError(f"{path}: {said}")
    if settings.replan_s and settings.profiles is None:
        raise ConfigError(f"{path}: cluster.replan_s needs cluster.profiles, a file written by pp.save_profiles")
    if config.tls is not None:
        raise ConfigError(f"{path}: [tls]: routers do not support TLS: remove it, and put a proxy with TLS in front")
    keys = build_keys(config, source)
    own = secrets.token_urlsafe(32) if keys else None
    if own is not None:
        if OWN_KEY in keys:
            raise ConfigError(f"{path}: [keys]: {OWN_KEY!r} is reserved for the cluster's own key: choose another name")
        keys[OWN_KEY] = Key(own)
    # Read from the environment here: other nodes have another environment.
    tree["keys"] = {name: {"key": k.secret, "roles": k.roles, "tenant": k.tenant} for name, k in keys.items()}
    folder = str(path.resolve().parent)
    return ClusterFile(settings=settings, engine=tree, models=models, folder=folder, key=own)


def engine_config(tree: dict[str, Any], file: str) -> tuple[Config, Source]:
    """The settings of an engine."""
    try:
        config, _ = load_config(options=tree)
    except ConfigError as e:
        raise ConfigError(f"{file}: {e}") from None
    return config, Source(file, Path(file).read_text() if Path(file).is_file() else "")


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
