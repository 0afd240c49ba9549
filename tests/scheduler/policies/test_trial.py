"""Trials of policies on sample jobs: their time, their cost, and whether they let anything run."""

from __future__ import annotations

from typing import Any

import numba
import pytest
from failing import failing

from paellapy.scheduler.policies import trial
from paellapy.scheduler.policies.compile import may_loop
from paellapy.scheduler.policies.policy import PolicyError, policy


def polynomial(job: Any) -> float:
    total = 0.0
    for k in range(3):
        total += job.batch * k
    return total


def test_a_policy_with_a_loop_that_ends_is_fine() -> None:
    assert may_loop(polynomial)
    assert policy(polynomial).cost_ns < trial.MAX_CALL_NS


def test_a_policy_that_does_not_return_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def endless(job: Any) -> float:
        total = 0.0
        while job.now_ns > total:
            total -= job.batch
        return total

    monkeypatch.setattr(trial, "TIME_LIMIT_S", 6.0)
    with failing(PolicyError, limit=6.0, line=endless.__code__.co_firstlineno + 2):
        policy(endless)


def test_an_endless_loop_in_a_function_that_it_calls_has_the_line_there(monkeypatch: pytest.MonkeyPatch) -> None:
    @numba.njit  # type: ignore[untyped-decorator]
    def halved(x: float) -> float:
        while x >= 0.0:
            x *= 0.5
        return x

    monkeypatch.setattr(trial, "TIME_LIMIT_S", 0.5)
    line = halved.py_func.__code__.co_firstlineno + 2
    with failing(PolicyError, policy="halved", limit=0.5, line=line):
        policy(lambda job: halved(job.batch))


def test_a_policy_that_crashes_is_refused() -> None:
    @numba.njit  # type: ignore[untyped-decorator]
    def deeper(x: float) -> float:
        if x < 1e15:
            return 0.5 * deeper(x + 1.0) + x
        return 0.0

    with failing(PolicyError, policy="<lambda>"):
        policy(lambda job: deeper(job.batch))


def test_a_policy_that_costs_too_much_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial, "MAX_CALL_NS", 0.0)  # any cost is too much
    with failing(PolicyError, limit=0.0):
        policy(lambda job: job.batch)


def test_an_admit_that_lets_nothing_run_is_refused() -> None:
    def never(job: Any, own: Any) -> float:
        return own.next_ns

    with failing(PolicyError, policy="never"):
        policy(state={"next_ns": 0.0}, admit=never, may_idle=True)(polynomial)


def test_an_error_in_a_loop_names_its_line() -> None:
    def loops_and_divides(job: Any) -> float:
        total = 0.0
        for _ in range(3):
            total += 1.0 / job.deficit_ns
        return total

    line = loops_and_divides.__code__.co_firstlineno + 4
    with failing(PolicyError, policy="loops_and_divides", name="deficit_ns=0", line=line):
        policy(loops_and_divides)
