"""Settings of a process that serves: its event loop, its memory, its garbage, and its interpreter lock."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import gc
import sys
from collections.abc import Callable

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h
SWITCH_S = 1e-3  # the interpreter's default of 5 ms would be added to requests while a thread makes metrics


def share_interpreter() -> None:
    """Makes threads beside the event loop give the interpreter back sooner."""
    sys.setswitchinterval(min(sys.getswitchinterval(), SWITCH_S))


def keep_memory() -> None:
    """Keeps freed memory: request bodies of some hundred KB come and go, and returning it to the system costs time."""
    with contextlib.suppress(AttributeError, OSError):  # glibc only
        libc = ctypes.CDLL(None)
        libc.mallopt(_M_MMAP_THRESHOLD, 8 << 20)
        libc.mallopt(_M_TRIM_THRESHOLD, 64 << 20)


_sparing = False  # whether this process spares its objects: not before its start is over, and not in others' servers


def spare_objects() -> None:
    """Takes all objects of the start out of the garbage collector's search: one search of the modules and models would
    stop the event loop for a tenth of a second, in the middle of serving.
    """
    global _sparing
    _sparing = True
    gc.collect()
    gc.freeze()


def spare_more_objects() -> None:
    """Spares also the objects of a model that was loaded after the start. The collector searches only objects that are
    not spared yet; after an unload these are all.
    """
    if _sparing:
        spare_objects()


def search_all_objects() -> None:
    """Lets the collector find a model that is unloaded: its objects may refer to each other."""
    gc.unfreeze()


def stop_sparing() -> None:
    """Lets the interpreter free everything when it ends."""
    global _sparing
    _sparing = False
    gc.unfreeze()


def loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """uvloop's, if it is installed."""
    try:
        import uvloop
    except ImportError:  # on Windows, or not installed
        return None
    return uvloop.new_event_loop
