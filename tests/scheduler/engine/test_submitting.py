"""Submitting several items: an error withdraws all of them, and frees their rows and memory once."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from engine_requests import Told

from paellapy.scheduler.engine.client import submit
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


def pending(loaded):
    return [Told(loaded, print) for _ in range(2)]


def test_staged_items_that_were_answered_are_not_freed_again():
    producer = Producer()
    slot = [memoryview(bytearray(16))]
    loaded = SimpleNamespace(instance_of={0: SimpleNamespace(slot_bytes=lambda k: (slot, {}))})
    with pytest.raises(ValueError):
        submit(producer, pending(loaded), [[bytes(16)], [bytes(12)]], TERMS)  # the second one does not fit its slot
    assert len(producer.given) == 1
    assert not producer.freed
    assert len(producer.cancelled) == 2


def test_items_that_were_not_posted_are_freed():
    producer = Producer()
    producer.claims = [None, None]
    with pytest.raises(TypeError):
        submit(producer, pending(SimpleNamespace(instance_of={})), [[bytes(16)], [None]], TERMS)
    assert len(producer.given) == 1
    assert len(producer.freed) == 2
    assert not producer.cancelled
