"""Ctrl-C waits while a request is submitted or answered: half of either would hold a lane of its model for ever."""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any

# The functions behind those of the standard library take a thirtieth of their time.
_set: Any = getattr(signal.signal, "__wrapped__", signal.signal)
_get: Any = getattr(signal.getsignal, "__wrapped__", signal.getsignal)
_SIGINT = int(signal.SIGINT)
_main = threading.main_thread()


class Uninterrupted:
    """A block that SIGINT does not interrupt: its handler, which may raise KeyboardInterrupt, is called at the end.

    Python calls handlers in the main thread only. In another thread, this does nothing.
    """

    __slots__ = ("_came", "_handler")

    def __enter__(self) -> None:
        self._came, self._handler = False, None
        if threading.get_ident() != _main.ident:
            return
        handler = _get(_SIGINT)
        if callable(handler) and getattr(handler, "__func__", None) is not Uninterrupted._note:  # not nested
            self._handler = handler
            _set(_SIGINT, self._note)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._came = True

    def __exit__(self, *_: object) -> None:
        handler = self._handler
        if handler is not None:
            _set(_SIGINT, handler)
            if self._came:
                handler(_SIGINT, None)
