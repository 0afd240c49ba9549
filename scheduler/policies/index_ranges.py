"""Which integers an index in a policy's source can be: compiled code must never index beyond the end.

An index is accepted if its range follows from the source alone, so that nothing has to be checked at run time.
"""

from __future__ import annotations

import ast
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from paellapy.scheduler.core.job import PER_MODEL

Range = tuple[float, float]  # least and largest value
ANY: Range = (-math.inf, math.inf)
_ROWS: Range = (0, PER_MODEL - 1)


class IndexRanges:
    """The ranges of the integers in one function."""

    def __init__(
        self, walk: Sequence[ast.AST], above: Mapping[ast.AST, ast.AST], outside: Mapping[str, Any],
        per_model: Iterable[str],
    ) -> None:  # fmt: skip
        self._above, self._outside = above, outside
        self._rows = {f"own.{name}" for name in per_model}
        self._stored: dict[str, list[ast.Name]] = {}
        self._called_on: set[str] = set()  # names with methods in use, such as list.pop
        for each in walk:
            if isinstance(each, ast.Name) and not isinstance(each.ctx, ast.Load):
                self._stored.setdefault(each.id, []).append(each)
            if isinstance(each, ast.Attribute) and isinstance(each.value, ast.Name):
                self._called_on.add(each.value.id)

    def length(self, node: ast.expr) -> int | None:
        """The number of entries of a tuple or a list; None if it does not follow from the source."""
        if isinstance(node, ast.Tuple | ast.List):
            return None if any(isinstance(each, ast.Starred) for each in node.elts) else len(node.elts)
        if isinstance(node, ast.Subscript):  # an entry of a tuple of tuples
            entries = self._entries(node.value)
            sizes = {len(each) if isinstance(each, tuple) else 0 for each in entries}
            return min(sizes, default=None)
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

    def _entries(self, node: ast.expr) -> tuple[Any, ...]:
        value = self._outside.get(node.id) if isinstance(node, ast.Name) and node.id not in self._stored else None
        return value if isinstance(value, tuple) else ()

    def fits(self, index: ast.expr, length: int, from_end: bool = False) -> bool:
        low, high = self.of(index)
        return (low >= 0 and high < length) or (from_end and -length <= low <= high < 0)

    def of(self, node: ast.expr, seen: frozenset[str] = frozenset()) -> Range:
        """The range of an expression."""
        if isinstance(node, ast.Constant):
            return (node.value, node.value) if isinstance(node.value, int) else ANY
        if isinstance(node, ast.Attribute):
            return _ROWS if ast.unparse(node) in ("job.model", "model.model") else ANY
        if isinstance(node, ast.Compare) or (isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not)):
            return (0, 1)
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            low, high = self.of(node.operand, seen)
            return (-high, -low)
        if isinstance(node, ast.IfExp):
            return _union([self.of(node.body, seen), self.of(node.orelse, seen)])
        if isinstance(node, ast.BinOp):
            return self._computed(node, seen)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and not node.keywords:
            return self._called(node.func.id, node.args, seen)
        if isinstance(node, ast.Name):
            return self._named(node.id, seen)
        return ANY

    def _computed(self, node: ast.BinOp, seen: frozenset[str]) -> Range:
        left, right = self.of(node.left, seen), self.of(node.right, seen)
        if isinstance(node.op, ast.Add):
            return (left[0] + right[0], left[1] + right[1])
        if isinstance(node.op, ast.Sub):
            return (left[0] - right[1], left[1] - right[0])
        # Only of integers: the remainder of a small negative float by n is n itself, after rounding.
        if isinstance(node.op, ast.Mod) and right[0] > 0 and self._whole(node.left):
            return (0, right[1] - 1)
        return ANY

    def _whole(self, node: ast.expr) -> bool:
        if isinstance(node, ast.Call):
            return ast.unparse(node.func) in ("int", "len")
        return ast.unparse(node) in ("job.model", "job.tenant", "model.model") or self.of(node) != ANY

    def _called(self, name: str, given: Sequence[ast.expr], seen: frozenset[str]) -> Range:
        if name == "len" and len(given) == 1:
            size = self.length(given[0])
            return ANY if size is None else (size, size)
        ranges = [self.of(each, seen) for each in given]
        if name == "int" and len(ranges) == 1:
            return (0, 1) if ast.unparse(given[0]) == "job.started" else ranges[0]
        if name == "min" and ranges:
            return (min(low for low, _ in ranges), min(high for _, high in ranges))
        if name == "max" and ranges:
            return (max(low for low, _ in ranges), max(high for _, high in ranges))
        return ANY

    def _named(self, name: str, seen: frozenset[str]) -> Range:
        if name not in self._stored:
            value = self._outside.get(name)
            return (value, value) if isinstance(value, int) else ANY
        if name in seen:
            return ANY
        return _union([self._bound(each, seen | {name}) for each in self._stored[name]])

    def _bound(self, node: ast.Name, seen: frozenset[str]) -> Range:
        """The range of the values that one statement gives a name."""
        above = self._above.get(node)
        if (assigned := self._assigned(node)) is not None:
            return self.of(assigned.value, seen)
        if isinstance(above, ast.For) and above.target is node and isinstance(above.iter, ast.Call):
            call = above.iter
            if ast.unparse(call.func) == "range" and 1 <= len(call.args) <= 2:
                first = self.of(call.args[0], seen) if len(call.args) == 2 else (0, 0)
                return (first[0], self.of(call.args[-1], seen)[1] - 1)
        return ANY

    def _assigned(self, node: ast.Name) -> ast.Assign | None:
        above = self._above.get(node)
        return above if isinstance(above, ast.Assign) and above.targets == [node] else None


def _union(ranges: Sequence[Range]) -> Range:
    return (min(low for low, _ in ranges), max(high for _, high in ranges))
