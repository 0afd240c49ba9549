"""Finds variables that a policy may read before they have a value: compiled code would use any number instead."""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

Names = set[str]
_COMPREHENSIONS = (ast.ListComp, ast.GeneratorExp, ast.SetComp, ast.DictComp)


class Assigned:
    """Follows the statements of one function in their order; `found` has the first reads of variables without a value.
    """

    def __init__(self, body: Sequence[ast.stmt], arguments: Collection[str], outside: Mapping[str, Any]) -> None:
        self.found: list[ast.Name] = []
        self._outside = outside
        stored = {name for each in body for name in _stored(each)}
        self._local = stored - set(arguments)
        self._breaks: list[Names] = []
        self._continues: list[Names] = []
        self._run(body, set(arguments))

    def _run(self, body: Sequence[ast.stmt], have: Names | None) -> Names | None:
        """The variables with a value after some statements; None if their end is not reached."""
        for each in body:
            if have is None:
                return None
            have = self._step(each, set(have))
        return have

    def _step(self, node: ast.stmt, have: Names) -> Names | None:
        if isinstance(node, ast.If):
            self._read(node.test, have)
            return _both(self._run(node.body, have), self._run(node.orelse, have))
        if isinstance(node, ast.For | ast.While):
            return self._loop(node, have)
        if isinstance(node, ast.Break | ast.Continue):
            (self._breaks if isinstance(node, ast.Break) else self._continues).append(have)
            return None
        for each in ast.iter_child_nodes(node):
            if isinstance(each, ast.expr):
                self._read(each, have)
        if isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Name):
            self._need(node.target, have)
        if isinstance(node, ast.Return | ast.Raise):
            return None
        if isinstance(node, ast.AnnAssign) and node.value is None:
            return have
        return have | _stored(node)

    def _loop(self, node: ast.For | ast.While, have: Names) -> Names | None:
        outer, self._breaks, self._continues = (self._breaks, self._continues), [], []
        self._read(node.iter if isinstance(node, ast.For) else node.test, have)
        turn = have | _stored(node.target) if isinstance(node, ast.For) else have
        end = self._run(node.body, turn)
        for each in self._continues:
            end = _both(end, each)
        if isinstance(node, ast.While) and isinstance(node.test, ast.Constant) and node.test.value:
            end = None  # only `break` ends it
        elif not (isinstance(node, ast.For) and self._surely(node.iter)):
            end = have
        end = self._run(node.orelse, end)
        for each in self._breaks:
            end = _both(end, each)
        self._breaks, self._continues = outer
        return end

    def _surely(self, node: ast.expr) -> bool:
        """Whether a loop over this has at least one turn."""
        if isinstance(node, ast.Tuple | ast.List):
            return bool(node.elts)
        if isinstance(node, ast.Name):
            return isinstance(value := self._outside.get(node.id), tuple) and bool(value)
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and not node.keywords):
            return False
        if node.func.id == "enumerate":
            return bool(node.args) and self._surely(node.args[0])
        if node.func.id != "range" or not node.args:
            return False
        last = node.args[0]
        if isinstance(last, ast.Call) and ast.unparse(last.func) == "len":  # of a tuple, or of numbers for each model
            return len(node.args) == 1 and (isinstance(last.args[0], ast.Attribute) or self._surely(last.args[0]))
        numbers = [self._outside.get(each.id) if isinstance(each, ast.Name) else _number(each) for each in node.args]
        return all(isinstance(each, int) for each in numbers) and bool(range(*numbers))  # type: ignore[arg-type]

    # -- expressions

    def _read(self, node: ast.AST, have: Names) -> None:
        """Notes variables without a value in an expression; adds those that it gives a value."""
        if isinstance(node, _COMPREHENSIONS):
            have = set(have)
            for each in node.generators:
                self._read(each.iter, have)
                have |= _stored(each.target)
                for test in each.ifs:
                    self._read(test, have)
            for part in [node.key, node.value] if isinstance(node, ast.DictComp) else [node.elt]:
                self._read(part, have)
            return
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
            self._need(node, have)
        for child in ast.iter_child_nodes(node):
            self._read(child, have)
        if isinstance(node, ast.NamedExpr):
            have.add(node.target.id)

    def _need(self, node: ast.Name, have: Names) -> None:
        if node.id in self._local and node.id not in have:
            self.found.append(node)
            have.add(node.id)  # once is enough


def _number(node: ast.expr) -> Any:
    try:
        return ast.literal_eval(node)
    except ValueError:
        return None


def _stored(node: ast.AST) -> Names:
    """The variables that get a value in a statement or a target, other than those of comprehensions."""
    if isinstance(node, _COMPREHENSIONS):
        return set()
    inside: Iterable[Names] = (_stored(each) for each in ast.iter_child_nodes(node))
    own = {node.id} if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) else set()
    return own.union(*inside)


def _both(one: Names | None, other: Names | None) -> Names | None:
    if one is None or other is None:
        return other if one is None else one
    return one & other
