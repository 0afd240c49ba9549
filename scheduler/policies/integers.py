"""Arithmetic on ranges of 64-bit integers, as compiled code computes them: sums that overflow can be any integer."""

from __future__ import annotations

import ast
import itertools
import math
from collections.abc import Sequence

Range = tuple[int, int]  # least and largest value
Value = Range | None  # None: not known to be an integer; it may be a fraction, infinite or NaN
INT: Range = (-(2**63), 2**63 - 1)
EXACT = 2**53  # Up to here integers are exact even if compiled code keeps them as floats.

MIRRORED: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.Gt, ast.Gt: ast.Lt, ast.LtE: ast.GtE, ast.GtE: ast.LtE, ast.Eq: ast.Eq, ast.NotEq: ast.NotEq,
}  # fmt: skip
NEGATED: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.GtE, ast.Gt: ast.LtE, ast.LtE: ast.Gt, ast.GtE: ast.Lt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
}  # fmt: skip


def exact(*values: Range) -> bool:
    return all(low >= -EXACT and high <= EXACT for low, high in values)


def union(values: Sequence[Value]) -> Value:
    known = [each for each in values if each is not None]
    if not known or len(known) != len(values):
        return None
    return (min(low for low, _ in known), max(high for _, high in known))


def least(values: Sequence[Value]) -> Value:
    known = [each for each in values if each is not None]
    if not known or len(known) != len(values):  # with NaN among them, the result may be NaN
        return None
    return (min(low for low, _ in known), min(high for _, high in known))


def largest(values: Sequence[Value]) -> Value:
    known = [each for each in values if each is not None]
    if not known or len(known) != len(values):
        return None
    return (max(low for low, _ in known), max(high for _, high in known))


def negative(value: Value) -> Value:
    if value is None:
        return None
    return (-value[1], -value[0]) if exact(value) else INT


def computed(op: ast.operator, left: Value, right: Value) -> Value:
    """The range of `left op right`."""
    if left is None or right is None:
        # Also for remainders: the remainder of a small negative fraction by n is n itself, after rounding.
        return None
    if isinstance(op, ast.Mod):
        return _remainder(left, right)
    if isinstance(op, ast.BitAnd):
        tops = [high for low, high in (left, right) if low >= 0]
        return (0, min(tops)) if tops else INT
    if isinstance(op, ast.Add):
        found = (left[0] + right[0], left[1] + right[1])
    elif isinstance(op, ast.Sub):
        found = (left[0] - right[1], left[1] - right[0])
    elif isinstance(op, ast.Mult):
        ends = [a * b for a, b in itertools.product(left, right)]
        found = (min(ends), max(ends))
    elif isinstance(op, ast.FloorDiv):
        found = _ends(left, right) if right[0] > 0 else INT
    elif isinstance(op, ast.RShift) and right[0] >= 0 and right[1] < 63:
        found = _ends(left, (2 ** right[0], 2 ** right[1]))
    else:  # such as / and **, whose results may be fractions
        return None
    return found if exact(left, right, found) else INT


def _ends(left: Range, right: Range) -> Range:
    ends = [a // b for a, b in itertools.product(left, right)]
    return (min(ends), max(ends))


def _remainder(left: Range, right: Range) -> Range:
    if right[0] <= 0 or not exact(right):
        return INT
    if left[0] < 0:
        return (0, right[1] - 1)
    return left if left[1] < right[0] else (0, min(left[1], right[1] - 1))


def compared(value: Range, op: type[ast.cmpop], bound: tuple[float, float]) -> Range:
    """The part of a range where `value op bound` holds; the whole range if there is no such part."""
    low, high = value
    if op is ast.Lt:
        high = min(high, math.ceil(bound[1]) - 1)
    elif op is ast.LtE:
        high = min(high, math.floor(bound[1]))
    elif op is ast.Gt:
        low = max(low, math.floor(bound[0]) + 1)
    elif op is ast.GtE:
        low = max(low, math.ceil(bound[0]))
    elif op is ast.Eq:
        low, high = max(low, math.ceil(bound[0])), min(high, math.floor(bound[1]))
    elif bound[0] == bound[1]:  # !=
        low, high = low + (low == bound[0]), high - (high == bound[0])
    return (low, high) if low <= high else value
