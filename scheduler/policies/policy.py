"""Policies: plain Python functions that rank jobs, compiled for the core and checked when they are made.

    @policy
    def shortest_first(job):
        return job.remaining_ns

The job with the lowest rank goes first. Further functions of a policy hold jobs back, keep numbers and place segments;
each declares only the arguments that it uses. docs/policies.md lists the functions, their arguments and the options.
"""

from __future__ import annotations

import functools
import importlib
import math
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass, field, fields
from typing import Any, Concatenate, ParamSpec, Protocol, cast, overload

import numpy as np

from paellapy.scheduler.core.job import PER_MODEL
from paellapy.scheduler.core.profiles import declare_params
from paellapy.scheduler.core.state import REFRESH, State
from paellapy.scheduler.core.values import shortened
from paellapy.scheduler.policies.check import check_source
from paellapy.scheduler.policies.compile import (
    ROLES,
    Admit,
    Compiled,
    Layout,
    PolicyError,
    Rank,
    Tell,
    arguments,
    calls_others,
    compile_function,
    facts_read,
    reads,
)

__all__ = ["Policy", "PolicyError", "Rank", "attach_functions", "attach_policy", "find_policy", "policy",
           "policy_names", "shipped"]  # fmt: skip

_SHIPPED = ("paellapy.scheduler.policies.builtin", "paellapy.scheduler.policies.papers")
_MOST = 1 << 30  # jobs or segments at a time: no limit
_MOVING = ("now_ns", "deficit_ns", "client_deficit_ns", "occupancy", "used_ns", "missing_bytes", "ready_ns")
_OF_CLIENT = ("client", "tenant", "share", "deficit_ns", "client_deficit_ns", "client_start_ns")


@dataclass(frozen=True, slots=True)
class Policy:
    """A policy ready for the core. Call it with a job to get the job's rank."""

    rank: Rank
    _: KW_ONLY
    name: str = ""  # by default the function's
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
    active: int | None = None  # None: the engine decides
    max_in_flight: int = 2
    whole: bool = False
    top_whole: bool = False
    never_whole: bool = False
    may_idle: bool = False
    fresh: bool = False
    # Compiled code, by role, function and names of numbers. Copies of a policy with other options share it.
    _code: dict[Any, Compiled] = field(default_factory=dict, repr=False, compare=False)

    def __post_init__(self) -> None:
        if isinstance(self.rank, Policy):
            remedy = "use it as it is, or make one from its function, `.rank`"
            raise PolicyError(f"{self.rank.name} is a policy already: {remedy}", policy=self.rank.name, remedy=remedy)
        object.__setattr__(self, "name", self.name or str(getattr(self.rank, "__name__", self.rank)))
        self._check_options()
        if not all(map(_is_ours, self.plain.values())):  # our own are checked by the tests, and compiled at first use
            for role, function in self.plain.items():
                arguments(role, function, self.layout)
            self._make()

    def _check_options(self) -> None:
        def refuse(option: str, needed: str) -> PolicyError:
            said = f"policy {self.name}: {option}={getattr(self, option)!r}; {needed}"
            return PolicyError(said, policy=str(self.name), name=option, remedy=needed)

        if not isinstance(self.name, str):
            raise refuse("name", "it must be a string")
        self.layout.check(self.name)
        for option in ("active", "max_in_flight"):
            value = getattr(self, option)
            whole = isinstance(value, int | np.integer) and not isinstance(value, bool)
            if not (whole and 1 <= value <= _MOST) and (option, value) != ("active", None):
                raise refuse(option, f"it must be an integer of at least 1 and at most {_MOST}")
        for option in ("whole", "top_whole", "never_whole", "may_idle", "fresh"):
            if not isinstance(getattr(self, option), bool):
                raise refuse(option, "it must be True or False")
        if self.tick_us is not None and not (isinstance(self.tick_us, int | float) and 1 <= self.tick_us < math.inf):
            raise refuse("tick_us", "it must be a number of microseconds, at least 1")
        if (self.tick is None) != (self.tick_us is None):
            raise refuse("tick_us", "give both tick and tick_us, as in tick=function, tick_us=1000")
        if self.may_idle and self.admit is None:
            raise refuse("may_idle", "it needs an `admit` function: give one, or leave may_idle out")

    def _make(self) -> None:
        """Compiles the functions that are not compiled yet, and tries those that are not ours."""
        made: dict[Any, Compiled] = {}
        for role, function in self.plain.items():
            if self._key(role) not in self._code:
                if not _is_ours(function):
                    check_source(role, function, self.layout)
                made[self._key(role)] = compile_function(role, function, self.layout, cache=_is_ours(function))
        if tried := [each for each in made.values() if not _is_ours(each.function)]:
            from paellapy.scheduler.policies.trial import check_idle, try_out  # its imports take time

            for each in tried:
                try_out(each, self.layout)
            if self.may_idle and self.tick is None:
                check_idle({**self._code, **made}[self._key("admit")], self.layout)
        self._code.update(made)

    def _key(self, role: str) -> tuple[Any, ...]:
        return role, getattr(self, role), *self.state, None, *self.per_model, None, *self.params

    @property
    def layout(self) -> Layout:
        return Layout(self.state, self.per_model, self.params)

    @property
    def plain(self) -> dict[str, Any]:
        """The plain functions by role."""
        given = {each: getattr(self, each) for each in ROLES}
        return {role: function for role, function in given.items() if function is not None or role == "rank"}

    @property
    def functions(self) -> dict[str, Compiled]:
        """The compiled functions by role."""
        self._make()
        return {role: self._code[self._key(role)] for role in self.plain}

    @property
    def timeless(self) -> bool:
        """Whether a job's rank changes only with the job, so that the core need not compute it again."""
        moves = self.fresh or reads(self.rank, "gpu", "own", *(f"job.{each}" for each in _MOVING))
        return not (moves or calls_others(self.rank))

    @property
    def facts(self) -> int:
        """The additional facts that the core computes for this policy: READS_SEGMENT …"""
        return functools.reduce(lambda facts, function: facts | facts_read(function), self.plain.values(), 0)

    @property
    def admits_by_client(self) -> bool:
        """Whether `admit` may answer differently for different clients of one model."""
        of_client = (f"job.{each}" for each in _OF_CLIENT)
        return self.admit is not None and (reads(self.admit, *of_client) or calls_others(self.admit))

    @property
    def reads_priority(self) -> bool:
        """Whether a request's priority may change anything."""
        fields = ("job.priority", "gpu.active_priority")
        return any(reads(each, *fields) or calls_others(each) for each in self.plain.values())

    @property
    def cost_ns(self) -> float:
        """Measured cost of one ranking."""
        from paellapy.scheduler.policies.trial import call_cost_ns

        return call_cost_ns(self.functions["rank"], self.layout)

    def __call__(self, *job_gpu_own: Any) -> float:
        return float(self.rank(*job_gpu_own))


def _is_ours(function: Any) -> bool:
    return getattr(function, "__module__", None) in _SHIPPED


_Options = ParamSpec("_Options")


class _Decorator(Protocol[_Options]):
    """A decorator that is used as it is, or with options."""

    @overload
    def __call__(self, rank: Rank, /) -> Policy: ...  # type: ignore[overload-overlap]  # options are given by name
    @overload
    def __call__(self, *none: _Options.args, **options: _Options.kwargs) -> Callable[[Rank], Policy]: ...


def _with_options_of(
    made: Callable[Concatenate[Rank, _Options], Policy],
) -> Callable[[Callable[..., Any]], _Decorator[_Options]]:
    """Types a decorator: its options are the keyword arguments of the class that it makes."""
    return lambda decorator: cast(_Decorator[_Options], decorator)


@_with_options_of(Policy)
def policy(rank: Rank | None = None, /, **options: Any) -> Policy | Callable[[Rank], Policy]:
    """Makes a policy from a function: compiles it, and calls it on sample jobs.

    `state` and `per_model` declare the numbers that the policy keeps, by name, each with its first value: own.limit,
    and own.used_ns[job.model]. `params` declares the models' parameters that it reads, such as job.params.limit, with
    the default for models without them. `tick_us`: the time between two calls of `tick`. `may_idle`: `admit` also
    decides for an idle GPU; otherwise an idle GPU takes the best job without asking `admit`.

    `active`: number of jobs that may launch at a time; by default the engine decides. `max_in_flight`: number of
    segments that a job may have on the GPU; if 1, the next segment is launched just before the current one ends.
    `whole`: always launch programs in one piece. `top_whole`: launch programs of the highest priority in one piece,
    where models of lower priority are loaded. `never_whole`: always launch programs in segments; by default a program
    alone on the GPU is launched in one piece, until jobs that come later often have to overtake it. `fresh`: rank all
    waiting jobs again before each decision.

    >>> @policy(active=4)
    ... def oldest(job):
    ...     return job.arrival_ns
    >>> oldest.name, oldest.active
    ('oldest', 4)
    """
    names = [each.name for each in fields(Policy) if each.name not in ("rank", "_code")]
    if unknown := set(options) - set(names):
        remedy = f"the options are {', '.join(names)}"
        raise PolicyError(f"a policy has no option {min(unknown)!r}: {remedy}", name=min(unknown), remedy=remedy)
    if rank is None:
        return lambda function: Policy(function, **options)
    return Policy(rank, **options)


@functools.cache
def shipped() -> Mapping[str, Policy]:
    """The policies that come with the package, by name. They are compiled, or read from disk, when they are used."""
    values = [value for name in _SHIPPED for value in vars(importlib.import_module(name)).values()]
    return {each.name: each for each in sorted((p for p in values if isinstance(p, Policy)), key=lambda p: p.name)}


def policy_names() -> list[str]:
    """The names of the policies that come with the package.

    >>> "srpt" in policy_names()
    True
    """
    return list(shipped())


def find_policy(which: str | Policy | Rank) -> Policy:
    """A policy by name, or the given policy; a plain function is made into a policy. A name may also be
    "package.module:function".

    >>> find_policy("srpt").name
    'srpt'
    """
    if isinstance(which, str):
        found = _imported(which) if ":" in which else shipped().get(which)
    else:
        found = which if isinstance(which, Policy) or which is None else policy(which)
    if found is None:
        remedy = f'choose one of {", ".join(policy_names())}, or give a function or its name, "package.module:function"'
        raise PolicyError(f"no policy named {shortened(which)}: {remedy}", name=str(which), remedy=remedy)
    found.functions  # noqa: B018 (compiled here, so that a busy engine is not held up)
    return found


def _imported(name: str) -> Policy:
    """The policy "package.module:function". The module may also be in the current folder."""
    module, _, attribute = name.partition(":")
    if (folder := os.getcwd()) not in sys.path:
        sys.path.append(folder)
    try:
        found = functools.reduce(getattr, attribute.split("."), cast(Any, importlib.import_module(module)))
    except PolicyError:
        raise
    except Exception as e:
        remedy = "the name must have the form package.module:function"
        said = f"{name} cannot be imported ({type(e).__name__}: {e}): {remedy}"
        raise PolicyError(said, name=name, remedy=remedy) from e
    if isinstance(found, str):
        remedy = "name a function, or a policy made with pp.policy"
        raise PolicyError(f"{name} is a text: {remedy}", name=name, remedy=remedy)
    return find_policy(found)


def attach_policy(state: State, policy: Policy) -> None:
    """Makes this policy decide from the next step on. The caller keeps it alive: the state holds addresses only."""
    if policy.per_model and len(state.model) > PER_MODEL:
        raise PolicyError(
            f"policy {policy.name} keeps per_model numbers for at most {PER_MODEL} models, and the engine has room for "
            f"{len(state.model)}: give the engine smaller limits",
            policy=policy.name, name="per_model",
        )  # fmt: skip
    if policy.place is not None and not state.core["partitions"][0]:
        raise PolicyError(
            f"policy {policy.name} has a `place`, but there are no SM partitions: ask for some with "
            "Engine(sm_partitions=8), simulate(…, sm_partitions=8) or `paellapy simulate --sm-partitions 8`",
            policy=policy.name, name="place",
        )  # fmt: skip
    if policy.admits_by_client:
        from paellapy.scheduler.core.throttle import attach_held_back  # compiles much, for few policies

        attach_held_back(state)
    attach_functions(state, policy)
    own = np.frombuffer(policy.layout.new_own().tobytes())
    state.own[...] = 0.0
    state.own[: len(own)] = own
    state.own_first[...] = 0.0
    state.own_first[: len(policy.per_model)] = list(policy.per_model.values())
    declare_params(state, policy.params)
    core = state.core[0]
    core["own_at"], core["own_names"] = len(policy.state), len(policy.per_model)
    core["max_active"] = min(policy.active or int(state.tuning["default_active"][0]), len(state.instance))
    core["demand_limit"] = np.inf
    core["max_in_flight"] = policy.max_in_flight
    core["whole_always"], core["top_whole"], core["whole_idle"] = policy.whole, policy.top_whole, not policy.never_whole
    core["timeless"] = policy.timeless
    core["refresh"] = _MOST if policy.fresh else REFRESH
    core["may_idle"], core["by_client"] = policy.may_idle, policy.admits_by_client
    core["tick_ns"], core["tick_at_ns"] = (policy.tick_us or 0.0) * 1e3, 0.0
    core["facts"] = policy.facts
    core["changed"] = 1


def attach_functions(state: State, policy: Policy) -> None:
    """Writes the addresses, in this process, of the policy's functions and arguments; the core's numbers stay."""
    where = {
        "job": state.job.ctypes.data,
        "gpu": state.gpu.ctypes.data,
        "segment": state.done_segment.ctypes.data,
        "model": state.owner.ctypes.data,
        "own": state.own.ctypes.data,
    }
    call, functions = state.call[0], policy.functions
    for role in ROLES:
        function = functions.get(role) or (functions["rank"] if role == "order" else None)
        arguments = [where[name] for name in function.names] if function else []
        call[role] = (function.address if function else 0, *arguments, 0, 0, 0)[:4]
