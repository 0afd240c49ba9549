"""Values that callers give: the rules that they must meet, and one sentence for those that do not."""

from __future__ import annotations

import difflib
import math
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields
from typing import Any, NamedTuple

import numpy as np

from paellapy.instrument.errors import ArgumentError, PaellaError

_LONGEST = 40


class Rule(NamedTuple):
    """Whether a value is valid, and the valid values in words."""

    fits: Callable[[Any], bool]
    wanted: str


def is_finite_number(value: Any) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float | np.integer | np.floating):
        return False
    plain = value.item() if isinstance(value, np.generic) else value  # a limit may not fit a number of few bits
    return bool(-sys.float_info.max <= plain <= sys.float_info.max)  # false for NaN too


def number(least: float, most: float = sys.float_info.max, *, above: bool = False, infinite: bool = False) -> Rule:
    """Numbers from `least`, or above it, to `most`, and with `infinite` also infinity.

    >>> number(0, above=True).fits(float("nan"))
    False
    """

    def fits(value: Any) -> bool:
        if isinstance(value, np.generic):
            value = value.item()
        if infinite and isinstance(value, float) and value == math.inf:
            return True
        return is_finite_number(value) and (least < value if above else least <= value) and bool(value <= most)

    upto = f" and at most {most:g}" if most < sys.float_info.max else ""
    return Rule(fits, f"a {'' if infinite else 'finite '}number {'above' if above else 'of at least'} {least:g}{upto}")


def integer(least: int, most: int) -> Rule:
    """Integers from `least` to `most`.

    >>> integer(1, 8).fits(2.0)
    False
    """

    def fits(value: Any) -> bool:
        return isinstance(value, int | np.integer) and not isinstance(value, bool) and bool(least <= value <= most)

    return Rule(fits, f"an integer from {least:,} to {most:,}")


def one_of(*valid: str) -> Rule:
    return Rule(lambda value: isinstance(value, str) and value in valid, f"one of {', '.join(valid)}")


def or_none(rule: Rule) -> Rule:
    return Rule(lambda value: value is None or rule.fits(value), f"{rule.wanted}, or None")


TRUE_OR_FALSE = Rule(lambda value: isinstance(value, bool), "True or False")


def check_values(
    given: Any, rules: Mapping[str, Rule], error: type[PaellaError] = ArgumentError, whose: str = "", **facts: Any
) -> None:
    """Raises the error for the first value that breaks its rule; `given` is a dict, or an object with these fields."""
    for name, rule in rules.items():
        value = given[name] if isinstance(given, Mapping) else getattr(given, name)
        if not _fits(rule, value):
            said = f"{whose}{name}={shortened(value)}: it must be {rule.wanted}"
            raise error(said, field=name, given=value, limit=rule.wanted, **facts)


def _fits(rule: Rule, value: Any) -> bool:
    try:
        return bool(rule.fits(value))
    except (TypeError, ValueError):  # an array cannot be compared with one value
        return False


def listed(given: Any) -> list[Any]:
    """The values of a list, or of anything else with several values; none of anything with one."""
    try:
        return list(given)
    except TypeError:  # a NumPy array of one number says that it has several values
        return []


def check_names(function: str, given: Iterable[str], options: type[Any]) -> None:
    """Raises ArgumentError for a name that is no field of the class of a function's options."""
    names = [each.name for each in fields(options)]
    for name in given:
        if name not in names:
            near = difflib.get_close_matches(name, names, 1)
            hint = f"did you mean {near[0]}? " if near else ""
            text = f"{function} has no option {name!r}: {hint}The options are {', '.join(names)}"
            raise ArgumentError(text, field=name, remedy=near[0] if near else None)


def shortened(given: Any) -> str:
    """A value as in Python, cut where it is long."""
    try:
        text = repr(given)
    except ValueError:  # Python does not print integers of many thousand digits
        text = f"an integer of {given.bit_length()} bits"
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}…"
