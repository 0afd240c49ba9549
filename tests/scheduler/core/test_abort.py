"""A producer may die between any two of its instructions: the core takes back what it had, and others never notice."""

from __future__ import annotations

import numpy as np
import pytest
from core_bench import LIMITS, Bench, profile
from core_check import check_integrity
from hypothesis import given, settings
from hypothesis import strategies as some

from paellapy.scheduler.core import abort, codes, tables
from paellapy.scheduler.core import state as st
from paellapy.scheduler.core.rings import SLOTS, STAGED, Message
from paellapy.scheduler.core.tenants import client_key, client_numbers, find_client
from paellapy.scheduler.engine import ring_calls

PRODUCERS = st.Limits(**{**{name: getattr(LIMITS, name) for name in LIMITS.__dataclass_fields__}, "producers": 3})
STEPS = ("claim", "post", "write", "run", "read")  # what a producer does, in order


class Producer:
    """A producer of another process, one instruction at a time."""

    def __init__(self, bench: Bench, producer: int) -> None:
        self.bench, self.producer = bench, producer
        self.held = ring_calls.Line(bench.state, producer, 0)  # nobody arms the bell
        self.line = self.held.address
        self.rows = list(st.producer_rows(PRODUCERS, producer))
        self.serial = 0
        self.taken = np.zeros((64, ring_calls.COMPLETION_WORDS), np.int64)
        self.done: list[list[int]] = []

    def claim(self, model: int = 0, client: int = 0) -> tuple[int, int] | None:
        found = ring_calls.claim(self.line, model, client)
        return None if found == STAGED else divmod(found, SLOTS)

    def post(self, place: tuple[int, int] | None, model: int = 0, generation: int = 0, client: int = 0) -> int:
        self.serial += 1
        instance, slot = place or (codes.NONE, codes.NONE)
        message = Message(
            kind=codes.SUBMIT, request=self.rows.pop(), serial=self.serial, model=model, instance=instance,
            slot=slot, generation=generation, arrival_ns=self.bench.now, client=client)  # fmt: skip
        assert ring_calls.post(self.line, message.address)
        return self.serial

    def take(self) -> list[list[int]]:
        n = ring_calls.take(self.line, self.taken)
        found = self.taken[:n].tolist()
        for entry in found:
            self.rows.append(entry[ring_calls.E_REQUEST])
        self.done += found
        return found

    def read(self, entry: list[int]) -> None:
        ring_calls.release(self.line, entry[ring_calls.E_INSTANCE], entry[ring_calls.E_SLOT])

    def submit(self, upto: str = "write", model: int = 0) -> None:
        """Submits one request, up to a given step."""
        place = self.claim(model)
        if upto == "claim":
            return
        self.post(place, model)
        if place is not None and upto != "post":
            ring_calls.ready(self.line, *place)


def finish_all(bench: Bench, *producers: Producer) -> None:
    """All living producers finish their requests."""
    for _ in range(100):
        instances = bench.running
        for instance in instances:
            bench.finish_segment(instance)
        bench.step(1000)
        taken = [(producer, entry) for producer in producers for entry in producer.take()]
        for producer, entry in taken:
            if entry[ring_calls.E_STATUS] == codes.OK:
                producer.read(entry)
        if not instances and not taken and not bench.state.core["live"][0]:
            break
    bench.step()


@pytest.fixture
def bench() -> Bench:
    return Bench([profile(batch=(1, 4), instances=2)], limits=PRODUCERS, hold=True)


@pytest.mark.parametrize("upto", STEPS)
def test_what_a_producer_had_when_it_died_holds_nobody_up(bench, upto):
    dying, other = Producer(bench, 1), Producer(bench, 2)
    dying.submit(upto)
    other.submit()
    if upto in ("run", "read"):
        bench.step()
        for instance in bench.running:
            bench.finish_segment(instance)
        bench.step()
    if upto == "read":
        dying.take()  # and never reads the outputs
    elif upto != "run":
        bench.step()
    abort.reclaim(bench.state, 1, bench.now)
    finish_all(bench, other)
    assert [entry[ring_calls.E_STATUS] for entry in other.done] == [codes.OK]
    assert bench.state.core["live"][0] == 0
    assert bench.state.model["free_n"][0] + (bench.state.model["filling"][0] >= 0) == 2
    check_integrity(bench.state)
    again = Producer(bench, 1)  # the process that takes its place starts with all rows
    for _ in range(6):
        again.submit()
    finish_all(bench, again, other)
    assert [entry[ring_calls.E_STATUS] for entry in again.done] == [codes.OK] * 6


def test_published_but_unread_submissions_of_the_dead_are_forgotten(bench):
    dying, other = Producer(bench, 1), Producer(bench, 2)
    for _ in range(5):
        dying.submit()
    abort.reclaim(bench.state, 1, bench.now)
    other.submit()
    finish_all(bench, other)
    assert len(other.done) == 1
    assert bench.state.core["live"][0] == 0
    check_integrity(bench.state)


def fill_every_slot_once(bench: Bench, producer: Producer, client: int) -> None:
    for _ in range(2):
        for _ in range(4):
            place = producer.claim(client=client)
            producer.post(place, client=client)
            if place is not None:
                ring_calls.ready(producer.line, *place)
        finish_all(bench, producer)


@pytest.mark.parametrize("posted", [False, True])
def test_a_slot_of_the_dead_is_charged_to_the_client_that_took_it(bench, posted):
    dying, other = Producer(bench, 1), Producer(bench, 2)
    fill_every_slot_once(bench, other, client=3)
    before = bench.state.client["used_ns"].tolist()
    place = dying.claim(client=2)
    if posted:
        dying.post(place, client=2)
    other.submit()
    abort.reclaim(bench.state, 1, bench.now)
    finish_all(bench, other)
    used = bench.state.client["used_ns"]
    assert (before[0], before[2], used[3]) == (0.0, 0.0, before[3])
    assert used[2] == used[0] > 0
    assert used.sum() == pytest.approx(bench.state.model["used_ns"].sum())


def test_a_producer_that_dies_before_it_names_a_client_charges_no_earlier_one(bench):
    other = Producer(bench, 2)
    fill_every_slot_once(bench, other, client=3)
    assert not bench.state.slot_client.any()


def test_completions_come_to_the_producer_that_asked(bench):
    first, second = Producer(bench, 1), Producer(bench, 2)
    for producer, n in ((first, 3), (second, 2)):
        for _ in range(n):
            producer.submit()
    finish_all(bench, first, second)
    assert (len(first.done), len(second.done)) == (3, 2)
    assert not bench.done


def test_each_batch_has_one_first_entry(bench):
    first, second = Producer(bench, 1), Producer(bench, 2)
    for producer in (first, second, first):
        producer.submit()
    finish_all(bench, first, second)
    column = (tables.COMPLETION.names or ()).index("first")
    assert sum(entry[column] for producer in (first, second) for entry in producer.done) == 1


def test_a_request_for_the_model_that_had_the_row_before_is_refused(bench):
    producer = Producer(bench, 1)
    place = producer.claim()
    assert place is not None
    producer.post(place, generation=99)
    ring_calls.ready(producer.line, *place)
    finish_all(bench, producer)
    assert [entry[ring_calls.E_STATUS] for entry in producer.done] == [codes.NO_MODEL]
    assert bench.state.core["live"][0] == 0


def test_a_client_has_one_number_for_all_producers(bench):
    s = bench.state  # four clients: nobody, and three numbers
    found = [find_client(s.client_key, s.client, key) for key in (11, 22, 33, 22, 11)]
    assert sorted(set(found)) == [1, 2, 3]
    assert found[:2] == [found[4], found[3]]
    assert find_client(s.client_key, s.client, 44) in (1, 2, 3)


@given(some.lists(some.text(max_size=8) | some.integers(), max_size=12), some.integers(13, 40))
@settings(max_examples=30)
def test_a_clients_number_follows_from_its_name_and_the_earlier_names(names, clients):
    s = st.new_state(st.Limits(models=1, instances=1, requests=4, clients=clients))
    found = [find_client(s.client_key, s.client, client_key(name)) for name in names]
    numbers = client_numbers(map(str, names), clients)
    assert found == [numbers[str(name)] for name in names]


actions = some.lists(
    some.tuples(some.sampled_from((1, 2)), some.sampled_from((*STEPS, "step", "finish", "die", "take"))), max_size=60
)


@given(actions)
@settings(max_examples=150)
def test_whenever_a_producer_dies_the_core_stays_whole(script):
    bench = Bench([profile(batch=(1, 4), instances=2)], limits=PRODUCERS, hold=True)
    producers = {k: Producer(bench, k) for k in (1, 2)}
    unread: dict[int, list[list[int]]] = {1: [], 2: []}
    unwritten: dict[int, list[tuple[int, int]]] = {1: [], 2: []}
    for who, action in script:
        producer = producers[who]
        if action == "die":
            abort.reclaim(bench.state, who, bench.now)
            producers[who], unread[who], unwritten[who] = Producer(bench, who), [], []
            bench.step()
        elif action in ("claim", "post", "write", "run", "read") and producer.rows:
            place = producer.claim()
            producer.post(place)
            if place is not None and action in ("claim", "post"):
                unwritten[who].append(place)
            elif place is not None:
                ring_calls.ready(producer.line, *place)
        elif action == "step":
            bench.step(1000)
        elif action == "finish":
            for instance in bench.running:
                bench.finish_segment(instance)
            bench.step(1000)
        elif action == "take":
            unread[who] += [entry for entry in producer.take() if entry[ring_calls.E_STATUS] == codes.OK]
    for who, producer in producers.items():
        for place in unwritten[who]:
            ring_calls.ready(producer.line, *place)
        for entry in unread[who]:
            producer.read(entry)
    finish_all(bench, *producers.values())
    assert bench.state.core["live"][0] == 0
    for who, producer in producers.items():
        assert sorted(producer.rows) == list(st.producer_rows(PRODUCERS, who))
