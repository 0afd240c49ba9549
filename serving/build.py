"""Builds the objects that a configuration describes: an engine, a registry, keys, TLS."""

from __future__ import annotations

import ctypes
import os
import ssl
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, wait
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from paellapy.instrument.device.base import Device
from paellapy.instrument.errors import PaellaError
from paellapy.scheduler.core.codes import OWN_ROWS
from paellapy.scheduler.core.errors import ModelError
from paellapy.scheduler.core.state import Limits
from paellapy.scheduler.engine.engine import Engine
from paellapy.scheduler.engine.pipelines import Pipeline
from paellapy.scheduler.models.model import Model
from paellapy.scheduler.policies.policy import Policy, find_policy
from paellapy.serving.access import Key
from paellapy.serving.config import (
    OF_LANGUAGE_MODELS,
    Config,
    KeyConfig,
    ModelConfig,
    Path_,
    PipelineConfig,
    Source,
    TensorConfig,
    TlsConfig,
)
from paellapy.serving.errors import ConfigError
from paellapy.serving.logs import log
from paellapy.serving.registry import FACTORY_ERRORS, Entry, check_name, find_factory

if TYPE_CHECKING:  # they need packages that only language models need
    from paellapy.scheduler.language.model import LanguageModel

PATIENCE_S = 10.0  # between log lines while a factory works


def build_policy(config: Config, source: Source) -> Policy:
    try:
        return find_policy(_import(config.policy, ("policy",), source) if ":" in config.policy else config.policy)
    except ConfigError:
        raise
    except PaellaError as e:
        raise source.error(("policy",), str(e)) from e


def build_engine(config: Config, source: Source, policy: Policy | None = None) -> Engine:
    """Makes the engine, without models. With workers, it has one producer for each besides its own."""
    policy = policy or build_policy(config, source)
    workers = config.server.workers
    limits = Limits(requests=config.max_queue + (OWN_ROWS if workers else 0), producers=workers + 1)
    try:
        engine = Engine(
            config.device,
            policy,
            config.memory_bytes,
            config.quantum_us,
            config.max_active,
            host_bytes=config.host_bytes,
            sm_partitions=config.sm_partitions,
            limits=limits,
        )
    except PaellaError as e:
        settings = ("sm_partitions", "host_bytes", "quantum_us", "memory_bytes", "max_active")
        named = next((key for key in settings if key in str(e)), "device")
        raise source.error((named,), str(e)) from e
    for name, each in config.tenants.items():
        try:
            engine.tenant(name, each.share, each.limit)
        except PaellaError as e:
            engine.close()
            raise source.error(("tenants", name), str(e)) from e
    return engine


def check_fork(config: Config) -> None:
    """Raises ConfigError if this process has used a GPU: processes forked from it could not use one at all."""
    if config.device.startswith("virtual"):
        return
    try:
        used = ctypes.CDLL("libcuda.so.1").cuCtxGetCurrent(ctypes.byref(ctypes.c_void_p())) == 0
    except OSError:  # no driver, hence no GPU
        return
    if used:
        raise ConfigError(
            "this process has already used the GPU, so the engine cannot be moved to a process of its own: name the "
            "models as factories in a configuration file, or serve with workers = 0"
        )


def has_room_twice(config: Config) -> bool:
    """Whether the device clearly has room for a second copy of its contents. The caller cannot fork afterwards."""
    if config.device.startswith("virtual"):
        return True
    device = Device.open(config.device)
    if device.name.startswith("virtual"):
        return True
    from paellapy.scheduler.backends.cuda_memory import free_and_whole_bytes  # importing it needs a driver

    free, whole = free_and_whole_bytes(device)
    return config.memory_bytes is None and free > 2 * (whole - free)


def build_entries(config: Config, source: Source) -> list[Entry]:
    """Makes one entry per model. Factories are imported now, so that a wrong path is found before the server starts."""
    if not config.models:
        raise source.error(("models",), "no model is configured: add at least one [[models]] table")
    entries: dict[str, Entry] = {}
    for k, each in enumerate(config.models):
        path: Path_ = ("models", k)
        for key in ("factory", "before", "after"):
            if (dotted := getattr(each, key)) is not None:
                _import(dotted, (*path, key), source)
        make: Callable[[], Model | LanguageModel] = partial(make_language_model, each, source.folder)
        if each.factory is not None:
            make = partial(make_model, each, source.folder, config.server.factory_timeout_s)
        if each.name is not None:
            name = each.name
        else:
            try:
                name = make().name
            except FACTORY_ERRORS as e:
                said = str(e) if each.factory is None else f"the factory failed: {type(e).__name__}: {e}"
                raise source.error(path, said) from e
        try:
            check_name(name, entries)
        except ModelError as e:
            raise source.error(path, str(e)) from e
        entries[name] = Entry(name, make, wanted=each.load, factory=each.source)
    return list(entries.values())


def build_pipelines(config: Config, source: Source, models: Iterable[Entry]) -> list[Entry]:
    """One entry per pipeline, to be loaded after these models."""
    known = {entry.name: entry for entry in models}
    made: dict[str, Entry] = {}
    for k, each in enumerate(config.pipelines):
        for at, step in enumerate(each.steps):
            path: Path_ = ("pipelines", k, "steps", at)
            if ":" in step:
                _import(step, path, source)
            elif step not in known:
                raise source.error(path, f"no model is named {step!r}; there are {', '.join(known)}")
        try:
            check_name(each.name, known.keys() | made.keys())
        except ModelError as e:
            raise source.error(("pipelines", k, "name"), str(e)) from e
        made[each.name] = Entry(each.name, partial(make_pipeline, each, source.folder, known))
    return list(made.values())


def make_pipeline(config: PipelineConfig, folder: Path, models: Mapping[str, Entry]) -> Pipeline:
    """The pipeline of models that are loaded."""
    steps: list[Any] = []
    for step in config.steps:
        found = find_factory(step, folder) if ":" in step else models[step].model
        if found is None:
            said = f"pipeline {config.name!r}: model {step!r} is not loaded: {models[step].reason or 'load it first'}"
            raise ModelError(said, model=config.name, field="steps", given=step)
        steps.append(found)
    return Pipeline(
        config.name, steps, takes=_tensors(config.takes), gives=_tensors(config.gives), priority=config.priority,
        workers=config.workers, processes=config.processes,
    )  # fmt: skip


def make_language_model(config: ModelConfig, folder: Path) -> LanguageModel:
    """Reads the shape and the tokenizer of a language model; its weights are read when it is loaded."""
    from paellapy.scheduler.language.model import LanguageModel

    assert config.language_model is not None
    given = config.given((*OF_LANGUAGE_MODELS, "name", "priority", "share", "params", "capture"))
    return LanguageModel(folder / config.language_model, **given)


def make_model(config: ModelConfig, folder: Path, within_s: float) -> Model:
    """Calls the factory, in its present version, and applies the settings of the configuration."""
    assert config.factory is not None
    factory = find_factory(config.factory, folder)
    found = factory
    if not isinstance(factory, Model):
        found = in_time(partial(factory, **config.arguments), config.factory, within_s)
    if not isinstance(found, Model):
        raise ModelError(f"{config.factory} returned a {type(found).__name__}; a factory must return a paellapy Model")
    before, after = (each and find_factory(each, folder) for each in (config.before, config.after))
    return found.changed(
        name=config.name,
        batch=config.batch,
        target_ms=config.target_ms,
        priority=config.priority,
        share=config.share,
        instances=config.instances,
        params=config.params,
        resident=config.resident,
        capture=config.capture,
        before=before,
        after=after,
        takes=_tensors(config.takes),
        gives=_tensors(config.gives),
        workers=config.workers,
        processes=config.processes,
    )


def _tensors(given: Mapping[str, str | TensorConfig] | None) -> dict[str, Any] | None:
    if given is None:
        return None
    return {key: msgspec.structs.asdict(e) if isinstance(e, TensorConfig) else e for key, e in given.items()}


def in_time(factory: Callable[[], Any], name: str, within_s: float) -> Any:
    """What the factory returns. ModelError: it has not returned within the time; its thread is left alone."""
    made: Future[Any] = Future()

    def call() -> None:
        try:
            made.set_result(factory())
        except BaseException as e:  # SystemExit too, which a script raises that parses its arguments
            made.set_exception(e)

    began = time.monotonic()
    threading.Thread(target=call, name="factory", daemon=True).start()
    while (left_s := began + within_s - time.monotonic()) > 0:
        if wait((made,), min(left_s, PATIENCE_S)).done:
            return made.result()
        log.info("a factory has not returned yet", extra={"fields": {"factory": name, "at_most_s": within_s}})
    said = f"{name} has not returned for {within_s:g} s: make it faster, or raise server.factory_timeout_s"
    raise ModelError(said, field="server.factory_timeout_s", limit=within_s)


def build_keys(config: Config, source: Source) -> dict[str, Key]:
    """API keys by name. A value `env:NAME` is read from the environment variable NAME."""
    keys: dict[str, Key] = {}
    names: dict[str, str] = {}  # by secret
    for name, given in config.keys.items():
        made = KeyConfig(key=given) if isinstance(given, str) else given
        value = made.key
        if value.startswith("env:"):
            found = os.environ.get(value[4:])
            if not found:
                raise source.error(("keys", name), f"the environment variable {value[4:]} is not set")
            value = found
        if value.strip() != value or not value.isprintable():
            said = "no header carries this key: leave out blanks at its ends and what cannot be printed"
            raise source.error(("keys", name), said)
        if (other := names.setdefault(value, name)) != name:
            raise source.error(("keys", name), f"{other} has the same key: give each client a key of its own")
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
    """Reads the certificate files into a context. If the context is in use, new connections get the new certificate."""
    key = "certificate"
    try:
        context.load_cert_chain(source.folder / tls.certificate, source.folder / tls.key)
        if tls.client_ca is not None:
            key = "client_ca"
            context.load_verify_locations(source.folder / tls.client_ca)
            context.verify_mode = ssl.CERT_REQUIRED
    except (OSError, ssl.SSLError) as e:
        raise source.error(("tls", key), f"the certificate or its private key cannot be loaded: {e}") from e


def _import(dotted: str, path: Path_, source: Source) -> Any:
    """Imports `package.module:name`, also from the folder of the configuration."""
    try:
        return find_factory(dotted, source.folder)
    except FACTORY_ERRORS as e:
        raise source.error(path, f"{dotted} cannot be imported: {type(e).__name__}: {e}") from e
