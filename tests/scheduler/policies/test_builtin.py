"""Our own policies: the order that each prefers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from core_bench import Bench, profile

from paellapy.scheduler.core import codes
from paellapy.scheduler.policies.builtin import edf, hrrn, not_beside_higher, paella, priority, slack, srpt
from paellapy.scheduler.policies.check import check_source
from paellapy.scheduler.policies.compile import compile_function, may_loop
from paellapy.scheduler.policies.policy import find_policy, policy_names
from paellapy.scheduler.policies.trial import check_idle, sample_gpus, sample_jobs, try_out


def job(paced: float = 0.0, **facts: float) -> Any:
    """A job with these facts, as policies see it."""
    rows = sample_jobs()[:1].view(slack.layout.job)
    rows["params"]["paced"] = paced
    row = np.rec.array(rows)
    for name, value in facts.items():
        row[name] = value
    return row[0]


@pytest.mark.parametrize("name", policy_names())
def test_a_shipped_policy_passes_the_checks_it_is_spared(name: str) -> None:
    found = find_policy(name)
    for role, function in found.functions.items():
        check_source(role, function.function, found.layout)
        try_out(compile_function(role, function.function, found.layout), found.layout)
        assert not may_loop(function.function)
    if found.may_idle:
        check_idle(found.functions["admit"], found.layout)
    assert found.rank.__doc__


def test_srpt_prefers_the_shortest_rest() -> None:
    assert srpt(job(remaining_ns=1e3)) < srpt(job(remaining_ns=1e4))


def test_edf_prefers_the_earliest_deadline_and_makes_one_up() -> None:
    assert edf(job(deadline_ns=1e9)) < edf(job(deadline_ns=2e9))
    assert edf(job(deadline_ns=codes.NEVER, arrival_ns=1e9, total_ns=1e6)) == 1e9 + 4e6


def test_hrrn_is_srpt_until_a_job_has_waited_long() -> None:
    fresh, long = (job(now_ns=1e9, arrival_ns=1e9, total_ns=ns, remaining_ns=ns, batch=1) for ns in (1e6, 4e6))
    assert hrrn(fresh) < hrrn(long)
    waited = job(now_ns=1e9, arrival_ns=1e9 - 20e6, total_ns=4e6, remaining_ns=4e6, batch=1)
    assert hrrn(waited) < hrrn(fresh)
    full = job(now_ns=1e9, arrival_ns=1e9, total_ns=4e6, remaining_ns=4e6, batch=8)
    assert hrrn(full) < hrrn(fresh)


def test_priority_beats_arrival_and_waits_beside_a_higher_one() -> None:
    late, early = job(priority=1, arrival_ns=2e15), job(priority=0, arrival_ns=1e15)
    assert priority(late) < priority(early)
    assert priority(job(priority=1, arrival_ns=1e15)) < priority(job(priority=1, arrival_ns=1e15 + 100))
    gpus = np.rec.array(sample_gpus())
    gpus.active_priority = 1
    assert not_beside_higher(late, gpus[0])
    assert not not_beside_higher(early, gpus[0])


def test_paella_is_srpt_until_somebody_is_owed_too_much() -> None:
    assert paella(job(remaining_ns=1e3, deficit_ns=0)) < paella(job(remaining_ns=1e4, deficit_ns=1e6))
    assert paella(job(remaining_ns=1e9, deficit_ns=1e9)) < paella(job(remaining_ns=1, deficit_ns=0))


def test_slack_ranks_urgent_then_relaxed_then_hopeless_jobs() -> None:
    relaxed, urgent, hopeless = (job(now_ns=0, deadline_ns=due, remaining_ns=1e6) for due in (1e9, 1.1e6, 0.9e6))
    assert slack(urgent) < slack(relaxed) < slack(hopeless)


def test_slack_lets_nothing_wait_for_ever() -> None:
    long_late = job(now_ns=1e10, deadline_ns=1e6, remaining_ns=1e6)
    fresh = job(now_ns=1e10, deadline_ns=1e10 + 4e5, remaining_ns=1e5)
    assert slack(long_late) < slack(fresh)


def test_slack_lets_a_paced_job_wait_until_it_is_due_and_then_go_first() -> None:
    step = {"arrival_ns": 0, "deadline_ns": 20e6, "remaining_ns": 5e6}
    early, due, late = (job(paced=1, now_ns=now, **step) for now in (12e6, 14e6, 16e6))
    others = [job(now_ns=0, deadline_ns=at, remaining_ns=1e9) for at in (codes.NEVER, 1.1e9, 0.5e9)]
    assert slack(late) < slack(due) < min(map(slack, others))
    assert slack(early) == np.inf
    untimed = {"now_ns": 0, "deadline_ns": codes.NEVER, "remaining_ns": 1e6}
    assert slack(job(paced=1, **untimed)) == slack(job(**untimed))


def test_only_policies_that_look_at_moving_facts_are_ranked_again() -> None:
    moving = {name for name in policy_names() if not find_policy(name).timeless}
    assert moving == {"fair", "hrrn", "lax", "lru", "mlfq", "paella", "slack", "token"}


def test_best_effort_pauses_between_segments_while_a_higher_priority_runs() -> None:
    models = [*(profile(name, segments=6, instances=1) for name in ("low", "other")), profile("high", instances=1)]
    bench = Bench(models, policy="priority")
    bench.submit(0)
    bench.submit(1)
    bench.step()
    low = bench.running
    assert len(low) == 2
    urgent = bench.submit(2, priority=5)
    bench.step()
    for instance in low:
        bench.finish_segment(instance)
    bench.step()
    assert all(bench.history[instance] == [0] for instance in low)  # the one that ran; no second
    while urgent not in bench.done:
        high = next(instance for instance in bench.running if instance not in low)
        bench.finish_segment(high)
        bench.step()
    assert all(len(bench.history[instance]) > 1 for instance in low)
    bench.run_dry()


def test_clients_of_one_model_take_turns_under_paella() -> None:
    bench = Bench([profile("m", segments=1, ns=1e6, instances=1)], policy="paella")
    flood = [bench.submit(client=0) for _ in range(10)]
    single = bench.submit(client=1)
    bench.step()
    order: list[int] = []
    while len(order) < 11:
        bench.finish_segment(bench.running[0])
        order += bench.step(1_000_000)
    assert order.index(single) <= 2
    assert [each for each in order if each != single] == flood
