"""Pauses Python's garbage collector during work that makes many objects, most of which it would find in use."""

from __future__ import annotations

import contextlib
import gc
import threading
from collections.abc import Iterator

_lock = threading.Lock()
_pauses: list[bool] = []  # one per thread inside: whether the collector was on before the first


@contextlib.contextmanager
def without_collection() -> Iterator[None]:
    """Lets no garbage collection begin inside, also while other threads leave. Objects without cycles are freed as
    always.
    """
    with _lock:
        _pauses.append(_pauses[0] if _pauses else gc.isenabled())
        gc.disable()
    try:
        yield
    finally:
        with _lock:
            was = _pauses.pop()
            if was and not _pauses:
                gc.enable()
