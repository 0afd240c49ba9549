"""Policies as newcomers write them, and wrongly: each is refused with its line and a remedy, in plain words."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import paellapy as pp
from paellapy.scheduler.policies.policy import PolicyError, policy

COUNT = 0
WEIGHTS = np.ones(8)
LIMITS = {0: 0.5, 1: 0.25}
HISTORY: list[float] = []
FACTORS = (1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0)


class Settings:
    limit = 0.5


SETTINGS = Settings()


def weight(x: float) -> float:
    return x * 2.0


def fifo(job: Any) -> float:
    return float(job.arrival_ns)


# --- one function each; the comment `wrong` marks the line that the message must name ---------------------------------


def counts_globally(job: Any) -> float:
    global COUNT  # wrong
    COUNT += 1
    return float(COUNT)


def raises_the_priority(job: Any) -> float:
    job.priority = 5.0  # wrong
    return -job.priority


def adds_to_a_fact(job: Any) -> float:
    job.remaining_ns += 1.0  # wrong
    return job.remaining_ns


def writes_by_key(job: Any) -> float:
    job["priority"] = 1.0  # wrong
    return job.priority


def writes_to_the_gpu(job: Any, gpu: Any) -> float:
    gpu.max_active = 3.0  # wrong
    return job.arrival_ns


def misspells(job: Any) -> float:
    return job.remainning_ns  # wrong


def asks_for_a_name(job: Any) -> float:
    return job.name  # wrong


def misspells_a_segment(job: Any) -> float:
    return job.segment.time_ns  # wrong


def reads_an_undeclared_parameter(job: Any) -> float:
    return job.arrival_ns * job.params.limit  # wrong


def forgets_to_return(job: Any) -> None:
    rank = job.arrival_ns  # noqa: F841  # wrong


def returns_in_one_case(job: Any) -> Any:  # noqa: RET503
    if job.batch > 1:
        return job.arrival_ns  # wrong


def returns_nothing(job: Any) -> Any:
    if job.batch > 1:
        return None  # wrong
    return 1.0


def returns_a_pair(job: Any) -> Any:
    return job.priority, job.arrival_ns  # wrong


def returns_the_job(job: Any) -> Any:
    return job  # wrong


def returns_text(job: Any) -> Any:
    return "first"  # wrong


def uses_a_dict(job: Any) -> float:
    return LIMITS[int(job.model)]  # wrong


def uses_an_array(job: Any) -> float:
    return WEIGHTS[job.model]  # wrong


def appends(job: Any) -> float:
    HISTORY.append(job.arrival_ns)  # wrong
    return job.arrival_ns


def uses_an_object(job: Any) -> float:
    return job.arrival_ns * SETTINGS.limit  # wrong


def calls_a_plain_function(job: Any) -> float:
    return weight(job.arrival_ns)  # wrong


def asks_the_clock(job: Any) -> float:
    return time.time() - job.arrival_ns  # wrong


def imports(job: Any) -> float:
    import math as m  # wrong

    return m.sqrt(job.batch)


def tries(job: Any) -> float:
    try:  # wrong
        return 1.0 / job.batch
    except ZeroDivisionError:
        return 0.0


def names_what_is_not_there(job: Any) -> float:
    return job.arrival_ns + offset  # type: ignore[name-defined]  # noqa: F821  # wrong


def formats(job: Any) -> Any:
    return f"{job.batch}"  # wrong


def hands_the_job_on(job: Any) -> float:
    other = job  # wrong
    return other.arrival_ns


def asks_a_number_for_its_mean(job: Any) -> float:
    return job.batch.mean()  # wrong


def has_a_function_inside(job: Any) -> float:
    key = lambda x: x * 2.0  # noqa: E731  # wrong
    return key(job.batch)


def calls_what_math_has_not(job: Any) -> float:
    return math.square(job.batch)  # type: ignore[attr-defined]  # wrong


def indexes_a_tuple_by_model(job: Any) -> float:
    return FACTORS[job.model]  # wrong


def indexes_a_tuple_by_tenant(job: Any) -> float:
    return FACTORS[min(job.tenant, 7)]  # wrong


def indexes_a_tuple_beyond(job: Any) -> float:
    return FACTORS[8]  # wrong


def indexes_a_short_list(job: Any) -> float:
    factors = [1.0, 2.0]
    return factors[job.model]  # wrong


def indexes_a_list_that_shrinks(job: Any) -> float:
    factors = [1.0, 2.0]
    factors.pop()
    return factors[1]  # wrong


def indexes_an_array_of_its_own(job: Any) -> float:
    factors = np.ones(4)
    return factors[job.model]  # wrong


def has_a_dict(job: Any) -> float:
    factors = {0: 1.0, 1: 2.0}  # wrong
    return factors[job.model]


def has_a_dict_of_texts(job: Any) -> float:
    factors = {"high": 1.0, "low": 2.0}  # wrong
    return factors["high"]


def writes_to_a_dict(job: Any) -> float:
    factors = {0: 1.0}  # wrong
    factors[0] = job.batch
    return factors[0]


def writes_to_a_list(job: Any) -> float:
    factors = [1.0, 2.0]
    factors[0] = job.batch  # wrong
    return factors[0]


def converts_infinity(job: Any) -> float:
    return min(job.deadline_ns, float("inf"))  # wrong


def gets_an_attribute(job: Any) -> float:
    return getattr(job, "priority")  # noqa: B009  # wrong


def divides_by_zero(job: Any) -> float:
    if job.batch > 1:
        return job.arrival_ns
    return job.arrival_ns / job.deficit_ns  # wrong


def returns_none_from_a_variable(job: Any) -> Any:
    found = None
    if job.batch > 1:
        found = job.arrival_ns
    return found  # wrong


def reads_what_is_set_in_one_case(job: Any) -> float:
    if job.batch > 1:
        found = job.arrival_ns
    return found  # wrong


def reads_what_a_loop_may_not_set(job: Any) -> float:
    for k in range(int(job.batch) - 1):
        found = float(k)
    return found  # wrong


def adds_to_what_is_not_set(job: Any) -> float:
    total += job.batch  # type: ignore[name-defined]  # noqa: F821  # wrong
    return total  # type: ignore[name-defined,no-any-return]


def tries_groups(job: Any) -> float:
    try:  # wrong
        found = 1.0 / job.batch
    except* ValueError:
        found = 0.0
    return found


def calls_itself(job: Any) -> float:
    return calls_itself(job)  # wrong


def loops_for_long(job: Any) -> float:
    total = 0.0
    for k in range(100_000):  # wrong
        total += k * job.batch
    return total


RANKS: list[Callable[..., Any]] = [
    reads_what_is_set_in_one_case, reads_what_a_loop_may_not_set, adds_to_what_is_not_set, tries_groups, calls_itself,
    loops_for_long,
    indexes_a_tuple_by_model, indexes_a_tuple_by_tenant, indexes_a_tuple_beyond, indexes_a_short_list,
    indexes_a_list_that_shrinks, indexes_an_array_of_its_own, has_a_dict, has_a_dict_of_texts, writes_to_a_dict,
    writes_to_a_list, converts_infinity, gets_an_attribute, divides_by_zero, returns_none_from_a_variable,
    counts_globally, raises_the_priority, adds_to_a_fact, writes_by_key, writes_to_the_gpu, misspells, asks_for_a_name,
    misspells_a_segment, reads_an_undeclared_parameter, forgets_to_return, returns_in_one_case, returns_nothing,
    returns_a_pair, returns_the_job, returns_text, uses_a_dict, uses_an_array, appends, uses_an_object,
    calls_a_plain_function, asks_the_clock, imports, tries, names_what_is_not_there, formats, hands_the_job_on,
    asks_a_number_for_its_mean, has_a_function_inside, calls_what_math_has_not,
]  # fmt: skip


def writes_in_rank(job: Any, own: Any) -> float:
    own.limit += 1.0  # wrong
    return own.limit


def uses_undeclared_own(job: Any, own: Any) -> float:
    return own.limits  # wrong


def indexes_with_a_float(job: Any, own: Any) -> float:
    return own.used_ns[job.client]  # wrong


def indexes_beyond(job: Any, own: Any) -> float:
    return own.used_ns[1000]  # wrong


def indexes_from_the_end(job: Any, own: Any) -> float:
    return own.used_ns[-1]  # wrong


def indexes_beside(job: Any, own: Any) -> float:
    m = job.model + 1
    return own.used_ns[m]  # wrong


def forgets_the_index(job: Any, own: Any) -> float:
    return own.used_ns + job.batch  # wrong


def indexes_one_number(job: Any, own: Any) -> float:
    return own.limit[job.model]  # wrong


def sums_by_a_method(job: Any, own: Any) -> float:
    return own.used_ns.sum()  # wrong


OWN_RANKS: list[Callable[..., Any]] = [
    sums_by_a_method,
    writes_in_rank, uses_undeclared_own, indexes_with_a_float, indexes_beyond, indexes_from_the_end, indexes_beside,
    forgets_the_index, indexes_one_number,
]  # fmt: skip


def admit_returns_text(job: Any, gpu: Any) -> Any:
    return "yes" if gpu.occupancy < 1 else "no"  # wrong


def admit_prints(job: Any, gpu: Any) -> bool:
    print(gpu.occupancy)  # wrong
    return True


def admit_returns_nothing(job: Any, gpu: Any) -> Any:  # noqa: RET503
    if gpu.occupancy < 1:
        return True  # wrong


def admit_returns_none_in_one_case(job: Any, gpu: Any) -> Any:
    return None if gpu.occupancy < 1 else True  # wrong


def place_with_an_unknown_option(job: Any) -> Any:
    return pp.Where(sm=0.25)  # wrong


def place_with_blocks(job: Any) -> Any:
    return pp.Where(sms=0.25, blocks=3)  # wrong


def place_by_percent(job: Any) -> Any:
    return pp.Where(sms=25)  # wrong


def place_on_nothing(job: Any) -> Any:
    return pp.Where(sms=-0.5)  # wrong


def done_keeps_text(job: Any, segment: Any, own: Any) -> None:
    own.limit = "low"  # wrong


def done_divides_by_zero(job: Any, segment: Any, own: Any) -> None:
    own.limit = segment.ns / (job.batch - 1.0)  # wrong


def tick_returns(gpu: Any, own: Any) -> float:
    own.limit = 0.5
    return own.limit  # wrong


def tick_reads_a_job_fact(gpu: Any, own: Any) -> None:
    own.limit = gpu.arrival_ns  # wrong


def done_writes_to_the_segment(job: Any, segment: Any, own: Any) -> None:
    segment.ns = 0.0  # wrong


def done_overwrites_all_models(job: Any, segment: Any, own: Any) -> None:
    own.used_ns = segment.ns  # wrong


OTHERS: list[tuple[str, Callable[..., Any]]] = [
    ("place", place_by_percent), ("place", place_on_nothing), ("done", done_keeps_text), ("done", done_divides_by_zero),
    ("admit", admit_returns_none_in_one_case), ("place", place_with_an_unknown_option), ("place", place_with_blocks),
    ("admit", admit_returns_text), ("admit", admit_prints), ("admit", admit_returns_nothing), ("tick", tick_returns),
    ("tick", tick_reads_a_job_fact), ("done", done_writes_to_the_segment), ("done", done_overwrites_all_models),
]  # fmt: skip

KEPT: dict[str, Any] = {"state": {"limit": 0.5}, "per_model": {"used_ns": 0.0}}
INTERNALS = re.compile(r"numba|nopython|unify|float64|int64|Record\(|\$|ufunc|typing|lowering|reflected", re.IGNORECASE)


def line_of(function: Callable[..., Any]) -> int:
    code: Any = function.__code__
    lines = Path(code.co_filename).read_text().splitlines()
    return next(k for k in range(code.co_firstlineno, len(lines)) if "# wrong" in lines[k - 1])


def check_message(caught: pytest.ExceptionInfo[PolicyError], function: Callable[..., Any]) -> None:
    said = str(caught.value)
    assert f"{function.__name__} (" in said
    assert f"line {line_of(function)}" in said
    shown = said.replace("@numba.njit", "")  # what to write before a function that is to be called
    assert not INTERNALS.search(shown.partition("): ")[2] or shown.partition(") ")[2]), said
    assert "\n" not in said


@pytest.mark.parametrize("function", RANKS, ids=lambda each: each.__name__)
def test_a_faulty_rank_is_refused(function: Callable[..., Any]) -> None:
    with pytest.raises(PolicyError) as caught:
        policy(function)
    check_message(caught, function)


@pytest.mark.parametrize("function", OWN_RANKS, ids=lambda each: each.__name__)
def test_a_faulty_use_of_own_is_refused(function: Callable[..., Any]) -> None:
    with pytest.raises(PolicyError) as caught:
        policy(**KEPT)(function)
    check_message(caught, function)


@pytest.mark.parametrize(("role", "function"), OTHERS, ids=lambda each: getattr(each, "__name__", each))
def test_other_faulty_functions_are_refused(role: str, function: Callable[..., Any]) -> None:
    options: dict[str, Any] = {role: function, **({"tick_us": 1000} if role == "tick" else {})}
    with pytest.raises(PolicyError) as caught:
        policy(**KEPT, **options)(fifo)
    check_message(caught, function)


def test_a_counter_outside_is_refused() -> None:
    count = 0

    def counting(job: Any) -> float:
        nonlocal count
        count += 1
        return float(count)

    with pytest.raises(PolicyError, match=r"nonlocal count.*state=\{'count': 0\.0\}"):
        policy(counting)


def never(job: Any, own: Any) -> float:
    return own.next_ns


def takes_a_default(job: Any, factor: float = 2.0) -> float:
    return job.batch * factor


def takes_own_first(own: Any, job: Any) -> float:
    return job.batch


async def waits(job: Any) -> float:
    return job.batch


def yields(job: Any) -> Any:
    yield job.batch


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: policy(takes_a_default), "`factor`"),
        (lambda: policy(**KEPT)(takes_own_first), "in this order"),
        (lambda: policy(never), "takes `own`.*state="),
        (lambda: policy(waits), "must answer at once"),
        (lambda: policy(yields), "must answer at once"),
        (lambda: policy(state={"next_ns": 0.0}, admit=never, may_idle=True)(fifo), "nothing would ever run"),
        (lambda: policy(may_idle=True)(fifo), "may_idle.*`admit`"),
        (lambda: policy(tick_us=1000)(fifo), "both tick and tick_us"),
        (lambda: policy(state={"a b": 0.0})(fifo), "'a b'"),
        (lambda: policy(state={"limit": "high"})(fifo), "finite number"),  # type: ignore[dict-item]
        (lambda: policy(state={"limit": 1.0}, per_model={"limit": 1.0})(fifo), "in state and in per_model"),
        (lambda: policy(params={f"p{k}": 0.0 for k in range(9)})(fifo), "at most 8"),
    ],
)
def test_faulty_declarations_are_refused(make: Callable[[], object], message: str) -> None:
    with pytest.raises(PolicyError, match=message):
        make()


def test_a_policy_without_source_must_not_write() -> None:
    made: dict[str, Any] = {}
    exec("def sneaky(job):\n    job.priority = 1.0\n    return job.priority", made)
    with pytest.raises(PolicyError, match="its source cannot be read"):
        policy(made["sneaky"])
    exec("def plain(job):\n    return job.priority", made)
    assert policy(made["plain"]).name == "plain"


REMEDIES: list[tuple[Callable[..., Any], str]] = [
    (indexes_a_tuple_by_model, r"8 entries.*job\.params"), (has_a_dict, r"job\.params"),
    (writes_to_a_list, "one variable"), (converts_infinity, r"math\.inf"), (gets_an_attribute, r"job\.priority"),
    (divides_by_zero, r"deficit_ns=0\b.*divisors"), (returns_none_from_a_variable, "returns None"),
]  # fmt: skip


@pytest.mark.parametrize(("function", "remedy"), REMEDIES, ids=lambda each: getattr(each, "__name__", ""))
def test_the_remedy_fits_the_fault(function: Callable[..., Any], remedy: str) -> None:
    with pytest.raises(PolicyError, match=remedy):
        policy(function)


def test_only_fields_that_are_read_are_shown() -> None:
    with pytest.raises(PolicyError) as caught:
        policy(divides_by_zero)
    assert "client_start_ns" not in str(caught.value)


def bounded_by_remainder(job: Any) -> float:
    return FACTORS[job.model % len(FACTORS)]


def bounded_by_min(job: Any) -> float:
    k = min(job.model, len(FACTORS) - 1)
    return FACTORS[k] + FACTORS[-1]


def bounded_by_both(job: Any) -> float:
    return FACTORS[max(0, min(int(job.priority), 7))]


def bounded_by_comparison(job: Any) -> float:
    return (2.0, 1.0)[int(job.batch > 1)]


def bounded_by_a_loop(job: Any) -> float:
    total = 0.0
    for k in range(len(FACTORS)):
        total += FACTORS[k]
    return total


@pytest.mark.parametrize(
    "function",
    [bounded_by_remainder, bounded_by_min, bounded_by_both, bounded_by_comparison, bounded_by_a_loop],
    ids=lambda each: each.__name__,
)
def test_an_index_that_stays_in_range_is_accepted(function: Callable[..., Any]) -> None:
    assert policy(function).name == function.__name__


def sum_of_all(job: Any, own: Any) -> float:
    total = 0.0
    for k in range(len(own.used_ns)):
        total += own.used_ns[k]
    return total


def test_the_numbers_of_all_models_may_be_summed() -> None:
    assert policy(**KEPT)(sum_of_all).name == "sum_of_all"


def test_where_names_its_only_option_outside_of_a_policy() -> None:
    assert pp.Where(sms=0.5) == 0.5
    for options in ({"blocks": 3}, {"sm": 0.5}):
        with pytest.raises(TypeError, match=next(iter(options))):
            pp.Where(**options)


def placed(job: Any) -> Any:
    return pp.Where(sms=0.25) if job.batch > 1 else pp.Where()


def test_a_place_compiles() -> None:
    assert policy(place=placed)(fifo).place is placed


def sets_in_both_cases(job: Any) -> float:
    if job.batch > 1:
        found = 1.0
    else:
        found = 2.0
    return found


def sets_in_every_turn(job: Any) -> float:
    for each in FACTORS:
        found = each * job.batch
    return found


def sets_before_it_breaks(job: Any) -> float:
    k = 0
    while True:
        k += 1
        if k > 3:
            found = k * job.batch
            break
    return found


def returns_otherwise(job: Any) -> float:
    if job.batch > 1:
        found = 1.0
    else:
        return 2.0
    return found


@pytest.mark.parametrize("function", [sets_in_both_cases, sets_in_every_turn, sets_before_it_breaks, returns_otherwise])
def test_a_variable_with_a_value_on_every_path_may_be_read(function: Callable[..., Any]) -> None:
    assert policy(function).name == function.__name__


def several(*job: Any) -> float:
    return 1.0


def named_only(*, job: Any) -> float:
    return job.batch


@pytest.mark.parametrize("function", [several, named_only])
def test_arguments_of_another_kind_are_told_apart_from_wrong_names(function: Callable[..., Any]) -> None:
    with pytest.raises(PolicyError, match=r"plain argument, as in `def rank\(job\)`"):
        policy(function)


@pytest.mark.parametrize(
    "options",
    [
        {"whole": "no"},
        {"may_idle": 1},
        {"max_in_flight": 10**30},
        {"active": True},
        {"state": {"x": 10**400}},
        {"state": {"x": np.complex64(1)}},
        {"name": 5},
    ],
)
def test_options_of_a_wrong_kind_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(PolicyError, match="must be"):
        policy(**options)(fifo)
