"""Priorities of models, turns and other processes: integers that the core's tables can hold."""

from __future__ import annotations

import operator
from typing import Any

from paellapy.scheduler.core.codes import NEVER

_LONGEST = 40


def checked_priority(given: Any) -> int:
    """The priority as an integer; ValueError if it is none, or out of range.

    >>> checked_priority(-1)
    -1
    """
    try:
        number = int(given) if isinstance(given, float) and given.is_integer() else operator.index(given)
    except TypeError:
        number = NEVER
    if not -NEVER < number < NEVER:
        raise ValueError(f"priority={shortened(given)}; the priority must be an integer between -2⁶² and 2⁶²")
    return number


def shortened(given: Any) -> str:
    """A value as in Python, cut where it is long."""
    try:
        text = repr(given)
    except ValueError:  # Python does not print integers of many thousand digits
        text = f"an integer of {given.bit_length()} bits"
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}…"
