"""The rings and bells between producers and the core: any order of steps, deaths between any two, real threads."""

from __future__ import annotations

import random
import threading
import time
from collections import Counter

import numba
import numpy as np
from core_bench import LIMITS, Bench, profile
from core_check import check_integrity
from core_producer import PRODUCERS, Producer, finish_all
from hypothesis import settings
from hypothesis import strategies as some
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from paellapy.scheduler.core import abort, codes, rings, tables
from paellapy.scheduler.core import state as st
from paellapy.scheduler.core.atomics import load_at, store_at
from paellapy.scheduler.core.rings import ANYTHING, AWAKE, Message, announce_sleep, must_ring
from paellapy.scheduler.engine import ring_calls as calls


def test_the_ring_says_when_it_is_full() -> None:
    state = st.new_state(LIMITS)
    message = rings.Message(kind=codes.CANCEL)
    answers = [rings.post(state, 0, message.address) for _ in range(state.submit.shape[1] + 1)]
    assert answers == [True] * state.submit.shape[1] + [False]


def test_a_message_arrives_as_it_was_written() -> None:
    state = st.new_state(LIMITS)
    values = {name: 3 + k for k, name in enumerate(tables.SUBMISSION.names or ())}
    assert rings.post(state, 0, rings.Message(**values).address)
    arrived = {name: int(state.submit[0, 0][name]) for name in values}
    assert arrived == {**values, "sequence": 1}


WHO = some.sampled_from((1, 2))


class Protocol(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.bench = Bench([profile(batch=(1, 4), instances=2)], limits=PRODUCERS, hold=True)
        self.holder: dict[tuple[int, int], int] = {}
        self.producers = {k: Producer(self.bench, k, self.holder) for k in (1, 2)}
        self.failed = False

    @rule(who=WHO)
    def claim(self, who: int) -> None:
        producer = self.producers[who]
        if len(producer.rows) > len(producer.claimed):
            producer.claim()

    @rule(who=WHO, written=some.booleans())
    def post(self, who: int, written: bool) -> None:
        if self.producers[who].rows:
            self.producers[who].post(written)

    @rule(who=WHO)
    def write(self, who: int) -> None:
        if self.producers[who].unwritten:
            self.producers[who].write()

    @rule(who=WHO, which=some.integers(0, 7))
    def cancel(self, who: int, which: int) -> None:
        producer = self.producers[who]
        if producer.posted:
            producer.cancel(sorted(producer.posted)[which % len(producer.posted)])

    @rule(who=WHO)
    def take(self, who: int) -> None:
        self.producers[who].take()

    @rule(who=WHO)
    def read(self, who: int) -> None:
        if self.producers[who].unread:
            self.producers[who].read()

    @rule()
    def step(self) -> None:
        self.bench.step(1000)

    @rule()
    def finish(self) -> None:
        self.bench.finish(1000)

    @rule(slot=some.integers(0, 3))
    def fault(self, slot: int) -> None:
        """The backend marks a slot whose values made the model fail."""
        for instance in self.bench.running:
            self.bench.state.instance_fault[instance] = 0
            self.bench.state.instance_fault[instance, 0] = np.uint64(1 << slot)
            self.bench.state.instance["faulty"][instance] = 1

    @rule(who=WHO, publishing=some.booleans())
    def die(self, who: int, publishing: bool) -> None:
        """Dies, whatever the state of its requests; then another process takes its place."""
        if publishing:
            self.producers[who].die_publishing()
            self.bench.step(1000)
        abort.reclaim(self.bench.state, who, self.bench.now)
        self.producers[who] = Producer(self.bench, who, self.holder)
        self.bench.step()

    @precondition(lambda self: not self.failed)
    @rule(often=some.integers(0, 15))
    def lose_the_gpu(self, often: int) -> None:
        if often == 0:
            self.failed = True
            self.bench.tell(codes.FAIL, tag=719)
            self.bench.step()
            self.bench.launched.clear()

    @invariant()
    def holds_together(self) -> None:
        check_integrity(self.bench.state)

    def teardown(self) -> None:
        """All living producers finish, and nothing is left."""
        finish_all(self.bench, *self.producers.values())
        state = self.bench.state
        assert state.core["live"][0] == 0
        assert self.failed or state.model["free_n"][0] + (state.model["filling"][0] >= 0) == 2
        for who, producer in self.producers.items():
            assert not producer.posted
            assert sorted(producer.rows) == list(st.producer_rows(PRODUCERS, who))
            lost = {codes.FAILED, codes.SUSPECTED} if self.failed else set()
            assert set(producer.statuses) <= {codes.OK, codes.CANCELLED, codes.FAULTED} | lost


Protocol.TestCase.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)
test_any_order_of_steps_and_deaths = Protocol.TestCase


def test_real_threads_that_stop_anywhere_and_die():
    """Four lives of each of two producers, each a thread with pauses between any two of its steps; one core."""
    bench, holder = Bench([profile(batch=(1, 4), instances=2)], limits=PRODUCERS, hold=True), {}
    over, dead, problems = threading.Event(), {}, []
    finished: Counter[int] = Counter()

    def live(number: int, life: int) -> None:
        producer, rng = Producer(bench, number, holder), random.Random(100 * number + life)
        last = life == 3
        wanted = 150 if last else rng.randrange(20, 120)
        began = 0
        try:
            while began < wanted or (last and producer.posted):
                for act in ("claim", "post", "write", "take", "read"):
                    if rng.random() < 0.2:
                        time.sleep(rng.random() * 2e-4)  # between any two of its steps
                    if act == "claim" and began < wanted and len(producer.rows) > len(producer.claimed):
                        producer.claim()
                    elif act == "post" and began < wanted and producer.rows:
                        began += 1
                        producer.post(rng.random() < 0.5)
                    elif act == "write" and producer.unwritten:
                        producer.write()
                    elif act == "take":
                        producer.take()
                    elif act == "read" and producer.unread:
                        producer.read()
            if last:
                while producer.unread:
                    producer.read()
                finished[number] = sum(producer.ended.values())
        except BaseException as e:
            problems.append(e)
        dead[number] = life

    def run(number: int) -> None:
        for life in range(4):
            thread = threading.Thread(target=live, args=(number, life))
            thread.start()
            thread.join()
            while life < 3 and number in dead and not over.is_set():  # until the core has taken back what it had
                time.sleep(1e-4)

    threads = [threading.Thread(target=run, args=(number,)) for number in (1, 2)]
    for each in threads:
        each.start()
    rng = random.Random(7)
    end = time.monotonic() + 60
    while any(each.is_alive() for each in threads) and time.monotonic() < end and not problems:
        for number, life in list(dead.items()):
            if life < 3:
                abort.reclaim(bench.state, number, bench.now)
                del dead[number]
        for instance in bench.running:
            if rng.random() < 0.7:
                bench.finish_segment(instance)
        bench.step(1000)
    over.set()
    for each in threads:
        each.join(10)
    assert not problems, problems
    assert finished == {1: 150, 2: 150}
    bench.step(1000)
    check_integrity(bench.state)
    assert bench.state.core["live"][0] == 0


def messages(n: int, **values: int) -> np.ndarray:
    """Messages one behind the other; those of requests have the rows 0, 1, …"""
    made = [Message(request=k, serial=k + 1, **values) for k in range(n)]
    return np.array([np.frombuffer(each, np.uint8) for each in made])


def test_requests_posted_together_are_one_batch():
    bench = Bench([profile(batch=(1, 8))])
    held = calls.Line(bench.state, 0, 0)
    producer = held.address
    assert calls.post_all(producer, messages(5, kind=codes.SUBMIT).ctypes.data, 5)
    bench.step()
    assert bench.state.instance["taken"].tolist().count(5) == 1
    assert [len(each) for each in bench.launched.values()] == [1]


def test_messages_posted_together_fit_all_or_none_and_go_around_the_ring():
    bench = Bench([profile()])
    state, held = bench.state, calls.Line(bench.state, 0, 0)
    producer = held.address
    capacity = state.submit.shape[1]
    some_messages = messages(capacity, kind=codes.CANCEL)  # of requests that do not exist: without effect
    for n in (capacity - 3, 7, capacity, 1, capacity):  # the second run crosses the ring's end
        assert calls.post_all(producer, some_messages.ctypes.data, n)
        assert not calls.post_all(producer, some_messages.ctypes.data, capacity - n + 1)
        assert int(state.ring[0, codes.SUBMIT_TAIL, 0] - state.ring[0, codes.SUBMIT_HEAD, 0]) == n
        bench.step()
        assert state.ring[0, codes.SUBMIT_TAIL, 0] == state.ring[0, codes.SUBMIT_HEAD, 0]
    bench.submit()
    bench.step()
    assert len(bench.launched) == 1


ROUNDS = 3000
APART = 16  # words between two that are shared: a cache line and more, so that they may be reordered


@numba.njit(nogil=True)
def posts(bell, post, begun, ended, rang):
    for k in range(1, len(rang)):
        while load_at(begun) != np.uint64(k):
            pass
        store_at(post, np.uint64(k))
        rang[k] = must_ring(bell, False)
        store_at(ended, np.uint64(k))


@numba.njit(nogil=True)
def sleeps(bell, post, begun, ended, seen):
    for k in range(1, len(seen)):
        store_at(bell, AWAKE)
        store_at(begun, np.uint64(k))
        announce_sleep(bell, ANYTHING)
        seen[k] = load_at(post) == np.uint64(k)
        while load_at(ended) != np.uint64(k):
            pass


def test_no_loop_sleeps_over_posted_work():
    words = np.zeros(4 * APART, np.uint64)
    shared = [np.uint64(words.ctypes.data + 8 * APART * k) for k in range(4)]
    rang, seen = (np.ones(ROUNDS + 1, np.bool_) for _ in range(2))
    poster = threading.Thread(target=posts, args=(*shared, rang), daemon=True)
    sleeps(*shared, seen[:1])  # compiled before the race
    posts(*shared, rang[:1])
    poster.start()
    sleeps(*shared, seen)
    poster.join()
    assert (rang | seen).all()
