"""A producer reads completions, and the core wakes it as seldom as possible."""

from __future__ import annotations

import os
import threading

import numpy as np
import pytest
from core_check import check_at_rest
from engine_models import scale_model
from engine_requests import post
from waiting import wait_until

import paellapy as pp

pytestmark = pytest.mark.quick

X = np.arange(64, dtype=np.float32)


@pytest.fixture
def engine():
    with pp.Engine("virtual:h200") as found:
        found.load(scale_model(instances=2, batch=(1,)))
        found.infer_sync("scale", {"x": X})
        while found.core.ring.drain():
            pass
        yield found


class Caller:
    """Submits requests, which nobody reads before the test does."""

    def __init__(self, engine) -> None:
        self.engine, self.producer = engine, engine.core.ring
        self.answered: list[int] = []
        self._row = engine.client.find("scale").row

    def submit(self, number: int, then=lambda: None) -> None:
        def finish(entry) -> None:
            self.answered.append(number)
            then()

        post(self.engine, "scale", {"x": X}, finish)

    def wait(self, completed: int) -> None:
        """Waits until the core has completed this many requests, and has woken everybody for them."""
        wait_until(lambda: int(self.engine.state.model["completed"][self._row]) == completed)
        looked = threading.Event()
        self.engine.core.call(looked.set)
        assert looked.wait(60)

    def wake_ups(self) -> int:
        """Wake-ups since the last call."""
        try:
            return os.eventfd_read(self.producer.wake_fd)
        except BlockingIOError:
            return 0


def test_answers_that_are_read_early_need_no_further_wake_up(engine):
    caller = Caller(engine)
    assert caller.wake_ups() == 0
    for k in range(8):  # from the third on, unread answers hold both instances until a request reads them
        caller.submit(k)
        caller.wait(k + 2)
    assert len(caller.answered) >= 4
    assert caller.wake_ups() == 1
    caller.producer.drain()
    assert sorted(caller.answered) == list(range(8))
    check_at_rest(engine.state)


def test_completions_that_come_while_others_are_answered_wake_nobody(engine):
    caller = Caller(engine)

    def submit_another() -> None:
        caller.submit(1)
        caller.wait(3)

    caller.submit(0, submit_another)
    caller.wait(2)
    assert caller.producer.drain() == 2
    assert caller.answered == [0, 1]
    assert caller.wake_ups() == 0
    caller.submit(2)
    caller.wait(4)
    assert caller.wake_ups() == 1  # the ring was empty, so the producer asked again
    assert caller.producer.drain() == 1


@pytest.mark.parametrize("early", [False, True])
def test_an_answer_that_fails_keeps_no_other_answer_waiting(engine, early):
    caller = Caller(engine)

    def fail() -> None:
        if not early:
            caller.submit(1)
            caller.wait(3)
        raise ValueError("of the caller's own")

    caller.submit(0, fail)
    caller.wait(2)
    if early:
        assert caller.producer._read_now(1)
        caller.submit(1)
        caller.wait(3)
        assert caller.wake_ups() > 0
    with pytest.raises(ValueError):
        caller.producer.drain()
    assert caller.answered == [0, 1]
    engine.infer_sync("scale", {"x": X})
    check_at_rest(engine.state)


def test_an_interrupted_reader_is_woken_again(engine):
    caller = Caller(engine)

    def interrupt() -> None:
        caller.submit(1)
        caller.wait(3)
        raise KeyboardInterrupt

    caller.submit(0, interrupt)
    caller.wait(2)
    with pytest.raises(KeyboardInterrupt):
        caller.producer.drain()
    assert caller.answered == [0]
    assert caller.wake_ups() > 0
    assert caller.producer.drain() == 1
    assert caller.answered == [0, 1]
