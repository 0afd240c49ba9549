"""The cost of a decision of the dispatcher core, and the speed of simulating segments. One CPU core, no GPU.

    python benchmarks/core_speed.py [--against CHECKOUT]

A decision is one launch with everything that belongs to it: a segment's completion is seen and accounted for, ranks are
computed again, and the next segment is chosen among all that wait, and launched. A launch takes its time alone. In a
long queue, programs of four segments are launched in one piece, so each decision also ends a request, which is answered
and followed by a new submission; the figure includes that. Every request has a deadline that the core watches.

Shared machines slow down for seconds at a time. So a loop of plain arithmetic runs before and after each round; a round
counts if the loop took at most 15 % longer than its fastest run here, and is repeated otherwise.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from harness import arguments, finish, in_turns, save
from numpy.typing import NDArray

from paellapy.instrument.gpu_model.parts import part
from paellapy.instrument.numba_ext.link import compiled
from paellapy.scheduler.core import codes, tables
from paellapy.scheduler.core import state as st
from paellapy.scheduler.core.atomics import store_at
from paellapy.scheduler.core.profiles import Capacity, ModelProfile, SegmentProfile, install, open_model, set_capacity
from paellapy.scheduler.core.rings import Message, post, publish, take_completions
from paellapy.scheduler.core.step import step
from paellapy.scheduler.policies.policy import attach_policy, find_policy
from paellapy.scheduler.sim.recorded_profiles import MIX, mix_profiles
from paellapy.scheduler.sim.simulate import simulate
from paellapy.scheduler.sim.workload import Lognormal

ROUNDS = 7
STEPS = 20_000
COUNTS = 1_000_000
SLOWER = 1.15  # than the quickest ever seen: the machine is busy
TRIES = 40  # for each round


@compiled
def shuffle(n: int, table: NDArray[np.int64]) -> int:
    """Many short chains of arithmetic, loads, stores and branches, as in the core: a neighbour on its CPU shows."""
    mask = len(table) - 1
    found = 0
    for k in range(n):
        i, j = (k * 40503) & mask, (k * 60493 + 7) & mask
        a, b = table[i], table[j]
        if a > b:
            table[i], table[j] = b, a + 1
        else:
            table[i] = a ^ k
            found += 1
        found += (a * 31 + k) & 7
        found ^= (b * 17 - k) & 3
    return found


class Quiet:
    """Measures only while this machine runs at its own speed."""

    def __init__(self) -> None:
        self._table = np.arange(1 << 12)
        shuffle(10, self._table)
        self.quickest = min(self._look() for _ in range(100))

    def _look(self) -> int:
        since = time.perf_counter_ns()
        shuffle(COUNTS, self._table)
        return time.perf_counter_ns() - since

    def _is_quiet(self) -> bool:
        took = self._look()
        self.quickest = min(self.quickest, took)
        return took <= SLOWER * self.quickest

    def measure(self, once: Callable[[], float]) -> list[float]:
        """ROUNDS results of rounds that nothing disturbed; of any, if there are too few of those."""
        found: list[float] = []
        every: list[float] = []
        while len(found) < ROUNDS and len(every) < ROUNDS * TRIES:
            before = self._is_quiet()
            every.append(once())
            if self._is_quiet() and before:
                found.append(every[-1])
        return found if len(found) == ROUNDS else every


@compiled
def drive(s: st.State, taken: tables.Table, message: tables.Table, steps: int) -> int:
    """The GPU completes one launch per step, and each answered request is followed by another; launches made."""
    before, now = s.core[0].launches, s.gpu[0].now_ns
    for k in range(steps):
        s.core[0].out = 0
        if s.core[0].flight > 0:
            instance = s.flight[k % s.core[0].flight]
            a = s.instance[instance]
            whole, launch = s.whole[instance, a.size], s.launch[instance, a.size, a.done]
            store_at(whole.word if a.whole else launch.word, np.uint64(1))
            now += s.size[a.model, a.size].total_ns if a.whole else s.segment[a.model, a.size, a.done].time_ns
        step(s, int(now))
        for i in range(take_completions(s, 0, taken.ctypes.data, taken.shape[0])):
            e, c = taken[i], message[0]
            c.request, c.serial, c.model, c.client = e.request, e.serial + np.uint64(1), e.model, e.client
            c.arrival_ns = int(now)
            c.deadline_ns = c.arrival_ns + 10**15 + 1_000_000 * (np.int64(e.serial) % 977)
            publish(s, 0, message.ctypes.data)
    return int(s.core[0].launches - before)


def waiting(models: int, requests: int, policy: str) -> st.State:
    """A core in which this number of requests waits, for models of many lengths."""
    one = {"instances_per_model": 1, "sizes": 1, "batch": 1}
    s = st.new_state(st.Limits(models=models, instances=models, segments=4, requests=requests, **one))
    set_capacity(s, Capacity.of((h200 := part("h200")).sms, h200.sm))
    attach_policy(s, find_policy(policy))
    random = np.random.default_rng(0)
    first, _ = install(s, ModelProfile("m0", {1: [SegmentProfile(50e3)] * 4}, instances=1, target_ms=20))
    # The rest like it, each with its own times: written at once, a hundred thousand `install`s would take minutes.
    scale = random.lognormal(0, 1, models)
    s.model[:] = s.model[first]
    s.size[:] = s.size[first]
    s.segment[:] = s.segment[first]
    s.size["total_ns"] *= scale[:, None]
    for name in ("time_ns", "tail_ns"):
        s.segment[name] *= scale[:, None, None]
    s.instance["model"] = s.model_instance[:, 0] = np.arange(models)
    segments = s.word.shape[1]
    words = s.word.ctypes.data + 8 * np.arange(s.word.size).reshape(models, segments)
    s.launch["word"] = words[:, None, :-1]
    s.whole["word"] = words[:, -1:]
    now = 1
    for m in range(models):
        open_model(s, m)
        if m % 1024 == 1023:
            step(s, now)
    for row in range(requests):
        now += 1000
        message = Message(kind=codes.SUBMIT, request=row, model=row % models, client=row % 7, arrival_ns=now)
        message.deadline_ns = now + 10**15 + int(random.integers(10**9))
        post(s, 0, message.address)
        if row % 512 == 511:
            step(s, now)
            s.core["out"][0] = 0
    while s.ring[0, codes.SUBMIT_HEAD, 0] != s.ring[0, codes.SUBMIT_TAIL, 0]:
        step(s, now)
        s.core["out"][0] = 0
    return s


def decision_cost(quiet: Quiet, models: int, requests: int, policy: str) -> dict[str, Any]:
    s = waiting(models, requests, policy)
    taken, message = np.zeros(64, tables.COMPLETION), np.zeros(1, tables.SUBMISSION)
    message["kind"], message["instance"], message["slot"] = codes.SUBMIT, codes.NONE, codes.NONE
    drive(s, taken, message, STEPS)

    def once() -> float:
        since = time.perf_counter_ns()
        decisions = drive(s, taken, message, STEPS)
        return (time.perf_counter_ns() - since) / decisions

    costs = quiet.measure(once)
    return {"policy": policy, "models": models, "waiting_requests": requests,
            "ns_per_decision_median": statistics.median(costs), "ns_per_decision_least": min(costs)}  # fmt: skip


def simulation_speed(quiet: Quiet, policy: str) -> dict[str, Any]:
    models = mix_profiles()
    workload = Lognormal(5000, MIX, duration=4.0)
    simulate(models, Lognormal(5000, MIX, duration=0.01), policy)
    seeds = itertools.count()

    def once() -> float:
        since = time.process_time()
        result = simulate(models, workload, policy, seed=next(seeds))
        return float(result.counters["segment_events"]) / (time.process_time() - since)

    rates = quiet.measure(once)
    return {"policy": policy, "segment_events_per_s_median": statistics.median(rates), "best": max(rates)}


def measure() -> dict[str, Any]:
    results: dict[str, Any] = {"decision": [], "simulation": []}
    quiet = Quiet()
    for policy in ("srpt", "edf", "paella", "slack"):
        for models, requests in ((1000, 1000), (8, 1000), (8, 100_000), (1000, 100_000), (100_000, 100_000)):
            if models == 100_000 and policy not in ("srpt", "paella"):
                continue
            results["decision"].append(decision_cost(quiet, models, requests, policy))
            print(results["decision"][-1], flush=True)
    for policy in ("srpt", "paella", "slack"):
        results["simulation"].append(simulation_speed(quiet, policy))
        print(results["simulation"][-1], flush=True)
    return results


def compared(results: Any) -> dict[str, float]:
    """Each row's median, for `--against`."""
    found = {}
    for kind, key in (("decision", "ns_per_decision_median"), ("simulation", "segment_events_per_s_median")):
        for row in results[kind]:
            label = ", ".join(str(row[name]) for name in ("policy", "models", "waiting_requests") if name in row)
            found[f"{kind}: {label}"] = float(row[key])
    return found


def main() -> None:
    parser = arguments(__doc__, rounds=1, against=True)
    o = parser.parse_args()
    if o.against:
        print(save("core_speed_against", in_turns(o, __file__, "core_speed", compared), folder=o.out))
        return
    results = measure()
    rows = [["figure", "range over policies", "aim"]]
    for waiting, aim in ((1_000, 1), (100_000, 2)):
        us = [r["ns_per_decision_median"] / 1e3 for r in results["decision"] if r["waiting_requests"] == waiting]
        range_us = f"{min(us):.2f} to {max(us):.2f}"
        rows.append([f"decision with {waiting:,} waiting requests, µs", range_us, f"≤ {aim}"])
    rates = [each["segment_events_per_s_median"] / 1e6 for each in results["simulation"]]
    range_rates = f"{min(rates):.2f} to {max(rates):.2f}"
    rows.append(["simulated segment events a second, millions", range_rates, "≥ 0.5"])
    finish(o, "core_speed", results, "the core", rows, table="core")


if __name__ == "__main__":
    main()
