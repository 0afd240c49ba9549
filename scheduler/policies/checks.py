"""Checks a policy before the core depends on it: calls it on sample jobs, measures its cost, and limits its time."""

from __future__ import annotations

import ast
import ctypes
import json
import math
import pickle
import subprocess
import sys
import time
from typing import Any

import numpy as np
from numba import cloudpickle

from paellapy.instrument.numba_ext.link import compiled
from paellapy.scheduler.core.atomics import call_asking
from paellapy.scheduler.core.codes import NEVER
from paellapy.scheduler.core.job import DONE, GPU, JOB, OWNER
from paellapy.scheduler.core.tables import Table
from paellapy.scheduler.policies.code import with_helpers
from paellapy.scheduler.policies.compiling import compile_function, may_loop
from paellapy.scheduler.policies.replay import last_line
from paellapy.scheduler.policies.roles import ROLES, Compiled, Layout, PolicyError, arguments, place
from paellapy.scheduler.policies.trees import tree_of

# A decision ranks about ten jobs; at this cost per call, dispatching would take as long as a launch.
MAX_CALL_NS = 2000.0
TIME_LIMIT_S = 20.0
CALLS = 200
_apart = False  # whether this is the process in which another one has a function called


def sample_jobs() -> Table:
    """Jobs as the core makes them: ordinary, late, without deadline, started, with credit and with debt."""
    jobs = np.zeros(8, JOB)
    jobs["now_ns"] = 5e12
    jobs["arrival_ns"] = 5e12 - np.array([0, 1, 1e3, 1e5, 1e6, 1e7, 1e8, 1e9])
    jobs["target_ns"] = [NEVER, 1e6, 1e7, 1e6, 1e9, NEVER, 1e6, 1e6]
    jobs["deadline_ns"] = np.minimum(jobs["arrival_ns"] + jobs["target_ns"], NEVER)
    jobs["priority"] = [0, 1, -1, 0, 5, 0, -100, 100]
    jobs["total_ns"] = [1e3, 3e5, 1e6, 1e7, 1e5, 1e9, 2e6, 1]
    jobs["remaining_ns"] = jobs["total_ns"] * [1, 1, 0.5, 0.1, 1, 1, 0, 1]
    jobs["batch"] = [1, 1, 2, 4, 8, 8, 64, 1]
    jobs["started"] = [0, 0, 1, 1, 0, 0, 1, 0]
    jobs["share"] = [1, 1, 0.1, 10, 1, 1, 1, 1]
    jobs["deficit_ns"] = [0, 1e6, -1e6, 1e9, -1e9, 0, 1, -1]
    jobs["client"] = np.arange(8)
    jobs["client_deficit_ns"] = -jobs["deficit_ns"]
    jobs["client_start_ns"] = jobs["arrival_ns"] / 2
    jobs["occupancy"] = [0, 0.1, 0.5, 1, 1.5, 0, 0.9, 20]
    jobs["used_ns"] = [0, 1e3, 1e6, 1e9, 1e12, 0, 1, 5]
    jobs["missing_bytes"] = [0, 0, 1e6, 1e9, 0, 4e9, 0, 1]
    jobs["ready_ns"] = jobs["now_ns"] + jobs["missing_bytes"] / 50
    jobs["model"] = jobs["tenant"] = np.arange(8)
    jobs["segment"] = [_segment(ns) for ns in (1e3, 3e5, 7e4, 1e6, 1e5, 1e7, 7e4, 1)]
    return jobs


def _segment(ns: float) -> tuple[float, ...]:
    return (ns, 132.0, 0.75, 0.5, 0.25, 0.0)


def sample_segments() -> Table:
    """A segment that took as long as alone, and one that took four times as long."""
    return np.array([(7e4, 0, *_segment(7e4)), (4e6, 3, *_segment(1e6))], DONE)


def sample_gpus() -> Table:
    """An empty GPU and a full one."""
    gpus = np.ones(2, GPU)
    for name in GPU.names or ():
        gpus[name][0] = 1e6 if name.startswith("capacity") else 0.0
    gpus["max_active"] = 8
    return gpus


def sample_owners() -> Table:
    """Models whose weights could leave: with and without demand, small and large, new and old on the GPU."""
    owners = np.zeros(8, OWNER)
    owners["now_ns"] = 5e12
    owners["bytes"] = [1 << 21, 1e8, 4e9, 1e9, 3e10, 1e9, 1e9, 2]
    owners["priority"], owners["share"] = [0, 1, -1, 0, 5, 0, -100, 100], [1, 1, 0.1, 10, 1, 1, 1, 1]
    owners["demand"] = [0, 1e-9, 1, 100, 1e6, 0, 3, 7]
    owners["used_ns"] = owners["now_ns"] - [0, 1, 1e3, 1e6, 1e9, 1e12, 5e12, 10]
    owners["came_ns"], owners["reload_ns"] = owners["used_ns"] / 2, owners["bytes"] / 50
    owners["model"] = np.arange(8)
    return owners


class Samples:
    """Arguments for test calls: one call per sample job, alternating between the two samples of the other arguments."""

    def __init__(self, layout: Layout) -> None:
        self.own: Any = layout.new_own() if layout.own.itemsize else np.zeros(1)
        self.jobs, self.gpus, self.segments = sample_jobs(), sample_gpus(), sample_segments()
        self.owners, self._job = sample_owners(), layout.job
        for k, value in enumerate(layout.params.values()):
            self.jobs["params"][f"p{k}"] = value

    def rows(self, names: tuple[str, ...], k: int) -> dict[str, Table]:
        """The arguments of call `k`, one row of each table, with the names of the policy's parameters."""
        tables = {"job": self.jobs.view(self._job), "gpu": self.gpus, "segment": self.segments, "model": self.owners}
        at = {"job": k % 8, "gpu": k // 8 % 2, "segment": k // 8 % 2, "model": k % 8}
        return {name: self.own if name == "own" else tables[name][at[name] : at[name] + 1] for name in names}

    def addresses(self, names: tuple[str, ...], k: int) -> list[int]:
        """The addresses of the arguments of call `k`; there are `count` calls."""
        return [each.ctypes.data for each in self.rows(names, k).values()]

    count = 16


@compiled
def call_often(function: Any, first: Any, second: Any, third: Any, n: int) -> float:
    total = 0.0
    for _ in range(n):
        total += call_asking(function, first, second, third)
    return total


def call_cost_ns(function: Compiled, layout: Layout) -> float:
    """Least time of one call, over several rounds and sample jobs."""
    samples = Samples(layout)
    costs = []
    address = np.uint64(function.address)
    for k in range(8):
        first, second, third = (np.uint64(each) for each in (*samples.addresses(function.names, k), 0, 0)[:3])
        if k == 0:
            call_often(address, first, second, third, 0)  # compiled before the clock starts
        for calls in (1, CALLS):
            since = time.perf_counter_ns()
            call_often(address, first, second, third, calls)
            cost = (time.perf_counter_ns() - since) / calls
            if cost > CALLS * MAX_CALL_NS:  # far above the limit: more calls would only take more time
                break
        costs.append(cost)
    return min(costs)


def answers(role: str, function: Any, compiled_function: Compiled, layout: Layout, samples: Samples) -> list[float]:
    """The function's answers for the samples (0 where it returns nothing); errors in the function are raised."""
    raised: list[BaseException] = []
    previous = sys.unraisablehook
    # Compiled code that is called from C cannot raise: Python passes its exceptions to this hook.
    sys.unraisablehook = lambda caught: raised.append(caught.exc_value or RuntimeError(str(caught.err_msg)))
    names, returns = compiled_function.names, None if ROLES[role].returns == "nothing" else ctypes.c_double
    call = ctypes.CFUNCTYPE(returns, *[ctypes.c_void_p] * len(names))(compiled_function.address)
    found: list[float] = []
    try:
        while len(found) < samples.count and not raised:
            found.append(call(*samples.addresses(names, len(found))) or 0.0)
    finally:
        sys.unraisablehook = previous
    if raised:
        at = _line(function, names, layout, len(found) - 1)
        none = isinstance(raised[0], TypeError) and "got None" in str(raised[0])
        wrong = "returns None" if none else f"raises {type(raised[0]).__name__} ({raised[0]})"
        raise PolicyError(
            f"{place(function)} {wrong}{at} on a sample job: {role} must answer for every job, so return "
            f"{ROLES[role].returns} on every path, and check values before they are used"
        )
    return found


def _line(function: Any, names: tuple[str, ...], layout: Layout, k: int) -> str:
    """The line at which call `k` ended, in words."""
    samples = Samples(layout)
    line = last_line(function, [samples.rows(names, each) for each in range(k + 1)])
    return "" if line is None else f" in line {line}"


def _at(function: Any, written: str | None = None) -> str:
    """The line where a field is written, or without one the line of the first loop, in words."""
    for each in ast.walk(tree) if (tree := tree_of(function)) else ():
        if written is None and isinstance(each, ast.For | ast.While):
            return f" in line {each.lineno}"
        if isinstance(each, ast.Attribute | ast.Subscript) and isinstance(each.ctx, ast.Store):
            target = each.value if isinstance(each, ast.Subscript) else each
            if ast.unparse(target) == written:
                return f" in line {each.lineno}"
    return ""


def _facts(function: Any, job: Any) -> str:
    """The fields of a sample that the function reads."""
    read = [name for name in job.dtype.names if not job.dtype[name].names and name in function.__code__.co_names]
    return f" with {', '.join(f'{name}={job[name]:g}' for name in read)}" if read else ""


def _try(role: str, function: Any, compiled_function: Compiled, layout: Layout) -> None:
    samples = Samples(layout)
    for k, value in enumerate(answers(role, function, compiled_function, layout, samples)):
        if math.isnan(value) or (role not in ("admit", "victim") and math.isinf(value)):
            what, seen = ("model", samples.owners) if role == "victim" else ("job", samples.jobs)
            raise PolicyError(
                f"{place(function)} returns {value}{_line(function, compiled_function.names, layout, k)} for a {what}"
                f"{_facts(function, seen[k % 8])}: return a finite number, and check divisors for 0"
            )
        if role == "place" and not 0.0 < value <= 1.0:
            raise PolicyError(
                f"{place(function)} returns {value:g}{_line(function, compiled_function.names, layout, k)}: sms is a "
                "part of the GPU, above 0 and at most 1, as in pp.Where(sms=0.25)"
            )
    for name in layout.own.names or ():
        if not np.isfinite(samples.own[name]).all():
            raise PolicyError(
                f"{place(function)} sets own.{name} to a number that is not finite{_at(function, f'own.{name}')}: "
                "check it for a division by zero"
            )
    if role in ("rank", "order"):
        cost = call_cost_ns(compiled_function, layout)
        if cost > MAX_CALL_NS:
            raise PolicyError(
                f"{place(function)} takes {cost / 1e3:.1f} µs per call; the limit is {MAX_CALL_NS / 1e3:g} µs, because "
                f"every decision ranks several jobs: compute from the job's fields, without loops{_at(function)}"
            )


def check_idle(admit: Any, compiled_function: Compiled, layout: Layout) -> None:
    """Raises PolicyError if a policy that may leave the GPU idle admits no sample job to an idle GPU, now or later."""
    if _apart:
        return
    found = answers("admit", admit, compiled_function, layout, Samples(layout))[:8]
    if not any(0.0 != each < math.inf for each in found):
        raise PolicyError(
            f"{place(admit)} admits none of the sample jobs to an idle GPU at first, so nothing would ever run: "
            "return True, or a time in ns from which the job may launch; a time of 0 counts as False"
        )


def check(role: str, function: Any, compiled_function: Compiled, layout: Layout) -> None:
    """Raises PolicyError unless the function answers every sample job with a number, in time.

    A function that might not return is first called in a process of its own, because compiled code cannot be
    interrupted.
    """
    if _apart:
        return
    if may_loop(function):
        _check_apart(role, function, layout)
    _try(role, function, compiled_function, layout)


def _by_value(function: Any) -> bytes:
    """The function with the values it uses, for another process. That process must not import the function's module,
    which may be half imported here, and would make its policies there.
    """
    module = sys.modules.get(function.__module__)
    registered = module is not None and module.__name__ not in cloudpickle.list_registry_pickle_by_value()
    if registered:
        cloudpickle.register_pickle_by_value(module)
    try:
        return bytes(cloudpickle.dumps(function))
    finally:
        if registered:
            cloudpickle.unregister_pickle_by_value(module)


def _check_apart(role: str, function: Any, layout: Layout) -> None:
    code = "from paellapy.scheduler.policies.checks import check_from_stdin; check_from_stdin()"
    try:
        done = subprocess.run(
            [sys.executable, "-c", code],
            input=pickle.dumps((sys.path, role, layout, _by_value(function))),
            capture_output=True,
            timeout=TIME_LIMIT_S,
            check=False,
        )
    except subprocess.TimeoutExpired as e:
        raise PolicyError(
            f"{place(function)} did not return within {TIME_LIMIT_S:g} s on a sample job: check its loops"
            f"{_at(function)}"
        ) from e
    if done.returncode != 0:
        raise PolicyError(
            f"{place(function)} crashed on a sample job (exit code {done.returncode}): check its loops, and the "
            f"functions that it calls for recursion. {done.stderr.decode()[-500:]}".rstrip()
        )
    problem = json.loads(done.stdout.splitlines()[-1])
    if problem:
        raise PolicyError(problem)


def check_from_stdin() -> None:
    """The child process of `check`: prints the problem as JSON, or null."""
    global _apart
    sys.path[:], role, layout, code_of_function = pickle.loads(sys.stdin.buffer.read())
    _apart = True  # a helper's module may make policies; those are not checked here
    function = pickle.loads(code_of_function)
    for each in with_helpers(function):
        each.__module__ = None  # Numba would import the module
    problem = None
    try:
        # The parent process has checked the source already.
        code = compile_function(role, function, layout, looked_at=True)
        _try(role, function, Compiled(code, arguments(role, function, layout)), layout)
    except PolicyError as e:
        problem = str(e)
    print(json.dumps(problem))
