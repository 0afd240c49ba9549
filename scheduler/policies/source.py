"""Finds forbidden operations in a policy's source before it is compiled, so that errors name the line and the remedy.

Compiled code freezes values from outside the function, checks no index, and writes wherever a record lets it. So a
policy reads only the fields of its arguments, numbers, and functions of `math`, and writes only to `own`.
"""

from __future__ import annotations

import ast
import builtins
import difflib
import dis
import inspect
from collections.abc import Iterator
from types import CodeType, ModuleType
from typing import Any

import numba
import numpy as np

from paellapy.scheduler.core.job import PER_MODEL
from paellapy.scheduler.policies.assigned import Assigned
from paellapy.scheduler.policies.code import outside
from paellapy.scheduler.policies.index_ranges import IndexRanges
from paellapy.scheduler.policies.roles import ROLES, Fields, Layout, Where
from paellapy.scheduler.policies.trees import Function, tree_of

_MODULES = {"math", "numpy", "numba", "random", "cmath"}
_CLOCKS = {"time", "datetime"}
_NOWHERE = {
    "blocks": "a segment is a captured graph with fixed grids, so all of its blocks are launched",
    "preempt": "the kernels of a captured graph cannot be stopped, so a segment runs to its end",
}
_TO_PYTHON = {
    "Try": "try", "TryStar": "try", "With": "with", "ClassDef": "class", "Await": "await", "Yield": "yield",
    "Match": "match",
}  # fmt: skip


def problem_in(role: str, function: Any, names: tuple[str, ...], layout: Layout) -> str | None:
    """The first problem with its line, phrased to follow the function's name; None if there is none."""
    tree = tree_of(function)
    if tree is None:
        return _without_source(function.__code__, "own" in names and bool(layout.per_model))
    return next(_Look(role, function, names, layout, tree).problems(), None)


def _without_source(code: CodeType, indexes: bool) -> str | None:
    """The check without source: only the bytecode is known, so code that needs a closer look is refused."""
    stores = ("STORE_ATTR", "STORE_GLOBAL", "STORE_DEREF", "STORE_SUBSCR", "DELETE_")
    if indexes or any(step.opname.startswith(stores) for step in dis.get_instructions(code)):
        return (
            "may write outside of `own`, and its source cannot be read to check that: put the function into a file or "
            "a notebook"
        )
    return None


class _Look:
    """The check of one function."""

    def __init__(self, role: str, function: Any, names: tuple[str, ...], layout: Layout, tree: Function) -> None:
        self.role, self.tree, self.code = role, tree, function.__code__
        self.fields: dict[str, Fields] = {name: layout.fields(name) for name in names}
        self.layout = layout
        self.outside = outside(function)
        self.walk = [each for part in self._body() for each in ast.walk(part)]
        stored = (each.id for each in self.walk if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store))
        self.local = {*stored, *names}
        self.above = {child: each for each in self.walk for child in ast.iter_child_nodes(each)}
        self.ranges = IndexRanges(self._body(), self.above, names, self.outside, layout.per_model)

    def _body(self) -> list[ast.AST]:
        return [self.tree.body] if isinstance(self.tree, ast.Lambda) else list(self.tree.body)

    def _only_where(self, module: str) -> bool:
        """Whether `Where` is all that is used of a module, as in pp.Where."""
        used = [each for each in self.walk if isinstance(each, ast.Name) and each.id == module]
        return all(isinstance(above := self.above.get(each), ast.Attribute) and above.attr == "Where" for each in used)

    def _call(self, call: ast.Call) -> Iterator[str]:
        """Calls that compile but never do the expected, and options that pp.Where does not have."""
        name, line = ast.unparse(call.func), call.lineno
        texts = [each.value for each in call.args if isinstance(each, ast.Constant) and isinstance(each.value, str)]
        if name in ("float", "int") and texts:
            number = "math.inf" if "inf" in texts[0].lower() else "math.nan" if "nan" in texts[0].lower() else texts[0]
            yield f"converts a text in line {line}, `{ast.unparse(call)}`: write the number, {number}"
        if name in ("getattr", "hasattr") and len(texts) == 1:
            yield f"calls `{name}` in line {line}: write `{ast.unparse(call.args[0])}.{texts[0]}`"
        if name.rpartition(".")[2] != "Where":
            return
        for given in call.keywords:
            if given.arg in _NOWHERE:
                yield f"passes {given.arg}= to Where in line {line}: {_NOWHERE[given.arg]}; give sms= only"
            elif given.arg != "sms":
                yield f"passes {given.arg}= to Where in line {line}: its only option is sms=, as in pp.Where(sms=0.25)"
        if len(call.args) + len(call.keywords) > 1:
            yield f"passes several values to Where in line {line}: its only option is sms=, as in pp.Where(sms=0.25)"

    def problems(self) -> Iterator[str]:
        for each in self.walk:
            if isinstance(each, ast.Global | ast.Nonlocal):
                name = each.names[0]
                yield (
                    f"declares `{type(each).__name__.lower()} {name}` in line {each.lineno}, but compiled code cannot "
                    f"change variables outside of it: keep the number in `own`, with @policy(state={{{name!r}: 0.0}}) "
                    f"and own.{name} here"
                )
            if isinstance(each, ast.Import | ast.ImportFrom):
                yield f"imports in line {each.lineno}: import `math` at the top of the file; no other can be used"
            if isinstance(each, ast.stmt | ast.expr) and (word := _TO_PYTHON.get(type(each).__name__)):
                yield f"has `{word}` in line {each.lineno}: a policy is compiled; use if, for, numbers and `math`"
            if isinstance(each, ast.FunctionDef | ast.Lambda):
                yield f"defines a function in line {each.lineno}: define it outside, with @numba.njit before it"
            if isinstance(each, ast.Assign) and _is_text(each.value):
                yield f"keeps the text {ast.unparse(each.value)} in line {each.lineno}: a policy keeps numbers only"
            if isinstance(each, ast.Call):
                yield from self._call(each)
            if isinstance(each, ast.Dict | ast.DictComp | ast.Set | ast.SetComp):
                kind = "dict" if isinstance(each, ast.Dict | ast.DictComp) else "set"
                yield (
                    f"makes a {kind} in line {each.lineno}, which a policy cannot use: write if and elif, or keep "
                    "numbers of models in params={…}, as job.params.NAME"
                )
            if isinstance(each, ast.Subscript):
                yield from self._index(each)
            if isinstance(each, ast.Attribute | ast.Subscript):
                yield from self._field(each)
            if isinstance(each, ast.Name):
                yield from self._name(each)
        yield from self._returns()
        if not isinstance(self.tree, ast.Lambda):
            for each in Assigned(self.tree.body, self.fields, self.outside).found:
                yield (
                    f"reads `{each.id}` in line {each.lineno}, which has no value on some path to it: set it before, "
                    f"as in `{each.id} = 0.0`"
                )

    # -- fields

    def _field(self, node: ast.Attribute | ast.Subscript) -> Iterator[str]:
        above = self.above.get(node)
        if isinstance(above, ast.Attribute | ast.Subscript) and above.value is node:
            return  # the enclosing expression is checked as a whole
        written = not isinstance(node.ctx, ast.Load)
        root, *steps = _path(node)
        shown = f"`{ast.unparse(node)}` in line {node.lineno}"
        if not isinstance(root, ast.Name):
            if written:
                yield f"writes {shown}: a policy may write to fields of `own` only"
            return
        if root.id not in self.fields:
            module = self.outside.get(root.id)
            if isinstance(module, ModuleType) and isinstance(steps[0], str) and not hasattr(module, steps[0]):
                yield f"uses {shown}, which the module {root.id} does not have"
            if written and root.id in self.local:
                yield f"writes {shown}, an entry of a local value: use one variable for each number that changes"
            elif written:
                yield (
                    f"writes {shown}: values outside of a policy are fixed when it is compiled; keep numbers that "
                    "change in `own`, with @policy(state={…})"
                )
            return
        if written and root.id != "own":
            yield (
                f"writes {shown}: {root.id} belongs to the core; keep the policy's numbers in `own`, with "
                "@policy(state={…})"
            )
        yield from self._steps(root.id, steps, node)
        if written and not ROLES[self.role].writes:
            yield (
                f"writes {shown}: {self.role} is called any number of times, also for predictions; write in admit, "
                "tick or done"
            )

    def _steps(self, said: str, steps: list[Any], node: ast.Attribute | ast.Subscript) -> Iterator[str]:
        """Follows a path from a record to its fields, and from a field to its entry for a model."""
        line, own = node.lineno, said == "own"
        fields: Any = self.fields[said]
        for step in steps:
            if isinstance(step, str) and isinstance(fields, dict):
                if step not in fields:
                    yield self._unknown(said, step, fields, line)
                    return
                fields, said = fields[step], f"{said}.{step}"
            elif isinstance(step, ast.expr) and fields == PER_MODEL:
                if not self.ranges.fits(step, PER_MODEL):
                    yield (
                        f"has `{said}[{ast.unparse(step)}]` in line {line}, which may be out of range: index with "
                        f"job.model, or bound an integer, as in {said}[min(max(int(x), 0), {PER_MODEL - 1})]"
                    )
                    return
                fields, said = None, f"{said}[…]"
            elif fields == PER_MODEL:
                yield (
                    f"has `{ast.unparse(node)}` in line {line}, but {said} has one number per model, and no methods: "
                    f"use {said}[job.model], or a loop over range(len({said}))"
                )
                return
            else:
                kept = "; declare numbers for each model with per_model={…}" if own else ""
                yield f"has `{ast.unparse(node)}` in line {line}, but {said} is one number, or has named fields{kept}"
                return
        if isinstance(fields, dict):
            some = ", ".join(f"{said}.{name}" for name in list(fields)[:4]) or "the names in params={…} of the policy"
            yield f"uses `{said}` as a whole in line {line}: use one of its fields, such as {some}"
        handed_on = isinstance(self.above.get(node), ast.Call) and isinstance(node.ctx, ast.Load)
        if fields == PER_MODEL and not handed_on:
            yield f"uses `{said}` as a whole in line {line}, which has one number per model: use {said}[job.model]"

    def _unknown(self, said: str, name: str, fields: dict[str, Any], line: int) -> str:
        near = difflib.get_close_matches(name, fields, 1)
        hint = f"did you mean {said}.{near[0]}? " if near else ""
        if said == "own":
            return (
                f"uses own.{name} in line {line}, which does not exist: {hint}Declare it with its first value, "
                f"state={{{name!r}: 0.0}}, or in per_model for one number per model"
            )
        if said == "job.params":
            return (
                f"uses job.params.{name} in line {line}, which does not exist: {hint}Declare it with the default for "
                f"models without it, @policy(params={{{name!r}: 1.0}})"
            )
        return (
            f"reads the field {said}.{name} in line {line}, which does not exist: {hint}The fields are "
            f"{', '.join(fields)}"
        )

    def _index(self, node: ast.Subscript) -> Iterator[str]:
        """An index into a tuple or a list: compiled code either fails at such a place, or does not notice."""
        root = _path(node)[0]
        if isinstance(node.slice, ast.Slice) or (isinstance(root, ast.Name) and root.id in self.fields):
            return
        length = self.ranges.length(node.value)
        if length is not None and self.ranges.fits(node.slice, length, from_end=True):
            return
        base, index = ast.unparse(node.value), ast.unparse(node.slice)
        bound = f"bound the index, as in {base}[int({index}) % len({base})]" if length else "use a tuple of numbers"
        yield (
            f"has `{base}[{index}]` in line {node.lineno}, which may be out of range: `{base}` has {length or 'some'} "
            f"entries; {bound}, or keep numbers of models in params={{…}}, as job.params.NAME"
        )

    # -- names

    def _name(self, node: ast.Name) -> Iterator[str]:
        name, line, above = node.id, node.lineno, self.above.get(node)
        if name in self.fields:
            if isinstance(above, ast.Attribute | ast.Subscript) and above.value is node:
                return
            if isinstance(above, ast.Call) and node in above.args and _is_builtin(above.func) and isinstance(
                node.ctx, ast.Load
            ):
                if ast.unparse(above.func) in {"setattr", "delattr"}:
                    yield f"calls `{ast.unparse(above.func)}` in line {line}: write fields of `own` as own.name = …"
                return
            if isinstance(above, ast.Return) or (isinstance(self.tree, ast.Lambda) and self.tree.body is node):
                return  # its type is checked when it is compiled
            yield f"uses `{name}` as a whole in line {line}: use its fields, and pass numbers to other functions"
            return
        if name in self.local or (name not in self.outside and hasattr(builtins, name)):
            return
        if name not in self.outside:
            yield (
                f"uses the name `{name}` in line {line}, which is not defined: define it above, or declare it in "
                "state={…}"
            )
            return
        yield from self._value(name, self.outside[name], line)

    def _value(self, name: str, value: Any, line: int) -> Iterator[str]:
        if isinstance(value, ModuleType):
            root = value.__name__.partition(".")[0]
            if root in _CLOCKS:
                yield f"asks `{name}` for the time in line {line}: the time is job.now_ns, or gpu.now_ns in tick"
            elif root not in _MODULES and not self._only_where(name):
                yield f"uses the module `{name}` in line {line}: a policy can use no module but `math`"
        elif inspect.isfunction(value) and value.__code__ is self.code:
            yield f"calls itself in line {line}: a policy's functions cannot; write a loop"
        elif inspect.isfunction(value) and value is not Where:
            yield f"calls `{name}` in line {line}, a plain function: write @numba.njit before its `def`"
        elif isinstance(value, np.ndarray | list | dict | set | bytearray):
            yield (
                f"uses `{name}` in line {line}, a {type(value).__name__}, whose contents compiled code would never see "
                "change: use a tuple of numbers for constants, and `own` for numbers that change"
            )
        elif not _usable(value):
            yield f"uses `{name}` in line {line}, a {type(value).__name__}: a policy can use only numbers from outside"

    # -- returning

    def _returns(self) -> Iterator[str]:
        needed = ROLES[self.role].returns
        if isinstance(self.tree, ast.Lambda):
            if needed != "nothing" and _may_be_none(self.tree.body):
                yield f"returns None in line {self.tree.lineno} where {needed} is needed"
            return
        for each in self.walk:
            if not isinstance(each, ast.Return):
                continue
            none = each.value is None or _may_be_none(each.value)
            if none and needed != "nothing":
                yield f"returns None in line {each.lineno} where {needed} is needed"
            if not none and needed == "nothing":
                yield (
                    f"returns a value in line {each.lineno}, but {self.role} must return nothing: remove the value"
                )
        if needed != "nothing" and _falls_through(self.tree.body):
            line = self.tree.body[-1].end_lineno
            yield f"returns None in line {line} where {needed} is needed: some path ends there without `return`"


def _may_be_none(value: ast.expr) -> bool:
    """Whether the value is None, or is in one of its cases."""
    if isinstance(value, ast.IfExp):
        return _may_be_none(value.body) or _may_be_none(value.orelse)
    return isinstance(value, ast.Constant) and value.value is None


def _falls_through(body: list[ast.stmt]) -> bool:
    last = body[-1]
    if isinstance(last, ast.Return | ast.Raise):
        return False
    if isinstance(last, ast.If):
        return not last.orelse or _falls_through(last.body) or _falls_through(last.orelse)
    if isinstance(last, ast.While) and isinstance(last.test, ast.Constant) and last.test.value:
        return any(isinstance(each, ast.Break) for each in ast.walk(last))
    return not isinstance(last, ast.With | ast.Try | ast.Match)  # these statements are refused for another reason


def _path(node: ast.expr) -> list[Any]:
    """The path from the root: a name, then names of fields and indices."""
    steps: list[Any] = []
    while isinstance(node, ast.Attribute | ast.Subscript):
        if isinstance(node, ast.Attribute):
            steps.append(node.attr)
        elif isinstance(node.slice, ast.Constant) and isinstance(node.slice.value, str):
            steps.append(node.slice.value)
        else:
            steps.append(node.slice)
        node = node.value
    return [node, *reversed(steps)]


def _is_text(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


def _is_builtin(function: ast.expr) -> bool:
    return isinstance(function, ast.Name) and hasattr(builtins, function.id)


def _usable(value: Any) -> bool:
    if isinstance(value, tuple):
        return all(_usable(each) for each in value)
    if value is Where or hasattr(value, "py_func"):
        return True
    if isinstance(value, bool | int | float | complex | str | np.generic):
        return True
    return inspect.isbuiltin(value) or value in (numba.objmode, *vars(builtins).values()) or isinstance(value, np.ufunc)
