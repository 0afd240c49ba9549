"""A running server applies its changed configuration: on SIGHUP, or after `paellapy reload config.toml`.

Models, keys, certificates and the policy can change. Settings that need a restart are reported and stay as they are.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import ssl
import tempfile
import threading
import time
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paellapy.instrument.errors import PaellaError
from paellapy.scheduler.core.errors import ModelError
from paellapy.scheduler.models.model import Model
from paellapy.serving.access import Access
from paellapy.serving.build import build_entries, build_keys, build_policy, build_tls, load_certificates
from paellapy.serving.config import Config, ModelConfig, Source
from paellapy.serving.errors import ConfigError
from paellapy.serving.logs import log
from paellapy.serving.preflight import born, is_alive
from paellapy.serving.registry import Entry, Registry, code_number, made

if TYPE_CHECKING:  # they need packages that only language models need
    from paellapy.scheduler.language.model import LanguageModel

GONE = "it was removed from the configuration"
PATIENCE_S = 120.0
FIXED = ("device", "quantum_us", "max_active", "sm_partitions", "memory_bytes", "host_bytes", "max_queue", "server",
         "tenants")  # fmt: skip


def check_file(config: Config, source: Source) -> None:
    """Raises PaellaError for a file that `Reloader` would refuse."""
    if config.models:
        build_entries(config, source)
    build_policy(config, source)
    check_secrets(config, source)


def check_secrets(config: Config, source: Source) -> None:
    """Raises PaellaError for keys and certificates that cannot be read."""
    build_keys(config, source)
    build_tls(config, source)


async def reload_secrets(source: Source, access: Access, tls: ssl.SSLContext | None) -> None:
    """Applies the file's keys and certificates to new connections; a wrong file changes nothing."""
    try:
        config, source = source.again()
        await asyncio.to_thread(check_file, config, source)
        if access.has_keys:
            keys = build_keys(config, source)
            if not keys:
                said = "the file has no [keys] any more: only a restart opens this server to all"
                raise ConfigError(said, field="keys")
            access.set_keys(keys)
        if tls is not None and config.tls is not None:
            load_certificates(tls, config.tls, source)
    except PaellaError as e:
        log.error("keys and certificates are unchanged", extra={"fields": {"error": str(e)}})


class Reloader:
    """Applies a new configuration to a registry. `again` of the source reads the file."""

    def __init__(self, registry: Registry, config: Config, source: Source) -> None:
        self._registry, self._config, self._source = registry, config, source
        self._at_start = config
        self._authorities = _authorities(config, source)
        names = [name for name, entry in registry.entries.items() if entry.factory]
        self._models = dict(zip(names, config.models, strict=True))  # each model's settings in the file
        self._reloading = threading.Lock()

    def reload(self) -> dict[str, Any]:
        """Applies the file, blocking while models load, and reports the changes. A wrong file changes nothing. Calls
        from several threads wait for each other.
        """
        with self._reloading:
            try:
                return self._reload()
            except Exception as e:  # else `paellapy reload` would wait for an outcome
                log.error("the reload failed", exc_info=e)
                return self._note({"error": f"the reload failed: {type(e).__name__}: {e}"})

    def _reload(self) -> dict[str, Any]:
        told: dict[str, Any] = {}
        try:
            config, source = self._source.again()
            entries = {each.name: each for each in build_entries(config, source)} if config.models else {}
            policy = build_policy(config, source) if config.policy != self._config.policy else None
            check_secrets(config, source)
            before, after = self._models, dict(zip(entries, config.models, strict=True))
            changed = {name: each for name, each in entries.items() if self._differs(each, after[name])}
            models = {name: made(each) for name, each in changed.items() if each.wanted or self._is_loaded(name)}
        except PaellaError as e:
            log.error("not reloaded", extra={"fields": {"error": str(e)}})
            return self._note({"error": str(e)})
        if needs := self._needs_restart(config, source):
            told["needs a restart"] = needs
        if policy is not None:
            self._registry.engine.set_policy(policy)
            told["policy"] = policy.name
        for name in before.keys() - after.keys():
            told.setdefault("unloaded", []).append(name)
            entry = self._registry.find(name)
            entry.make = _gone
            self._registry.unload(name)
            entry.reason = GONE
        for name, each in changed.items():
            known = self._registry.entries.get(name)
            if known is None:
                self._registry.add(each)
            else:
                known.make, known.factory = each.make, each.factory
                known.code = each.code if name in models else known.code
            if name in models:
                self._load(name, models[name], told)
        self._config, self._source, self._models = config, source, after
        self._registry.tell()
        log.info("reloaded", extra={"fields": told})
        return self._note(told)

    def _needs_restart(self, config: Config, source: Source) -> list[str]:
        """The settings of the file that this server does not have, and does not get by a reload."""
        start = self._at_start
        needs = [name for name in FIXED if getattr(config, name) != getattr(start, name)]
        needs += [name for name in ("keys", "tls") if bool(getattr(config, name)) != bool(getattr(start, name))]
        if config.tls is not None and start.tls is not None and _authorities(config, source) != self._authorities:
            needs.append("tls.client_ca")  # authorities that are gone stay trusted
        return needs

    def _differs(self, entry: Entry, settings: ModelConfig) -> bool:
        """Whether the server has no such model, or one with other settings or of older code."""
        known = self._registry.entries.get(entry.name)
        same = known is not None and self._models.get(entry.name) == settings
        return not same or known is None or known.code != code_number(entry.factory)

    def _is_loaded(self, name: str) -> bool:
        known = self._registry.entries.get(name)
        return known is not None and known.loaded is not None

    def _load(self, name: str, model: Model | LanguageModel, told: dict[str, Any]) -> None:
        try:
            self._registry.load(name, model)
            told.setdefault("loaded", []).append(name)
        except PaellaError as e:
            told.setdefault("could not be loaded", {})[name] = str(e)

    def _note(self, told: dict[str, Any]) -> dict[str, Any]:
        if self._source.name:
            try:
                write_outcome(self._source.name, told)
            except (OSError, ConfigError) as e:
                log.warning("`paellapy reload` will not hear of this", extra={"fields": {"error": str(e)}})
        return told


def _authorities(config: Config, source: Source) -> bytes | None:
    """The authorities of clients' certificates, as their file has them."""
    if config.tls is None or config.tls.client_ca is None:
        return None
    with contextlib.suppress(OSError):
        return (source.folder / config.tls.client_ca).read_bytes()
    return b""


def _gone() -> Model:
    raise ModelError(GONE)


# -- which process serves which file


def _path(file: str | Path, suffix: str) -> Path:
    given = os.environ.get("XDG_RUNTIME_DIR", "")  # inherited from another session, it may name a folder that is gone
    folder = Path(given if os.path.isdir(given) else tempfile.gettempdir()) / f"paellapy-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.stat().st_uid != os.getuid():
        raise ConfigError(f"{folder} belongs to another user: set XDG_RUNTIME_DIR to a folder of your own")
    return folder / f"{sha256(str(Path(file).resolve()).encode()).hexdigest()[:16]}.{suffix}"


@contextlib.contextmanager
def noted(source: Source) -> Iterator[None]:
    """Notes, while inside, that this process serves the file, so that `ask_to_reload` finds it."""
    if not source.name:
        yield
        return
    note, path = json.dumps([os.getpid(), born(os.getpid())]), None
    try:
        path = _path(source.name, "pid")
        path.write_text(note)
    except (OSError, ConfigError) as e:
        log.warning("`paellapy reload` will not find this server", extra={"fields": {"error": str(e)}})
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            if path is not None and path.read_text() == note:  # else a newer server has the file
                path.unlink()


def write_outcome(file: str, told: dict[str, Any]) -> None:
    path = _path(file, "said")
    new = path.with_suffix(".new")
    new.write_text(json.dumps(told))
    os.replace(new, path)


def ask_to_reload(file: Path) -> dict[str, Any]:
    """Makes the server of a file reload it; returns the changes. ConfigError: no server has it, or none answers."""
    try:
        pid, since = json.loads(_path(file, "pid").read_text())
        running = is_alive(pid, since)
    except (OSError, ValueError):
        running = False
    if not running:
        raise ConfigError(f"no server of this user uses {file}: start one with `paellapy serve {file}`", field="file")
    said = _path(file, "said")
    said.unlink(missing_ok=True)
    os.kill(pid, signal.SIGHUP)
    end = time.monotonic() + PATIENCE_S
    while time.monotonic() < end:
        if said.exists():
            found: dict[str, Any] = json.loads(said.read_text())
            return found
        time.sleep(0.05)
    raise ConfigError(f"the server (process {pid}) has not answered for {PATIENCE_S:.0f} s: see its log")
