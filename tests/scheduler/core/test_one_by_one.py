"""Where the host computes the launches: the core decides again after each of them, and admission refuses few."""

from __future__ import annotations

import ctypes
import heapq
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from core_bench import LIMITS, Bench, profile, take_done

from paellapy.scheduler.core import admission, codes, step, tables
from paellapy.scheduler.core.admission import reader
from paellapy.scheduler.core.profiles import ModelProfile, SegmentProfile
from paellapy.scheduler.core.tuning import Tuning
from paellapy.scheduler.policies.policy import policy as make_policy
from paellapy.serving.admission import AdmissionLimit, Asked

MS = 1_000_000
TUNING = Tuning.for_part("h200")


def models_of(bench):
    return [int(bench.state.instance["model"][instance]) for instance in bench.running]


def test_a_short_request_waits_for_one_launch_only():
    long, short = profile("long", ns=1e6, instances=4), profile("short", segments=1, ns=1e4, instances=2)
    bench = Bench([long, short], policy="srpt", one_by_one=True)
    for _ in range(3):
        bench.submit(0)
    bench.step()
    assert models_of(bench) == [0]
    quick = bench.submit(1)
    bench.step()
    assert models_of(bench) == [0, 1]
    bench.finish_segment(bench.running[1])
    bench.step()
    assert quick in bench.done
    bench.run_dry()


def test_a_short_job_runs_all_its_segments_before_a_long_job_continues():
    long, short = profile("long", segments=3, ns=1e6, instances=2), profile("short", ns=1e4, instances=2)
    bench = Bench([long, short], policy="srpt", one_by_one=True)
    bench.submit(0)
    bench.submit(0)
    bench.step()
    order = models_of(bench)
    bench.submit(1)
    while bench.rows:
        bench.finish(1)
        order += models_of(bench)
    assert order[:4] == [0, 1, 1, 1]
    assert 1 not in order[4:]


def oldest(job):
    return job.arrival_ns


def is_ordinary(job):
    return job.priority == 0


def test_a_started_job_goes_before_younger_ones_while_an_older_one_is_refused():
    models = [profile("held", 1, instances=1), profile("long", 3, instances=1), profile("short", 1, instances=4)]
    policy = make_policy(admit=is_ordinary, may_idle=True)(oldest)
    bench = Bench(models, policy=policy, one_by_one=True)
    for model in range(3):
        bench.submit(model, priority=int(model == 0))
        bench.now += 1
    order = []
    for _ in range(12):
        bench.step(1)
        order += models_of(bench)
        for instance in bench.running:
            bench.finish_segment(instance)
        bench.submit(2)
    assert 0 not in order
    assert order[:3] == [1, 1, 1]


def test_a_batch_stays_open_while_the_host_computes():
    bench = Bench([profile(segments=1, batch=(1, 8), instances=4)], policy="fifo", one_by_one=True)
    bench.submit()
    bench.step()
    first = bench.running[0]
    serials = [bench.submit() for _ in range(5)]
    bench.finish_segment(first)
    bench.step()
    (instance,) = bench.running
    assert bench.state.instance["taken"][instance] == 5
    bench.finish_segment(instance)
    bench.step()
    assert all(bench.done[serial]["batch"] == 5 for serial in serials)


def test_where_the_hardware_decides_all_jobs_are_launched_at_once():
    bench = Bench([profile(instances=4)], policy="streams", one_by_one=True)
    for _ in range(4):
        bench.submit()
    bench.step()
    assert len(bench.running) == 4
    bench.run_dry()


# --- admission in simulated time ------------------------------------------------------------------------------------

# Targets, shares of the requests, and the host's time by batch size, all like those of the demo models. The GPU itself
# would take microseconds, so predictions know nothing of the host.
SIZES = (1, 2, 4, 8)
TARGET_NS = (50 * MS, 100 * MS, 200 * MS)
SHARES = (0.6, 0.27, 0.13)
HOST_NS = ((270e3, 280e3, 290e3, 360e3), (720e3, 1030e3, 1540e3, 2660e3), (3250e3, 4970e3, 6670e3, 10200e3))
GPU_NS = (14e3, 40e3, 156e3)


class Host:
    """A thread that steps the core and computes its launches; a server that admits requests, if asked to."""

    def __init__(self, one_by_one: bool, admits: bool, policy: str = "paella") -> None:
        made = [
            ModelProfile(
                f"m{m}", {b: [SegmentProfile(ns)] for b in SIZES}, target_ms=TARGET_NS[m] / MS, instances=8,
                demand=dict.fromkeys(SIZES, 0.2),
            )
            for m, ns in enumerate(GPU_NS)
        ]  # fmt: skip
        limits = replace(LIMITS, instances=32, instances_per_model=8, sizes=4, requests=1 << 14)
        self.bench = Bench(made, policy=policy, limits=limits, demand=TUNING.demand_limit, one_by_one=one_by_one)
        self.state, self.now = self.bench.state, 10**9
        self.rng = np.random.default_rng(0)
        self.ends: list[tuple[float, int]] = []  # when the virtual GPU is done with a launch, and its word
        self.asked, self.reader = Asked(), reader(self.state)
        self.limits = [AdmissionLimit(8, TUNING) for _ in made] if admits else []
        for limit, cost in zip(self.limits, HOST_NS, strict=False):
            limit.begin(8, 1.2 * cost[-1], 1)
        self.numbers: dict[int, int] = {}  # requests in flight when the serial entered

    def admits(self, m: int, now: int) -> bool:
        if not self.limits:
            return True
        asked = self.asked
        asked.model, asked.entered_ns, asked.now_ns, asked.limit_ns = m, now, now, TARGET_NS[m]
        asked.deadline_ns = codes.NEVER
        return admission.admit_one(self.reader, self.limits[m].table, asked.table) == admission.ADMITTED

    def turn(self) -> tuple[list[int], bool]:
        """One turn of the loop: the serials of completed requests, and whether there was anything to do."""
        s = self.state
        while self.ends and self.ends[0][0] <= self.now:
            ctypes.c_uint64.from_address(heapq.heappop(self.ends)[1]).value = 1
        events = step.step(s, self.now)
        done, into = [], np.zeros(64, tables.COMPLETION)
        while n := take_done(s, 0, into):
            done += into["serial"][:n].tolist()
            self.bench.free += into["request"][:n].tolist()
        launches = s.out[: s.core["out"][0]].tolist()
        s.core["out"][0] = 0
        for instance, size, _, word, _ in launches:
            m = int(s.instance["model"][instance])
            heapq.heappush(self.ends, (self.now + GPU_NS[m], word))
            self.now += int(HOST_NS[m][size] * self.rng.uniform(0.8, 1.2))
        return done, bool(done or launches or events)

    def play(self, arrivals):
        """Latencies by request; those that are refused have none (NaN)."""
        took = np.full(len(arrivals), np.nan)
        began, owner, k = self.now, {}, 0
        while k < len(arrivals) or owner:
            while k < len(arrivals) and began + arrivals[k][0] <= self.now:
                at, m = began + arrivals[k][0], arrivals[k][1]
                if self.admits(m, at):
                    self.bench.now = at
                    owner[serial := self.bench.submit(m, direct=True)] = k
                    self.numbers[serial] = self.limits[m].in_flight if self.limits else 0
                k += 1
            done, busy = self.turn()
            for serial in done:
                which = owner.pop(serial)
                at, m = arrivals[which]
                took[which] = self.now - began - at
                if self.limits:
                    self.limits[m].in_flight -= 1
                    self.limits[m].done(began + at, self.now, TARGET_NS[m], self.numbers.pop(serial))
            if not busy:
                coming = [began + arrivals[k][0]] if k < len(arrivals) else []
                self.now = max(self.now + 1, int(min(coming + [end for end, _ in self.ends[:1]])))
        return took


def outcome(load: float, one_by_one: bool = True, seconds: float = 3.0):
    """Refused requests by model, the part of them that is late without admission, and the parts in time with admission
    and without, and late though let in.
    """
    full = sum(share * cost[-1] / 8 for share, cost in zip(SHARES, HOST_NS, strict=True))  # in full batches
    rng = np.random.default_rng(int(load * 10))
    n = int(load * 1e9 / full * seconds)
    times, models = np.cumsum(rng.exponential(full / load, n)).astype(int), rng.choice(3, n, p=SHARES)
    arrivals = list(zip(times.tolist(), models.tolist(), strict=True))
    target = np.array(TARGET_NS)[models]
    with_it, without = (Host(one_by_one, admits).play(arrivals) for admits in (True, False))
    refused = np.isnan(with_it)
    return (
        Counter(models[refused].tolist()),
        (without > target)[refused].mean() if refused.any() else 1.0,
        (with_it <= target).mean(),
        (without <= target).mean(),
        (with_it > target)[~refused].mean(),
    )


@pytest.mark.parametrize("load", [0.5, 0.8])
def test_below_its_capacity_a_host_refuses_and_delays_no_request(load):
    refused, _, in_time, without, late = outcome(load)
    assert not refused
    assert in_time == without == 1.0
    assert late == 0.0


@pytest.mark.parametrize("load", [1.2, 1.6])
def test_beyond_its_capacity_a_host_refuses_late_requests(load):
    _, rightly, in_time, without, late = outcome(load)
    assert rightly >= 0.8
    assert in_time >= without
    assert late < 0.02


def test_cheap_requests_are_not_refused_because_of_expensive_ones():
    refused, _, in_time, _, _ = outcome(1.2)
    assert refused[0] == refused[1] == 0
    assert refused[2] > 0
    assert in_time > outcome(1.2, one_by_one=False)[2]
