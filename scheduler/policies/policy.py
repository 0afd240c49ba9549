"""Policies: plain Python functions that rank jobs, compiled for the core and checked when they are made.

    @policy
    def shortest_first(job):
        return job.remaining_ns

The job of least rank goes first. `job` has the fields of `Job`. Two more functions may be given: `admit(job, gpu)` says
whether the best job may launch now (asked again before each of its segments), and `order(job)` arranges the waiting
requests of one model among themselves (asked once, when a request arrives; by default it is `rank`).
"""

from __future__ import annotations

import importlib
import pkgutil
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, cast, overload

import numpy as np

from paellapy.scheduler.policies.compiling import Admit, PolicyError, Rank, calls_others, compile_function

__all__ = ["Policy", "PolicyError", "Rank", "find_policy", "policy", "policy_names"]

BUILT_IN = "paellapy.scheduler.policies"
_TOOLS = {"policy", "attach", "checks", "code", "compiling", "words"}  # every other module of the folder is a policy


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
