"""How the functions of a policy are read and compiled: the facts they need, and indices that stay in range."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from paellapy.scheduler.core.job import PER_MODEL, READS_PARAMS, READS_TERMS, READS_USE
from paellapy.scheduler.policies.compile import Layout, bounded, compile_function, paths_read
from paellapy.scheduler.policies.policy import find_policy, policy
from paellapy.scheduler.policies.trial import Samples

FACTORS = (1.0, 2.0, 3.0, 4.0)
LAYOUT = Layout({"x": 0.0}, {"seen": 0.0})


def answer(function: Callable[..., Any], layout: Layout = LAYOUT, **facts: float) -> float:
    """The compiled function's answer for a job with these facts. Row k of own.seen is k."""
    made, samples = compile_function("rank", function, layout), Samples(layout)
    samples.own["seen"][0] = np.arange(PER_MODEL)
    for name, value in facts.items():
        samples.tables["job"][name][0] = value
    call = ctypes.CFUNCTYPE(ctypes.c_double, *[ctypes.c_void_p] * len(made.names))(made.address)
    return float(call(*samples.addresses(made.names, 0)))


def by_model(job: Any, own: Any) -> float:
    return own.seen[job.model]


def by_priority(job: Any, own: Any) -> float:
    return own.seen[int(job.priority)]


def by_nested_index(job: Any, own: Any) -> float:
    return own.seen[int(own.seen[int(job.priority)]) + 250]


def of_a_tuple(job: Any) -> float:
    return FACTORS[int(job.priority)]


def of_a_list(job: Any) -> float:
    factors = [1.0, 2.0, 3.0, 4.0]
    return factors[int(job.priority)]


@pytest.mark.parametrize(
    ("function", "priority", "wanted"),
    [
        (by_priority, 7, 7), (by_priority, 1e6, PER_MODEL - 1), (by_priority, -1e6, 0), (by_priority, np.nan, 0),
        (by_nested_index, 3, 253), (by_nested_index, 100, PER_MODEL - 1),
        (of_a_tuple, 2, 3.0), (of_a_tuple, 1e6, 4.0), (of_a_tuple, -1, 4.0), (of_a_tuple, -1e6, 1.0),
        (of_a_list, 1e6, 4.0), (of_a_list, -1e6, 1.0),
    ],
)  # fmt: skip
def test_an_index_out_of_range_reaches_the_nearest_entry(
    function: Callable[..., Any], priority: float, wanted: float
) -> None:
    assert answer(function, priority=priority) == wanted


def test_the_index_of_a_model_is_compiled_as_it_is_written() -> None:
    assert bounded(by_model) is by_model
    assert answer(by_model, model=5) == 5


def test_a_bounded_function_keeps_its_closure_and_lines() -> None:
    offset = 2

    def shifted(job: Any, own: Any) -> float:
        return own.seen[int(job.priority) + offset]

    assert answer(shifted, priority=1e6) == PER_MODEL - 1
    assert answer(shifted, priority=3) == 5
    assert answer(lambda job, own: own.seen[int(job.priority) + offset], priority=3) == 5
    assert bounded(shifted).__code__.co_firstlineno == shifted.__code__.co_firstlineno


def test_two_lambdas_in_one_line_are_told_apart() -> None:
    lower, higher = (lambda job, own: own.seen[int(job.priority)]), (lambda job, own: own.seen[int(job.priority) + 1])
    assert (answer(lower, priority=3), answer(higher, priority=3)) == (3, 4)


def test_bounds_hold_where_the_policy_renames_builtins() -> None:
    def renamed(job: Any, own: Any) -> float:
        min = int(job.priority)
        return own.seen[min]

    assert answer(renamed, priority=1e6) == PER_MODEL - 1


def climbs(job: Any, segment: Any, own: Any) -> None:
    own.seen[min(max(int(job.priority), 0), PER_MODEL - 1)] += 1


def test_an_own_number_is_counted_at_a_bounded_index() -> None:
    made = policy(done=climbs, per_model={"seen": 0.0})(lambda job: job.arrival_ns)
    assert made.functions["done"].bounded is not climbs


# --- the fields that are read ----------------------------------------------------------------------------------------


def test_paths_are_read_by_attribute_by_key_and_in_comprehensions() -> None:
    assert paths_read(lambda job: job["segment"]["ns"] + job.batch) == {"job.segment.ns", "job.batch"}
    assert paths_read(lambda job: sum([job.params.share for _ in range(2)])) == {"job.params.share"}
    assert paths_read(lambda job, own: own.top[job.model]) == {"own.top", "job.model"}


def test_a_rank_with_moving_facts_is_not_timeless() -> None:
    assert not policy(lambda job: -job["now_ns"]).timeless
    assert not policy(lambda job: sum([job.used_ns for _ in range(2)])).timeless
    assert policy(lambda job: job.segment.occupancy).timeless


def by_arrival(job: Any) -> float:
    return float(job.arrival_ns)


def test_admit_reads_the_client_only_where_it_reads_a_field_of_the_job() -> None:
    assert policy(admit=lambda job: job["tenant"] != 5)(by_arrival).admits_by_client
    assert policy(admit=lambda job: job.share > 1)(by_arrival).admits_by_client
    assert not policy(admit=lambda job: job.batch > 1)(by_arrival).admits_by_client
    # A parameter or a number of the policy's own may have the name of a client's field.
    named = policy(admit=lambda job: job.params.share > 0.0, params={"share": 1.0}, may_idle=True)(by_arrival)
    assert (named.admits_by_client, named.facts) == (False, READS_PARAMS)
    kept = policy(admit=lambda job, own: own.tenant < 1.0, state={"tenant": 0.0})(by_arrival)
    assert not kept.admits_by_client


def test_facts_of_other_records_with_the_same_name_are_not_computed() -> None:
    assert find_policy("quota").facts == READS_PARAMS
    assert not find_policy("pack").facts & READS_USE  # gpu.occupancy
    assert not find_policy("lru").facts & READS_USE  # model.used_ns
    assert find_policy("tally").facts == READS_TERMS  # not own.top
