"""A producer may die between any two of its instructions: the core takes back what it had, and others never notice."""

from __future__ import annotations

import pytest
from core_bench import Bench, profile
from core_producer import PRODUCERS, Producer, finish_all

from paellapy.scheduler.core import abort, codes, tables


@pytest.fixture
def bench() -> Bench:
    return Bench([profile(batch=(1, 4), instances=2)], limits=PRODUCERS, hold=True)


@pytest.mark.parametrize("upto", ["publish", "claim", "post", "write", "run", "read"])
def test_slots_and_requests_of_a_dead_producer_block_no_other_producer(bench, upto):
    dying, other = Producer(bench, 1), Producer(bench, 2)
    dying.submit(upto)
    other.submit()
    if upto != "publish":  # these messages are never read
        bench.step()
    if upto in ("run", "read"):
        bench.finish()
    if upto == "read":
        dying.take()  # and never reads the outputs
    abort.reclaim(bench.state, 1, bench.now)
    finish_all(bench, other)
    assert other.statuses == {codes.OK: 1}
    assert bench.state.core["live"][0] == 0
    assert bench.state.model["free_n"][0] + (bench.state.model["filling"][0] >= 0) == 2
    again = Producer(bench, 1)  # the process that takes its place starts with all rows
    for _ in range(6):
        again.submit()
    finish_all(bench, again, other)
    assert again.statuses == {codes.OK: 6}


def fill_every_slot_once(bench: Bench, producer: Producer, client: int) -> None:
    for _ in range(2):
        for _ in range(4):
            producer.submit(client=client)
        finish_all(bench, producer)


@pytest.mark.parametrize("posted", [False, True])
def test_a_slot_of_the_dead_is_charged_to_the_client_that_took_it(bench, posted):
    dying, other = Producer(bench, 1), Producer(bench, 2)
    fill_every_slot_once(bench, other, client=3)
    before = bench.state.client["used_ns"].tolist()
    dying.submit("post" if posted else "claim", client=2)
    other.submit()
    abort.reclaim(bench.state, 1, bench.now)
    finish_all(bench, other)
    used = bench.state.client["used_ns"]
    assert (before[0], before[2], used[3]) == (0.0, 0.0, before[3])
    assert used[2] == used[0] > 0
    assert used.sum() == pytest.approx(bench.state.model["used_ns"].sum())


def test_a_producer_that_dies_before_it_names_a_client_charges_no_earlier_one(bench):
    fill_every_slot_once(bench, Producer(bench, 2), client=3)
    assert not bench.state.slot_client.any()


def test_each_batch_has_one_first_entry(bench):
    first, second = Producer(bench, 1), Producer(bench, 2)
    for producer in (first, second, first):
        producer.submit()
    column = (tables.COMPLETION.names or ()).index("first")
    assert sum(entry[column] for entry in finish_all(bench, first, second)) == 1


def test_a_request_for_the_model_that_had_the_row_before_is_refused(bench):
    producer = Producer(bench, 1)
    producer.claim()
    producer.post(generation=99)
    finish_all(bench, producer)
    assert producer.statuses == {codes.NO_MODEL: 1}
    assert bench.state.core["live"][0] == 0
