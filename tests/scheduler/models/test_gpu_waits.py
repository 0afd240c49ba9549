"""Waits are errors in the thread that captures, and go unnoticed in others."""

from __future__ import annotations

import threading
import warnings

import pytest

from paellapy.scheduler.models.gpu_waits import WAITS, errors_in_this_thread


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
            with pytest.raises(UserWarning, match="synchronizing"):
                warn()
        with pytest.warns(UserWarning, match="something else"):
            warnings.warn("something else", UserWarning, stacklevel=1)
    assert seen == [None, None]


def test_filters_of_warnings_are_as_they_were_afterwards():
    with warnings.catch_warnings():
        with errors_in_this_thread():  # adds the filter that matches nothing, once
            pass
        before = list(warnings.filters)
        with pytest.raises(KeyError), errors_in_this_thread():
            raise KeyError
        assert list(warnings.filters) == before
        warnings.simplefilter("always")
        with pytest.warns(UserWarning, match="synchronizing"):
            warn()


def test_a_copy_of_the_filters_that_comes_back_later_matches_nothing():
    with warnings.catch_warnings():
        with errors_in_this_thread():
            copied = list(warnings.filters)
        warnings.filters[:] = copied
        warnings.filterwarnings("always", "called", append=False)
        with pytest.warns(UserWarning, match="synchronizing"):
            warn()
        assert not copied[0][1].match(WAITS)
