"""Pauses Python's garbage collector during work that makes many objects, most of which it would find in use."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def without_collection() -> Iterator[None]:
    """Lets no garbage collection begin inside. Objects without cycles are freed as always."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()
