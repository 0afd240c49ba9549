"""A line on stderr while code is compiled that is not cached: only if compiling takes long, and only once.

On a terminal the line disappears afterwards. PAELLAPY_QUIET=1 turns it off.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from typing import Any

from numba.core import event

_OURS = __name__.partition(".")[0] + "."
PATIENCE_S = 1.0  # a shorter compilation shows no line
_PAUSE_S = 2.0  # pause after which a new compilation counts as a new one
TEXT = "paellapy: compiling the scheduler for this machine, once; this takes some seconds …"


class Announcer(event.Listener):  # type: ignore[misc]
    """Listens to Numba's events for functions of this package, which may be compiled one inside the other."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._depth = 0
        self._began = self._ended = -_PAUSE_S
        self._timer: threading.Timer | None = None
        self._shown = self._said = False

    def on_start(self, event: Any) -> None:
        if not _is_ours(event):
            return
        with self._lock:
            self._depth += 1
            if self._depth > 1:
                return
            now = time.monotonic()
            if now - self._ended > _PAUSE_S:
                self._began = now
            self._timer = threading.Timer(max(0.0, self._began + PATIENCE_S - now), self._show)
            self._timer.daemon = True
            self._timer.start()

    def on_end(self, event: Any) -> None:
        if not _is_ours(event):
            return
        with self._lock:
            self._depth -= 1
            if self._depth > 0:
                return
            self._ended = time.monotonic()
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None
            if self._shown:
                self._shown = False
                _erase()

    def _show(self) -> None:
        with self._lock:
            if self._depth == 0 or self._shown or os.environ.get("PAELLAPY_QUIET"):
                return
            if sys.stderr.isatty():
                self._shown = True
                _console().print(TEXT, style="dim", end="\r", soft_wrap=False, overflow="ellipsis", no_wrap=True)
            elif not self._said:
                self._said = True
                _console().print(TEXT, soft_wrap=True)


def _is_ours(event: Any) -> bool:
    return str(event.data["dispatcher"].py_func.__module__).startswith(_OURS)


def _console() -> Any:
    from rich.console import Console  # imported only if a line is shown

    return Console(stderr=True)


def _erase() -> None:
    from rich.control import Control
    from rich.segment import ControlType

    _console().control(Control(ControlType.CARRIAGE_RETURN, (ControlType.ERASE_IN_LINE, 2)))


def show() -> None:
    """Shows the line from now on, whenever this process compiles for long."""
    event.register("numba:compile", Announcer())
