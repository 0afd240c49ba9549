"""The functions of a policy: their arguments, their results, and the layout of the numbers they read."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numba
import numpy as np
from numba import types
from numba.extending import overload

from paellapy.instrument.errors import PaellaError
from paellapy.scheduler.core.job import DONE, GPU, JOB, NO_NAMES, OWN_NAMES, OWN_PER_MODEL, OWNER, PARAMS, PER_MODEL
from paellapy.scheduler.core.profiles import is_finite_number

Rank = Callable[..., float]
Admit = Callable[..., float]
Tell = Callable[..., None]


class PolicyError(PaellaError):
    """A policy cannot be used; the message names the function, the line and the reason."""


@dataclass(frozen=True, slots=True)
class Role:
    """The purpose of one function of a policy."""

    takes: tuple[str, ...]  # in this order; the function leaves out arguments that it does not use
    needs: tuple[str, ...]
    returns: str
    writes: bool  # whether it may write to `own`

    @property
    def arguments(self) -> str:
        return f"({', '.join(self.takes)})"


ROLES = {
    "rank": Role(("job", "gpu", "own"), ("job",), "a number", writes=False),
    "order": Role(("job", "gpu", "own"), ("job",), "a number", writes=False),
    "admit": Role(("job", "gpu", "own"), ("job",), "True, False, or a time in ns", writes=True),
    "place": Role(("job", "gpu", "own"), ("job",), "pp.Where(sms=…)", writes=False),
    "tick": Role(("gpu", "own"), (), "nothing", writes=True),
    "done": Role(("job", "segment", "own"), (), "nothing", writes=True),
    "victim": Role(("model", "gpu", "own"), ("model",), "a number", writes=False),
}
Fields = Mapping[str, Any]  # by name: None for a number, PER_MODEL for one per model, or the fields of a record


def _fields(kind: np.dtype[Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name in kind.names or ():
        column = kind[name]
        found[name] = PER_MODEL if column.shape else _fields(column) if column.names else None
    return found


@dataclass(frozen=True, slots=True)
class Layout:
    """A policy's own numbers, and the parameters of models that it reads, each with its first value."""

    state: Mapping[str, float] = field(default_factory=dict)
    per_model: Mapping[str, float] = field(default_factory=dict)
    params: Mapping[str, float] = field(default_factory=dict)

    def check(self, policy: str) -> None:
        for what, given, most in (
            ("state", self.state, OWN_NAMES),
            ("per_model", self.per_model, OWN_PER_MODEL),
            ("params", self.params, PARAMS),
        ):
            if not isinstance(given, Mapping) or len(given) > most:
                raise PolicyError(
                    f"policy {policy}: {what}={given!r}; it must be a dict of at most {most} names, each with its "
                    "first value, as in "
                    f"{what}={{'limit': 0.5}}"
                )
            for name, value in given.items():
                if not isinstance(name, str) or not name.isidentifier():
                    raise PolicyError(
                        f"policy {policy}: {what} has the name {name!r}; names must be plain, like those of variables"
                    )
                if not is_finite_number(value):
                    raise PolicyError(f"policy {policy}: {what}[{name!r}] is {value!r}; it must be a finite number")
        if twice := set(self.state) & set(self.per_model):
            raise PolicyError(f"policy {policy}: {min(twice)!r} is in state and in per_model; rename one of them")

    @property
    def own(self) -> np.dtype[Any]:
        """The record that functions receive as `own`."""
        once = [(name, "f8") for name in self.state]
        return np.dtype([*once, *((name, "f8", (PER_MODEL,)) for name in self.per_model)], align=True)

    def new_own(self) -> np.ndarray[Any, Any]:
        made = np.zeros(1, self.own)
        for name, value in {**self.state, **self.per_model}.items():
            made[name] = value
        return made

    @property
    def job(self) -> np.dtype[Any]:
        """JOB, with names for the parameters."""
        names = [*self.params, *(f"_{k}" for k in range(PARAMS - len(self.params)))]
        named = np.dtype({"names": names, "formats": ["f8"] * PARAMS, "itemsize": NO_NAMES.itemsize})
        columns = [(name, named if name == "params" else JOB[name]) for name in JOB.names or ()]
        return np.dtype(columns, align=True)

    def kind(self, argument: str) -> np.dtype[Any]:
        return {"job": self.job, "gpu": GPU, "segment": DONE, "model": OWNER, "own": self.own}[argument]

    def fields(self, argument: str) -> Fields:
        found = _fields(self.kind(argument))
        if argument == "job":
            found["params"] = dict.fromkeys(self.params)
        return found

    def signature(self, role: str, names: tuple[str, ...]) -> Any:
        returns = types.void if ROLES[role].returns == "nothing" else types.float64
        return returns(*(numba.from_dtype(self.kind(name)) for name in names))


@dataclass(frozen=True, slots=True)
class Compiled:
    """A function of a policy for the core. `code` keeps the compiled code at its address alive."""

    code: Any
    names: tuple[str, ...]  # names of its arguments

    @property
    def address(self) -> int:
        return int(self.code.address)


def Where(sms: float = 1.0) -> float:
    """The place of a segment, for a policy's `place`. If `sms`, a fraction of the GPU, is below 1, the segment runs in
    an SM partition; otherwise on all SMs. All partitions of an engine have the same size (`Engine(sm_partitions=8)`).

    >>> Where(sms=0.25)
    0.25
    """
    return float(sms)


def _compiled_where(sms: Any = 1.0) -> Callable[..., float]:
    def where(sms: Any = 1.0) -> float:
        return float(sms)

    return where


overload(Where)(_compiled_where)


def place(function: Any) -> str:
    code = function.__code__
    return f"{function.__name__} ({code.co_filename}:{code.co_firstlineno})"


def arguments(role: str, function: Any, layout: Layout) -> tuple[str, ...]:
    """The names of a function's arguments; PolicyError if the function cannot have that role."""
    expected = ROLES[role]
    if not inspect.isfunction(function):
        raise PolicyError(f"{role} is {function!r}: it must be a plain function {role}{expected.arguments}")
    where = f"{place(function)}:"
    if inspect.iscoroutinefunction(function) or inspect.isgeneratorfunction(function):
        raise PolicyError(
            f"{where} {role} must answer at once: write it with `def` and `return`, without `async` and `yield`"
        )
    given = inspect.signature(function).parameters
    names = tuple(given)
    for name, parameter in given.items():
        if name in expected.takes and parameter.kind is parameter.POSITIONAL_OR_KEYWORD:
            continue
        if name in expected.takes:
            raise PolicyError(
                f"{where} `{name}` must be a plain argument, as in `def {role}({expected.takes[0]})`, without * and /"
            )
        near = difflib.get_close_matches(name, expected.takes, 1)
        hint = f"did you mean `{near[0]}`?" if near else "use a number from outside, or params={…} of the models"
        if name == "own":
            hint = "numbers are kept between calls only in `state` and `per_model`, as `own`"
        raise PolicyError(
            f"{where} {role} takes {expected.arguments} or some of these, and `{name}` is not among them: {hint}"
        )
    if any(name not in names for name in expected.needs) or list(names) != sorted(names, key=expected.takes.index):
        always = f", `{expected.needs[0]}` always" if expected.needs else ""
        raise PolicyError(f"{where} {role} takes {expected.arguments} in this order{always}, not ({', '.join(names)})")
    if "own" in names and not (layout.state or layout.per_model):
        raise PolicyError(
            f"{where} {role} takes `own`, but the policy declares no numbers of its own: declare each with its first "
            "value, as in @policy(state={'limit': 0.5}, per_model={'used_ns': 0.0})"
        )
    return names
