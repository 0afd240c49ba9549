"""Parameters of models, by name: numbers that a model carries for policies. A policy declares those it reads."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Mapping
from typing import Any

import numpy as np

from paellapy.scheduler.core.job import PARAMS
from paellapy.scheduler.core.state import State


def is_finite_number(value: Any) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float | np.integer | np.floating):
        return False
    return bool(-sys.float_info.max <= value <= sys.float_info.max)  # false for NaN too


def checked_params(given: Mapping[str, float]) -> dict[str, float]:
    """The parameters as floats; ValueError if they are not valid.

    >>> checked_params({"limit": 1})
    {'limit': 1.0}
    """
    if not isinstance(given, Mapping) or len(given) > PARAMS:
        raise ValueError(
            f"params={given!r}: it must be a dict of at most {PARAMS} numbers, as in params={{'limit': 0.5}}"
        )
    for name, value in given.items():
        if not isinstance(name, str) or not name.isidentifier():
            raise ValueError(
                f"params has the name {name!r}: it must be an identifier, because policies read it as job.params.NAME"
            )
        if not is_finite_number(value):
            raise ValueError(f"params[{name!r}] is {value!r}: it must be a finite number")
    return {name: float(value) for name, value in given.items()}


def _key(name: str) -> int:
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little") | 1  # 0 stands for no name


def give_params(state: State, model: int, params: Mapping[str, float]) -> None:
    """Sets the parameters of a model that is being installed."""
    state.given[model] = 0
    for k, (name, value) in enumerate(params.items()):
        state.given[model, k] = (_key(name), value)
    _resolve(state, model)


def want_params(state: State, params: Mapping[str, float]) -> None:
    """Sets the parameters that the policy reads, with the defaults for models without them."""
    state.wanted[...] = 0
    for k, (name, value) in enumerate(params.items()):
        state.wanted[k] = (_key(name), value)
    for model in range(len(state.given)):
        _resolve(state, model)


def _resolve(state: State, model: int) -> None:
    values = dict(zip(state.given["key"][model], state.given["value"][model], strict=True))
    for k, (key, value) in enumerate(zip(state.wanted["key"], state.wanted["value"], strict=True)):
        state.param[model, k] = values.get(key, value) if key else 0.0
