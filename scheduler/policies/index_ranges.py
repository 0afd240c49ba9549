"""Which integers an index in a policy's source can be: compiled code must never index beyond the end.

An index is accepted if its range follows from the source alone, so that nothing has to be checked at run time. The
statements are followed in their order, with the range of each variable.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from paellapy.scheduler.policies.expressions import Expressions, Ranges, constant, parts
from paellapy.scheduler.policies.integers import INT, Value, computed, exact, union

_UNROLLED = 16  # Shorter loops are followed turn by turn.
_TURNS = 8  # of a loop, until its variables count as unknown


class IndexRanges(Expressions):
    """The ranges of the indices in one function."""

    def __init__(
        self, body: Sequence[ast.AST], above: Mapping[ast.AST, ast.AST], arguments: Iterable[str],
        outside: Mapping[str, Any], per_model: Iterable[str],
    ) -> None:  # fmt: skip
        super().__init__(body, above, arguments, outside, per_model)
        self._breaks: list[Ranges] = []
        self._continues: list[Ranges] = []
        if isinstance(body[0], ast.expr):  # of a lambda
            self.of(body[0], {})
        else:
            self._run([each for each in body if isinstance(each, ast.stmt)], {})

    def fits(self, index: ast.expr, length: int, from_end: bool = False) -> bool:
        found = self._at(index)
        if found is None:
            return False
        low, high = found
        return (low >= 0 and high < length) or (from_end and -length <= low <= high < 0)

    def _at(self, index: ast.expr) -> Value:
        return self._found[index] if index in self._found else self.of(index, {})  # of code that is never reached

    # -- statements

    def _run(self, body: Sequence[ast.stmt], now: Ranges | None) -> Ranges | None:
        """The ranges after some statements; None if their end is not reached."""
        for each in body:
            if now is None:
                return None
            now = self._step(each, dict(now))
        return now

    def _step(self, node: ast.stmt, now: Ranges) -> Ranges | None:
        if isinstance(node, ast.If):
            self.of(node.test, now)
            yes = self._run(node.body, self._given(node.test, True, now))
            return _either(yes, self._run(node.orelse, self._given(node.test, False, now)))
        if isinstance(node, ast.For | ast.While):
            return self._loop(node, now)
        if isinstance(node, ast.Break | ast.Continue):
            (self._breaks if isinstance(node, ast.Break) else self._continues).append(now)
            return None
        values = {each: self.of(each, now) for each in parts(node)}
        if isinstance(node, ast.Return | ast.Raise):
            return None
        if isinstance(node, ast.Assign):
            for target in node.targets:
                self._assign(target, node.value, values[node.value], now)
            return now
        if isinstance(node, ast.AnnAssign) and node.value is not None:
            self._assign(node.target, node.value, values[node.value], now)
            return now
        if isinstance(node, ast.AugAssign):
            if isinstance(node.target, ast.Name):
                self._bind(node.target, computed(node.op, now.get(node.target.id), values[node.value]), now)
            return now
        if isinstance(node, ast.Expr | ast.Pass | ast.AnnAssign):
            return now
        return {}  # other statements are refused for another reason

    def _assign(self, target: ast.expr, value: ast.expr, found: Value, now: Ranges) -> None:
        before = dict(now)
        self._bind(target, found, now)
        if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple) and len(target.elts) == len(value.elts):
            for each, given in zip(target.elts, value.elts, strict=True):
                self._bind(each, self.of(given, before), now)

    def _loop(self, node: ast.For | ast.While, now: Ranges) -> Ranges | None:
        outer = self._breaks, self._continues
        self._breaks = []
        ends: Ranges | None
        if isinstance(node, ast.For):
            self.of(node.iter, now)
            each_turn = self._turns(node.iter, now)
            if each_turn is not None:
                ends = now
                for value in each_turn:
                    ends = self._once(node, ends, value) if ends is not None else None
            else:
                turn, surely = self._turn(node.iter, now), self._surely(node.iter, now)
                last = self._once(node, self._repeated(node, now, turn), turn)
                ends = last if surely else _either(now, last)
        else:
            head = self._repeated(node, now, None)
            self._once(node, head, None)
            forever = isinstance(node.test, ast.Constant) and bool(node.test.value)
            ends = None if forever else self._given(node.test, False, head)
        breaks = self._breaks
        self._breaks, self._continues = outer
        ends = self._run(node.orelse, ends)
        for each in breaks:
            ends = _either(ends, each)
        return ends

    def _once(self, node: ast.For | ast.While, now: Ranges, turn: Value) -> Ranges | None:
        """The ranges after one turn of a loop."""
        now, self._continues = dict(now), []
        if isinstance(node, ast.For):
            self._bind_turn(node.target, node.iter, turn, now)
        else:
            self.of(node.test, now)
            now = self._given(node.test, True, now)
        end = self._run(node.body, now)
        for each in self._continues:
            end = _either(end, each)
        return end

    def _repeated(self, node: ast.For | ast.While, before: Ranges, turn: Value) -> Ranges:
        """The ranges before any turn of a loop, the first or a later one."""
        self._searching += 1
        breaks, head = self._breaks, before
        for k in range(_TURNS):
            self._breaks = []
            again = _either(before, self._once(node, head, turn)) or {}
            if _within(again, head):
                head = again  # at most as wide, and still true before each turn
                again = _either(before, self._once(node, head, turn)) or {}
                head = again if _within(again, head) else head
                break
            head = _widened(head, again) if k > 1 else _either(head, again) or {}
        else:
            changed = {each.id for each in ast.walk(node) if isinstance(each, ast.Name) and each.id in self._stored}
            head = {name: value for name, value in before.items() if name not in changed and "." not in name}
        self._breaks = breaks
        self._searching -= 1
        return head

    def _turns(self, node: ast.expr, now: Ranges) -> list[Value] | None:
        """The variable in every turn of a short loop; None if it may be long."""
        if isinstance(node, ast.Tuple) and (self.length(node) or _UNROLLED + 1) <= _UNROLLED:
            return [constant(each.value) if isinstance(each, ast.Constant) else None for each in node.elts]
        if isinstance(node, ast.Name) and 0 < len(self._entries(node)) <= _UNROLLED:
            return [constant(each) for each in self._entries(node)]
        found = self._range(node, now)
        if found is None or any(low != high for low, high in found) or not found[2][0]:
            return None
        turns = range(*(low for low, _ in found))
        return [(k, k) for k in turns] if len(turns[: _UNROLLED + 1]) <= _UNROLLED else None

    def _surely(self, node: ast.expr, now: Ranges) -> bool:
        """Whether a loop has at least one turn."""
        found = self._range(node, now)
        return found is not None and exact(*found) and found[2][0] > 0 and found[0][1] < found[1][0]


def _either(one: Ranges | None, other: Ranges | None) -> Ranges | None:
    if one is None or other is None:
        return other if one is None else one
    return {name: found for name in one if name in other and (found := union([one[name], other[name]]))}


def _within(small: Ranges, large: Ranges) -> bool:
    return all(
        name in small and low <= small[name][0] and small[name][1] <= high for name, (low, high) in large.items()
    )


def _widened(old: Ranges, new: Ranges) -> Ranges:
    """Ranges that stay as they are while a loop goes on: an end that still moves goes all the way."""
    return {
        name: (low if new[name][0] >= low else INT[0], high if new[name][1] <= high else INT[1])
        for name, (low, high) in old.items()
        if name in new
    }
