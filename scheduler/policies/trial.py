"""Tries a policy before the core depends on it: calls it on sample jobs, measures its cost, and limits its time."""

from __future__ import annotations

import ast
import contextlib
import ctypes
import faulthandler
import math
import os
import signal
import sys
import time
import warnings
from types import FrameType
from typing import Any

import numpy as np

from paellapy.instrument.numba_ext.link import compiled
from paellapy.scheduler.core.atomics import call_asking
from paellapy.scheduler.core.codes import NEVER
from paellapy.scheduler.core.job import DONE, GPU, JOB, OWNER, PER_MODEL
from paellapy.scheduler.core.tables import Table
from paellapy.scheduler.policies.compile import (
    ROLES,
    Compiled,
    Layout,
    fault,
    may_loop,
    tree_of,
    with_helpers,
)

# A decision ranks about ten jobs; at this cost per call, dispatching would take as long as a launch.
MAX_CALL_NS = 2000.0
TIME_LIMIT_S = 20.0
CALLS = 200
MOST_LINES = 100_000  # plain Python is slow: a function with long loops is not followed to its end


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
    jobs["model"] = jobs["tenant"] = jobs["client"] = [0, 1, 2, 3, 4, 5, 6, PER_MODEL - 1]
    jobs["client_deficit_ns"] = -jobs["deficit_ns"]
    jobs["client_start_ns"] = jobs["arrival_ns"] / 2
    jobs["occupancy"] = [0, 0.1, 0.5, 1, 1.5, 0, 0.9, 20]
    jobs["used_ns"] = [0, 1e3, 1e6, 1e9, 1e12, 0, 1, 5]
    jobs["missing_bytes"] = [0, 0, 1e6, 1e9, 0, 4e9, 0, 1]
    jobs["ready_ns"] = jobs["now_ns"] + jobs["missing_bytes"] / 50
    jobs["segment"] = [_segment(ns) for ns in (1e3, 3e5, 7e4, 1e6, 1e5, 1e7, 7e4, 1)]
    return jobs


def _segment(ns: float) -> tuple[float, ...]:
    return (ns, 132.0, 0.75, 0.5, 0.25, 0.0)


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
    owners["model"] = [0, 1, 2, 3, 4, 5, 6, PER_MODEL - 1]
    return owners


class Samples:
    """Arguments for test calls: one call per sample job, alternating between the two samples of the other arguments."""

    count = 16

    def __init__(self, layout: Layout) -> None:
        self.own: Any = layout.new_own() if layout.own.itemsize else np.zeros(1)
        jobs = sample_jobs()
        for k, value in enumerate(layout.params.values()):
            jobs["params"][f"p{k}"] = value
        # A segment that took as long as alone, and one that took four times as long.
        segments = np.array([(7e4, 0, *_segment(7e4)), (4e6, 3, *_segment(1e6))], DONE)
        owners, gpus = sample_owners(), sample_gpus()
        self.tables = {"job": jobs.view(layout.job), "gpu": gpus, "segment": segments, "model": owners}

    def rows(self, names: tuple[str, ...], k: int) -> dict[str, Table]:
        """The arguments of call `k`, one row of each table, with the names of the policy's parameters."""
        at = {"job": k % 8, "gpu": k // 8 % 2, "segment": k // 8 % 2, "model": k % 8}
        return {name: self.own if name == "own" else self.tables[name][at[name] :][:1] for name in names}

    def addresses(self, names: tuple[str, ...], k: int) -> list[int]:
        return [each.ctypes.data for each in self.rows(names, k).values()]


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


def answers(function: Compiled, layout: Layout, samples: Samples) -> list[float]:
    """The function's answers for the samples (0 where it returns nothing); errors in the function are raised."""
    raised: list[BaseException] = []
    previous = sys.unraisablehook
    # Compiled code that is called from C cannot raise: Python passes its exceptions to this hook.
    sys.unraisablehook = lambda caught: raised.append(caught.exc_value or RuntimeError(str(caught.err_msg)))
    returns = None if ROLES[function.role].returns == "nothing" else ctypes.c_double
    call = ctypes.CFUNCTYPE(returns, *[ctypes.c_void_p] * len(function.names))(function.address)
    found: list[float] = []
    try:
        while len(found) < samples.count and not raised:
            found.append(call(*samples.addresses(function.names, len(found))) or 0.0)
    finally:
        sys.unraisablehook = previous
    if raised:
        none = isinstance(raised[0], TypeError) and "got None" in str(raised[0])
        raise fault(
            function.function,
            "returns None" if none else f"raises {type(raised[0]).__name__} ({raised[0]}) on a sample job",
            f"return {ROLES[function.role].returns} on every path, and check values before they are used",
            line=replayed(function, layout, len(found))[0],
        )
    return found


def replayed(function: Compiled, layout: Layout, calls: int) -> tuple[int | None, bool]:
    """Makes the first calls again in plain Python: the last line that ran in the last call, or in the first call with
    an index out of range; and whether there was such an index. The line is None if the function cannot be followed.
    """
    code, samples = function.function.__code__, Samples(layout)
    seen, count = 0, 0

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal seen, count
        if frame.f_code is not code:
            return None
        if event == "line":
            seen, count = frame.f_lineno, count + 1
            if count > MOST_LINES:
                raise TimeoutError
        return trace

    previous = sys.gettrace()
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")
        for k in range(calls):
            rows = samples.rows(function.names, k)
            seen = 0
            sys.settrace(trace)
            try:
                function.function(*(row.view(np.recarray)[0] for row in rows.values()))
            except TimeoutError:
                return None, False
            except IndexError:
                return seen or None, True
            except Exception:  # the failure that is looked for; its line has been seen
                continue
            finally:
                sys.settrace(previous)
    return seen or None, False


def _line_of(function: Any, written: str) -> int | None:
    """The line where a field of `own` is written."""
    for each in ast.walk(tree) if (tree := tree_of(function)) else ():
        if isinstance(each, ast.Attribute | ast.Subscript) and isinstance(each.ctx, ast.Store):
            target = each.value if isinstance(each, ast.Subscript) else each
            if ast.unparse(target) == written:
                return each.lineno
    return None


def _loop_of(function: Any) -> tuple[Any, int | None]:
    """The function that has the first loop, itself or one that it calls, and the line of that loop."""
    for each in with_helpers(function):
        for node in ast.walk(tree) if (tree := tree_of(each)) else ():
            if isinstance(node, ast.For | ast.While):
                return each, node.lineno
    return function, None


def _try(function: Compiled, layout: Layout) -> None:
    samples, plain, role = Samples(layout), function.function, function.role
    found = answers(function, layout, samples)
    # A rank of math.inf, where it is written, has a meaning for some jobs; otherwise it comes from a division by zero.
    meant = role == "rank" and "inf" in plain.__code__.co_names and min(found) < math.inf
    for k, value in enumerate(found):
        infinite = math.isinf(value) and role not in ("admit", "victim") and not (meant and value > 0.0)
        if math.isnan(value) or infinite:
            argument = "model" if role == "victim" else "job"
            row = samples.rows((argument,), k)[argument][0]
            read = [name for name in row.dtype.names if not row.dtype[name].names and name in plain.__code__.co_names]
            facts = ", ".join(f"{name}={row[name]:g}" for name in read)
            problem = f"returns {value} for a {argument}" + (f" with {facts}" if facts else "")
            remedy = "return a finite number, and check divisors for 0"
            raise fault(plain, problem, remedy, line=replayed(function, layout, k + 1)[0], name=facts or None)
        if role == "place" and not 0.0 < value <= 1.0:
            remedy = "sms is a part of the GPU, above 0 and at most 1, as in pp.Where(sms=0.25)"
            raise fault(plain, f"returns {value:g}", remedy, line=replayed(function, layout, k + 1)[0])
    for name in layout.own.names or ():
        if not np.isfinite(samples.own[name]).all():
            problem, remedy = f"sets own.{name} to a number that is not finite", "check it for a division by zero"
            raise fault(plain, problem, remedy, line=_line_of(plain, f"own.{name}"), name=name)
    if function.bounded is not plain:  # compiled code would use the nearest entry
        line, beyond = replayed(function, layout, samples.count)
        if beyond:
            remedy = (
                f"models have the numbers 0 to {PER_MODEL - 1}: bound the index, as in T[int(x) % len(T)], or keep "
                "numbers of models in params={…}, as job.params.NAME"
            )
            raise fault(plain, "has an index that is out of range on a sample job", remedy, line=line)
    if role in ("rank", "order"):
        cost = call_cost_ns(function, layout)
        if cost > MAX_CALL_NS:
            slow, line = _loop_of(plain)
            raise fault(
                slow,
                f"takes {cost / 1e3:.1f} µs per call, above the limit of {MAX_CALL_NS / 1e3:g} µs",
                "compute from the job's fields, without loops: every decision ranks several jobs",
                line=line, limit=MAX_CALL_NS,
            )  # fmt: skip


def check_idle(admit: Compiled, layout: Layout) -> None:
    """Raises PolicyError if a policy that may leave the GPU idle admits no sample job to an idle GPU, now or later."""
    if not any(0.0 != each < math.inf for each in answers(admit, layout, Samples(layout))[:8]):
        raise fault(
            admit.function,
            "admits none of the sample jobs to an idle GPU at first, so nothing would ever run",
            "return True, or a time in ns from which the job may launch; a time of 0 counts as False",
        )


def try_out(function: Compiled, layout: Layout) -> None:
    """Raises PolicyError unless the function answers every sample job with a number, in time."""
    if may_loop(function.function):
        _try_apart(function, layout)
    _try(function, layout)


def _try_apart(function: Compiled, layout: Layout) -> None:
    """Calls the function in a copy of this process first: compiled code that does not return cannot be interrupted."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of threads in this process: the copy calls nothing but the function
        child = os.fork()
    if child == 0:
        faulthandler.disable()
        with contextlib.suppress(BaseException):  # an error is found again in this process
            answers(function, layout, Samples(layout))
        os._exit(0)
    plain, until = function.function, time.monotonic() + TIME_LIMIT_S
    while (ended := os.waitpid(child, os.WNOHANG))[0] == 0:
        if time.monotonic() > until:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            problem = f"did not return within {TIME_LIMIT_S:g} s on a sample job"
            slow, line = _loop_of(plain)
            raise fault(slow, problem, "check its loops", line=line, limit=TIME_LIMIT_S)
        time.sleep(1e-3)
    if ended[1] != 0:
        problem = f"crashed on a sample job (signal {os.WTERMSIG(ended[1])})"
        raise fault(plain, problem, "check its loops, and the functions that it calls for recursion")
