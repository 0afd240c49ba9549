"""Threads in which networks of convolutions run, one for each batch size.

cuDNN plans every convolution when it first runs at a batch size, once per thread, and computes on the host for that.
With a thread per size the sizes are planned at once, and each is captured in the thread that has its plans. The threads
stay, because a trace or another load of the same network needs the plans again.
"""

from __future__ import annotations

import contextvars
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

_threads: dict[int, ThreadPoolExecutor] = {}  # by batch size, one thread each
_lock = threading.Lock()  # engines on several GPUs may load at once
os.register_at_fork(after_in_child=_threads.clear)  # threads do not survive a fork


def in_thread_of(batch: int, function: Callable[P, T], *given: P.args, **named: P.kwargs) -> T:
    """Calls a function in the thread of a batch size, and waits for its end, also when interrupted."""
    called = _submit(batch, function, *given, **named)
    try:
        return called.result()
    finally:
        wait([called])  # the caller frees memory that the function may use
        del called  # holds the error, whose traceback holds this frame and the tensors of the function


def side_by_side(batches: Sequence[int], function: Callable[[int], T]) -> dict[int, T]:
    """Calls a function with each batch size in its thread, all at once; returns the results of calls that succeeded."""
    called = {batch: _submit(batch, function, batch) for batch in batches}
    found: dict[int, T] = {}
    try:
        for batch, each in called.items():
            # Raised here, an error would have this frame in its traceback, and the frame has the error: the tensors of
            # the failed size would stay on the GPU, where the next attempt needs their memory.
            if each.exception() is None:
                found[batch] = each.result()
    finally:
        wait(called.values())
    return found


def _submit(batch: int, function: Callable[P, T], *given: P.args, **named: P.kwargs) -> Future[T]:
    context = contextvars.copy_context()
    with _lock:
        if batch not in _threads:
            _threads[batch] = ThreadPoolExecutor(1, f"paellapy-size-{batch}")
        return _threads[batch].submit(lambda: context.run(function, *given, **named))
