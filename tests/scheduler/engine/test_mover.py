"""The mover carries out orders in their order, but lets weights begin to come while others leave."""

from __future__ import annotations

import time

import pytest

from paellapy.scheduler.core import codes
from paellapy.scheduler.core.errors import WeightsError
from paellapy.scheduler.core.state import new_state
from paellapy.scheduler.engine.mover import Mover


class Noted:
    """Notes the calls of the mover; evictions of rows in `stuck` fail."""

    def __init__(self, stuck=()):
        self.calls, self._stuck = [], stuck

    def __getattr__(self, name):
        def call(row):
            self.calls.append((name, row))
            if name == "evict" and row in self._stuck:
                raise WeightsError("stuck")

        return call


def carried_out(moves, orders):
    state = new_state()
    for k, (kind, row) in enumerate(orders):
        state.move[k]["kind"], state.move[k]["model"] = kind, row
    state.move_ring[codes.MOVE_TAIL, 0] = len(orders)
    mover = Mover(state, moves, lambda: None)
    until = time.monotonic() + 30
    while int(state.move_ring[codes.MOVE_HEAD, 0]) < len(orders) and time.monotonic() < until:
        time.sleep(0.001)
    mover.close()
    return mover


def test_the_next_weights_begin_to_come_before_others_leave():
    moves = Noted()
    carried_out(moves, [(codes.EVICT, 0), (codes.EVICT, 1), (codes.BRING, 2), (codes.BRING, 3)])
    assert [call for call in moves.calls if call[0] != "begin"] == [
        ("evict", 0), ("evict", 1), ("bring", 2), ("bring", 3),
    ]  # fmt: skip
    assert moves.calls[0] == ("begin", 2)
    assert ("begin", 3) not in moves.calls


@pytest.mark.parametrize("number", [1, 3])
def test_weights_that_began_to_come_are_withdrawn_if_others_cannot_leave(number):
    moves = Noted(stuck=(0,))
    orders = [(codes.EVICT, 0), *((codes.EVICT, 5 + k) for k in range(number - 1)), (codes.BRING, 2)]
    mover = carried_out(moves, orders)
    assert moves.calls[-1] == ("withdraw", 2)
    assert ("bring", 2) not in moves.calls
    assert set(mover.errors) == {2}
    assert set(mover.stuck) == {0}
