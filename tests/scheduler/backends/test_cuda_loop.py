"""The loop's thread on a real GPU, without one: after an error of its own it goes on."""

from __future__ import annotations

import ctypes
import os
import threading
from collections import deque
from types import SimpleNamespace

import numpy as np
import pytest
from waiting import wait_until

from paellapy.scheduler.backends import cuda_loop
from paellapy.scheduler.backends.cuda_loop import CudaLoop
from paellapy.scheduler.core.rings import Bell
from paellapy.scheduler.core.state import Limits, new_state
from paellapy.scheduler.core.step import attach_loop

pytest.importorskip("cuda.bindings.driver")


@pytest.mark.parametrize("where", ["serve", "call"])
def test_a_loop_goes_on_after_an_error_of_its_own(monkeypatch, where):
    threads, failures, rounds = object.__new__(CudaLoop), [], []

    def wrong():
        raise SystemError("bad argument to internal function")

    def serve(*given):
        rounds.append(given)
        if len(rounds) == 1 and where == "serve":
            wrong()
        threads._calls = deque([wrong] if len(rounds) == 1 else [])
        threads._stopping = len(rounds) == 3
        return 0

    monkeypatch.setattr(cuda_loop, "serve", serve)
    monkeypatch.setattr(cuda_loop, "RETRY_S", 0.001)
    threads._device, threads._bell = SimpleNamespace(activate=lambda: None), SimpleNamespace(word=0, fd=0)
    threads._state, threads._stop_word, threads._scratch = None, np.zeros(8, np.uint64), None
    threads._stopping, threads._calls, threads._failed = False, deque(), failures.append
    threads._loop()
    assert len(rounds) == 3
    assert ["SystemError: bad argument" in str(each) for each in failures] == [True]


@pytest.mark.parametrize(("gap_ms", "awake_ms"), [(1, 10), (20, 40), (250, 500), (251, 10)])
def test_a_loop_stays_awake_for_requests_that_come_regularly(gap_ms, awake_ms):
    assert cuda_loop.next_linger.py_func(gap_ms * 10**6, 10 * 10**6) == awake_ms * 10**6


def test_a_loop_without_work_sleeps_until_its_bell_rings():
    state = new_state(Limits(models=1, instances=1, requests=8, segments=1))
    attach_loop(state)
    stop, scratch = np.zeros(8, np.uint64), np.zeros(8, np.int64)
    bell = Bell(state.bell, blocking=True)
    read = ctypes.cast(ctypes.CDLL(None).read, ctypes.c_void_p).value
    returned = []
    serving = threading.Thread(
        target=lambda: returned.append(
            cuda_loop.serve(state, stop, 1_000_000, scratch, bell.word, bell.fd, read, False)
        )
    )
    serving.start()
    wait_until(lambda: bell.armed)
    stop[0] = 1
    os.eventfd_write(bell.fd, 1)
    serving.join(60)
    assert returned == [cuda_loop.INTERRUPTED]
    assert not bell.armed
    bell.close()
