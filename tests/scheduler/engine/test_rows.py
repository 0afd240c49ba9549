"""Rows for requests: one client, or several, may want all of them, and others still find one."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as some

from paellapy.scheduler.core import state as st
from paellapy.scheduler.core.errors import QueueFullError, TooManyRequestsError
from paellapy.scheduler.engine.ring_client import Rows

pytestmark = pytest.mark.quick

CLIENTS = 12


def rows_of(total: int, named: bool = True) -> Rows:
    state = st.new_state(st.Limits(models=1, instances=1, requests=total, clients=CLIENTS))
    state.client_key[1] = named
    return Rows(state, range(total))


def fill(rows: Rows, client: int) -> list[int]:
    """Takes rows until the client is refused."""
    found: list[int] = []
    while True:
        try:
            found.append(rows.take(client))
        except QueueFullError:
            return found


def test_one_client_gets_most_rows_and_not_the_last():
    for total in range(2, 40):
        rows = rows_of(total)
        assert total * 8 // 9 <= len(fill(rows, 1)) + 1 <= total
        rows.take(2)


def test_where_nobody_has_a_name_all_rows_can_be_used():
    rows = rows_of(16, named=False)
    assert len(fill(rows, 0)) == 16
    rows = rows_of(16)
    assert len(fill(rows, 0)) < 16
    with pytest.raises(QueueFullError, check=lambda e: e.limit == 16):
        rows.take(0)


@pytest.mark.parametrize("flooders", range(1, 9))
def test_no_client_that_floods_has_less_than_half_of_an_equal_part(flooders):
    rows = rows_of(800)
    held = {client: fill(rows, client) for client in range(1, flooders + 1)}
    for _ in range(1000):
        for client, mine in held.items():
            if len(mine) > 1:
                rows.give(client, mine.pop(0))
        for client, mine in held.items():
            mine += fill(rows, client)
    sizes = sorted(map(len, held.values()))
    assert sizes[0] >= 800 // (2 * flooders)
    with pytest.raises(TooManyRequestsError, match="800 requests"):
        rows.take(1)
    assert rows.take(CLIENTS - 1) >= 0


def test_a_client_with_few_requests_is_not_blamed_for_a_full_table():
    rows = rows_of(12)
    for client in range(1, CLIENTS):
        rows.take(client)
    with pytest.raises(QueueFullError) as found:
        rows.take(3)
    assert not isinstance(found.value, TooManyRequestsError)


@given(some.integers(2, 40), some.lists(some.tuples(some.integers(0, CLIENTS - 1), some.booleans()), max_size=200))
@settings(max_examples=100)
def test_each_row_has_one_owner_and_a_newcomer_gets_any_free_row(total, script):
    rows = rows_of(total)
    held: dict[int, list[int]] = {client: [] for client in range(CLIENTS)}
    for client, wants in script:
        used = sum(map(len, held.values()))
        if wants:
            try:
                held[client].append(rows.take(client))
            except QueueFullError:
                assert held[client] or used == total
        elif held[client]:
            rows.give(client, held[client].pop())
        taken = [row for mine in held.values() for row in mine]
        assert len(set(taken)) == len(taken) <= total
    for client, mine in held.items():
        for row in mine:
            rows.give(client, row)
    assert {rows.take(client) for client in range(min(total, CLIENTS))} <= set(range(total))
