"""Faulty policies, as newcomers write them: each is refused with its line and a remedy, in plain words."""

from __future__ import annotations

import builtins
import math
import random
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numba
import numpy as np
import pytest
from failing import failing

import paellapy as pp
from paellapy.scheduler.policies.policy import PolicyError, policy

NUMBERS: dict[str, Any] = {"state": {"limit": 0.5}, "per_model": {"used_ns": 0.0}}
INTERNALS = re.compile(r"numba|nopython|unify|float64|int64|Record\(|\$|ufunc|typing|lowering|reflected", re.IGNORECASE)
ARGUMENTS = {"rank": "job, gpu, own", "admit": "job, gpu, own", "place": "job", "tick": "gpu, own",
             "done": "job, segment, own"}  # fmt: skip


class Settings:
    limit = 0.5


@numba.njit  # type: ignore[untyped-decorator]
def loud_helper(x: float) -> float:
    print(x)
    return x


OUTSIDE = {
    "COUNT": 0, "WEIGHTS": np.ones(8), "LIMITS": {0: 0.5, 1: 0.25}, "HISTORY": [1.0], "FACTORS": (1.0, 2.0, 3.0, 4.0),
    "PAIRS": ((1.0, 2.0), (3.0, 4.0)), "SETTINGS": Settings(), "LOUD": print, "FIRST": "resnet18", "LARGE": 2**64,
    "plain_helper": lambda x: 2.0 * x, "loud_helper": loud_helper, "math": math, "time": time, "random": random,
    "numba": numba, "pp": pp,
}  # fmt: skip


def function_of(
    body: str, folder: Path, role: str = "rank", arguments: str | None = None
) -> tuple[Any, int | None]:
    """A function with this body, which may use the names in OUTSIDE, and its line with the comment `wrong`."""
    lines = [f"def {role}({arguments or ARGUMENTS[role]}):", *(f"    {line}" for line in body.splitlines())]
    path = folder / "tried.py"
    path.write_text("\n".join(lines))
    made: dict[str, Any] = {"__name__": "tried", **OUTSIDE}
    exec(compile(path.read_text(), path, "exec"), made)
    return made[role], next((k for k, line in enumerate(lines, 1) if "# wrong" in line), None)


def by_arrival(job: Any) -> float:
    return float(job.arrival_ns)


def refused(body: str, folder: Path, role: str = "rank") -> tuple[PolicyError, int | None]:
    function, line = function_of(body, folder, role)
    options = {} if role == "rank" else {role: function, **({"tick_us": 1000} if role == "tick" else {})}
    with pytest.raises(PolicyError) as caught:
        policy(**NUMBERS, **options)(function if role == "rank" else by_arrival)
    return caught.value, line


def blocks(text: str) -> list[str]:
    return text.strip().split("\n\n")


RANKS = blocks("""
if job.batch > 1:
    found = job.arrival_ns
return found  # wrong

for k in range(int(job.batch) - 1):
    found = float(k)
return found  # wrong

total += job.batch  # wrong
return total

try:  # wrong
    return 1.0 / job.batch
except ZeroDivisionError:
    return 0.0

try:  # wrong
    found = 1.0 / job.batch
except* ValueError:
    found = 0.0
return found

return rank(job, gpu, own)  # wrong

total = 0.0
for k in range(100_000):  # wrong
    total += k * job.batch
return total

return FACTORS[job.tenant]  # wrong

return FACTORS[4]  # wrong

return PAIRS[1][2]  # wrong

factors = [1.0, 2.0]
return factors[job.model]  # wrong

factors = [1.0, 2.0]
factors.pop()
return factors[1]  # wrong

factors = WEIGHTS  # wrong
return factors[job.model]

factors = {0: 1.0, 1: 2.0}  # wrong
return factors[job.model]

factors = {"high": 1.0, "low": 2.0}  # wrong
return factors["high"]

factors = [1.0, 2.0]
factors[0] = job.batch  # wrong
return factors[0]

if job.batch > 1:
    return job.arrival_ns
return job.arrival_ns / job.deficit_ns  # wrong

global COUNT  # wrong
COUNT += 1
return float(COUNT)

job.priority = 5.0  # wrong
return -job.priority

job.remaining_ns += 1.0  # wrong
return job.remaining_ns

job["priority"] = 1.0  # wrong
return job.priority

gpu.max_active = 3.0  # wrong
return job.arrival_ns

return job.name  # wrong

return job.segment.time_ns  # wrong

rank = job.arrival_ns  # wrong

if job.batch > 1:
    return job.arrival_ns  # wrong

if job.batch > 1:
    return None  # wrong
return 1.0

return job.priority, job.arrival_ns  # wrong

return job  # wrong

return "first"  # wrong

return "first" if job.batch > 1 else 1.0  # wrong

return LIMITS[int(job.model)]  # wrong

HISTORY.append(job.arrival_ns)  # wrong
return job.arrival_ns

return job.arrival_ns * SETTINGS.limit  # wrong

import math as m  # wrong
return m.sqrt(job.batch)

return job.arrival_ns + offset  # wrong

return f"{job.batch}"  # wrong

return len(f"{job.batch:.2f}")  # wrong

return float(str(job.batch))  # wrong

first, *others = job.batch, 1.0  # wrong
return first

return type(job.batch)  # wrong

other = job  # wrong
return other.arrival_ns

return job.batch.mean()  # wrong

return len(job)  # wrong

key = lambda x: x * 2.0  # wrong
return key(job.batch)

return math.square(job.batch)  # wrong

if (n := job.batch) > 1:  # wrong
    return n
return 1.0

return job.batch * LARGE  # wrong

if job.batch > 4:
    raise ValueError("too many")  # wrong
return 1.0

assert job.batch > 0  # wrong
return 1.0

return sum([job.batch for _ in range(2) if print(job.batch)])  # wrong

LOUD(job.batch)  # wrong
return 1.0

with numba.objmode():  # wrong
    return 1.0

open("ranks.txt")  # wrong
return 1.0

return 0.0 if job.model == "resnet18" else 1.0  # wrong

return 0.0 if job.model in ("resnet18", "resnet34") else 1.0  # wrong

return (job.now_ns - job.now_ns) / (job.now_ns - job.now_ns)  # wrong

own.limit += 1.0  # wrong
return own.limit

return own.used_ns[job.client]  # wrong

return own.used_ns[1000]  # wrong

return own.used_ns[-1]  # wrong

m = job.model + 1
return own.used_ns[m]  # wrong

return own.used_ns[job.model, 0]  # wrong

return own.used_ns + job.batch  # wrong

return own.limit[job.model]  # wrong

return own.used_ns.sum()  # wrong
""")
OTHERS = {
    "admit": blocks("""
return "yes" if gpu.occupancy < 1 else "no"  # wrong

print(gpu.occupancy)  # wrong
return True

if gpu.occupancy < 1:
    return True  # wrong

return None if gpu.occupancy < 1 else True  # wrong

return job.batch / gpu.no_such_field > 1  # wrong

if gpu.active_jobs > 3:
    raise ValueError  # wrong
return True
"""),
    "place": blocks("""
return pp.Where(sm=0.25)  # wrong

return pp.Where(sms=0.25, blocks=3)  # wrong

return pp.Where(sms=0.5, preempt=True)  # wrong

return pp.Where(0.5, 0.5)  # wrong

return pp.Where(sms=25)  # wrong

return pp.Where(sms=-0.5)  # wrong
"""),
    "tick": blocks("""
own.limit = 0.5
return own.limit  # wrong

own.limit = gpu.arrival_ns  # wrong
"""),
    "done": blocks("""
own.limit = "low"  # wrong

own.limit = segment.ns / (job.batch - 1.0)  # wrong

segment.ns = 0.0  # wrong

own.used_ns = segment.ns  # wrong
"""),
}
# With the name in the error, and words that it must have.
WORDING: list[tuple[str, str | None, str]] = [
    ("return job.remainning_ns  # wrong", "remainning_ns", r"did you mean job\.remaining_ns"),
    ("return own.limits  # wrong", "limits", r"did you mean own\.limit.*state=\{'limits': 0\.0\}"),
    ("return job.params.limit  # wrong", "limit", r"@policy\(params=\{'limit': 1\.0\}\)"),
    ("return FACTORS[job.model]  # wrong", None, r"job\.params"),
    ("return min(job.batch, float('inf'))  # wrong", "float", r"math\.inf"),
    ("return getattr(job, 'priority')  # wrong", "getattr", r"job\.priority"),
    ("return job.arrival_ns / job.deficit_ns  # wrong", "arrival_ns=5e+12, deficit_ns=0", r"deficit_ns=0\b.*divisors"),
    ("found = None\nif job.batch > 1:\n    found = 1.0\nreturn found  # wrong", None, "returns None"),
    ("return random.choice((1.0, 2.0))  # wrong", "choice", r"random\.random\(\)"),
    ("return job.batch * 2**64  # wrong", None, r"64 bits"),
    ("return job.batch * 2**70  # wrong", None, r"64 bits"),
    ("return float(int(job.batch) << 70)  # wrong", None, r"64 bits"),
    ("return rank(job)  # wrong", "rank", r"a loop"),
    ("return job.now_ns()  # wrong", "job.now_ns", r"write `job\.now_ns`"),
    ("return job.batch + 1j  # wrong", None, "a complex number"),
    ("return -math.inf  # wrong", None, "finite"),
    ("return math.inf  # wrong", None, "finite"),
    ("return plain_helper(job.batch)  # wrong", "plain_helper", r"@numba\.njit"),
    ("return time.time()  # wrong", "time", r"job\.now_ns"),
    ("print(job.batch)  # wrong\nreturn 1.0", "print", "without Python"),
    ("return 1.0 if job.model == FIRST else 0.0  # wrong", "resnet18", r"job\.priority"),
    ("if job.batch > 4:\n    raise ValueError  # wrong\nreturn 1.0", None, "a large number"),
]
CASES = [
    *(("rank", body, None, "") for body in RANKS), *(("rank", *each) for each in WORDING),
    *((role, body, None, "") for role, bodies in OTHERS.items() for body in bodies),
]  # fmt: skip


@pytest.mark.parametrize(("role", "body", "name", "words"), CASES)
def test_a_faulty_function_is_refused_with_its_line_and_a_remedy(
    role: str, body: str, name: str | None, words: str, tmp_path: Path
) -> None:
    error, line = refused(body, tmp_path, role)
    assert (error.policy, error.line) == (role, line)
    assert name is None or error.name == name
    assert error.remedy
    said = str(error)
    assert said.startswith(f"{role} ({tmp_path / 'tried.py'}:{line}) ")
    assert said.endswith(error.remedy)
    assert re.search(words, said)
    assert not INTERNALS.search(said.partition(") ")[2].replace("@numba.njit", ""))
    assert "\n" not in said


def test_a_fault_in_a_function_that_it_calls_has_the_line_there(tmp_path: Path) -> None:
    error, _ = refused("return loud_helper(job.batch)", tmp_path)
    line = loud_helper.py_func.__code__.co_firstlineno + 2
    assert (error.policy, error.name, error.line) == ("loud_helper", "print", line)


def test_a_count_outside_of_the_function_is_refused() -> None:
    count = 0

    def counting(job: Any) -> float:
        nonlocal count
        count += 1
        return float(count)

    with failing(PolicyError, name="count") as caught:
        policy(counting)
    assert "state={'count': 0.0}" in caught.value.remedy


ACCEPTED = blocks("""
return FACTORS[job.model % len(FACTORS)]

k = min(job.model, len(FACTORS) - 1)
return FACTORS[k] + FACTORS[-1] + PAIRS[1][0]

return (2.0, 1.0)[int(job.batch > 1)]

total = 0.0
for k in range(len(FACTORS)):
    total += FACTORS[k] + FACTORS[-k]
return total

factors = [1.0, 2.0]
return factors[job.model % 2]

pair = job.model, job.batch
return pair[0] * pair[1]

total = 0.0
for k in range(len(own.used_ns)):
    total += own.used_ns[k]
return total

if job.batch > 1:
    found = 1.0
else:
    found = 2.0
return found

k = 0
while True:
    k += 1
    if k > 3:
        found = k * job.batch
        break
return found

if job.batch > 1:
    found = 1.0
else:
    return 2.0
return found

return random.random() * job["batch"] + math.sqrt(own["limit"])

return math.inf if job.priority < 0 else job.arrival_ns
""")


@pytest.mark.parametrize("body", ACCEPTED)
def test_a_sound_function_is_accepted(body: str, tmp_path: Path) -> None:
    assert policy(**NUMBERS)(function_of(body, tmp_path)[0]).name == "rank"


def test_a_place_compiles() -> None:
    def placed(job: Any) -> Any:
        return pp.Where(sms=0.25) if job.batch > 1 else pp.Where()

    assert policy(place=placed)(by_arrival).place is placed


def test_a_policy_without_source_must_not_write() -> None:
    made: dict[str, Any] = {}
    exec("def sneaky(job):\n    job.priority = 1.0\n    return job.priority", made)
    with failing(PolicyError, policy="sneaky"):
        policy(made["sneaky"])
    exec("def plain(job):\n    return job.priority", made)
    assert policy(made["plain"]).name == "plain"
    exec("def misspells(job):\n    return job.prio", made)
    with failing(PolicyError, name="prio"):
        policy(made["misspells"])


def test_print_is_refused_whoever_has_replaced_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(builtins, "print", lambda *_: None)
    assert refused("print(job.batch)\nreturn 1.0", tmp_path)[0].name == "print"


def test_a_policy_may_have_a_docstring_and_read_facts_by_name() -> None:
    def documented(job: Any) -> float:
        """Small batches first."""
        return float(job["batch"])

    assert policy(documented).name == "documented"


# --- arguments -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "name", "remedy"),
    [
        ("job, factor=2.0", "factor", r"params=\{…\}"),
        ("own, job", "job", None),
        ("job, own", "own", "state="),
        ("*job", "job", r"`def rank\(job\)`"),
        ("*, job", "job", r"`def rank\(job\)`"),
        ("request", "request", "name it `job`"),
        ("job, other", "other", None),
    ],
)
def test_arguments_that_a_policy_cannot_have(arguments: str, name: str, remedy: str | None, tmp_path: Path) -> None:
    function, _ = function_of("return 1.0", tmp_path, arguments=arguments)
    with failing(PolicyError, policy="rank", name=name) as caught:
        policy(function)
    assert remedy is None or re.search(remedy, caught.value.remedy or "")


async def waits(job: Any) -> float:
    return job.batch


def yields(job: Any) -> Any:
    yield job.batch


@pytest.mark.parametrize("function", [waits, yields])
def test_coroutines_and_generators_are_refused(function: Callable[..., Any]) -> None:
    with failing(PolicyError, policy=function.__name__, name=None, line=function.__code__.co_firstlineno) as caught:
        policy(function)
    assert caught.value.remedy
