"""The client of the rings: submitting, rows and their parts of clients, reading completions."""

from __future__ import annotations

import asyncio
import os
import threading
from types import SimpleNamespace

import numpy as np
import pytest
from core_check import check_at_rest
from engine_models import scale_model
from engine_requests import Told, post
from hypothesis import given, settings
from hypothesis import strategies as some
from waiting import wait_until

import paellapy as pp
from paellapy.scheduler.core import state as st
from paellapy.scheduler.core.errors import QueueFullError, TooManyRequestsError
from paellapy.scheduler.engine.client import submit
from paellapy.scheduler.engine.input_staging import OwnStage
from paellapy.scheduler.engine.ring_client import Rows

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


# Submitting several items: an error withdraws all of them, and frees their rows and memory once.


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


# Rows for requests: one client, or several, may want all of them, and others still find one.


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


@pytest.mark.parametrize("spin_ns", [0, 1_000, 50_000_000])
def test_threads_and_event_loops_are_answered_whether_threads_spin_or_sleep(engine, spin_ns):
    engine.core.ring.spin_ns = spin_ns

    def ask_in_thread(k):
        return [engine.infer_sync("scale", {"x": X + k + n})["y"] for n in range(10)]

    async def ask():
        own = [engine.infer("scale", {"x": X + n}) for n in range(10)]
        others = [asyncio.to_thread(ask_in_thread, k) for k in (100, 200, 300)]
        return await asyncio.gather(asyncio.gather(*own), *others)

    for first, answers in zip((0, 100, 200, 300), asyncio.run(asyncio.wait_for(ask(), 120)), strict=True):
        for n, found in enumerate(answers):
            np.testing.assert_array_equal(found["y"] if first == 0 else found, 2 * (X + first + n))
    assert engine.infer_sync("scale", {"x": X})["y"][1] == 2
    assert not engine.core.ring.waiting
