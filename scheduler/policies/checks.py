"""Trying a policy before the core depends on it: on sample jobs, with its cost, and with a limit on its time."""

from __future__ import annotations

import ctypes
import json
import math
import subprocess
import sys
import time
from typing import Any

import numpy as np
from numba import cloudpickle

from paellapy.instrument.device.jit import compiled
from paellapy.scheduler.core.atomics import call_rank
from paellapy.scheduler.core.codes import NEVER
from paellapy.scheduler.core.job import GPU, JOB
from paellapy.scheduler.core.tables import Table
from paellapy.scheduler.policies.compiling import PolicyError, compile_function, may_loop, place

# A decision ranks about ten jobs: at this cost each, dispatch would take as long as a launch.
MAX_CALL_NS = 2000.0
TIME_LIMIT_S = 20.0
CALLS = 200


def sample_jobs() -> Table:
    """Jobs as the core makes them: ordinary, late, without deadline, started, rich and in debt."""
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
    jobs["model"] = np.arange(8)
    return jobs


def sample_gpus() -> Table:
    """An empty GPU and a full one."""
    gpus = np.ones(2, GPU)
    for name in GPU.names or ():
        gpus[name][0] = 1e6 if name.startswith("capacity") else 0.0
    gpus["max_active"] = 8
    return gpus


@compiled
def call_often(function: Any, job: Table, n: int) -> float:
    total = 0.0
    for _ in range(n):
        total += call_rank(function, job.ctypes.data)
    return total


def call_cost_ns(address: int) -> float:
    """Least time of one call, over several tries and sample jobs."""
    jobs = sample_jobs()
    call_often(np.uint64(address), jobs[:1], 0)  # compiled before the clock runs
    costs = []
    for k in range(len(jobs)):
        job = jobs[k : k + 1]
        for calls in (1, CALLS):
            since = time.perf_counter_ns()
            call_often(np.uint64(address), job, calls)
            cost = (time.perf_counter_ns() - since) / calls
            if cost > CALLS * MAX_CALL_NS:  # hopeless: more calls would only take more time
                break
        costs.append(cost)
    return min(costs)


def _values(role: str, function: Any, address: int) -> list[float]:
    """The function's answers for the samples; what it raises is raised."""
    raised: list[BaseException] = []
    previous = sys.unraisablehook
    # Compiled code called from C cannot raise: Python hands its exceptions to this hook.
    sys.unraisablehook = lambda caught: raised.append(caught.exc_value or RuntimeError(str(caught.err_msg)))
    try:
        jobs = sample_jobs()
        where = [jobs[k : k + 1].ctypes.data for k in range(len(jobs))]
        if role == "admit":
            gpus = sample_gpus()
            pairs = ctypes.CFUNCTYPE(ctypes.c_uint8, ctypes.c_void_p, ctypes.c_void_p)(address)
            values = [float(pairs(job, gpus[k : k + 1].ctypes.data)) for job in where for k in range(len(gpus))]
        else:
            single = ctypes.CFUNCTYPE(ctypes.c_double, ctypes.c_void_p)(address)
            values = [single(job) for job in where]
    finally:
        sys.unraisablehook = previous
    if raised:
        reason = f"{type(raised[0]).__name__}: {raised[0]}"
        raise PolicyError(f"{place(function)} raises on a sample job: {reason}. A {role} must answer for every job.")
    return values


def _try(role: str, function: Any, address: int) -> None:
    for value, job in zip(_values(role, function, address), sample_jobs(), strict=role != "admit"):
        if not math.isfinite(value):
            facts = ", ".join(f"{name}={job[name]:g}" for name in JOB.names or ())
            raise PolicyError(f"{place(function)} returns {value} for a job with {facts}: return a finite number")
    if role != "admit":
        cost = call_cost_ns(address)
        if cost > MAX_CALL_NS:
            raise PolicyError(
                f"{place(function)} takes {cost / 1e3:.1f} µs per call; the limit is {MAX_CALL_NS / 1e3:g} µs, because "
                "every decision ranks several jobs: compute from the job's facts, without loops"
            )


def check(role: str, function: Any, compiled_function: Any) -> None:
    """Raise PolicyError unless the function answers every sample job with a number, in time.

    A function that might not return is tried in a process of its own first: compiled code cannot be interrupted.
    """
    if may_loop(function):
        _check_apart(role, function)
    _try(role, function, compiled_function.address)


def _check_apart(role: str, function: Any) -> None:
    code = "from paellapy.scheduler.policies.checks import check_from_stdin; check_from_stdin()"
    try:
        done = subprocess.run(
            [sys.executable, "-c", code],
            input=cloudpickle.dumps((role, function, sys.path)),
            capture_output=True,
            timeout=TIME_LIMIT_S,
            check=False,
        )
    except subprocess.TimeoutExpired as e:
        raise PolicyError(
            f"{place(function)} did not return within {TIME_LIMIT_S:g} s on a sample job: does it loop for ever?"
        ) from e
    if done.returncode != 0:
        raise PolicyError(f"{place(function)} ended its process ({done.returncode}): {done.stderr.decode()[-500:]}")
    problem = json.loads(done.stdout.splitlines()[-1])
    if problem:
        raise PolicyError(problem)


def check_from_stdin() -> None:
    """The process's side of `check`: prints the problem as JSON, or null."""
    role, function, path = cloudpickle.loads(sys.stdin.buffer.read())
    sys.path[:] = path
    problem = None
    try:
        _try(role, function, compile_function(role, function).address)
    except PolicyError as e:
        problem = str(e)
    print(json.dumps(problem))
