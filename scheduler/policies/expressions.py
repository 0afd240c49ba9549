"""The range of an expression in a policy's source, given the ranges of the variables at this place."""

from __future__ import annotations

import ast
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from paellapy.scheduler.core.job import PER_MODEL
from paellapy.scheduler.policies.integers import (
    EXACT,
    INT,
    MIRRORED,
    NEGATED,
    Range,
    Value,
    compared,
    computed,
    exact,
    largest,
    least,
    negative,
    union,
)

Ranges = dict[str, Range]  # by name, of variables that are integers here
_ROWS: Range = (0, PER_MODEL - 1)
_FIELDS: Ranges = {"job.model": _ROWS, "model.model": _ROWS, "job.tenant": INT, "segment.number": INT}


class Expressions:
    """The ranges of the expressions in one function, given the ranges of its variables."""

    def __init__(
        self, body: Sequence[ast.AST], above: Mapping[ast.AST, ast.AST], arguments: Iterable[str],
        outside: Mapping[str, Any], per_model: Iterable[str],
    ) -> None:  # fmt: skip
        self._above, self._arguments, self._outside = above, set(arguments), outside
        self._rows = {f"own.{name}" for name in per_model}
        self._stored: dict[str, list[ast.Name]] = {}
        self._called_on: set[str] = set()  # names with methods in use, such as list.pop
        self._unclear: set[str] = set()  # names assigned within expressions
        for each in (each for part in body for each in ast.walk(part)):
            if isinstance(each, ast.Name) and not isinstance(each.ctx, ast.Load):
                self._stored.setdefault(each.id, []).append(each)
            if isinstance(each, ast.Attribute) and isinstance(each.value, ast.Name):
                self._called_on.add(each.value.id)
            if isinstance(each, ast.NamedExpr):
                self._unclear.add(each.target.id)
        self._found: dict[ast.expr, Value] = {}  # of every index
        self._searching = 0  # > 0: the ranges of a loop's variables are not final yet

    def length(self, node: ast.expr) -> int | None:
        """The number of entries of a tuple or a list; None if it does not follow from the source."""
        if isinstance(node, ast.Tuple | ast.List):
            return None if any(isinstance(each, ast.Starred) for each in node.elts) else len(node.elts)
        if isinstance(node, ast.Subscript):  # an entry of a tuple of tuples
            entries, index = self._entries(node.value), node.slice
            if isinstance(index, ast.Constant) and isinstance(index.value, int) and 0 <= index.value < len(entries):
                entries = entries[index.value : index.value + 1]
            sizes = {len(each) if isinstance(each, tuple) else 0 for each in entries}
            return sizes.pop() if len(sizes) == 1 else None
        if isinstance(node, ast.Attribute):
            return PER_MODEL if ast.unparse(node) in self._rows else None
        if not isinstance(node, ast.Name) or node.id in self._called_on:
            return None
        if node.id not in self._stored:
            value = self._outside.get(node.id)
            return len(value) if isinstance(value, tuple) else None
        made = [above.value for each in self._stored[node.id] if (above := self._assigned(each)) is not None]
        sizes_made = [self.length(each) if isinstance(each, ast.Tuple | ast.List) else None for each in made]
        if len(made) != len(self._stored[node.id]) or len(set(sizes_made)) != 1:
            return None
        return sizes_made[0]

    def _assigned(self, node: ast.Name) -> ast.Assign | None:
        above = self._above.get(node)
        return above if isinstance(above, ast.Assign) and above.targets == [node] else None

    def _entries(self, node: ast.expr) -> tuple[Any, ...]:
        value = self._outside.get(node.id) if isinstance(node, ast.Name) and node.id not in self._stored else None
        return value if isinstance(value, tuple) else ()

    # -- expressions

    def of(self, node: ast.expr, now: Ranges) -> Value:
        """The range of an expression; notes the ranges of the indices in it."""
        if isinstance(node, ast.IfExp):
            self.of(node.test, now)
            yes = self.of(node.body, self._given(node.test, True, now))
            return union([yes, self.of(node.orelse, self._given(node.test, False, now))])
        if isinstance(node, ast.BoolOp):
            values, given = [], now
            for each in node.values:
                values.append(self.of(each, given))
                given = self._given(each, isinstance(node.op, ast.And), given)
            return union(values)
        if isinstance(node, ast.ListComp | ast.GeneratorExp | ast.SetComp | ast.DictComp):
            self._comprehended(node, now)
            return None
        inner = {each: self.of(each, now) for each in parts(node)}
        if isinstance(node, ast.Subscript):
            if not self._searching:
                seen = self._found.get(node.slice, inner[node.slice])
                self._found[node.slice] = union([seen, inner[node.slice]])
            return union([constant(each) for each in self._entries(node.value)])
        if isinstance(node, ast.Constant):
            return constant(node.value)
        if isinstance(node, ast.Name | ast.Attribute):
            return self._read(node, now)
        if isinstance(node, ast.Compare) or (isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not)):
            return (0, 1)
        if isinstance(node, ast.UnaryOp):
            return negative(inner[node.operand]) if isinstance(node.op, ast.USub) else None
        if isinstance(node, ast.BinOp):
            return computed(node.op, inner[node.left], inner[node.right])
        if isinstance(node, ast.Call) and not node.keywords and self._is_builtin(node.func):
            return self._called(ast.unparse(node.func), node.args, [inner[each] for each in node.args])
        return None

    def _is_builtin(self, node: ast.expr) -> bool:
        return isinstance(node, ast.Name) and node.id not in self._stored and node.id not in self._outside

    def _read(self, node: ast.Name | ast.Attribute, now: Ranges) -> Value:
        if isinstance(node, ast.Attribute):
            name = ast.unparse(node)
            return now.get(name, _FIELDS.get(name)) if ast.unparse(node.value) in self._arguments else None
        if node.id in self._stored:
            return None if node.id in self._unclear else now.get(node.id)
        return now.get(node.id, constant(self._outside.get(node.id)))

    def _called(self, name: str, given: Sequence[ast.expr], values: Sequence[Value]) -> Value:
        if name in ("min", "max"):
            return least(values) if name == "min" else largest(values)
        if len(given) != 1:
            return None
        if name == "len":
            size = self.length(given[0])
            return (0, EXACT) if size is None else (size, size)
        if name == "int":  # NaN passes every clamp, and becomes any integer
            return values[0] or ((0, 1) if ast.unparse(given[0]) == "job.started" else INT)
        if name == "bool":
            return (0, 1)
        if name == "abs" and values[0] is not None:
            return largest([values[0], negative(values[0]), (0, 0)]) if exact(values[0]) else INT
        return None

    def _comprehended(
        self, node: ast.ListComp | ast.GeneratorExp | ast.SetComp | ast.DictComp, now: Ranges
    ) -> None:
        now = dict(now)
        for each in node.generators:
            self.of(each.iter, now)
            self._bind_turn(each.target, each.iter, self._turn(each.iter, now), now)
            for test in each.ifs:
                self.of(test, now)
                now = self._given(test, True, now)
        for part in [node.key, node.value] if isinstance(node, ast.DictComp) else [node.elt]:
            self.of(part, now)

    # -- conditions

    def _given(self, test: ast.expr, holds: bool, now: Ranges) -> Ranges:
        """The ranges where a condition holds, or does not."""
        if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
            return self._given(test.operand, not holds, now)
        if isinstance(test, ast.BoolOp) and isinstance(test.op, ast.And) == holds:
            for each in test.values:
                now = self._given(each, holds, now)
        if isinstance(test, ast.Compare) and (holds or len(test.ops) == 1):
            sides = [test.left, *test.comparators]
            for left, op, right in zip(sides, test.ops, sides[1:], strict=False):
                if type(op) in MIRRORED:
                    true = type(op) if holds else NEGATED[type(op)]
                    now = self._narrowed(left, true, right, now)
                    now = self._narrowed(right, MIRRORED[true], left, now)
        return now

    def _narrowed(self, node: ast.expr, op: type[ast.cmpop], other: ast.expr, now: Ranges) -> Ranges:
        """The ranges where `node op other` holds."""
        if not isinstance(node, ast.Name | ast.Attribute):
            return now
        value, bound = self._read(node, now), self._limit(other, now)
        if value is None or bound is None:
            return now
        return {**now, ast.unparse(node): compared(value, op, bound)}

    def _limit(self, node: ast.expr, now: Ranges) -> tuple[float, float] | None:
        if isinstance(node, ast.Constant) and isinstance(node.value, float) and math.isfinite(node.value):
            return (node.value, node.value)
        return self._again(node, now)

    def _again(self, node: ast.expr, now: Ranges) -> Value:
        """The range of an expression whose indices are noted elsewhere."""
        self._searching += 1
        value = self.of(node, now)
        self._searching -= 1
        return value

    def _bind(self, target: ast.expr, value: Value, now: Ranges) -> None:
        if isinstance(target, ast.Name) and value is not None:
            now[target.id] = value
            return
        for each in ast.walk(target):
            if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store):
                now.pop(each.id, None)

    # -- loops

    def _range(self, node: ast.expr, now: Ranges) -> tuple[Range, Range, Range] | None:
        """The start, stop and step of range(…), each any integer if it is not known; None for other expressions."""
        if not (isinstance(node, ast.Call) and self._is_builtin(node.func) and ast.unparse(node.func) == "range"):
            return None
        values = [self._again(each, now) or INT for each in node.args]
        start, stop, step = [(0, 0), *values, (1, 1)] if len(values) == 1 else [*values, (1, 1), (1, 1)][:3]
        return start, stop, step

    def _turn(self, node: ast.expr, now: Ranges) -> Value:
        """The range of a loop's variable; for enumerate(…), of its first variable."""
        if self._enumerates(node):
            size = self.length(node.args[0])  # type: ignore[attr-defined]
            return (0, EXACT if size is None else max(size - 1, 0))
        found = self._range(node, now)
        if found is None:
            return None
        (first, last), (lower, upper), step = found
        # The compiled loop computes stop - start, which must not overflow.
        if not exact((first, last), step) or not (exact(found[1]) or (upper <= EXACT and last <= 0 < step[0])):
            return INT
        if step[0] <= 0 <= step[1]:
            return INT
        return (first, max(first, upper - 1)) if step[0] > 0 else (min(last, lower + 1), last)

    def _enumerates(self, node: ast.expr) -> bool:
        call = isinstance(node, ast.Call) and self._is_builtin(node.func) and ast.unparse(node.func) == "enumerate"
        return call and len(node.args) == 1 and not node.keywords  # type: ignore[attr-defined]

    def _bind_turn(self, target: ast.expr, node: ast.expr, turn: Value, now: Ranges) -> None:
        """Gives a loop's variables their values in one turn."""
        self._bind(target, None, now)
        if isinstance(target, ast.Name) and not self._enumerates(node):
            self._bind(target, turn, now)
        if isinstance(target, ast.Tuple) and self._enumerates(node):
            self._bind(target.elts[0], turn, now)


def parts(node: ast.AST) -> list[ast.expr]:
    found = [each.value if isinstance(each, ast.keyword) else each for each in ast.iter_child_nodes(node)]
    return [each for each in found if isinstance(each, ast.expr)]


def constant(value: Any) -> Value:
    return (int(value), int(value)) if isinstance(value, int) and exact((value, value)) else None
