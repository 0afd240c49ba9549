"""The loop's thread on a real GPU, without one: after an error of its own it goes on."""

from __future__ import annotations

from collections import deque
from types import SimpleNamespace

import numpy as np
import pytest

from paellapy.scheduler.backends import cuda_loop
from paellapy.scheduler.backends.cuda_loop import CudaLoop

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
