"""State that one engine process of a server hands on to the next: wanted models, policy, durations of full batches."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import msgspec

from paellapy.serving.logs import log
from paellapy.serving.registry import READY, Registry


class _Choices(msgspec.Struct):
    policy: str
    wanted: dict[str, bool]
    tried_ns: dict[str, float] = {}


class Kept:
    """A file in the server's own folder. The next engine process starts in the state of the last one."""

    def __init__(self, path: Path) -> None:
        self._path, self._lock = path, threading.Lock()
        self._last: _Choices | None = None

    def restore(self, registry: Registry) -> str:
        """Sets which models are wanted; returns the policy to switch to, "" if it is the configured one."""
        try:
            kept = msgspec.json.decode(self._path.read_bytes(), type=_Choices)
        except FileNotFoundError:  # nothing has been changed yet
            return ""
        registry.tried_ns = kept.tried_ns
        changed: dict[str, Any] = {}
        for name, entry in registry.entries.items():
            wanted = kept.wanted.get(name, entry.wanted)
            if wanted != entry.wanted:
                entry.wanted = wanted
                if not wanted:
                    entry.reason = "unloaded"
                changed.setdefault("loaded" if wanted else "unloaded", []).append(name)
        policy = "" if kept.policy == registry.engine.policy else kept.policy
        if policy:
            changed["policy"] = policy
        if changed:
            log.info("restored changes that were made while the server ran", extra={"fields": changed})
        return policy

    def save(self, registry: Registry) -> None:
        """Saves the state; called after every change, in the thread that made it."""
        with self._lock:
            entries = registry.entries.values()
            tried_ns = {e.name: registry.engine.tried_ns(e.name) for e in entries if e.state == READY}
            now = _Choices(registry.engine.policy, {e.name: e.wanted for e in entries}, tried_ns)
            if now == self._last:
                return
            new = self._path.with_suffix(".new")
            try:
                new.write_bytes(msgspec.json.encode(now))
                os.replace(new, self._path)  # atomic: a process killed meanwhile leaves the old file intact
            except OSError as e:
                fields = {"error": str(e)}
                log.warning("a restart of the engine will undo this change", extra={"fields": fields})
            else:
                self._last = now
