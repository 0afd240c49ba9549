"""The cluster file: the settings of `paellapy serve`, and a table `[cluster]` about engines and routers.

device = "cuda"                # "virtual:h200" with resource = "virtual_gpu"
[cluster]
engines = 4
port = 8000
[cluster.replicas]             # a model that is not named is on every engine
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
from paellapy.serving.access import Key
from paellapy.serving.build import build_entries, build_keys, build_policy
from paellapy.serving.config import Config, Source, load_config
from paellapy.serving.errors import ConfigError

Count = Annotated[int, Meta(ge=1)]
Positive = Annotated[float, Meta(gt=0)]
OWN_KEY = "paellapy-cluster"


class ClusterSettings(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    engines: Count = 1
    routers: Count = 1
    host: str = "127.0.0.1"  # of the front door
    port: Annotated[int, Meta(ge=1, le=65535)] = 8000
    engine_host: str = "node"  # engines listen on their node's address; or "127.0.0.1" where all are on one machine
    resource: str = "GPU"  # what a Ray node has one of for every engine: GPU, or a name of your own
    replicas: dict[str, Count] = {}
    ready_s: Positive = 300.0  # an engine that is not ready after so long will not be
    hung_s: Positive = 5.0  # an engine that says nothing for so long is started again; routers avoid it after 0.6 s
    standby: bool = True  # a process beside every engine, ready to take over: 0.3 GB of memory, none of the GPU's
    every_ms: Positive = 5.0
    hold_s: Positive = 20.0
    replan_s: float = 0.0  # how often placement follows the load; 0: never. Needs profiles
    profiles: str | None = None  # of the models, for plans
    gpu_gb: Positive | None = None
    memory_gb: dict[str, float] = {}


class ClusterFile(msgspec.Struct, kw_only=True):
    """All that engines, routers and the controller are told."""

    settings: ClusterSettings
    engine: dict[str, Any]  # as `paellapy serve` has it
    models: list[str]
    folder: str
    key: str | None  # that the cluster's own parts show to engines, where clients need keys


def load_cluster(path: Path) -> ClusterFile:
    """Errors name the file and what belongs there; every model's factory is imported once."""
    try:
        tree = tomllib.loads(path.read_text())
    except (OSError, tomllib.TOMLDecodeError) as e:
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
            said = f"[cluster.{key}] names {', '.join(unknown)}: the models are {', '.join(models)}"
            raise ConfigError(f"{path}: {said}")
    if settings.replan_s and settings.profiles is None:
        raise ConfigError(f"{path}: cluster.replan_s needs cluster.profiles, a file that pp.save_profiles has written")
    if config.tls is not None:
        raise ConfigError(f"{path}: [tls]: routers do not speak TLS: leave it out, and put a proxy that does in front")
    keys = build_keys(config, source)
    own = secrets.token_urlsafe(32) if keys else None
    if own is not None:
        if OWN_KEY in keys:
            raise ConfigError(f"{path}: [keys]: {OWN_KEY!r} is the name of the cluster's own key: take another")
        keys[OWN_KEY] = Key(own)
    # Read from the environment here: that of other nodes has nothing of it.
    tree["keys"] = {name: {"key": k.secret, "roles": k.roles, "tenant": k.tenant} for name, k in keys.items()}
    folder = str(path.resolve().parent)
    return ClusterFile(settings=settings, engine=tree, models=models, folder=folder, key=own)


def engine_config(tree: dict[str, Any], file: str) -> tuple[Config, Source]:
    """An engine's own part."""
    try:
        config, _ = load_config(defaults=tree)
    except ConfigError as e:
        raise ConfigError(f"{file}: {e}") from None
    return config, Source(file, Path(file).read_text() if Path(file).is_file() else "")


def first_placement(file: ClusterFile, engines: int) -> Placement:
    """Every engine has every model, but those with `replicas`: they are dealt out in turn."""
    placed: list[list[str]] = [[] for _ in range(engines)]
    turn = 0
    for name in file.models:
        wanted = min(engines, file.settings.replicas.get(name, engines))
        for k in range(wanted):
            placed[(turn + k) % engines].append(name)
        turn += wanted % engines
    return tuple(tuple(sorted(each)) for each in placed)
