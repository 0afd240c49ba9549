"""Policies: plain Python functions that rank jobs, compiled for the core and checked when they are made.

    @policy
    def shortest_first(job):
        return job.remaining_ns

The job of least rank goes first. `job` has the fields of `Job`. Two more functions may be given: `admit(job, gpu)` says
whether the best job may launch now (asked again before each of its segments), and `order(job)` arranges the waiting
requests of one model among themselves (asked once, when a request arrives; by default it is `rank`).
"""

from __future__ import annotations

import dis
import importlib
import inspect
import math
import pkgutil
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, cast, overload

import numba
import numpy as np
from numba import types
from numba.core.errors import NumbaError

from paellapy.instrument.errors import PaellaError
from paellapy.scheduler.core.job import GPU, JOB
from paellapy.scheduler.policies.code import forbidden, text_in
from paellapy.scheduler.policies.words import reason

BUILT_IN = "paellapy.scheduler.policies"
_TOOLS = {"policy", "checks", "code", "words"}  # in the same folder; every other module there is a policy
DEFAULT_ACTIVE = 8  # jobs at once where neither a policy nor what the models demand says how many


class PolicyError(PaellaError):
    """A policy cannot be used; the message names the function, the line and the reason."""


Rank = Callable[[Any], float]
Admit = Callable[[Any, Any], bool]
_JOB = numba.from_dtype(JOB)
_GPU = numba.from_dtype(GPU)
_SIGNATURES = {"rank": types.float64(_JOB), "order": types.float64(_JOB), "admit": types.uint8(_JOB, _GPU)}


@dataclass(frozen=True, slots=True)
class Policy:
    """A policy ready for the core. Call it with a job to see its rank."""

    name: str
    rank: Rank
    admit: Admit | None
    order: Rank | None
    active: int | None  # None: the engine decides
    look_ahead: int
    whole: bool
    compiled: tuple[Any, ...] = field(repr=False)  # rank, admit, order; kept alive for their addresses

    def __post_init__(self) -> None:
        for name, value in (("active", self.active), ("look_ahead", self.look_ahead)):
            if value is None:
                continue
            if not isinstance(value, int | np.integer):
                raise PolicyError(f"policy {self.name}: {name} is a whole number, not {value!r}")
            if value < 1:
                raise PolicyError(f"policy {self.name}: {name} is at least 1, not {value}")

    @property
    def addresses(self) -> tuple[int, int, int]:
        rank, admit, order = (each.address if each else 0 for each in self.compiled)
        return rank, admit, order

    @property
    def timeless(self) -> bool:
        """Whether a job's rank changes only with the job: then the core need not look at it again."""
        moving = {"now_ns", "deficit_ns", "client_deficit_ns", "occupancy"}
        code = cast(Any, self.rank).__code__
        return not moving & {*code.co_names, *code.co_freevars} and not calls_others(self.rank)

    @property
    def cost_ns(self) -> float:
        """Measured cost of one ranking."""
        from paellapy.scheduler.policies.checks import call_cost_ns

        return call_cost_ns(self.addresses[0])

    def __call__(self, job: Any) -> float:
        return float(self.rank(job))


@overload
def policy(rank: Rank, /) -> Policy: ...
@overload
def policy(
    *,
    name: str | None = None,
    admit: Admit | None = None,
    order: Rank | None = None,
    active: int | None = None,
    look_ahead: int = 2,
    whole: bool = False,
) -> Callable[[Rank], Policy]: ...
def policy(
    rank: Rank | None = None,
    /,
    *,
    name: str | None = None,
    admit: Admit | None = None,
    order: Rank | None = None,
    active: int | None = None,
    look_ahead: int = 2,
    whole: bool = False,
) -> Policy | Callable[[Rank], Policy]:
    """Make a policy of a function: compiled, and tried on sample jobs.

    `active`: jobs that may launch at a time; by default the engine decides. `look_ahead`: segments a job has on the GPU
    at a time; where it is 1, the next is sent just before that one ends. `whole`: launch programs in one piece always.

    >>> @policy(active=4)
    ... def oldest(job):
    ...     return job.arrival_ns
    >>> oldest.name, oldest.active
    ('oldest', 4)
    """
    if rank is None:
        return lambda function: _make(function, name, admit, order, active, look_ahead, whole)
    return _make(rank, name, admit, order, active, look_ahead, whole)


def _make(
    rank: Rank,
    name: str | None,
    admit: Admit | None,
    order: Rank | None,
    active: int | None,
    look_ahead: int,
    whole: bool,
) -> Policy:
    title = name or str(getattr(rank, "__name__", rank))
    functions: dict[str, Any] = {"rank": rank, "admit": admit, "order": order}
    room, _, module = getattr(rank, "__module__", "").rpartition(".")
    own = room == BUILT_IN and module not in _TOOLS
    compiled = []
    for role, function in functions.items():
        compiled.append(compile_function(role, function, cache=own) if function is not None else None)
    if not own:  # ours are checked by the tests: start-up is part of the product
        from paellapy.scheduler.policies.checks import check

        for (role, function), each in zip(functions.items(), compiled, strict=True):
            if function is not None:
                check(role, function, each)
    return Policy(title, rank, admit, order, active, look_ahead, whole, tuple(compiled))


def compile_function(role: str, function: Any, cache: bool = False) -> Any:
    """The function as compiled code that the core calls by its address."""
    wanted = len(_SIGNATURES[role].args)
    arguments = "(job)" if wanted == 1 else "(job, gpu)"
    if not inspect.isfunction(function):
        raise PolicyError(f"{role} is {function!r}: give a plain function {role}{arguments}")
    where = place(function)
    if len(inspect.signature(function).parameters) != wanted:
        raise PolicyError(f"{where}: {role} takes {arguments}")
    problem = None if cache else forbidden(function, role)  # ours are kept on disk, and checked by the tests
    if problem:
        raise PolicyError(f"{where} {problem}.")
    try:
        compiled = numba.cfunc(_SIGNATURES[role], cache=cache, error_model="numpy", nogil=True)(function)
    except KeyError as e:  # how Numba says that a record has no such field
        fields = ", ".join(JOB.names or ())
        if wanted == 2:
            fields = f"in job {fields}, in gpu {', '.join(GPU.names or ())}"
        raise PolicyError(f"{where} reads the field {e}, which there is not; there are {fields}") from e
    except NumbaError as e:
        returns = "a number" if role != "admit" else "True or False"
        raise PolicyError(
            f"{where} {reason(e, returns)}. Use numbers, fields of {arguments} and the math module only, and return "
            f"{returns} on every path."
        ) from e
    problem = None if cache else text_in(function)  # after Numba, which says more of text that does not compile
    if problem:
        raise PolicyError(f"{where} {problem}.")
    return compiled


def place(function: Any) -> str:
    code = function.__code__
    return f"{function.__name__} ({code.co_filename}:{code.co_firstlineno})"


def may_loop(function: Any) -> bool:
    """Whether the function could run for ever: it jumps back, or calls something that is not known to return."""
    if any(
        each.opname in {"FOR_ITER", "JUMP_ABSOLUTE"} or "BACKWARD" in each.opname
        for each in dis.get_instructions(function)
    ):
        return True
    return calls_others(function)


def calls_others(function: Any) -> bool:
    """Whether the function refers to any that is neither a builtin nor of the math module."""
    outside = inspect.getclosurevars(function)
    known = {value for value in vars(math).values() if callable(value)}
    values = [*outside.globals.values(), *outside.nonlocals.values()]
    return any(callable(value) and value not in known for value in values)


def find_policy(which: str | Policy | Rank) -> Policy:
    """A policy by name, or the policy given; a plain function becomes one.

    >>> find_policy("srpt").name
    'srpt'
    """
    if isinstance(which, Policy):
        return which
    if not isinstance(which, str):
        return policy(which)
    if which not in policy_names():
        raise PolicyError(f"no policy named {which!r}: choose one of {', '.join(policy_names())}, or give a function")
    return cast(Policy, importlib.import_module(f"{BUILT_IN}.{which}").rank)


def policy_names() -> list[str]:
    """The policies that come with the package."""
    package = sys.modules.get(BUILT_IN) or importlib.import_module(BUILT_IN)
    return sorted(each.name for each in pkgutil.iter_modules(package.__path__) if each.name not in _TOOLS)
