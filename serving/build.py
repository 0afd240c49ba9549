"""From a configuration to what it describes: an engine, a registry, keys, TLS."""

from __future__ import annotations

import ctypes
import os
import ssl
from functools import partial
from pathlib import Path
from typing import Any

from paellapy.instrument.device.base import Device
from paellapy.instrument.errors import PaellaError
from paellapy.scheduler.core.codes import OWN_ROWS
from paellapy.scheduler.core.errors import ModelError
from paellapy.scheduler.core.state import Limits
from paellapy.scheduler.engine.engine import Engine
from paellapy.scheduler.models.model import Model
from paellapy.scheduler.policies.policy import Policy, find_policy
from paellapy.serving.access import Key
from paellapy.serving.config import Config, KeyConfig, ModelConfig, Path_, Source, TlsConfig
from paellapy.serving.errors import ConfigError
from paellapy.serving.factories import find_factory
from paellapy.serving.registry import Entry


def build_policy(config: Config, source: Source) -> Policy:
    try:
        return find_policy(_import(config.policy, ("policy",), source) if ":" in config.policy else config.policy)
    except ConfigError:
        raise
    except PaellaError as e:
        raise source.error(("policy",), str(e)) from e


def build_engine(config: Config, source: Source, policy: Policy | None = None) -> Engine:
    """The engine, without models. With workers, a front end for each beside its own."""
    policy = policy or build_policy(config, source)
    workers = config.server.workers
    limits = Limits(requests=config.max_queue + (OWN_ROWS if workers else 0), fronts=workers + 1)
    try:
        engine = Engine(
            config.device,
            policy,
            config.memory_bytes,
            config.quantum_us,
            config.max_active,
            host_bytes=config.host_bytes,
            sm_windows=config.sm_windows,
            limits=limits,
        )
    except PaellaError as e:
        named = next((key for key in ("sm_windows", "host_bytes") if key in str(e)), "device")
        raise source.error((named,), str(e)) from e
    for name, each in config.tenants.items():
        try:
            engine.tenant(name, each.share, each.limit)
        except PaellaError as e:
            engine.close()
            raise source.error(("tenants", name), str(e)) from e
    return engine


def check_fork(config: Config) -> None:
    """A process that has used a GPU cannot hand it on: those forked from it cannot use one at all."""
    if config.device.startswith("virtual"):
        return
    try:
        used = ctypes.CDLL("libcuda.so.1").cuCtxGetCurrent(ctypes.byref(ctypes.c_void_p())) == 0
    except OSError:  # no driver, and so no GPU
        return
    if used:
        raise ConfigError(
            "this process has used the GPU already, so the engine cannot have a process of its own: give the models as "
            "factories in a configuration file, or serve without workers"
        )


def has_room_twice(config: Config) -> bool:
    """Whether the device would clearly hold again what is on it. A process that asks cannot fork any more."""
    if config.device.startswith("virtual"):
        return True
    device = Device.open(config.device)
    if device.name.startswith("virtual"):
        return True
    from paellapy.scheduler.backends.cuda import free_and_whole_bytes  # needs a driver

    free, whole = free_and_whole_bytes(device)
    return config.memory_bytes is None and free > 2 * (whole - free)


def build_entries(config: Config, source: Source) -> list[Entry]:
    """One entry per model. The factories are imported now, so that a wrong path is found before anything starts."""
    if not config.models:
        raise source.error(("models",), "name at least one model")
    entries: dict[str, Entry] = {}
    for k, each in enumerate(config.models):
        path: Path_ = ("models", k)
        _import(each.factory, (*path, "factory"), source)
        make = partial(make_model, each, source.folder)
        if each.name is not None:
            name = each.name
        else:
            try:
                name = make().name
            except Exception as e:
                raise source.error(path, f"the model could not be made: {type(e).__name__}: {e}") from e
        if name in entries:
            raise source.error(path, f"another model is named {name!r} too: give this one a name of its own")
        entries[name] = Entry(name, make, wanted=each.load, factory=each.factory)
    return list(entries.values())


def make_model(config: ModelConfig, folder: Path) -> Model:
    """The factory's model, by its code as it stands now, with what the configuration says otherwise."""
    factory = find_factory(config.factory, folder)
    found = factory if isinstance(factory, Model) else factory(**config.arguments)
    if not isinstance(found, Model):
        raise ModelError(f"{config.factory} gave a {type(found).__name__}, not a Model")

    return found.changed(
        name=config.name,
        batch=config.batch,
        target_ms=config.target_ms,
        priority=config.priority,
        share=config.share,
        lanes=config.lanes,
        params=config.params,
        resident=config.resident,
    )


def build_keys(config: Config, source: Source) -> dict[str, Key]:
    """API keys by name; `env:NAME` is read from the environment."""
    keys = {}
    for name, given in config.keys.items():
        made = KeyConfig(key=given) if isinstance(given, str) else given
        value = made.key
        if value.startswith("env:"):
            found = os.environ.get(value[4:])
            if not found:
                raise source.error(("keys", name), f"the environment has no {value[4:]}")
            value = found
        keys[name] = Key(value, tuple(made.roles), made.tenant)
    return keys


def build_tls(config: Config, source: Source) -> ssl.SSLContext | None:
    if config.tls is None:
        return None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    load_certificates(context, config.tls, source)
    return context


def load_certificates(context: ssl.SSLContext, tls: TlsConfig, source: Source) -> None:
    """Also into a context that is in use: connections from now on are greeted with what the files hold now."""
    key = "certificate"
    try:
        context.load_cert_chain(source.folder / tls.certificate, source.folder / tls.key)
        if tls.client_ca is not None:
            key = "client_ca"
            context.load_verify_locations(source.folder / tls.client_ca)
            context.verify_mode = ssl.CERT_REQUIRED
    except (OSError, ssl.SSLError) as e:
        raise source.error(("tls", key), f"the certificate and its key cannot be loaded: {e}") from e


def _import(dotted: str, path: Path_, source: Source) -> Any:
    """`package.module:name`, also from the folder of the configuration."""
    try:
        return find_factory(dotted, source.folder)
    except Exception as e:
        raise source.error(path, f"{dotted} cannot be imported: {type(e).__name__}: {e}") from e
