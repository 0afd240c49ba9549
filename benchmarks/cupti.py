"""Callbacks of CUPTI's on kernel launches: the other way to hold a script back without a compiler."""

from __future__ import annotations

import ctypes
import glob
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numba
import numpy as np

from paellapy.scheduler.core.atomics import load_at, store_at

DRIVER_API = 1  # CUPTI_CB_DOMAIN_DRIVER_API
LAUNCH_KERNEL = 307  # CUPTI_DRIVER_TRACE_CBID_cuLaunchKernel
MISSING = "libcupti.so is not on this machine: it comes with PyTorch for CUDA, and with CUDA's toolkit"


def library() -> str | None:
    """The path of CUPTI: of PyTorch's packages, or of a toolkit."""
    places = [f"{each}/nvidia/**/libcupti.so*" for each in sys.path if Path(each).name.endswith("-packages")]
    places += ["/usr/local/cuda*/extras/CUPTI/lib64/libcupti.so*", "/usr/local/cuda*/lib64/libcupti.so*"]
    return next((found for place in places for found in sorted(glob.glob(place, recursive=True))), None)


@numba.cfunc("void(uint64, int32, uint32, uint64)")  # type: ignore[untyped-decorator]
def look(words: Any, domain: Any, function: Any, call: Any) -> None:
    """As a gate: on entering a call, counts it and looks whether it may go on. Here it always may."""
    entering = load_at(call) & np.uint64(0xFFFF_FFFF) == np.uint64(0)  # CUpti_CallbackData.callbackSite
    if entering and load_at(words) == np.uint64(0):
        store_at(words + np.uint64(8), load_at(words + np.uint64(8)) + np.uint64(1))


@contextmanager
def callbacks(path: str) -> Iterator[Any]:
    """A context in which every cuLaunchKernel of this process calls `look`; yields its words."""
    lib, words, subscriber = ctypes.CDLL(path), np.zeros(2, np.uint64), ctypes.c_void_p()
    given = ctypes.c_void_p(look.address), ctypes.c_void_p(words.ctypes.data)
    _check(lib.cuptiSubscribe(ctypes.byref(subscriber), *given), "cuptiSubscribe")
    try:
        enabled = ctypes.c_uint32(1), subscriber, ctypes.c_int(DRIVER_API), ctypes.c_uint32(LAUNCH_KERNEL)
        _check(lib.cuptiEnableCallback(*enabled), "cuptiEnableCallback")
        yield words
    finally:
        _check(lib.cuptiUnsubscribe(subscriber), "cuptiUnsubscribe")


def _check(status: int, doing: str) -> None:
    if status:
        raise SystemExit(f"{doing} failed with status {status}: another tool may use CUPTI in this process")
