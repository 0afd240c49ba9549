"""Admission: what cannot be in time is refused at once, what can is let in, and the server learns how slow it is."""

from __future__ import annotations

import asyncio
import socket

import aiohttp
import numpy as np
import pytest
from engine_models import scale_model
from serving_server import DEVICE, infer_body, running

from paellapy.scheduler.core.admission import new_limits, note_latency
from paellapy.scheduler.core.tuning import Tuning
from paellapy.scheduler.engine.engine import Engine
from paellapy.serving.admission import Admission, AdmissionLimit
from paellapy.serving.errors import RefusedError, retry_after_s

pytestmark = pytest.mark.quick

TUNING = Tuning.for_part("h200")

X = {"x": np.ones(64, np.float32)}


@pytest.fixture(scope="module")
def engine():
    with Engine(DEVICE) as found:
        found.load(scale_model("fast", batch=(1, 8)))
        found.load(scale_model("slow", steps=200, batch=(1,), target_ms=0.001))
        yield found


def rows(engine):
    return {loaded.model.name: row for row, loaded in engine.loaded_rows().items()}


def test_without_a_limit_everything_is_let_in(engine):
    assert Admission(engine).enter(engine.models["fast"], rows(engine)["fast"], None, None) is None


def test_a_deadline_shorter_than_the_model_is_refused(engine):
    model, row = engine.models["fast"], rows(engine)["fast"]
    admission = Admission(engine)
    with pytest.raises(RefusedError) as caught:
        admission.enter(model, row, None, 0.001)
    assert (caught.value.reason, caught.value.limit) == ("predicted_deadline", 0.001)
    assert caught.value.given > 0.001
    assert retry_after_s(caught.value) == 1
    ticket = admission.enter(model, row, None, 1000.0)
    assert admission.limits["fast"].in_flight == 1
    ticket.leave(answered=True)
    assert admission.limits["fast"].in_flight == 0


@pytest.mark.parametrize(("mode", "refused"), [("targets", True), ("deadlines", False), ("off", False)])
def test_a_target_counts_where_that_is_asked_for(engine, mode, refused):
    admission = Admission(engine, mode)
    model, row = engine.models["slow"], rows(engine)["slow"]
    if refused:
        with pytest.raises(RefusedError) as caught:
            admission.enter(model, row, None, None)
        assert (caught.value.reason, caught.value.limit) == ("predicted_target", model.target_ms)
    else:
        assert admission.enter(model, row, None, None) is None


def test_off_is_off(engine):
    assert Admission(engine, "off").enter(engine.models["fast"], rows(engine)["fast"], None, 1e-6) is None


def test_a_full_allowance_refuses_until_somebody_leaves(engine):
    admission = Admission(engine)
    model, row = engine.models["fast"], rows(engine)["fast"]
    tickets = [admission.enter(model, row, None, 1000.0) for _ in range(16)]
    with pytest.raises(RefusedError) as caught:
        admission.enter(model, row, None, 1000.0)
    assert (caught.value.reason, caught.value.given) == ("overloaded", 16)
    tickets[0].leave(answered=False)
    assert admission.enter(model, row, None, 1000.0) is not None


SECOND, MS = 1_000_000_000, 1_000_000


def test_an_admission_limit_finds_what_can_be_done_in_time():
    """A server that takes 10 ms an item, one after the other, and a limit of 100 ms: five or six, half of the way."""
    limit, clock, waiting, sizes = AdmissionLimit(32, TUNING), 0, [], []
    for _ in range(5000):
        while len(waiting) < limit.size:
            waiting.append((clock, len(waiting) + 1))
        clock += 10 * MS
        entered, number = waiting.pop(0)
        limit.done(entered, clock, 100 * MS, number)
        sizes.append(limit.size)
    assert 3 < np.mean(sizes[1000:]) < 7


def test_an_admission_limit_never_closes_and_grows_only_when_it_is_used():
    limit = AdmissionLimit(1, TUNING)
    for k in range(100):
        limit.done(k * SECOND, (k + 1) * SECOND, 100 * MS, 1)
    assert limit.size == 1.0
    for k in range(100, 200):
        limit.done(k * SECOND, k * SECOND + MS, 100 * MS, 2)
    grown = limit.size
    assert grown > 4
    limit.done(300 * SECOND, 300 * SECOND + MS, 100 * MS, 1)
    assert limit.size == grown


def test_predictions_that_were_too_good_are_trusted_less():
    rng = np.random.default_rng(0)
    limit, clock, late = AdmissionLimit(32, TUNING), 0, []
    for _ in range(20_000):
        clock += 10 * MS
        predicted = rng.uniform(20, 100) * MS  # limit 100; it takes up to twice as long
        if predicted <= limit.longest_admitted_ns(100 * MS, 20 * MS, 32, clock):
            took = int(predicted * rng.uniform(0.5, 2.0))
            limit.done(clock - took, clock, 100 * MS, 1)
            late.append(took > 100 * MS)
    assert 0.0025 < np.mean(late[2000:]) < 0.01  # 0.30 of all


def margin(limit, now, live=32):
    """The part of the time beyond the shortest latency that may be used."""
    shortest = limit.shortest_ns
    return (limit.longest_admitted_ns(100 * MS, 10 * MS, live, now) - shortest) / (100 * MS - shortest)


@pytest.mark.parametrize("up_s", [0, 12, 3600])
def test_the_first_margin_holds_however_long_the_machine_has_been_up(up_s):
    now = up_s * SECOND + 10 * MS
    limit, table = AdmissionLimit(32, TUNING), new_limits([32], TUNING)
    limit.in_flight = 32
    limit.done(now - 10 * MS, now, 100 * MS, 1)
    note_latency.py_func(table.view(np.recarray), 0, now - 10 * MS, now, 100 * MS, 1, TUNING)
    assert margin(limit, now) == pytest.approx(TUNING.first_margin, rel=0.01)
    assert margin(limit, now, live=2) == pytest.approx(TUNING.few_margin)
    assert table["margin"][0] == limit.margin


def test_a_margin_grows_also_while_nothing_is_let_in(engine):
    admission, model, row = Admission(engine), engine.models["fast"], rows(engine)["fast"]
    with pytest.raises(RefusedError):
        admission.enter(model, row, None, 1e-6)
    limit = admission.limits["fast"]
    limit.in_flight, now = 1, limit.margin_ns
    assert limit.longest_admitted_ns(100 * MS, 0.0, 32, now) == pytest.approx(TUNING.first_margin * 100 * MS)
    assert limit.longest_admitted_ns(100 * MS, 0.0, 32, now + int(TUNING.margin_back_ns)) == 100 * MS


def test_a_model_of_which_none_is_in_flight_is_tried():
    limit = AdmissionLimit(32, TUNING)
    limit.done(0, 10 * MS, 100 * MS, 1)
    assert margin(limit, 20 * MS) == pytest.approx(TUNING.few_margin)
    limit.in_flight = 1
    assert margin(limit, 20 * MS) == pytest.approx(TUNING.first_margin, rel=0.01)


def test_a_first_request_that_is_late_leaves_a_margin_that_grows_fast():
    """A model may be slow when it is cold."""
    cold, warm = AdmissionLimit(32, TUNING), AdmissionLimit(32, TUNING)
    cold.done(0, 500 * MS, 100 * MS, 1)
    for limit in (cold, warm):
        limit.in_flight = 32
        for k in range(250):
            limit.done(SECOND + k * MS, SECOND + (k + 10) * MS, 100 * MS, 1)
    assert margin(cold, SECOND + 260 * MS) > 0.8 * margin(warm, SECOND + 260 * MS) > 0.7


def test_a_stall_that_makes_many_late_counts_for_a_few_and_is_forgotten():
    limit = AdmissionLimit(32, TUNING)
    limit.done(0, 10 * MS, 100 * MS, 1)
    for _ in range(60):
        limit.done(SECOND, SECOND + 500 * MS, 100 * MS, 60)
    assert margin(limit, SECOND + 500 * MS) == pytest.approx(TUNING.stall_share * TUNING.first_margin, rel=0.04)
    for k in range(10, 110):
        limit.done(k * 200 * MS, (k + 1) * 200 * MS, 100 * MS, 1)
    assert margin(limit, 22 * SECOND) == pytest.approx(TUNING.least_margin, rel=0.1)
    assert margin(limit, 22 * SECOND + int(TUNING.margin_back_ns)) == 1.0  # nobody need be let in for that
    for k in range(4000):
        limit.done(22 * SECOND + k * MS, 22 * SECOND + (k + 10) * MS, 100 * MS, 1)
    assert margin(limit, 26 * SECOND + 10 * MS) > 0.9  # or many are, and are in time


def test_who_asks_for_less_than_is_possible_does_not_make_it_harder_for_others():
    limit = AdmissionLimit(32, TUNING)
    limit.done(0, 20 * MS, 100 * MS, 1)
    for k in range(1, 100):
        limit.done(k * SECOND, k * SECOND + 20 * MS, 10 * MS, 1)
    assert margin(limit, 101 * SECOND) == 1.0


def test_an_admission_limit_is_smaller_where_some_requests_take_far_longer():
    def late_and_size(slow):
        rng = np.random.default_rng(0)
        limit, late, sizes = AdmissionLimit(32, TUNING), [], []
        for k in range(20_000):
            took = int(2 * MS * limit.size * (slow if rng.random() < 0.1 else 1.0))
            limit.done(100 * MS * k, 100 * MS * k + took, 100 * MS, int(limit.size))
            late.append(took > 100 * MS)
            sizes.append(limit.size)
        return np.mean(late[5000:]), np.mean(sizes[5000:])

    calm, rough = late_and_size(1.0), late_and_size(4.0)
    assert rough[1] < calm[1]
    assert rough[0] < 0.02


def test_a_model_loaded_anew_has_a_limit_of_its_own(engine):
    admission, model, row = Admission(engine), engine.models["fast"], rows(engine)["fast"]
    admission.enter(model, row, None, 1000.0)
    before = admission.limits["fast"]
    admission.enter(model, row, None, 1000.0)
    assert admission.limits["fast"] is before
    engine.unload("fast")
    engine.load(model)
    admission.enter(model, rows(engine)["fast"], None, 1000.0)
    assert admission.limits["fast"] is not before
    assert admission.limits["fast"].in_flight == 1


def test_under_overload_the_surplus_is_refused_and_it_recovers():
    """150 at once are more than a limit takes."""
    model = scale_model("slow", steps=200, batch=(1,), instances=1, target_ms=10.0)
    body = infer_body("x", np.ones((1, 64), np.float32))

    async def one(session, url):
        async with session.post(f"{url}/v2/models/slow/infer", json=body) as answer:
            await answer.read()
            return answer.status, answer.headers.get("Retry-After")

    async def main(server):
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
            for _ in range(60):
                assert (await one(session, server.url))[0] in (200, 503)
            found = []
            for _ in range(4):
                found += await asyncio.gather(*(one(session, server.url) for _ in range(150)))
            server.wait_until(lambda: server.engine.stats()["live"] == 0)
            return found, (await one(session, server.url))[0]

    with running([model]) as server:
        found, after = asyncio.run(main(server))
        refused = server.service.counters.of("slow").refused
    statuses = [status for status, _ in found]
    assert set(statuses) == {200, 503}
    assert all(retry is not None for status, retry in found if status == 503)
    assert after == 200
    assert refused["predicted_target"] + refused["overloaded"] >= statuses.count(503)


def test_a_full_server_refuses_before_it_reads_the_body():
    with running([scale_model("m", batch=(1,), target_ms=1000.0)]) as server:
        server.service.admission.limits["m"] = AdmissionLimit(0, TUNING)
        with socket.create_connection(("127.0.0.1", server.port), timeout=60) as connection:
            connection.sendall(b"POST /v2/models/m/infer HTTP/1.1\r\nHost: x\r\nContent-Length: 900\r\n\r\n{")
            assert connection.recv(1000).startswith(b"HTTP/1.1 503")
        assert server.service.counters.of("m").refused["overloaded"] == 1


def test_a_machine_that_stalls_does_not_close_a_model_that_is_fast():
    """Eight clients of a model that takes 2 ms of its 50, on a machine that stands still for 30 ms now and then."""
    limit = AdmissionLimit(8, TUNING)
    limit.begin(8, 2e6, 1)
    limit_ns, now_ns, refused = 50e6, 10**9, 0
    for k in range(4000):
        took_ns = 2_000_000 + (30_000_000 if k % 100 == 0 else 0)
        entered = []
        for _ in range(8):
            if limit.is_full(limit_ns):
                refused += 1
                continue
            limit.in_flight += 1
            entered.append(limit.in_flight)
        for n, number in enumerate(entered):
            limit.in_flight -= 1
            limit.done(now_ns, now_ns + took_ns * (n + 1) // 8, limit_ns, number)
        now_ns += took_ns
    assert refused == 0


def test_a_burst_after_a_time_of_few_requests_is_let_in():
    """One at a time for long: what was done then says how many asked, not how many could have been done."""
    limit = AdmissionLimit(8, TUNING)
    limit.begin(8, 2e6, 1)
    limit_ns, now_ns = 50e6, 10**9
    for _ in range(3000):
        limit.in_flight = 0
        limit.done(now_ns, now_ns + 5_000_000, limit_ns, 1)
        now_ns += 10_000_000
    while not limit.is_full(limit_ns) and limit.in_flight < 200:
        limit.in_flight += 1
    assert limit.in_flight >= 0.8 * 8 * 25


def test_a_flood_that_cannot_be_done_in_time_is_still_refused():
    limit = AdmissionLimit(8, TUNING)
    limit.begin(8, 16e6, 1)
    limit_ns, now_ns, one_ns = 50e6, 10**9, 2_000_000  # 25 in the time of one
    most = 0
    for _ in range(200):
        entered = []
        while not limit.is_full(limit_ns) and limit.in_flight < 1000:
            limit.in_flight += 1
            entered.append(limit.in_flight)
        most = max(most, len(entered))
        for number in entered:
            limit.in_flight -= 1
            limit.done(now_ns, now_ns + number * one_ns, limit_ns, number)
        now_ns += len(entered) * one_ns
    assert most <= 30
    assert len(entered) <= 25


def test_a_model_begins_with_the_batches_that_its_trial_had_time_for(engine):
    row, model = rows(engine)["fast"], engine.models["fast"].changed(target_ms=100.0)
    engine.state.model["trial_ns"][row] = 4e6
    admission = Admission(engine)
    tickets = [admission.enter(model, row, None, None) for _ in range(int(0.8 * 25 * model.max_batch))]
    assert all(tickets)
    with pytest.raises(RefusedError) as caught:
        admission.enter(model, row, None, None)
    assert (caught.value.reason, caught.value.given) == ("overloaded", len(tickets))
