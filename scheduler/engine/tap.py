"""Observes the requests of all front ends from the core's own process; the core records them only while observed."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np

from paellapy.scheduler.core.state import State

LOOK_S = 0.01  # completions are seen at most this late
_SLACK = 256  # entries of the ring that may be overwritten while it is read


class Tap:
    """Passes completions to watchers. Its thread runs only while there is a watcher."""

    def __init__(self, state: State) -> None:
        self._state = state
        self._watchers: list[Callable[[Any], None]] = []
        self._seen = 0
        self._lock = threading.RLock()
        self._thread: threading.Thread | None = None
        self._stop = threading.Event()

    def watch(self, watcher: Callable[[Any], None]) -> Callable[[], None]:
        """Adds a watcher; call the returned function to remove it."""
        with self._lock:
            if not self._watchers:
                self._seen = int(self._state.core["tap_tail"][0])
                self._state.core["tapped"][0] = 1
                self._stop = threading.Event()
                self._thread = threading.Thread(target=self._run, args=(self._stop,), name="paellapy-tap", daemon=True)
                self._thread.start()
            self._watchers.append(watcher)
        return lambda: self._leave(watcher)

    def _leave(self, watcher: Callable[[Any], None]) -> None:
        with self._lock:
            self._watchers.remove(watcher)
            if not self._watchers:
                self._state.core["tapped"][0] = 0
                self._stop.set()

    def _run(self, stop: threading.Event) -> None:
        while not stop.wait(LOOK_S):
            self.look()

    def look(self) -> None:
        """Passes new completions to the watchers."""
        with self._lock:
            ring = self._state.tap
            tail = int(self._state.core["tap_tail"][0])
            first = max(self._seen, tail - len(ring) + _SLACK)
            self._seen = tail
            for entry in ring[np.arange(first, tail) & (len(ring) - 1)]:
                for watcher in self._watchers:
                    watcher(entry)
