"""A running server applies its changed configuration: on SIGHUP, or after `paellapy reload config.toml`.

Models, keys, certificates and the policy can change. Settings that need a restart are reported and stay as they are.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import ssl
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from paellapy.instrument.errors import PaellaError
from paellapy.scheduler.core.errors import ModelError
from paellapy.scheduler.engine.pipelines import Served
from paellapy.scheduler.models.model import Model
from paellapy.scheduler.policies.policy import Policy
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
         "tenants", "pipelines")  # fmt: skip


def check_secrets(config: Config, source: Source, at_start: Config) -> None:
    """Raises PaellaError for keys and certificates that cannot be read, or that only a restart could take."""
    keys = build_keys(config, source)
    if at_start.keys and not keys:
        raise ConfigError("the file has no [keys] any more: only a restart opens this server to all", field="keys")
    build_tls(config, source)


def take_secrets(config: Config, source: Source, access: Access, tls: ssl.SSLContext | None) -> None:
    """Applies keys and certificates, which have been checked, to new requests and connections."""
    if tls is not None and config.tls is not None:
        load_certificates(tls, config.tls, source)
    if access.has_keys:
        access.set_keys(build_keys(config, source))


@dataclass(frozen=True, slots=True)
class _Change:
    """A configuration that is ready to be taken: `settings` by model, the entries that differ, and their models."""

    config: Config
    source: Source
    policy: Policy | None
    settings: dict[str, ModelConfig]
    changed: dict[str, Entry]
    models: dict[str, Served | LanguageModel]


class Reloader:
    """Applies a new configuration to a registry: all of it, or nothing. `again` of the source reads the file."""

    def __init__(
        self,
        registry: Registry,
        config: Config,
        source: Source,
        secrets: Callable[[Config, Source], None] = lambda config, source: None,
    ) -> None:
        """`secrets` takes keys and certificates, or tells the processes that use them."""
        self._registry, self._config, self._source, self._take_secrets = registry, config, source, secrets
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
        try:
            change = self._change()
            told = self._apply(change)
        except PaellaError as e:
            log.error("not reloaded", extra={"fields": {"error": str(e)}})
            return self._note({"error": str(e)})
        self._config, self._source, self._models = change.config, change.source, change.settings
        self._registry.tell()
        log.info("reloaded", extra={"fields": told})
        return self._note(told)

    def _change(self) -> _Change:
        """Reads and checks the file, and makes its policy and its models."""
        config, source = self._source.again()
        entries = {each.name: each for each in build_entries(config, source)} if config.models else {}
        policy = build_policy(config, source) if config.policy != self._config.policy else None
        check_secrets(config, source, self._at_start)
        settings = dict(zip(entries, config.models, strict=True))
        changed = {name: each for name, each in entries.items() if self._differs(each, settings[name])}
        models = {name: made(each) for name, each in changed.items() if each.wanted or self._is_loaded(name)}
        return _Change(config, source, policy, settings, changed, models)

    def _apply(self, change: _Change) -> dict[str, Any]:
        """Takes the change, or raises the error of a model that cannot be loaded, and then leaves all as it was.

        Models that are gone make room only if the others do not fit beside them.
        """
        registry, told = self._registry, dict[str, Any]()
        gone = sorted(self._models.keys() - change.settings.keys())
        if needs := self._needs_restart(change.config, change.source):
            told["needs a restart"] = needs
        with contextlib.ExitStack() as undo:
            for name, each in change.changed.items():
                undo.callback(self._put_back, name, self._kept(name))
                known = registry.entries.get(name)
                if known is None:
                    registry.add(each)
                else:
                    known.make, known.factory = each.make, each.factory
                    known.code = each.code if name in change.models else known.code
                if name in change.models:
                    try:
                        registry.load(name, change.models[name])
                    except PaellaError:
                        unloaded = [other for other in gone if self._is_loaded(other)]
                        if not unloaded:
                            raise
                        for other in unloaded:
                            undo.callback(self._put_back, other, self._kept(other))
                            registry.unload(other)
                        registry.load(name, change.models[name])
                    told.setdefault("loaded", []).append(name)
            if change.policy is not None:
                undo.callback(registry.engine.set_policy, registry.engine.current_policy)
                registry.engine.set_policy(change.policy)
                told["policy"] = change.policy.name
            self._take_secrets(change.config, change.source)
            undo.pop_all()
        for name in gone:
            told.setdefault("unloaded", []).append(name)
            entry = registry.find(name)
            entry.make = _gone
            registry.unload(name)
            entry.reason = GONE
        return told

    def _kept(self, name: str) -> Entry | None:
        """The entry as it is now."""
        known = self._registry.entries.get(name)
        return None if known is None else replace(known)

    def _put_back(self, name: str, kept: Entry | None) -> None:
        """Undoes a change of an entry; `kept`: the entry before it, None if there was none."""
        registry = self._registry
        entry = registry.entries[name]
        is_same = kept is not None and entry.loaded is kept.loaded
        if not is_same:
            registry.unload(name)
        if kept is None:
            registry.remove(name)
            return
        entry.make, entry.factory, entry.code = kept.make, kept.factory, kept.code
        if not is_same and kept.loaded is not None:
            try:
                registry.load(name, kept.loaded)
            except PaellaError as e:
                log.error("a model could not be loaded again", extra={"fields": {"model": name, "error": str(e)}})
        entry.wanted = kept.wanted
        if entry.loaded is None and kept.loaded is None:
            entry.reason = kept.reason
        registry.tell()

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

    def _note(self, told: dict[str, Any]) -> dict[str, Any]:
        if self._source.name:
            try:
                if "error" not in told:
                    _write(self._source.name, "settings", settings_of(self._config, self._source))
                _write(self._source.name, "said", told)
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


def settings_of(config: Config, source: Source) -> dict[str, Any]:
    """All settings by their paths, as in server.port; digests in place of keys."""
    tree = msgspec.to_builtins(config)
    for name, key in build_keys(config, source).items():
        tree["keys"][name] = sha256(key.secret.encode()).hexdigest()[:12], list(key.roles), key.tenant
    tree["models"] = {each["name"] or f"{each['factory']} {each['arguments']}": each for each in tree["models"]}

    def flat(at: Any, path: str) -> Iterator[tuple[str, Any]]:
        if not isinstance(at, dict):
            yield path, at
            return
        for key, value in at.items():
            yield from flat(value, f"{path}.{key}" if path else key)

    return dict(flat(tree, ""))


def check(config: Config, source: Source) -> tuple[list[str], dict[str, tuple[Any, Any]] | None]:
    """Makes everything that a server of this configuration makes before it loads models. Returns the models' names,
    and the settings that differ from those of the server of the file, before and after; None: there is no server.
    """
    build_policy(config, source)
    entries = build_entries(config, source)
    for each in entries:
        made(each)
    build_tls(config, source)
    after = settings_of(config, source)
    if _server_of(source.name) is None:
        return [each.name for each in entries], None
    before = json.loads(_path(source.name, "settings").read_text())
    after = json.loads(json.dumps(after))
    changed = {name: (before.get(name), after.get(name)) for name in before | after}
    return [each.name for each in entries], {name: pair for name, pair in changed.items() if pair[0] != pair[1]}


def _server_of(file: str | Path) -> int | None:
    """The process that serves the file."""
    try:
        pid, since = json.loads(_path(file, "pid").read_text())
    except (OSError, ValueError):
        return None
    return int(pid) if is_alive(pid, since) else None


@contextlib.contextmanager
def noted(source: Source, config: Config) -> Iterator[None]:
    """Notes, while inside, that this process serves the file, so that `ask_to_reload` and `check` find it."""
    if not source.name:
        yield
        return
    note, path = json.dumps([os.getpid(), born(os.getpid())]), None
    try:
        path = _path(source.name, "pid")
        _write(source.name, "settings", settings_of(config, source))
        path.write_text(note)
    except (OSError, ConfigError) as e:
        log.warning("`paellapy reload` will not find this server", extra={"fields": {"error": str(e)}})
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            if path is not None and path.read_text() == note:  # else a newer server has the file
                path.unlink()


def _write(file: str, suffix: str, value: dict[str, Any]) -> None:
    path = _path(file, suffix)
    new = path.with_suffix(".new")
    new.write_text(json.dumps(value))
    os.replace(new, path)


def ask_to_reload(file: Path) -> dict[str, Any]:
    """Makes the server of a file reload it; returns the changes. ConfigError: no server has it, or none answers."""
    pid = _server_of(file)
    if pid is None:
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
