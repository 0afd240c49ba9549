"""Indices in policies: accepted where the source shows that they stay in range, refused elsewhere."""

from __future__ import annotations

import ast
import operator
import re
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paellapy.scheduler.policies.integers import Range, computed
from paellapy.scheduler.policies.policy import PolicyError, policy
from paellapy.scheduler.policies.roles import Layout
from paellapy.scheduler.policies.source import problem_in

OUTSIDE = """
import math
T = (1.0, 2.0, 3.0, 4.0)
STEPS = (1e3, 1e6, 1e9)
ROWS = (0, 7, 255)
PAIRS = ((1.0, 2.0), (3.0, 4.0))
N = 4
"""
LAYOUT = Layout({"x": 0.0}, {"hist": 0.0})


def problem(body: str, folder: Path) -> str | None:
    """The problem of a `done` with this body."""
    path = folder / "tried.py"
    path.write_text(f"{OUTSIDE}\ndef done(job, segment, own):\n{textwrap.indent(textwrap.dedent(body), '    ')}\n")
    made: dict[str, Any] = {}
    exec(compile(path.read_text(), path, "exec"), made)
    return problem_in("done", made["done"], ("job", "segment", "own"), LAYOUT)


ACCEPTED = """
own.hist[job.model] += 1
own.hist[min(max(int(job.occupancy * 10), 0), 255)] += 1
own.hist[int(job.priority) % 256] += 1
own.hist[-int(job.priority) % 256] += 1
own.hist[job.tenant % 256] += 1
own.hist[int(job.priority) & 255] += 1
own.hist[255 - job.model] += 1
own.hist[job.model // 2 * 2] += 1
own.hist[job.model >> 3] += 1
own.hist[ROWS[job.model % 3]] += 1
own.hist[abs(job.model - 255)] += 1
own.hist[3 if job.batch > 1 else job.model] += 1
for m in range(0, 256, 2): own.hist[m] = 0.0
for m in range(255, -1, -1): own.hist[m] = 0.0
for m in range(len(own.hist) - 1): own.hist[m + 1] = own.hist[m]
for m in range(min(int(job.batch), 256)): own.hist[m] = 0.0
own.x = sum([own.hist[m] for m in range(256)])
own.x = T[int(job.priority) % len(T)]
own.x = T[max(min(int(job.priority) // 16, 3), 0)]
own.x = T[int(job.priority) & 3]
own.x = PAIRS[job.model % 2][int(job.priority) % len(PAIRS[0])]
own.x = T[job.tenant] if 0 <= job.tenant < 4 else 0.0
if 0 <= job.tenant and job.tenant < len(T): own.x = T[job.tenant]
k = int(job.priority); own.x = T[k % len(T)]
k = int(job.priority); own.x = T[k % 4]
k = int(job.priority); k %= N; own.x = T[k]
k = int(job.priority); k = min(max(k, 0), 3); own.x = T[k]
k = int(job.priority); k = max(k, 0); k = min(k, 3); own.hist[k] += 1
k, m = int(job.priority) % 4, job.model; own.hist[m] = T[k]
""".strip().splitlines()

ACCEPTED_BLOCKS = [
    """
    k = int(job.priority)
    if k < 0:
        k = 0
    elif k > 3:
        k = 3
    own.x = T[k]
    """,
    """
    k = int(job.priority)
    if k < 0 or k >= len(T):
        return
    own.x = T[k]
    """,
    """
    level = 0
    if job.batch > 1:
        level += 1
    if job.batch > 8:
        level += 1
    own.x = T[level]
    """,
    """
    level = 0
    for limit in STEPS:
        if job.total_ns > limit:
            level += 1
    own.x = T[level]
    """,
    """
    level = 0
    while level < 3 and job.total_ns > STEPS[level]:
        level += 1
    own.x = T[level]
    """,
    """
    n = len(T)
    for k in range(n - 1, -1, -1):
        own.x += T[k]
    """,
    """
    best = 0
    for m in range(256):
        if own.hist[m] > own.hist[best]:
            best = m
    own.hist[best] = 0.0
    """,
    """
    for m in range(256):
        if own.hist[m] > 0:
            break
    own.hist[m] = 0.0
    """,
    """
    for k, factor in enumerate(T):
        own.hist[k] = factor
    """,
]

REFUSED = """
own.hist[int(-max(job.occupancy * 1e-30, 0) % 256)] += 1
own.hist[int(min(max(job.used_ns / job.total_ns, 0), 255))] += 1
own.hist[int(max(0, min(255, job.priority)))] += 1
own.hist[int(job.priority % 256)] += 1
own.hist[int(job.priority)] += 1
own.hist[job.tenant] += 1
own.hist[segment.number] += 1
own.hist[job.model + 1] += 1
own.hist[job.model * 2] += 1
own.hist[-1] += 1
own.hist[min(max(int(job.priority), 0) + 1, 255)] += 1
own.hist[min(abs(int(job.priority)), 255)] += 1
own.hist[int(job.batch) % int(job.priority)] += 1
own.hist[int(job.batch / 2) % 257] += 1
own.hist[min(int(job.priority), 255)] += 1
for m in range(257): own.hist[m] = 0.0
for m in range(256, -1, -1): own.hist[m] = 0.0
for m in range(int(job.batch)): own.hist[m] = 0.0
for m in range(5, min(int(job.batch), 256)): own.hist[m] = 0.0
for m in range(256): own.hist[m + 1] = own.hist[m]
own.x = sum([own.hist[m] for m in range(300)])
own.x = T[job.model]
own.x = T[4]
own.x = T[job.tenant] if job.tenant < 4 else 0.0
k = int(job.priority); own.hist[k] += 1
k = 0; k += int(job.batch); own.hist[k] += 1
k = job.priority; k = min(max(k, 0), 3); own.hist[int(k)] += 1
k = job.model; own.hist[k] += (k := 300)
own.x = (k := 300) if job.batch > 1 else (k := 0); own.hist[k] += 1
min = max; own.hist[min(job.tenant, 5)] += 1
""".strip().splitlines()

REFUSED_BLOCKS = [
    """
    x = job.used_ns / job.total_ns
    if x < 0:
        x = 0
    elif x > 255:
        x = 255
    own.hist[int(x)] += 1
    """,
    """
    k = 0
    for m in range(300):
        k += 1
    own.hist[k] += 1
    """,
    """
    k = 0
    while job.batch > k:
        own.hist[k] += 1
        k += 1
    """,
    """
    if job.batch > 1:
        k = 3
    own.hist[k] += 1
    """,
    """
    k = 0
    for m in range(100):
        if job.batch > m:
            k = 300
            continue
        own.hist[k] += 1
    """,
    """
    k = 0
    while True:
        if job.batch > 1:
            k = 300
            break
        k = 1
    own.hist[k] += 1
    """,
]


@pytest.mark.parametrize("body", ACCEPTED + ACCEPTED_BLOCKS)
def test_an_index_in_range_is_accepted(body: str, tmp_path: Path) -> None:
    assert problem(body, tmp_path) is None


@pytest.mark.parametrize("body", REFUSED + REFUSED_BLOCKS)
def test_an_index_that_may_be_out_of_range_is_refused(body: str, tmp_path: Path) -> None:
    assert "out of range" in (problem(body, tmp_path) or "")


@pytest.mark.parametrize("index", ["job.priority", "job.model", "int(job.priority) + 1", "-job.tenant", "9"])
def test_the_remedy_of_a_tuple_is_accepted(index: str, tmp_path: Path) -> None:
    said = problem(f"own.x = T[{index}]", tmp_path) or ""
    remedy = re.search(r"as in (T\[.*\]), or", said)
    assert remedy, said
    assert problem(f"own.x = {remedy[1]}", tmp_path) is None


def test_the_remedy_of_own_is_accepted(tmp_path: Path) -> None:
    said = problem("own.hist[int(min(max(job.used_ns / job.total_ns, 0), 255))] += 1", tmp_path) or ""
    assert "own.hist[min(max(int(x), 0), 255)]" in said
    assert problem("x = job.used_ns / job.total_ns\nown.hist[min(max(int(x), 0), 255)] += 1", tmp_path) is None


def rounds_up_to_the_end(job: Any, segment: Any, own: Any) -> None:
    own.hist[int(-max(job.occupancy * 1e-30, 0) % 256)] += 1


def climbs(job: Any, segment: Any, own: Any) -> None:
    k = int(job.priority)
    if k < 0:
        k = 0
    elif k > 255:
        k = 255
    own.hist[k] += 1


def by_arrival(job: Any) -> float:
    return float(job.arrival_ns)


def test_policies_are_made_only_with_indices_in_range() -> None:
    with pytest.raises(PolicyError, match="out of range"):
        policy(done=rounds_up_to_the_end, per_model={"hist": 0.0})(by_arrival)
    assert policy(done=climbs, per_model={"hist": 0.0})(by_arrival).name == "by_arrival"


OPERATORS: list[tuple[ast.operator, Callable[[int, int], int]]] = [
    (ast.Add(), operator.add), (ast.Sub(), operator.sub), (ast.Mult(), operator.mul), (ast.Mod(), operator.mod),
    (ast.FloorDiv(), operator.floordiv), (ast.BitAnd(), operator.and_), (ast.RShift(), operator.rshift),
]  # fmt: skip
ENDS = st.tuples(st.integers(-40, 40), st.integers(0, 20))


@given(st.sampled_from(OPERATORS), ENDS, ENDS, st.data())
def test_a_result_lies_in_its_range(
    pair: tuple[ast.operator, Callable[[int, int], int]], one: Range, other: Range, data: st.DataObject
) -> None:
    left, right = (one[0], sum(one)), (other[0], sum(other))
    a, b = data.draw(st.integers(*left)), data.draw(st.integers(*right))
    op, compute = pair
    found = computed(op, left, right)
    if found is not None and not (b == 0 and isinstance(op, ast.Mod | ast.FloorDiv)):
        assert found[0] <= compute(a, b) <= found[1]
