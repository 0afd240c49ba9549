"""Parameters of models, by name: numbers that a model carries for policies. A policy says which of them it reads."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping

import numpy as np

from paellapy.scheduler.core.job import PARAMS
from paellapy.scheduler.core.state import State


def checked_params(given: Mapping[str, float]) -> dict[str, float]:
    """The same as floats; ValueError says what is wrong.

    >>> checked_params({"limit": 1})
    {'limit': 1.0}
    """
    if not isinstance(given, Mapping) or len(given) > PARAMS:
        raise ValueError(f"params={given!r}: give at most {PARAMS} numbers by name, as in params={{'limit': 0.5}}")
    for name, value in given.items():
        if not isinstance(name, str) or not name.isidentifier():
            raise ValueError(f"params has the name {name!r}: policies read it as job.params.NAME, so give a plain name")
        number = isinstance(value, int | float | np.number) and not isinstance(value, bool)
        if not number or not math.isfinite(value):
            raise ValueError(f"params[{name!r}] is {value!r}: give a finite number")
    return {name: float(value) for name, value in given.items()}


def _key(name: str) -> int:
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little") | 1  # 0: no name


def give_params(state: State, model: int, params: Mapping[str, float]) -> None:
    """A model that is being installed has these."""
    state.given[model] = 0
    for k, (name, value) in enumerate(params.items()):
        state.given[model, k] = (_key(name), value)
    _resolve(state, model)


def want_params(state: State, params: Mapping[str, float]) -> None:
    """The policy reads these, and takes the values here where a model has none."""
    state.wanted[...] = 0
    for k, (name, value) in enumerate(params.items()):
        state.wanted[k] = (_key(name), value)
    for model in range(len(state.given)):
        _resolve(state, model)


def _resolve(state: State, model: int) -> None:
    values = dict(zip(state.given["key"][model], state.given["value"][model], strict=True))
    for k, (key, value) in enumerate(zip(state.wanted["key"], state.wanted["value"], strict=True)):
        state.param[model, k] = values.get(key, value) if key else 0.0
