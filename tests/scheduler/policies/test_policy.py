"""Policies in the core: ranking, admission, kept numbers, parameters and places; and the options they are made with."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from core_bench import Bench, profile
from failing import failing

import paellapy as pp
from paellapy.scheduler.core import codes
from paellapy.scheduler.core.errors import ProfileError
from paellapy.scheduler.core.job import READS_PARAMS, READS_SEGMENT, READS_SHARES, READS_TERMS, READS_TOP
from paellapy.scheduler.core.profiles import ModelProfile, SegmentProfile, set_params
from paellapy.scheduler.policies.policy import Policy, PolicyError, attach_functions, attach_policy, find_policy, policy
from paellapy.scheduler.policies.trial import sample_jobs
from paellapy.scheduler.sim.simulate import simulate
from paellapy.scheduler.sim.workload import ClosedLoop, Poisson, TraceWorkload

pytestmark = [pytest.mark.quick, pytest.mark.versions]


def fifo(job: Any) -> float:
    return float(job.arrival_ns)


def not_model_0(job: Any) -> bool:
    return bool(job.model != 0)


def at_5_us(job: Any) -> float:
    return 5e3


def own(bench: Bench, made: Policy) -> Any:
    """The policy's numbers, by name."""
    kind = made.layout.own
    return bench.state.own[: kind.itemsize // 8].view(kind)[0]


def two_models(made: Policy) -> Bench:
    return Bench([profile("a", instances=1), profile("b", instances=1)], policy=made)


def test_a_job_that_is_not_admitted_does_not_block_those_behind_it() -> None:
    bench = two_models(policy(admit=not_model_0, may_idle=True)(fifo))
    held, other = bench.submit(0), bench.submit(1)
    bench.step()
    assert [int(bench.state.instance["model"][instance]) for instance in bench.running] == [1]
    while other not in bench.done:
        bench.finish_segment(bench.running[0])
        bench.step(1000)
    assert held not in bench.done
    assert not bench.running  # the GPU idles


def test_ties_of_rank_do_not_hide_a_job_from_admit() -> None:
    def constant(job: Any) -> float:
        return 0.0

    bench = two_models(policy(admit=not_model_0, may_idle=True)(constant))
    bench.submit(1)
    bench.submit(0)
    bench.step()
    assert len(bench.running) == 1


def test_an_idle_gpu_takes_the_best_job_unless_the_policy_may_idle() -> None:
    bench = two_models(policy(admit=not_model_0)(fifo))
    bench.submit(0)
    bench.step()
    assert len(bench.running) == 1


def test_admit_may_say_when_to_ask_again() -> None:
    bench = two_models(policy(admit=at_5_us, may_idle=True)(fifo))
    bench.submit(0)
    bench.step(1000)
    assert not bench.running
    assert bench.state.core["wake_at_ns"][0] == 5000.0
    bench.step(4000)
    assert len(bench.running) == 1


def test_done_and_tick_are_told_and_keep_numbers() -> None:
    def done(job: Any, segment: Any, own: Any) -> None:
        own.used_ns[job.model] += segment.ns
        own.took_ns += segment.took_ns
        own.last = segment.number

    def tick(gpu: Any, own: Any) -> None:
        own.ticks += 1.0
        own.at_ns = gpu.now_ns

    state = {"took_ns": 0.0, "last": -1.0, "ticks": 0.0, "at_ns": 0.0}
    made = policy(done=done, tick=tick, tick_us=10, state=state, per_model={"used_ns": 7.0})(fifo)
    bench = two_models(made)
    bench.submit(0)
    bench.submit(1)
    bench.step(2000)
    assert bench.state.core["wake_at_ns"][0] == 12_000.0
    for instance in list(bench.running):
        bench.finish_segment(instance)
    bench.step(3000)
    kept = own(bench, made)
    assert kept["ticks"] == 0.0
    segment_ns = 50e3
    assert list(kept["used_ns"][:3]) == [7.0 + segment_ns, 7.0 + segment_ns, 7.0]
    assert kept["took_ns"] == 2 * 3000.0
    assert kept["last"] == 0.0
    bench.step(8000)
    assert kept["ticks"] == 1.0
    assert kept["at_ns"] == 13_000.0
    bench.run_dry()
    ticks = kept["ticks"]
    bench.step(1_000_000)
    assert kept["ticks"] == ticks  # there is no work
    attach_functions(bench.state, made)  # as producers of other processes do
    assert kept["ticks"] == ticks
    attach_policy(bench.state, made)
    assert kept["ticks"] == 0.0


def test_parameters_are_read_by_name_with_a_value_for_models_without() -> None:
    def by_weight(job: Any) -> float:
        return -float(job.params.weight)

    made = policy(params={"other": 3.0, "weight": 1.0}, active=1)(by_weight)
    models = [profile("light", instances=1), profile("heavy", instances=1, params={"weight": 5, "unread": 2})]
    bench = Bench(models, policy=made)
    assert bench.state.param[:2, :2].tolist() == [[3.0, 1.0], [3.0, 5.0]]
    bench.submit(0)
    heavy = bench.submit(1)
    bench.step()
    assert [int(bench.state.instance["model"][instance]) for instance in bench.running] == [1]
    set_params(bench.state, 1, {})
    assert bench.state.param[1, 1] == 1.0
    bench.run_dry()
    assert heavy in bench.done


@pytest.mark.parametrize(
    "params",
    [{"a b": 1.0}, *({"a": value} for value in ("1", np.inf, 10**400, 1j)), {f"a{k}": 1.0 for k in range(9)}],
)
def test_faulty_parameters_are_refused(params: Any) -> None:
    with failing(ProfileError, model="m", field="params"):
        profile(params=params)


def test_facts_are_worked_out_only_for_policies_that_read_them() -> None:
    assert find_policy("srpt").facts == 0
    assert find_policy("orion").facts == READS_SEGMENT | READS_TOP | READS_SHARES | READS_TERMS
    assert find_policy("token").facts == READS_PARAMS
    bench = two_models(find_policy("srpt"))
    assert not any(bench.state.call[role]["function"][0] for role in ("admit", "tick", "done"))


def test_a_policy_sees_the_share_and_the_use_of_a_job() -> None:
    def keep(job: Any, gpu: Any, own: Any) -> bool:
        own.share, own.used_ns, own.occupancy = job.share, job.used_ns, job.occupancy
        return True

    made = policy(admit=keep, may_idle=True, state={"share": 0.0, "used_ns": -1.0, "occupancy": -1.0})(fifo)
    bench = two_models(made)
    bench.state.model["share"][1] = 3.0
    bench.submit(1)
    bench.step()
    kept = own(bench, made)
    assert (kept["share"], kept["used_ns"], kept["occupancy"]) == (3.0, 0.0, 0.0)
    bench.run_dry()
    bench.submit(1)
    bench.step()
    assert kept["used_ns"] == bench.state.model["used_ns"][1] > 0.0


def test_what_top_priority_has_on_the_gpu_is_seen() -> None:
    def beside(job: Any, gpu: Any, own: Any) -> bool:
        if job.priority < gpu.active_priority:
            own.top_ns, own.top_blocks, own.next_ns = gpu.top.ns, gpu.top.blocks, job.segment.ns
        return bool(job.priority >= gpu.active_priority)

    made = policy(admit=beside, state={"top_ns": 0.0, "top_blocks": 0.0, "next_ns": 0.0}, max_in_flight=1)(fifo)
    bench = Bench([profile("low", instances=1, ns=30e3), profile("high", instances=1, segments=4)], policy=made)
    bench.submit(1, priority=5)
    bench.submit(0)
    bench.step()
    kept = own(bench, made)
    assert (kept["top_blocks"], kept["next_ns"]) == (8.0, 30e3)
    assert kept["top_ns"] in (50e3, 200e3)  # a segment of it, or all in one piece
    bench.run_dry()


def test_a_simulation_warns_of_ranks_that_are_not_numbers() -> None:
    def rank(job: Any) -> float:
        return (job.now_ns - 1e6) / (job.now_ns - 1e6) * job.arrival_ns

    load = TraceWorkload(((1e-3, "m", None, None, 0), (2e-3, "m", None, None, 0)))
    with pytest.warns(UserWarning, match=r"gave \d+ times an answer that is not a number"):
        assert simulate(profile("m", segments=2), load, policy(rank)).all.completed == 2


def always_later(job: Any) -> float:
    return float(job.now_ns + 1e6)


def nothing_changes(own: Any) -> None:
    own.had += 0.0


def three_times(job: Any, own: Any) -> bool:
    return bool(own.had < 3.0)


def counts(own: Any) -> None:
    own.had += 1.0


def never_from_then_on(job: Any, own: Any) -> bool:
    return bool(job.arrival_ns < 1.0)


@pytest.mark.parametrize("fidelity", ["segments", "blocks"])
@pytest.mark.parametrize(
    "options",
    [
        {"admit": always_later},
        {"admit": three_times, "done": counts, "state": {"had": 0.0}},
        {"admit": never_from_then_on, "tick": nothing_changes, "tick_us": 1e6, "state": {"had": 0.0}},
    ],
)
def test_a_simulation_that_a_policy_never_ends_says_so(
    options: dict[str, Any], fidelity: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("paellapy.scheduler.sim.block_model.MOST_IN_VAIN", 1000)  # its steps take longer
    made = policy(may_idle=True, **options)(fifo)
    with failing(PolicyError, requests=1):
        simulate(profile("m", segments=2), ClosedLoop("m", duration=0.01), made, fidelity=fidelity)


def test_a_policy_is_found_by_its_module(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "policies_of_mine.py").write_text("def latest(job):\n    return -job.arrival_ns\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [])
    assert find_policy("policies_of_mine:latest").name == "latest"
    for wrong in ("policies_of_mine:earliest", "no_such_module:rank", "policies_of_mine:__name__", "nonesuch"):
        with failing(PolicyError, name=wrong):
            find_policy(wrong)


# -- placing


def small(job: Any) -> float:
    return float(pp.Where(sms=0.25 if job.priority == 0 else 1.0))


def with_partitions(made: Policy) -> Bench:
    bench = Bench([profile("low", instances=2), profile("high", instances=2, priority=1)])
    bench.state.core["partitions"][0] = 4
    bench.state.instance_partition[:, 0] = np.arange(len(bench.state.instance)) % 4
    bench.state.overlap[:4, :4] = np.eye(4)
    bench.state.confined[...] = 77
    attach_policy(bench.state, made)
    return bench


def test_place_sends_jobs_to_partitions_of_sms() -> None:
    bench = with_partitions(policy(place=small)(fifo))
    low, high = bench.submit(0), bench.submit(1, priority=1)
    bench.step()
    rows = bench.state.instance[bench.running]
    partitions = dict(zip(rows["model"].tolist(), rows["partition"].tolist(), strict=True))
    assert partitions[0] >= 0
    assert partitions[1] == -1
    assert bench.state.core["confined_launches"][0] >= 1
    bench.run_dry()
    assert {low, high} <= set(bench.done)


def test_a_policy_that_places_needs_partitions() -> None:
    with failing(PolicyError, name="place"):
        attach_policy(Bench([profile("a")]).state, policy(place=small)(fifo))


def by_attribute(job: Any) -> float:
    return job.segment.ns


def by_key(job: Any) -> float:
    return job["segment"]["ns"]


def in_a_comprehension(job: Any) -> float:
    return sum([job.segment.ns for _ in range(TIMES)])


TIMES = 2


@pytest.mark.parametrize("function", [by_key, in_a_comprehension])
def test_a_fact_is_there_however_it_is_read(function: Any) -> None:
    models = [ModelProfile(name, {1: [SegmentProfile(ns)] * 4}) for name, ns in (("long", 200e3), ("short", 50e3))]
    load = Poisson(2000, ["long", "short"], duration=0.02)
    wanted, found = (simulate(models, load, policy(active=1)(each)) for each in (by_attribute, function))
    assert (found.jobs["finish_ns"] == wanted.jobs["finish_ns"]).all()


LOOPING = """
from pathlib import Path
import numba
from paellapy.scheduler.policies.policy import policy

with Path(__file__).with_name("imports").open("a") as file:
    print("imported", file=file)


@numba.njit
def twice(x):
    return 2.0 * x


def admit(job, own):
    total = 0.0
    for k in range(4):
        total += twice(own.used_ns[k])
    return total < 1e12


@policy(admit=admit, per_model={"used_ns": 0.0})
def looping(job):
    return job.arrival_ns
"""


def test_a_module_with_looping_policies_is_imported_once(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "looping_policies.py").write_text(LOOPING)
    monkeypatch.syspath_prepend(tmp_path)
    assert find_policy("looping_policies:looping").name == "looping"
    assert (tmp_path / "imports").read_text().splitlines() == ["imported"]


# -- making


def test_a_function_becomes_a_policy() -> None:
    @policy(active=3, max_in_flight=1)
    def youngest(job: Any) -> float:
        return -job.arrival_ns + math.sqrt(job.batch)

    assert (youngest.name, youngest.active, youngest.max_in_flight, youngest.whole) == ("youngest", 3, 1, False)
    assert find_policy(youngest) is youngest
    row = np.rec.array(sample_jobs()[:1])
    row.arrival_ns, row.batch = 5.0, 4
    assert youngest(row[0]) == -3.0
    assert find_policy(fifo).rank is fifo
    bench = Bench([profile(instances=2)], policy=youngest)
    bench.submit()
    bench.run_dry()


def test_a_bad_rank_at_run_time_goes_last_and_is_counted() -> None:
    def root(job: Any) -> float:
        return math.sqrt(job.priority + 1000.0)

    bench = Bench([profile("a", instances=1), profile("b", instances=1)], policy=policy(active=1)(root))
    bench.submit(0)
    bench.step()
    bad, good = bench.submit(0, priority=-5000), bench.submit(1)
    bench.run_dry()
    assert bench.state.core["bad_ranks"][0] > 0
    assert {bench.status(bad), bench.status(good)} == {codes.OK}


def test_copies_with_other_options_share_compiled_code() -> None:
    made = policy(fifo)
    assert replace(made, active=3).functions["rank"] is made.functions["rank"]
    changed = replace(made, admit=not_model_0, may_idle=True)
    assert set(changed.functions) == {"rank", "admit"}
    assert replace(find_policy("token"), active=3).active == 3


@pytest.mark.parametrize(
    ("option", "options"),
    [
        ("active", {"active": 0}),
        ("active", {"active": 1.5}),
        ("active", {"active": True}),
        ("max_in_flight", {"max_in_flight": 0}),
        ("max_in_flight", {"max_in_flight": 10**30}),
        ("whole", {"whole": "no"}),
        ("may_idle", {"may_idle": 1}),
        ("may_idle", {"may_idle": True}),
        ("name", {"name": 5}),
        ("tick_us", {"tick_us": 1000}),
        ("tick_us", {"tick": nothing_changes, "state": {"had": 0.0}}),
        ("tick_us", {"tick_us": 0.5, "tick": nothing_changes, "state": {"had": 0.0}}),
        ("state", {"state": {"a b": 0.0}}),
        ("state", {"state": {"limit": "high"}}),
        ("state", {"state": {"x": 10**400}}),
        ("state", {"state": {"x": np.complex64(1)}}),
        ("per_model", {"state": {"limit": 1.0}, "per_model": {"limit": 1.0}}),
        ("params", {"params": {f"p{k}": 0.0 for k in range(9)}}),
        ("activ", {"activ": 3}),
        ("admit", {"admit": 3}),
    ],
)
def test_faulty_options_are_refused(option: str, options: dict[str, Any]) -> None:
    with failing(PolicyError, name=option):
        policy(**options)(fifo)


@pytest.mark.parametrize("given", [3, find_policy("fifo"), None])
def test_a_policy_is_made_from_a_plain_function_only(given: Any) -> None:
    with pytest.raises(PolicyError):
        policy()(given)


def test_a_lottery_with_fresh_ranks_divides_the_gpu_by_tickets() -> None:
    @policy(active=1, fresh=True, params={"tickets": 1.0})
    def lottery(job: Any) -> float:
        return -math.log(1.0 - random.random()) / job.params.tickets

    tickets = {"a": 3.0, "b": 1.0}
    models = [ModelProfile(each, {1: [SegmentProfile(1e5)] * 4}, params={"tickets": n}) for each, n in tickets.items()]
    load = ClosedLoop("a", clients=8, duration=0.8) + ClosedLoop("b", clients=8, duration=0.8)
    assert simulate(models, load, lottery).gpu_share("a") == pytest.approx(0.75, abs=0.03)


def test_fresh_ranks_are_those_of_the_moment_of_the_decision() -> None:
    """Jobs rise at different speeds, so their order changes while they wait."""
    speeds = [1.0, 3.0, 9.0, 2.0, 5.0, 30.0, 0.5, 12.0, 7.0, 20.0]
    models = [
        ModelProfile(f"m{k}", {1: [SegmentProfile(1e6)]}, instances=1, params={"speed": speed})
        for k, speed in enumerate(speeds)
    ]
    load = Poisson(1500, [each.name for each in models], duration=0.1)

    def missed(fresh: bool) -> float:
        @policy(active=1, whole=True, fresh=fresh, params={"speed": 1.0})
        def rising(job: Any) -> float:
            return (job.arrival_ns - job.now_ns) * job.params.speed

        jobs = simulate(models, load, rising, host_launch_ns=0).jobs
        first = [jobs[jobs["model"] == m] for m in range(len(models))]
        late = 0
        for job in jobs:
            now = job["started_ns"]
            waiting = [each[(each["arrival_ns"] < now - 1000) & (each["started_ns"] >= now)][:1] for each in first]
            best = max(
                (((now - one["arrival_ns"][0]) * speeds[m], m) for m, one in enumerate(waiting) if len(one)),
                default=(0.0, job["model"]),
            )
            late += best[1] != job["model"]
        return late / len(jobs)

    assert missed(fresh=True) < 0.01
    assert missed(fresh=False) > 2 * missed(fresh=True)


def test_a_program_alone_goes_in_one_piece_until_others_have_to_overtake_it() -> None:
    one = SegmentProfile(100e3, warps=8448)
    models = [ModelProfile("long", {1: [one] * 40}), ModelProfile("short", {1: [one]})]
    calm = TraceWorkload(tuple((k * 10e-3, name, None, None, 0) for k in range(20) for name in ("long",)))
    both = calm + TraceWorkload(tuple((k * 10e-3 + 1e-3, "short", None, None, 0) for k in range(20)))
    launches = {load: simulate(models, load, "srpt", active=1).counters["launches"] for load in (calm, both)}
    assert launches == {calm: 20, both: 20 + 1 + 19 * 40}  # the first long job is in the way of a short one
    assert simulate(models, both, "fifo", active=1).counters["launches"] == 40  # none overtakes


def test_never_whole_lets_an_urgent_job_go_before_the_rest_of_one_that_was_alone() -> None:
    one = SegmentProfile(100e3, warps=8448)
    models = [ModelProfile("long", {1: [one] * 40}), ModelProfile("short", {1: [one]})]
    load = TraceWorkload(((0.0, "long", 100.0, None, 0), (1e-3, "short", 0.5, None, 0)))
    met, launches = [], []
    for never in (False, True):
        by_deadline = policy(active=1, max_in_flight=1, never_whole=never)(lambda job: job.deadline_ns)
        run = simulate(models, load, by_deadline)
        met.append(run.model("short").within_target)
        launches.append(run.counters["launches"])
    assert met == [0.0, 1.0]
    assert launches == [1, 41]  # the short job expires behind the whole program
