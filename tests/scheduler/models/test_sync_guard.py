"""Waits are errors in the thread that captures, and go unnoticed in others."""

from __future__ import annotations

import sys
import threading
import time
import warnings
from types import SimpleNamespace

import pytest

from paellapy.scheduler.core.errors import CaptureError
from paellapy.scheduler.models import sync_guard
from paellapy.scheduler.models.sync_guard import WAITS, errors_in_this_thread, refusing_to_wait


def warn() -> None:
    warnings.warn(f"{WAITS} (Triggered internally at somewhere.cpp:80.)", UserWarning, stacklevel=1)


def test_a_wait_is_an_error_in_this_thread_and_nothing_in_another():
    seen: list[BaseException | None] = []

    def other() -> None:
        try:
            warn()
            seen.append(None)
        except BaseException as e:
            seen.append(e)

    with errors_in_this_thread():
        for _ in range(2):  # Python remembers a warning that it has let pass, but not one that is ignored
            thread = threading.Thread(target=other)
            thread.start()
            thread.join()
            with pytest.raises(UserWarning):
                warn()
        with pytest.warns(RuntimeWarning):
            warnings.warn("something else", RuntimeWarning, stacklevel=1)
    assert seen == [None, None]


def test_waits_that_began_earlier_are_ignored_shortly_afterwards_in_other_threads(monkeypatch):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(KeyError), errors_in_this_thread():
            raise KeyError
        failed: list[Exception] = []

        def other() -> None:
            try:
                warn()
            except Exception as e:
                failed.append(e)

        def in_another_thread() -> None:
            thread = threading.Thread(target=other)
            thread.start()
            thread.join()

        in_another_thread()
        assert not failed
        with pytest.raises(UserWarning):  # by the filter above; in this thread nothing is left
            warn()
        later = time.monotonic() + sync_guard._AFTER_S + 1
        monkeypatch.setattr(sync_guard.time, "monotonic", lambda: later)
        in_another_thread()
        assert len(failed) == 1


def test_filters_do_not_pile_up(monkeypatch):
    with warnings.catch_warnings():
        with errors_in_this_thread():  # adds the filter that matches nothing, once
            pass
        before = len(warnings.filters)
        for k in range(3):
            later = time.monotonic() + (k + 1) * (sync_guard._AFTER_S + 1)
            with monkeypatch.context() as patch, errors_in_this_thread():
                patch.setattr(sync_guard.time, "monotonic", lambda later=later: later)
        assert len(warnings.filters) <= before + 1


class FakeCuda:
    """PyTorch's mode, of the whole process."""

    mode: str | int = 0

    def get_sync_debug_mode(self) -> str | int:
        return self.mode

    def set_sync_debug_mode(self, mode: str | int) -> None:
        self.mode = mode

    def wait(self) -> None:
        if self.mode == "warn":
            warn()


@pytest.mark.parametrize("leaves_first", ["this thread", "the other"])
def test_two_threads_refuse_waits_at_once(monkeypatch, leaves_first):
    cuda = FakeCuda()
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=cuda))
    begun, leave, left = threading.Event(), threading.Event(), threading.Event()
    refused: list[bool] = []

    def other() -> None:
        try:
            with refusing_to_wait():
                begun.set()
                leave.wait(60)
                cuda.wait()
            refused.append(False)
        except CaptureError:
            refused.append(True)
        left.set()

    def here() -> None:
        with refusing_to_wait():
            thread.start()
            assert begun.wait(60)
            if leaves_first == "the other":
                leave.set()
                assert left.wait(60)
            cuda.wait()

    with warnings.catch_warnings():
        thread = threading.Thread(target=other)
        with pytest.raises(CaptureError):
            here()
        leave.set()
        thread.join()
    assert refused == [True]
    assert cuda.mode == 0, "the mode is as it was before"
