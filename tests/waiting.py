"""Waiting for a condition, and keeping an engine waiting, as tests of threads and processes do."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


def wait_until(condition: Callable[[], object], seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)


@contextmanager
def held_core(engine: Any) -> Iterator[None]:
    """Keeps an engine's core from working meanwhile."""
    begun, go_on = threading.Event(), threading.Event()

    def hold() -> None:
        begun.set()
        go_on.wait(60)

    engine.core.call(hold)
    assert begun.wait(60)
    try:
        yield
    finally:
        go_on.set()
