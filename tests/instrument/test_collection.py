"""The pause of Python's garbage collector, which several threads may want at once."""

from __future__ import annotations

import gc
import threading

from paellapy.instrument.collection import without_collection


def test_a_thread_that_leaves_does_not_end_the_pause_of_another() -> None:
    inside, leave = threading.Event(), threading.Event()

    def first() -> None:
        with without_collection():
            inside.set()
            leave.wait(60)

    thread = threading.Thread(target=first)
    thread.start()
    inside.wait(60)
    with without_collection():
        leave.set()
        thread.join()
        assert not gc.isenabled()
    assert gc.isenabled()


def test_a_collector_that_was_off_stays_off() -> None:
    gc.disable()
    try:
        with without_collection(), without_collection():
            assert not gc.isenabled()
        assert not gc.isenabled()
    finally:
        gc.enable()
