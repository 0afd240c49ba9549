"""Ctrl-C in the middle of a request: it ends the call, and harms no later one."""

from __future__ import annotations

import signal

import numpy as np
import pytest
from core_check import check_at_rest
from engine_models import scale_model
from waiting import wait_until

import paellapy as pp
from paellapy.scheduler.engine.ring_client import Uninterrupted

X = np.arange(64, dtype=np.float32)


@pytest.fixture(autouse=True)
def handler():
    """Python's own handler, whatever started the tests."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def engine():
    with pp.Engine("virtual:h200") as found:
        found.load(scale_model(instances=1, batch=(1,)))
        yield found


def interrupting(function):
    """The function with a Ctrl-C right behind it, once."""
    left = [signal.raise_signal]

    def call(*given):
        found = function(*given)
        if left:
            left.pop()(signal.SIGINT)
        return found

    return call


def reserved(engine):
    slot = engine.reserve("scale")
    slot.inputs["x"][...] = X
    return slot.submit_sync()


def ask_until_interrupted(ask, engine):
    """A request that finds no open instance is staged, which takes other functions."""
    while True:
        ask(engine)


def asked(engine):
    return engine.infer_sync("scale", {"x": X})


@pytest.mark.parametrize(
    ("ask", "where"),
    [
        *((ask, where) for ask in (asked, reserved) for where in ("take_row", "claim", "_answer", "drain")),
        (asked, "post_written"),
        (reserved, "post_claimed"),
        (reserved, "ready"),
    ],
)
def test_a_call_that_is_interrupted_anywhere_harms_no_later_one(engine, monkeypatch, ask, where):
    producer = engine.core.ring
    with monkeypatch.context() as patch:
        patch.setattr(producer, where, interrupting(getattr(producer, where)))
        with pytest.raises(KeyboardInterrupt):
            ask_until_interrupted(ask, engine)
    for k in range(3):
        np.testing.assert_array_equal(engine.infer_sync("scale", {"x": X + k})["y"], 2 * (X + k))
        np.testing.assert_array_equal(reserved(engine)["y"], 2 * X)
    wait_until(lambda: producer.drain() == 0 and producer.waiting == 0)
    check_at_rest(engine.state)


def test_blocks_may_be_nested_and_raise_once():
    passed = []

    def interrupted() -> None:
        with Uninterrupted():
            with Uninterrupted():
                signal.raise_signal(signal.SIGINT)
                signal.raise_signal(signal.SIGINT)
                passed.append("inner")
            passed.append("outer")

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert passed == ["inner", "outer"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_handlers_of_others_are_called_at_once():
    told = []
    signal.signal(signal.SIGINT, lambda *_: told.append(1))
    with Uninterrupted():
        signal.raise_signal(signal.SIGINT)
        assert told == [1]


def test_a_signal_that_is_ignored_stays_so():
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with Uninterrupted():
        signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
