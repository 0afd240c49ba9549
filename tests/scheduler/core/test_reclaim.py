"""A front end may die between any two of its instructions: the core takes back what it had, and others never notice."""

from __future__ import annotations

import numpy as np
import pytest
from core_bench import LIMITS, Bench, profile
from hypothesis import given, settings
from hypothesis import strategies as some

from paellapy.scheduler.core import codes, step, tables
from paellapy.scheduler.core import state as st
from paellapy.scheduler.core.check import check_integrity
from paellapy.scheduler.core.rings import SLOTS, STAGED, Message
from paellapy.scheduler.core.shares import client_key, client_numbers, find_client
from paellapy.scheduler.engine import ring_calls

FRONTS = st.Limits(**{**{name: getattr(LIMITS, name) for name in LIMITS.__dataclass_fields__}, "fronts": 3})
STEPS = ("claim", "post", "write", "run", "read")  # what a front end does, in order


class Front:
    """A front end of another process, one instruction at a time."""

    def __init__(self, bench: Bench, front: int) -> None:
        self.bench, self.front = bench, front
        self.held = ring_calls.Line(bench.state, front, 0)  # nobody arms the bell
        self.line = self.held.address
        self.rows = list(st.front_rows(FRONTS, front))
        self.serial = 0
        self.taken = np.zeros((64, ring_calls.COMPLETION_WORDS), np.int64)
        self.done: list[list[int]] = []

    def claim(self, model: int = 0, client: int = 0) -> tuple[int, int] | None:
        found = ring_calls.claim(self.line, model, client)
        return None if found == STAGED else divmod(found, SLOTS)

    def post(self, place: tuple[int, int] | None, model: int = 0, generation: int = 0, client: int = 0) -> int:
        self.serial += 1
        lane, slot = place or (codes.NONE, codes.NONE)
        message = Message(kind=codes.SUBMIT, request=self.rows.pop(), serial=self.serial, model=model, lane=lane,
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
        ring_calls.release(self.line, entry[ring_calls.E_LANE], entry[ring_calls.E_SLOT])

    def submit(self, upto: str = "write", model: int = 0) -> None:
        """Submits one request, up to a given step."""
        place = self.claim(model)
        if upto == "claim":
            return
        self.post(place, model)
        if place is not None and upto != "post":
            ring_calls.ready(self.line, *place)


def finish_all(bench: Bench, *fronts: Front) -> None:
    """All living front ends finish their requests."""
    for _ in range(100):
        lanes = bench.running
        for lane in lanes:
            bench.finish_segment(lane)
        bench.step(1000)
        taken = [(front, entry) for front in fronts for entry in front.take()]
        for front, entry in taken:
            if entry[ring_calls.E_STATUS] == codes.OK:
                front.read(entry)
        if not lanes and not taken and not bench.state.core["live"][0]:
            break
    bench.step()


@pytest.fixture
def bench() -> Bench:
    return Bench([profile(batch=(1, 4), lanes=2)], limits=FRONTS, hold=True)


@pytest.mark.parametrize("upto", STEPS)
def test_what_a_front_end_had_when_it_died_holds_nobody_up(bench, upto):
    dying, other = Front(bench, 1), Front(bench, 2)
    dying.submit(upto)
    other.submit()
    if upto in ("run", "read"):
        bench.step()
        for lane in bench.running:
            bench.finish_segment(lane)
        bench.step()
    if upto == "read":
        dying.take()  # and never reads the outputs
    elif upto != "run":
        bench.step()
    step.reclaim(bench.state, 1, bench.now)
    finish_all(bench, other)
    assert [entry[ring_calls.E_STATUS] for entry in other.done] == [codes.OK]
    assert bench.state.core["live"][0] == 0
    assert bench.state.model["free_n"][0] + (bench.state.model["filling"][0] >= 0) == 2
    check_integrity(bench.state)
    again = Front(bench, 1)  # the process that takes its place starts with all rows
    for _ in range(6):
        again.submit()
    finish_all(bench, again, other)
    assert [entry[ring_calls.E_STATUS] for entry in again.done] == [codes.OK] * 6


def test_published_but_unread_submissions_of_the_dead_are_forgotten(bench):
    dying, other = Front(bench, 1), Front(bench, 2)
    for _ in range(5):
        dying.submit()
    step.reclaim(bench.state, 1, bench.now)
    other.submit()
    finish_all(bench, other)
    assert len(other.done) == 1
    assert bench.state.core["live"][0] == 0
    check_integrity(bench.state)


def fill_every_slot_once(bench: Bench, front: Front, client: int) -> None:
    for _ in range(2):
        for _ in range(4):
            place = front.claim(client=client)
            front.post(place, client=client)
            if place is not None:
                ring_calls.ready(front.line, *place)
        finish_all(bench, front)


@pytest.mark.parametrize("posted", [False, True])
def test_a_slot_of_the_dead_is_charged_to_the_client_that_took_it(bench, posted):
    dying, other = Front(bench, 1), Front(bench, 2)
    fill_every_slot_once(bench, other, client=3)
    before = bench.state.client["used_ns"].tolist()
    place = dying.claim(client=2)
    if posted:
        dying.post(place, client=2)
    other.submit()
    step.reclaim(bench.state, 1, bench.now)
    finish_all(bench, other)
    used = bench.state.client["used_ns"]
    assert (before[0], before[2], used[3]) == (0.0, 0.0, before[3])
    assert used[2] == used[0] > 0
    assert used.sum() == pytest.approx(bench.state.model["used_ns"].sum())


def test_a_front_end_that_dies_before_it_names_a_client_charges_no_earlier_one(bench):
    other = Front(bench, 2)
    fill_every_slot_once(bench, other, client=3)
    assert not bench.state.slot_client.any()


def test_completions_come_to_the_front_end_that_asked(bench):
    first, second = Front(bench, 1), Front(bench, 2)
    for front, n in ((first, 3), (second, 2)):
        for _ in range(n):
            front.submit()
    finish_all(bench, first, second)
    assert (len(first.done), len(second.done)) == (3, 2)
    assert not bench.done


def test_each_batch_has_one_first_entry(bench):
    first, second = Front(bench, 1), Front(bench, 2)
    for front in (first, second, first):
        front.submit()
    finish_all(bench, first, second)
    column = (tables.COMPLETION.names or ()).index("first")
    assert sum(entry[column] for front in (first, second) for entry in front.done) == 1


def test_a_request_for_the_model_that_had_the_row_before_is_refused(bench):
    front = Front(bench, 1)
    place = front.claim()
    assert place is not None
    front.post(place, generation=99)
    ring_calls.ready(front.line, *place)
    finish_all(bench, front)
    assert [entry[ring_calls.E_STATUS] for entry in front.done] == [codes.NO_MODEL]
    assert bench.state.core["live"][0] == 0


def test_a_client_has_one_number_for_all_front_ends(bench):
    s = bench.state  # four clients: nobody, and three numbers
    found = [find_client(s.client_key, s.client, key) for key in (11, 22, 33, 22, 11)]
    assert sorted(set(found)) == [1, 2, 3]
    assert found[:2] == [found[4], found[3]]
    assert find_client(s.client_key, s.client, 44) in (1, 2, 3)


@given(some.lists(some.text(max_size=8) | some.integers(), max_size=12), some.integers(13, 40))
@settings(max_examples=30)
def test_a_clients_number_follows_from_its_name_and_the_earlier_names(names, clients):
    s = st.new_state(st.Limits(models=1, lanes=1, requests=4, clients=clients))
    found = [find_client(s.client_key, s.client, client_key(name)) for name in names]
    numbers = client_numbers(map(str, names), clients)
    assert found == [numbers[str(name)] for name in names]


actions = some.lists(
    some.tuples(some.sampled_from((1, 2)), some.sampled_from((*STEPS, "step", "finish", "die", "take"))), max_size=60
)


@given(actions)
@settings(max_examples=150)
def test_whenever_a_front_end_dies_the_core_stays_whole(script):
    bench = Bench([profile(batch=(1, 4), lanes=2)], limits=FRONTS, hold=True)
    fronts = {k: Front(bench, k) for k in (1, 2)}
    unread: dict[int, list[list[int]]] = {1: [], 2: []}
    unwritten: dict[int, list[tuple[int, int]]] = {1: [], 2: []}
    for who, action in script:
        front = fronts[who]
        if action == "die":
            step.reclaim(bench.state, who, bench.now)
            fronts[who], unread[who], unwritten[who] = Front(bench, who), [], []
            bench.step()
        elif action in ("claim", "post", "write", "run", "read") and front.rows:
            place = front.claim()
            front.post(place)
            if place is not None and action in ("claim", "post"):
                unwritten[who].append(place)
            elif place is not None:
                ring_calls.ready(front.line, *place)
        elif action == "step":
            bench.step(1000)
        elif action == "finish":
            for lane in bench.running:
                bench.finish_segment(lane)
            bench.step(1000)
        elif action == "take":
            unread[who] += [entry for entry in front.take() if entry[ring_calls.E_STATUS] == codes.OK]
    for who, front in fronts.items():
        for place in unwritten[who]:
            ring_calls.ready(front.line, *place)
        for entry in unread[who]:
            front.read(entry)
    finish_all(bench, *fronts.values())
    assert bench.state.core["live"][0] == 0
    for who, front in fronts.items():
        assert sorted(front.rows) == list(st.front_rows(FRONTS, who))
