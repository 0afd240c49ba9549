"""Finds what must not be in a policy before it is compiled, so that errors name the line and the remedy.

Compiled code freezes values from outside the function and writes wherever a record lets it. So a policy reads only the
fields of its arguments, numbers, and functions of `math`, and writes only to `own`.
"""

from __future__ import annotations

import ast
import builtins
import difflib
import inspect
from types import ModuleType
from typing import Any, cast

import numba
import numpy as np

from paellapy.scheduler.core.job import PER_MODEL
from paellapy.scheduler.policies.compile import (
    ROLES,
    Fields,
    Layout,
    PolicyError,
    Tree,
    Where,
    arguments,
    constant,
    fault,
    outside,
    path_of,
    steps,
    tree_of,
    with_helpers,
)

_MODULES = {"math", "numpy", "numba", "random", "cmath"}
_CLOCKS = {"time", "datetime"}
_IN_OWN = "keep numbers that change in `own`, with @policy(state={…})"
_NOT_PLACED = {
    "blocks": "a segment is a captured graph with fixed grids, so all of its blocks are launched; give sms= only",
    "preempt": "the kernels of a captured graph cannot be stopped, so a segment runs to its end; give sms= only",
}
_NO_ANSWER = ("raises", "answer for every job: return False from admit, a large number from rank to put the job last")
_REFUSED: dict[type[ast.AST], tuple[str, str]] = {
    ast.Raise: _NO_ANSWER,
    ast.Assert: _NO_ANSWER,
    ast.Import: ("imports", "import `math` at the top of the file; no other module can be used"),
    ast.ImportFrom: ("imports", "import `math` at the top of the file; no other module can be used"),
    ast.FunctionDef: ("defines a function", "define it outside, with @numba.njit before it"),
    ast.Lambda: ("defines a function", "define it outside, with @numba.njit before it"),
    ast.NamedExpr: ("assigns with `:=`", "assign in a line of its own"),
    ast.JoinedStr: ("formats a text", "a policy computes with numbers only"),
    ast.Dict: ("makes a dict", "write if and elif, or keep numbers of models in params={…}, as job.params.NAME"),
    ast.DictComp: ("makes a dict", "write if and elif, or keep numbers of models in params={…}, as job.params.NAME"),
    ast.Set: ("makes a set", "write comparisons with `or`"),
    ast.SetComp: ("makes a set", "write comparisons with `or`"),
} | {
    kind: (f"has `{word}`", "a policy is compiled; use if, for, numbers and `math`")
    for kind, word in ((ast.Try, "try"), (ast.TryStar, "try"), (ast.With, "with"), (ast.ClassDef, "class"),
                       (ast.Await, "await"), (ast.Yield, "yield"), (ast.Match, "match"))
}  # fmt: skip


def check_source(role: str, function: Any, layout: Layout) -> None:
    """Raises PolicyError for the first problem in a function's source, or in its bytecode if there is no source."""
    arguments(role, function, layout)
    tree = tree_of(function)
    if tree is not None:
        _Source(role, function, layout, tree).check()
    elif any(each.opname.startswith(_WRITES) for each, _ in steps(function.__code__)) or (
        layout.per_model and "own" in function.__code__.co_varnames
    ):
        raise fault(
            function, "may write outside of `own`, and its source cannot be read to check that",
            "write it with `def` in a file or a notebook",
        )  # fmt: skip
    _check_code(function)


_WRITES = ("STORE_ATTR", "STORE_GLOBAL", "STORE_DEREF", "STORE_SUBSCR", "DELETE_")
_LOADS = {"LOAD_GLOBAL", "LOAD_DEREF", "LOAD_NAME"}
# These need Python's global lock, which the thread that waits for the compiled code may hold.
_OF_PYTHON = {"print": builtins.print, "input": builtins.input, "open": builtins.open, "objmode": numba.objmode}


def _check_code(function: Any) -> None:
    """Checks what compiles but must not run, also in the functions that a policy calls, by their bytecode."""
    for each in with_helpers(function):
        values = {**vars(builtins), **outside(each)}
        code = [step for step in steps(each.__code__) if step[0].opname not in ("CACHE", "EXTENDED_ARG")]
        for (step, line), (after, _) in zip(code, [*code[1:], code[-1]], strict=True):
            value = values.get(step.argval) if step.opname in _LOADS else None
            if inspect.isfunction(value) and value.__code__ is each.__code__:
                raise fault(each, "calls itself", "write a loop", line=line, name=step.argval)
            # Libraries such as Ray replace some builtins.
            found = {k for k, v in _OF_PYTHON.items() if value is v or value is getattr(builtins, k, v)}
            if step.opname == "RAISE_VARARGS":
                raise fault(each, *_REFUSED[ast.Raise], line=line)
            if found or (step.opname in ("LOAD_ATTR", "LOAD_METHOD") and step.argval == "objmode"):
                name = "".join(found) or "objmode"
                remedy = "to see what it computes, call the plain function, or look at the jobs of pp.simulate's result"
                raise fault(each, f"calls `{name}`, but a policy runs without Python", remedy, line=line, name=name)
            if step.opname == "LOAD_CONST":
                value = step.argval
            # job["batch"] is fine; so are names of arguments, which Python 3.13 and later load like a value
            key = after.opname in ("BINARY_SUBSCR", "STORE_SUBSCR", "CALL_KW") or after.argrepr == "[]"
            for entry in value if isinstance(value, tuple | frozenset) else (value,):
                if isinstance(entry, str) and not key:
                    remedy = (
                        "all fields of a job are numbers, job.model too (in simulations its place in the list, from "
                        "0): compare with numbers, or tell models apart by job.priority"
                    )
                    raise fault(each, f"has the text {entry!r}, which equals no number", remedy, line=line, name=entry)
                if isinstance(entry, int) and not -(2**63) <= entry < 2**63:
                    problem = f"has the number {entry}, which does not fit 64 bits"
                    raise fault(each, problem, "write a float, as in 2.0**64", line=line)


class _Source:
    """The check of one function's syntax tree."""

    def __init__(self, role: str, function: Any, layout: Layout, tree: Tree) -> None:
        self.role, self.function, self.tree = role, function, tree
        self.fields: dict[str, Fields] = {each.arg: layout.fields(each.arg) for each in tree.args.args}
        self.outside = outside(function)
        body: list[ast.AST] = [tree.body] if isinstance(tree, ast.Lambda) else list(tree.body)
        self.walk = [each for part in body for each in ast.walk(part)]
        stored = (each.id for each in self.walk if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store))
        self.local = {*stored, *self.fields}
        self.above = {child: each for each in self.walk for child in ast.iter_child_nodes(each)}

    def fault(self, node: ast.AST, problem: str, remedy: str, name: str | None = None) -> PolicyError:
        return fault(self.function, problem, remedy, line=getattr(node, "lineno", None), name=name)

    def check(self) -> None:
        for each in self.walk:
            if isinstance(each, ast.Global | ast.Nonlocal):
                name = each.names[0]
                raise self.fault(
                    each, f"declares `{type(each).__name__.lower()} {name}`, which compiled code cannot change",
                    f"keep the number in `own`, with @policy(state={{{name!r}: 0.0}}) and own.{name} here", name,
                )  # fmt: skip
            if (refused := _REFUSED.get(type(each))) is not None:
                raise self.fault(each, *refused)
            if isinstance(each, ast.Starred) and isinstance(each.ctx, ast.Store):
                raise self.fault(each, "unpacks with `*`", "give each value a name")
            if isinstance(each, ast.BinOp):
                self._power(each)
            if isinstance(each, ast.Call):
                self._call(each)
            if isinstance(each, ast.Subscript):
                self._index(each)
            if isinstance(each, ast.Attribute | ast.Subscript):
                self._field(each)
            if isinstance(each, ast.Name):
                self._name(each)
        self._returns()

    def _power(self, node: ast.BinOp) -> None:
        """Powers and shifts of constants beyond 64 bits, which compiled code would compute as 0."""
        left, right = self._integer(node.left), self._integer(node.right)
        shift = isinstance(node.op, ast.LShift)
        if right is None or not (shift or isinstance(node.op, ast.Pow)):
            return
        small = left is not None and -(2**63) <= left < 2**63
        beyond = small and right >= 0 and abs(left or 0) > 1 and (
            right > 63 or not -(2**63) <= (left << right if shift else left**right) < 2**63  # type: ignore[operator]
        )  # fmt: skip
        if beyond or (shift and left is None and right > 62):
            problem = f"computes `{ast.unparse(node)}` in integers of 64 bits, which it does not fit"
            raise self.fault(node, problem, "write a float, as in 2.0**70")

    def _integer(self, node: ast.expr) -> int | None:
        """The value of an integer, or of the name of one from outside; None for other expressions."""
        value = constant(node)
        if value is None and isinstance(node, ast.Name) and node.id not in self.local:
            value = self.outside.get(node.id)
        return int(value) if isinstance(value, int | np.integer) and not isinstance(value, bool) else None

    def _call(self, call: ast.Call) -> None:
        """Calls that compile but never do the expected, and options that pp.Where does not have."""
        name, shown = ast.unparse(call.func), ast.unparse(call)
        texts = [each.value for each in call.args if isinstance(each, ast.Constant) and isinstance(each.value, str)]
        if name in ("float", "int") and texts:
            number = next((f"math.{each}" for each in ("inf", "nan") if each in texts[0].lower()), texts[0])
            raise self.fault(call, f"converts a text, `{shown}`", f"write the number, {number}", name)
        if name in ("str", "repr", "format", "chr", "ascii"):
            raise self.fault(call, f"makes a text, `{shown}`", "a policy computes with numbers only", name)
        if name in ("getattr", "hasattr", "setattr", "delattr") and texts:
            written = " = …" if name == "setattr" else ""
            raise self.fault(call, f"calls `{name}`", f"write `{ast.unparse(call.args[0])}.{texts[0]}{written}`", name)
        given = [*(each.arg for each in call.keywords if each.arg != "sms"), *call.args]
        if name.rpartition(".")[2] == "Where" and (len(given) > 1 or any(isinstance(each, str) for each in given)):
            option = next((each for each in given if isinstance(each, str)), None)
            remedy = _NOT_PLACED.get(option or "", "its only option is sms=, as in pp.Where(sms=0.25)")
            raise self.fault(call, f"passes {option or 'several values'} to Where", remedy, option)

    def _index(self, node: ast.Subscript) -> None:
        """An index that is always out of range; computed ones are bounded when the function is compiled."""
        root, k = path_of(node)[0], constant(node.slice)
        own = isinstance(root, ast.Name) and root.id in self.fields
        if isinstance(node.slice, ast.Tuple) or (own and k is not None and not 0 <= k < PER_MODEL):
            problem = f"has the index `{ast.unparse(node)}`, which is out of range"
            raise self.fault(node, problem, f"use job.model, or one number of 0 to {PER_MODEL - 1}")

    # -- fields

    def _field(self, node: ast.Attribute | ast.Subscript) -> None:
        above = self.above.get(node)
        if isinstance(above, ast.Attribute | ast.Subscript) and above.value is node:
            return  # the enclosing expression is checked as a whole
        written = not isinstance(node.ctx, ast.Load)
        root, *path = path_of(node)
        shown, of = ast.unparse(node), root.id if isinstance(root, ast.Name) else ""
        if of not in self.fields:
            module = self.outside.get(of)
            if isinstance(module, ModuleType) and isinstance(path[0], str) and not hasattr(module, path[0]):
                raise self.fault(node, f"uses `{shown}`, which does not exist", f"see the names in {of}", path[0])
            if written:
                remedy = "use one variable for each number that changes" if of in self.local else _IN_OWN
                raise self.fault(node, f"writes `{shown}`, which is not a field of `own`", remedy, of or None)
            return
        if written and of != "own":
            raise self.fault(node, f"writes `{shown}`, which belongs to the core", _IN_OWN, shown)
        self._follow(of, path, node)
        if isinstance(above, ast.Call) and above.func is node:
            raise self.fault(node, f"calls `{shown}`, which is a number", f"write `{shown}`", shown)
        if written and not ROLES[self.role].writes:
            remedy = f"write in admit, tick or done: {self.role} is called any number of times, also for predictions"
            raise self.fault(node, f"writes `{shown}` in {self.role}", remedy, shown)

    def _follow(self, said: str, path: list[Any], node: ast.Attribute | ast.Subscript) -> None:
        """Follows a path from a record to its fields, and from a field to its entry for a model."""
        shown, fields = ast.unparse(node), cast(Any, self.fields[said])
        per_model = f"use {said}.{path[0]}[job.model], or a loop over range(len({said}.{path[0]}))"
        for step in path:
            if isinstance(step, str) and isinstance(fields, dict):
                if step not in fields:
                    raise self._unknown(said, step, fields, node)
                fields, said = fields[step], f"{said}.{step}"
            elif isinstance(step, ast.expr) and fields == PER_MODEL:
                fields, said = None, f"{said}[…]"
            elif fields == PER_MODEL:
                raise self.fault(node, f"has `{shown}`, but {said} has one number per model", per_model, said)
            else:
                remedy = "declare numbers for each model with per_model={…}" if said[:3] == "own" else "use it alone"
                raise self.fault(node, f"has `{shown}`, but {said} is one number, or has named fields", remedy, said)
        if isinstance(fields, dict):
            some = ", ".join(f"{said}.{name}" for name in list(fields)[:4]) or "the names in params={…} of the policy"
            raise self.fault(node, f"uses `{said}` as a whole", f"use one of its fields, such as {some}", said)
        handed_on = isinstance(self.above.get(node), ast.Call) and isinstance(node.ctx, ast.Load)
        if fields == PER_MODEL and not handed_on:
            raise self.fault(node, f"uses `{said}` as a whole, which has one number per model", per_model, said)

    def _unknown(self, said: str, name: str, fields: Fields, node: ast.AST) -> PolicyError:
        near = difflib.get_close_matches(name, fields, 1)
        remedy = f"did you mean {said}.{near[0]}? " if near else ""
        if said == "own":
            remedy += f"Declare it with its first value, in state={{{name!r}: 0.0}} or per_model={{{name!r}: 0.0}}"
        elif said == "job.params":
            remedy += f"Declare it with the default for models without it, @policy(params={{{name!r}: 1.0}})"
        else:
            remedy += f"The fields are {', '.join(fields)}"
        return self.fault(node, f"uses the field {said}.{name}, which does not exist", remedy, name)

    # -- names

    def _name(self, node: ast.Name) -> None:
        name, above = node.id, self.above.get(node)
        if name in self.fields:
            field = isinstance(above, ast.Attribute | ast.Subscript) and above.value is node
            # The compiler explains a job that is returned or given to a builtin function.
            call = isinstance(above, ast.Call) and node in above.args and isinstance(above.func, ast.Name)
            builtin = call and hasattr(builtins, above.func.id)  # type: ignore[union-attr]
            returned = isinstance(above, ast.Return) or self.tree.body is node
            if not (field or builtin or returned):
                remedy = "use its fields, and pass numbers to other functions"
                raise self.fault(node, f"uses `{name}` as a whole", remedy, name)
        elif name in self.outside:
            self._value(node, self.outside[name])
        elif name == self.function.__name__ and name not in self.local:  # not bound yet while it is decorated
            raise self.fault(node, "calls itself", "write a loop", name)
        elif name not in self.local and not hasattr(builtins, name):
            remedy = "define it above, or declare it in state={…}"
            raise self.fault(node, f"uses the name `{name}`, which is not defined", remedy, name)

    def _value(self, node: ast.Name, value: Any) -> None:
        """A value from outside of the function."""
        name, kind = node.id, type(value).__name__
        problem, remedy = f"uses `{name}`, a {kind}", "a policy can use only numbers from outside"
        if isinstance(value, ModuleType):
            root = value.__name__.partition(".")[0]
            if root in _CLOCKS:
                problem, remedy = f"asks `{name}` for the time", "the time is job.now_ns, or gpu.now_ns in tick"
            elif root in _MODULES or self._only_where(name):
                return
            else:
                problem, remedy = f"uses the module `{name}`", "a policy can use no module but `math`"
        elif value is Where or hasattr(value, "py_func"):
            return
        elif inspect.isfunction(value):
            if value.__code__ is self.function.__code__:
                problem, remedy = "calls itself", "write a loop"
            else:
                problem, remedy = f"calls `{name}`, a plain function", "write @numba.njit before its `def`"
        elif isinstance(value, np.ndarray | list | dict | set | bytearray):
            problem = f"uses `{name}`, a {kind}, whose contents compiled code would never see change"
            remedy = "use a tuple of numbers for constants, and `own` for numbers that change"
        elif _is_constant(value):
            return
        raise self.fault(node, problem, remedy, name)

    def _only_where(self, module: str) -> bool:
        """Whether `Where` is all that is used of a module, as in pp.Where."""
        used = [self.above.get(each) for each in self.walk if isinstance(each, ast.Name) and each.id == module]
        return all(isinstance(above, ast.Attribute) and above.attr == "Where" for above in used)

    # -- returning

    def _returns(self) -> None:
        needed = ROLES[self.role].returns
        if isinstance(self.tree, ast.Lambda):
            ends: list[tuple[ast.AST, ast.expr | None]] = [(self.tree, self.tree.body)]
        else:
            ends = [(each, each.value) for each in self.walk if isinstance(each, ast.Return)]
        for node, value in ends:
            none = value is None or _may_be_none(value)
            if none and needed != "nothing":
                raise self.fault(node, "returns None", f"return {needed}")
            if not none and needed == "nothing" and not isinstance(self.tree, ast.Lambda):
                raise self.fault(node, f"returns a value, but {self.role} returns nothing", "remove the value")
        if needed != "nothing" and not isinstance(self.tree, ast.Lambda) and _falls_through(self.tree.body):
            last = self.tree.body[-1].end_lineno
            raise fault(self.function, "returns None: some path ends without `return`", f"return {needed}", line=last)


def _may_be_none(value: ast.expr) -> bool:
    """Whether the value is None, or is in one of its cases."""
    if isinstance(value, ast.IfExp):
        return _may_be_none(value.body) or _may_be_none(value.orelse)
    return isinstance(value, ast.Constant) and value.value is None


def _falls_through(body: list[ast.stmt]) -> bool:
    last = body[-1]
    if isinstance(last, ast.If):
        return not last.orelse or _falls_through(last.body) or _falls_through(last.orelse)
    if isinstance(last, ast.While) and isinstance(last.test, ast.Constant) and last.test.value:
        return any(isinstance(each, ast.Break) for each in ast.walk(last))
    return not isinstance(last, ast.Return | ast.Raise)


def _is_constant(value: Any) -> bool:
    """Whether compiled code can use the value. Texts can be compiled, and are refused by their bytecode."""
    if isinstance(value, tuple):
        return all(_is_constant(each) for each in value)
    if isinstance(value, bool | int | float | complex | str | np.generic | np.ufunc):
        return True
    return inspect.isbuiltin(value) or value in (numba.objmode, *vars(builtins).values())
