"""Policies: plain Python functions that rank jobs, compiled for the core and checked when they are made.

    @policy
    def shortest_first(job):
        return job.remaining_ns

The job with the lowest rank goes first. A policy may have more functions:

* `admit(job, gpu, own)` says whether a job may launch now: True, False, or a time in ns from which it may. It is called
  for the waiting jobs in order of rank, and again before each further segment of a job;
* `order(job, gpu, own)` orders the waiting requests of one model: called once, when a request arrives; the default is
  `rank`;
* `place(job, gpu, own)` says on which part of the SMs the next segment goes: pp.Where(sms=0.25);
* `tick(gpu, own)` is called every `tick_us` while there is work;
* `done(job, segment, own)` is called after each segment;
* `victim(model, gpu, own)` rates a model's weights where not all weights fit on the GPU: those with the lowest value
  leave first. The default is recent demand times the time to bring them back, per byte.

Each function declares only the arguments that it uses. `own` holds the numbers that the policy keeps between calls.
docs/policies.md lists every field.
"""

from __future__ import annotations

import importlib
import math
import os
import pkgutil
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, TypedDict, Unpack, cast, overload

import numpy as np

from paellapy.scheduler.policies.code import fields_read
from paellapy.scheduler.policies.compiling import calls_others, compile_function, facts_read, reads_client
from paellapy.scheduler.policies.roles import ROLES, Admit, Compiled, Layout, PolicyError, Rank, Tell, arguments

__all__ = ["Policy", "PolicyError", "Rank", "find_policy", "policy", "policy_names"]

BUILT_IN = "paellapy.scheduler.policies"
_MOST = 1 << 30  # jobs or segments at a time: no limit
# Modules of this folder that are not policies.
_TOOLS = {
    "policy", "assigned", "attach", "checks", "code", "compiling", "expressions", "index_ranges", "integers", "replay",
    "roles", "source", "trees", "words",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Policy:
    """A policy ready for the core. Call it with a job to get the job's rank."""

    name: str
    rank: Rank
    admit: Admit | None
    order: Rank | None
    place: Rank | None
    tick: Tell | None
    done: Tell | None
    victim: Rank | None
    active: int | None  # None: the engine decides
    max_in_flight: int
    whole: bool
    top_whole: bool
    may_idle: bool
    tick_us: float
    layout: Layout
    functions: Mapping[str, Compiled] = field(repr=False)  # by role

    def __post_init__(self) -> None:
        for name, value in (("active", self.active), ("max_in_flight", self.max_in_flight)):
            if value is None:
                continue
            if not isinstance(value, int | np.integer) or isinstance(value, bool) or value > _MOST:
                raise PolicyError(
                    f"policy {self.name}: {name}={value!r}; it must be an integer of at least 1 and at most {_MOST}"
                )
            if value < 1:
                raise PolicyError(f"policy {self.name}: {name}={value}; it must be at least 1")
        for name in ("whole", "top_whole", "may_idle"):
            if not isinstance(getattr(self, name), bool):
                raise PolicyError(f"policy {self.name}: {name}={getattr(self, name)!r}; it must be True or False")
        if not isinstance(self.name, str):
            raise PolicyError(f"the name of a policy is {self.name!r}; it must be a string")
        if self.may_idle and self.admit is None:
            raise PolicyError(
                f"policy {self.name}: may_idle=True needs an `admit` function: give one, or leave may_idle out"
            )

    @property
    def plain(self) -> dict[str, Any]:
        """The plain functions by role."""
        given = {each: getattr(self, each) for each in ROLES}
        return {role: function for role, function in given.items() if function is not None}

    @property
    def timeless(self) -> bool:
        """Whether a job's rank changes only with the job, so that the core need not compute it again."""
        moving = {"now_ns", "deficit_ns", "client_deficit_ns", "occupancy", "used_ns", "missing_bytes", "ready_ns"}
        if self.functions["rank"].names != ("job",):
            return False
        return moving.isdisjoint(fields_read(self.rank)) and not calls_others(self.rank)

    @property
    def facts(self) -> int:
        """The additional facts that the core computes for this policy: READS_SEGMENT …"""
        return facts_read(self.plain.values())

    @property
    def admits_by_client(self) -> bool:
        """Whether `admit` may answer differently for different clients of one model."""
        return self.admit is not None and (reads_client(self.admit) or calls_others(self.admit))

    @property
    def cost_ns(self) -> float:
        """Measured cost of one ranking."""
        from paellapy.scheduler.policies.checks import call_cost_ns

        return call_cost_ns(self.functions["rank"], self.layout)

    def __call__(self, *job_gpu_own: Any) -> float:
        return float(self.rank(*job_gpu_own))


class PolicyOptions(TypedDict, total=False):
    """The options of `policy`."""

    name: str | None
    admit: Admit | None
    order: Rank | None
    place: Rank | None
    tick: Tell | None
    done: Tell | None
    victim: Rank | None
    state: Mapping[str, float]
    per_model: Mapping[str, float]
    params: Mapping[str, float]
    tick_us: float | None
    active: int | None
    max_in_flight: int
    whole: bool
    top_whole: bool
    may_idle: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class _Options:
    """The same options with defaults."""

    name: str | None = None
    admit: Admit | None = None
    order: Rank | None = None
    place: Rank | None = None
    tick: Tell | None = None
    done: Tell | None = None
    victim: Rank | None = None
    state: Mapping[str, float] = field(default_factory=dict)
    per_model: Mapping[str, float] = field(default_factory=dict)
    params: Mapping[str, float] = field(default_factory=dict)
    tick_us: float | None = None
    active: int | None = None
    max_in_flight: int = 2
    whole: bool = False
    top_whole: bool = False
    may_idle: bool = False


@overload
def policy(rank: Rank, /) -> Policy: ...
@overload
def policy(**options: Unpack[PolicyOptions]) -> Callable[[Rank], Policy]: ...
def policy(rank: Rank | None = None, /, **options: Unpack[PolicyOptions]) -> Policy | Callable[[Rank], Policy]:
    """Makes a policy from a function: compiles it, and calls it on sample jobs.

    `state` and `per_model` declare the numbers that the policy keeps, by name, each with its first value: own.limit,
    and own.used_ns[job.model]. `params` declares the models' parameters that it reads, such as job.params.limit, with
    the default for models without them. `tick_us`: the time between two calls of `tick`. `may_idle`: `admit` also
    decides for an idle GPU; otherwise an idle GPU takes the best job without asking `admit`.

    `active`: number of jobs that may launch at a time; by default the engine decides. `max_in_flight`: number of
    segments that a job may have on the GPU; if 1, the next segment is launched just before the current one ends.
    `whole`: always launch programs in one piece. `top_whole`: launch programs of the highest priority in one piece,
    where models of lower priority are loaded.

    >>> @policy(active=4)
    ... def oldest(job):
    ...     return job.arrival_ns
    >>> oldest.name, oldest.active
    ('oldest', 4)
    """
    unknown = set(options) - {each.name for each in fields(_Options)}
    if unknown:
        names = ", ".join(PolicyOptions.__annotations__)
        raise PolicyError(f"a policy has no option {min(unknown)!r}; the options are {names}")
    given = _Options(**options)
    if rank is None:
        return lambda function: _make(function, given)
    return _make(rank, given)


def _make(rank: Rank, given: _Options) -> Policy:
    if isinstance(rank, Policy):
        raise PolicyError(f"{rank.name} is a policy already: use it as it is, or make one from its function, `.rank`")
    title = given.name or str(getattr(rank, "__name__", rank))
    layout = Layout(given.state, given.per_model, given.params)
    layout.check(title)
    if (given.tick is None) != (given.tick_us is None):
        raise PolicyError(f"policy {title}: give both tick and tick_us, as in tick=function, tick_us=1000")
    if given.tick_us is not None and not (isinstance(given.tick_us, int | float) and 1 <= given.tick_us < math.inf):
        raise PolicyError(f"policy {title}: tick_us={given.tick_us!r}; it must be a number of microseconds, at least 1")
    wanted = {"rank": rank} | {role: getattr(given, role) for role in ROLES if role != "rank"}
    room, _, module = (getattr(rank, "__module__", None) or "").rpartition(".")
    ours = room == BUILT_IN and module not in _TOOLS
    functions = {}
    for role, function in wanted.items():
        if function is not None:
            code = compile_function(role, function, layout, cache=ours)
            functions[role] = Compiled(code, arguments(role, function, layout))
    if not ours:  # the package's own are checked by the tests, which keeps start-up short
        from paellapy.scheduler.policies.checks import check

        for role, compiled in functions.items():
            check(role, wanted[role], compiled, layout)
    made = Policy(
        title, rank, given.admit, given.order, given.place, given.tick, given.done, given.victim, given.active,
        given.max_in_flight,
        given.whole, given.top_whole, given.may_idle, given.tick_us or 0.0, layout, functions,
    )  # fmt: skip
    if not ours and made.may_idle and made.tick is None:
        from paellapy.scheduler.policies.checks import check_idle

        check_idle(made.admit, functions["admit"], made.layout)
    return made


def find_policy(which: str | Policy | Rank) -> Policy:
    """A policy by name, or the given policy; a plain function is made into a policy. A name may also be
    "package.module:function".

    >>> find_policy("srpt").name
    'srpt'
    """
    if isinstance(which, Policy):
        return which
    if which is None:
        raise PolicyError(f"no policy was given: choose one of {', '.join(policy_names())}, or give a function")
    if not isinstance(which, str):
        return policy(which)
    if ":" in which:
        return imported_policy(which)
    if which not in policy_names():
        raise PolicyError(
            f"no policy named {which!r}: choose one of {', '.join(policy_names())}, or give a function or its name, "
            '"package.module:function"'
        )
    return cast(Policy, importlib.import_module(f"{BUILT_IN}.{which}").rank)


def imported_policy(name: str) -> Policy:
    """The policy "package.module:function". The module may also be in the current folder.

    >>> imported_policy("paellapy.scheduler.policies.srpt:rank").name
    'srpt'
    """
    module, _, attribute = name.partition(":")
    if (folder := os.getcwd()) not in sys.path:
        sys.path.append(folder)
    try:
        found: Any = importlib.import_module(module)
        for each in attribute.split("."):
            found = getattr(found, each)
    except PolicyError:
        raise
    except Exception as e:
        raise PolicyError(
            f"{name} cannot be imported ({type(e).__name__}: {e}): the name must have the form package.module:function"
        ) from e
    if isinstance(found, str):
        raise PolicyError(f"{name} is a text: name a function, or a policy made with pp.policy")
    return find_policy(found)


def policy_names() -> list[str]:
    """The policies that come with the package."""
    package = sys.modules.get(BUILT_IN) or importlib.import_module(BUILT_IN)
    return sorted(each.name for each in pkgutil.iter_modules(package.__path__) if each.name not in _TOOLS)
