"""Ctrl-C waits while a request is submitted or answered: half of either would hold a lane of its model for ever."""

from __future__ import annotations

import importlib
import signal
import threading
from types import FrameType
from typing import Any

# The functions behind those of `signal`, which take a twentieth of their time: every request passes here.
_signal: Any = importlib.import_module("_signal")
_get, _set, _raises = _signal.getsignal, _signal.signal, signal.default_int_handler
_SIGINT = int(signal.SIGINT)
_main = threading.main_thread()


class Uninterrupted:
    """A block in which SIGINT does not raise KeyboardInterrupt. If the signal came, the end of the block raises it.

    Python calls handlers in the main thread only. In another thread this does nothing, nor where the handler is not
    Python's own: those of event loops raise nothing.
    """

    __slots__ = ("_came", "_set")

    def __enter__(self) -> None:
        self._came = False
        self._set = threading.get_ident() == _main.ident and _get(_SIGINT) is _raises  # neither is it so when nested
        if self._set:
            _set(_SIGINT, self._note)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._came = True

    def __exit__(self, *_: object) -> None:
        if self._set:
            _set(_SIGINT, _raises)
            if self._came:
                raise KeyboardInterrupt
