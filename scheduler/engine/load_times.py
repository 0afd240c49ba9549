"""Time spent loading a model: seconds by phase, a progress line for a long load, and one line in the log."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Iterator

PHASES = ("upload", "rehearse", "memory", "capture", "measure", "cut", "first launches", "weights", "install")
PATIENCE_S = 2.0  # a load that takes longer shows its current phase

_log = logging.getLogger("paellapy.load")


class LoadTimes:
    """Seconds of one load by phase. The time of a nested phase does not count for the outer one."""

    def __init__(self, model: str) -> None:
        self.model = model
        self.seconds: dict[str, float] = {}
        self._current: list[str] = []
        self._since = time.perf_counter()

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        assert name in PHASES, name
        self._turn()
        self._current.append(name)
        try:
            yield
        finally:
            self._turn()
            self._current.pop()

    def _turn(self) -> None:
        """Starts another phase: the time since the last call belongs to the phase that ends."""
        now = time.perf_counter()
        if self._current:
            name = self._current[-1]
            self.seconds[name] = self.seconds.get(name, 0.0) + now - self._since
        self._since = now

    @property
    def doing(self) -> str:
        """The current phase; "" between two phases."""
        return self._current[-1] if self._current else ""

    @property
    def total_s(self) -> float:
        return sum(self.seconds.values())

    def __str__(self) -> str:
        """The total, and the phases that took a noticeable time, the longest first.

        >>> times = LoadTimes("net")
        >>> times.seconds = {"capture": 0.31, "upload": 0.0004, "measure": 1.2}
        >>> str(times)
        'net: 1.51 s (measure 1.20, capture 0.31)'
        """
        longest = sorted(self.seconds.items(), key=lambda item: -item[1])
        parts = ", ".join(f"{name} {seconds:.2f}" for name, seconds in longest if seconds >= 0.005)
        return f"{self.model}: {self.total_s:.2f} s" + (f" ({parts})" if parts else "")


@contextlib.contextmanager
def shown(times: LoadTimes) -> Iterator[None]:
    """Shows the current phase during a long load, and writes one line to the log at its end. Without a terminal, the
    phase is one line in the log or, where nobody reads the log, on stderr. PAELLAPY_QUIET=1 turns it off.
    """
    ended = threading.Event()
    watcher = threading.Thread(target=_watch, args=(times, ended), name="paellapy-load-line", daemon=True)
    watcher.start()
    try:
        yield
    finally:
        ended.set()
        watcher.join()
    _log.info("loaded %s", times)


def _watch(times: LoadTimes, ended: threading.Event) -> None:
    if ended.wait(PATIENCE_S) or os.environ.get("PAELLAPY_QUIET"):
        return
    from rich.console import Console

    console = Console(stderr=True)
    if console.is_jupyter or not console.is_terminal:  # one line: a line that is redrawn needs a terminal
        if _log.isEnabledFor(logging.INFO) and _log.hasHandlers():
            _log.info("loading %s: %s …", times.model, times.doing)
        else:
            console.print(f"loading {times.model}: {times.doing} …", highlight=False, soft_wrap=True)
        return
    began = time.perf_counter() - PATIENCE_S
    with console.status("") as line:
        while not ended.wait(0.1):
            line.update(f"loading {times.model}: {times.doing}, {time.perf_counter() - began:.0f} s")
