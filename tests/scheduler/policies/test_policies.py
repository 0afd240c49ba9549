"""Policies: what each prefers, and what is refused when one is made."""

from __future__ import annotations

import builtins
import math
from collections.abc import Callable
from typing import Any

import numba
import numpy as np
import pytest
from core_bench import Bench, profile

from paellapy.scheduler.core import codes
from paellapy.scheduler.policies import checks, edf, hrrn, paella, priority, slack, source, srpt
from paellapy.scheduler.policies.compiling import may_loop
from paellapy.scheduler.policies.policy import Policy, PolicyError, find_policy, policy, policy_names
from paellapy.scheduler.policies.roles import arguments


def job(**facts: float) -> Any:
    """A job with these facts, as policies see it."""
    row = np.rec.array(checks.sample_jobs()[:1].copy())
    for name, value in facts.items():
        row[name] = value
    return row[0]


# --- ours -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", policy_names())
def test_a_built_in_policy_passes_the_check_it_is_spared(name: str) -> None:
    found = find_policy(name)
    for role, function in found.plain.items():
        checks.check(role, function, found.functions[role], found.layout)
        names = arguments(role, function, found.layout)
        assert source.problem_in(role, function, names, found.layout) is None
        assert not may_loop(function)
    if found.may_idle:
        checks.check_idle(found.admit, found.functions["admit"], found.layout)


def test_srpt_prefers_the_shortest_rest() -> None:
    assert srpt.rank(job(remaining_ns=1e3)) < srpt.rank(job(remaining_ns=1e4))


def test_edf_prefers_the_earliest_deadline_and_makes_one_up_where_there_is_none() -> None:
    assert edf.rank(job(deadline_ns=1e9)) < edf.rank(job(deadline_ns=2e9))
    assert edf.rank(job(deadline_ns=codes.NEVER, arrival_ns=1e9, total_ns=1e6)) == 1e9 + 4e6


def test_hrrn_is_srpt_until_somebody_has_waited_for_several_times_its_length() -> None:
    fresh, long = (job(now_ns=1e9, arrival_ns=1e9, total_ns=ns, remaining_ns=ns, batch=1) for ns in (1e6, 4e6))
    assert hrrn.rank(fresh) < hrrn.rank(long)
    waited = job(now_ns=1e9, arrival_ns=1e9 - 20e6, total_ns=4e6, remaining_ns=4e6, batch=1)
    assert hrrn.rank(waited) < hrrn.rank(fresh)
    full = job(now_ns=1e9, arrival_ns=1e9, total_ns=4e6, remaining_ns=4e6, batch=8)
    assert hrrn.rank(full) < hrrn.rank(fresh)


def test_priority_beats_arrival_and_stands_still_beside_a_higher_one() -> None:
    late, early = job(priority=1, arrival_ns=2e15), job(priority=0, arrival_ns=1e15)
    assert priority.rank(late) < priority.rank(early)
    assert priority.rank(job(priority=1, arrival_ns=1e15)) < priority.rank(job(priority=1, arrival_ns=1e15 + 100))
    gpus = np.rec.array(checks.sample_gpus())
    gpus.active_priority = 1
    assert priority.admit(late, gpus[0])
    assert not priority.admit(early, gpus[0])


def test_paella_is_srpt_until_somebody_is_owed_too_much() -> None:
    assert paella.rank(job(remaining_ns=1e3, deficit_ns=0)) < paella.rank(job(remaining_ns=1e4, deficit_ns=1e6))
    assert paella.rank(job(remaining_ns=1e9, deficit_ns=1e9)) < paella.rank(job(remaining_ns=1, deficit_ns=0))


def test_slack_puts_the_urgent_before_the_relaxed_and_both_before_the_hopeless() -> None:
    relaxed, urgent, hopeless = (job(now_ns=0, deadline_ns=due, remaining_ns=1e6) for due in (1e9, 1.1e6, 0.9e6))
    assert slack.rank(urgent) < slack.rank(relaxed) < slack.rank(hopeless)


def test_slack_lets_nothing_wait_for_ever() -> None:
    long_late = job(now_ns=1e10, deadline_ns=1e6, remaining_ns=1e6)
    fresh = job(now_ns=1e10, deadline_ns=1e10 + 4e5, remaining_ns=1e5)
    assert slack.rank(long_late) < slack.rank(fresh)


def test_only_policies_that_look_at_moving_facts_are_ranked_again() -> None:
    moving = {name for name in policy_names() if not find_policy(name).timeless}
    assert moving == {"fair", "hrrn", "lax", "lru", "mlfq", "paella", "slack", "token"}


def test_best_effort_pauses_between_segments_while_a_higher_priority_runs() -> None:
    models = [
        profile("low", segments=6, instances=1),
        profile("other", segments=6, instances=1),
        profile("high", instances=1),
    ]
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


# --- yours ----------------------------------------------------------------------------------------------------------


def test_a_function_becomes_a_policy() -> None:
    @policy(active=3, max_in_flight=1)
    def youngest(job: Any) -> float:
        return -job.arrival_ns + math.sqrt(job.batch)

    assert (youngest.name, youngest.active, youngest.max_in_flight, youngest.whole) == ("youngest", 3, 1, False)
    assert find_policy(youngest) is youngest
    assert youngest(job(arrival_ns=5.0, batch=4)) == -3.0
    bench = Bench([profile(instances=2)], policy=youngest)
    bench.submit()
    bench.run_dry()


def test_a_plain_function_is_found_as_a_policy() -> None:
    assert find_policy(lambda job: job.batch).rank(job(batch=7)) == 7


def test_a_policy_with_a_loop_that_ends_is_fine() -> None:
    def polynomial(job: Any) -> float:
        total = 0.0
        for k in range(3):
            total += job.batch * k
        return total

    assert may_loop(polynomial)
    assert isinstance(policy(polynomial), Policy)


def raises(job: Any) -> float:
    if job.batch > 4:
        raise ValueError("too many")
    return 1.0


def asserts(job: Any) -> float:
    assert job.batch > 0
    return 1.0


def prints(job: Any) -> float:
    print(job.batch)
    return 1.0


LOUD = print


def prints_by_another_name(job: Any) -> float:
    LOUD(job.batch)
    return 1.0


@numba.njit  # type: ignore[untyped-decorator]
def loud_helper(x: float) -> float:
    print(x)
    return x


def prints_in_a_helper(job: Any) -> Any:
    return loud_helper(job.batch)


def back_to_python(job: Any) -> float:
    with numba.objmode():
        pass
    return 1.0


def reads(job: Any) -> float:
    open("ranks.txt")  # noqa: SIM115
    return 1.0


def by_name(job: Any) -> float:
    return 0.0 if job.model == "resnet18" else 1.0


def by_names(job: Any) -> float:
    return 0.0 if job.model in ("resnet18", "resnet34") else 1.0


FIRST = "resnet18"


def by_the_name_of_a_constant(job: Any) -> float:
    return 0.0 if job.model != FIRST else 1.0


def not_a_number(job: Any) -> float:
    return (job.now_ns - job.now_ns) / (job.now_ns - job.now_ns)


def nothing(job: Any) -> None:
    job.batch + 1.0


def text(job: Any) -> Any:
    return "first"


def either(job: Any) -> Any:
    return "first" if job.batch > 1 else 1.0


def measures(job: Any) -> Any:
    return len(job)


def unknown(job: Any) -> Any:
    return job.size_of_the_moon


def two(job: Any, other: Any) -> float:
    return 1.0


def sometimes(job: Any) -> Any:
    if job.batch > 1:
        return 1.0
    return None


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (raises, r"raises in line \d+: rank must answer for every job, so return a large number"),
        (asserts, r"raises in line \d+"),
        (prints, r"calls `print` in line \d+: a policy runs without Python"),
        (prints_by_another_name, r"calls `print` in line \d+"),
        (prints_in_a_helper, r"calls `print` in line \d+"),
        (back_to_python, r"calls `objmode` in line \d+"),
        (reads, r"calls `open` in line \d+"),
        (by_name, r"has the text 'resnet18' in line \d+, .* numbers, job\.model too"),
        (by_names, "has the text 'resnet18'"),
        (by_the_name_of_a_constant, "has the text 'resnet18'"),
        (not_a_number, "returns nan"),
        (nothing, r"returns None in line \d+ where a number is needed"),
        (text, r"returns a str in line \d+ where a number is needed"),
        (either, r"(has a str in one case and a number in another|returns a str).* in line \d+"),
        (measures, r"applies `len` in line \d+ to .*not a number"),
        (unknown, "size_of_the_moon"),
        (two, r"takes \(job, gpu, own\)"),
        (sometimes, r"returns None in line \d+ where a number is needed"),
        (3, "plain function"),
    ],
)
def test_what_cannot_be_a_policy_is_refused_with_its_name_and_line(function: Any, message: str) -> None:
    with pytest.raises(PolicyError, match=message) as caught:
        policy(function)
    if callable(function):
        assert f"{function.__name__} ({__file__}:" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_policy_that_does_not_return_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def endless(job: Any) -> float:
        total = 0.0
        while job.now_ns > total:
            total -= job.batch
        return total

    monkeypatch.setattr(checks, "TIME_LIMIT_S", 6.0)
    with pytest.raises(PolicyError, match="did not return within 6 s"):
        policy(endless)


def test_a_policy_that_costs_too_much_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "MAX_CALL_NS", 0.0)  # any cost is too much
    with pytest.raises(PolicyError, match="µs per call"):
        policy(lambda job: job.batch)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: policy(active=0)(lambda job: job.batch), "active=0.*at least 1"),
        (lambda: policy(max_in_flight=0)(lambda job: job.batch), "max_in_flight=0.*at least 1"),
        (lambda: policy(active=1.5)(lambda job: job.batch), "active=1.5.*integer"),  # type: ignore[call-overload]
        (lambda: find_policy("nonesuch"), "no policy named 'nonesuch'"),
    ],
)
def test_options_and_names_are_checked(make: Callable[[], object], message: str) -> None:
    with pytest.raises(PolicyError, match=message):
        make()


def test_admit_is_checked_too() -> None:
    def admit(job: Any, gpu: Any) -> bool:
        return bool(job.batch / gpu.no_such_field > 1)

    with pytest.raises(PolicyError, match=r"gpu\.no_such_field in line \d+, .*pending_blocks"):
        policy(admit=admit)(lambda job: job.batch)


def test_print_is_refused_whoever_has_replaced_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(builtins, "print", lambda *_: None)
    with pytest.raises(PolicyError, match="calls `print`"):
        policy(prints)


def test_admit_and_order_neither_print_nor_raise() -> None:
    def admit(job: Any, gpu: Any) -> bool:
        if gpu.active_jobs > 3:
            raise ValueError
        return True

    with pytest.raises(PolicyError, match="admit must answer for every job, so return False"):
        policy(admit=admit)(lambda job: job.batch)
    with pytest.raises(PolicyError, match="calls `print`"):
        policy(order=prints)(lambda job: job.batch)


def test_a_policy_may_have_a_docstring_and_read_facts_by_name() -> None:
    def documented(job: Any) -> float:
        """Small batches first."""
        return float(job["batch"])

    assert isinstance(policy(documented), Policy)


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
