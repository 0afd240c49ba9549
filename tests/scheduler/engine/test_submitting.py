"""Submitting several items: an error withdraws all of them, and frees their rows and memory once."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from paellapy.scheduler.engine.requests import submit
from paellapy.scheduler.engine.ring_calls import OwnStage

pytestmark = pytest.mark.quick

TERMS = (0, 0, 0, 0)


class Producer:
    """A producer whose core answers staged requests at once; the second item of a request claims a slot."""

    def __init__(self):
        self.stage, self.given, self.freed, self.cancelled = OwnStage(), [], [], []
        self.stage.give = self.given.append
        self.claims = [None, (0, 0)]

    def take_row(self, pending, client):
        pending.row = 2 - len(self.claims)

    def claim(self, loaded, client):
        return self.claims.pop(0)

    def post_staged(self, staged, *terms):
        for _, _, keep in staged:
            self.stage.give(keep)

    def post_written(self, *given):
        pass

    def cancel(self, pending):
        self.cancelled.append(pending)

    def give_back(self, pending):
        self.freed.append(pending)


def test_staged_items_that_were_answered_are_not_freed_again():
    producer = Producer()
    instance = SimpleNamespace(inputs={"x": np.zeros((1, 4), np.float32)})
    loaded = SimpleNamespace(instance_of={0: instance})
    items = [{"x": np.ones(4, np.float32)}, {"x": np.ones(3, np.float32)}]  # the second one does not fit its slot
    with pytest.raises(ValueError, match="shape"):
        submit(producer, loaded, items, TERMS, [print, print])
    assert len(producer.given) == 1
    assert not producer.freed
    assert len(producer.cancelled) == 2


def test_items_that_were_not_posted_are_freed():
    producer = Producer()
    producer.claims = [None, None]
    items = [{"x": np.ones(4, np.float32)}, {"x": None}]
    with pytest.raises(AttributeError):
        submit(producer, SimpleNamespace(instance_of={}), items, TERMS, [print, print])
    assert len(producer.given) == 1
    assert len(producer.freed) == 2
    assert not producer.cancelled
