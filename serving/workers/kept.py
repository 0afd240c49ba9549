"""What was changed while the server ran, kept beyond the engine's process: which models are wanted, the policy."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import msgspec

from paellapy.serving.logs import log
from paellapy.serving.registry import Registry


class _Choices(msgspec.Struct):
    policy: str
    wanted: dict[str, bool]


class Kept:
    """A file in a folder of the server's own. The next process of the engine begins as the last one was."""

    def __init__(self, path: Path) -> None:
        self._path, self._lock = path, threading.Lock()
        self._last: _Choices | None = None

    def restore(self, registry: Registry) -> str:
        """Sets which models are wanted; the policy to switch to, "" where that is the configured one."""
        try:
            kept = msgspec.json.decode(self._path.read_bytes(), type=_Choices)
        except FileNotFoundError:  # nothing has been changed yet
            return ""
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
            log.info("as it was before, and not as configured", extra={"fields": changed})
        return policy

    def save(self, registry: Registry) -> None:
        """After every change, in whichever thread made it."""
        with self._lock:
            now = _Choices(registry.engine.policy, {e.name: e.wanted for e in registry.entries.values()})
            if now == self._last:
                return
            new = self._path.with_suffix(".new")
            try:
                new.write_bytes(msgspec.json.encode(now))
                os.replace(new, self._path)  # a process that is killed meanwhile leaves the old one whole
            except OSError as e:
                fields = {"error": str(e)}
                log.warning("a restart of the engine will not know what was changed", extra={"fields": fields})
            else:
                self._last = now
