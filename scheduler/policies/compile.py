"""The functions of a policy: what each takes and returns, the numbers it reads, and how it is compiled for the core."""

from __future__ import annotations

import ast
import contextlib
import difflib
import dis
import inspect
import linecache
import math
import re
import textwrap
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from types import CodeType, FunctionType
from typing import Any

import numba
import numpy as np
from numba import types
from numba.core import config
from numba.core.compiler_lock import global_compiler_lock
from numba.extending import overload

from paellapy.instrument.errors import PaellaError
from paellapy.scheduler.core import job as facts
from paellapy.scheduler.core.values import is_finite_number

Rank = Callable[..., float]
Admit = Callable[..., float]
Tell = Callable[..., None]
Tree = ast.FunctionDef | ast.Lambda
Fields = Mapping[str, Any]  # by name: None for a number, PER_MODEL for one per model, or the fields of a record


class PolicyError(PaellaError):
    """A policy cannot be used.

    `policy` names the policy or its function, `line` is the line of the fault in its file, `name` is the field, option
    or variable at fault, and `remedy` says what to write instead. Each is None where it does not apply.
    """

    policy: str | None = None
    line: int | None = None
    name: str | None = None
    remedy: str | None = None


def fault(
    function: Any, problem: str, remedy: str | None = None, *, line: int | None = None, **facts: Any
) -> PolicyError:
    """The error for one function of a policy. The message begins with the function, its file and the line."""
    code = function.__code__
    said = f"{function.__name__} ({code.co_filename}:{line or code.co_firstlineno}) {problem}"
    text = f"{said}: {remedy}" if remedy else said
    return PolicyError(text, policy=function.__name__, line=line, remedy=remedy, **facts)


# --- roles -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Role:
    """The purpose of one function of a policy."""

    takes: tuple[str, ...]  # in this order; the function leaves out arguments that it does not use
    needs: str  # the argument that it must take; "": none
    returns: str
    writes: bool  # whether it may write to `own`


ROLES = {
    "rank": Role(("job", "gpu", "own"), "job", "a number", writes=False),
    "order": Role(("job", "gpu", "own"), "job", "a number", writes=False),
    "admit": Role(("job", "gpu", "own"), "job", "True, False, or a time in ns", writes=True),
    "place": Role(("job", "gpu", "own"), "job", "pp.Where(sms=…)", writes=False),
    "tick": Role(("gpu", "own"), "", "nothing", writes=True),
    "done": Role(("job", "segment", "own"), "", "nothing", writes=True),
    "victim": Role(("model", "gpu", "own"), "model", "a number", writes=False),
}


@dataclass(frozen=True, slots=True)
class Layout:
    """A policy's own numbers, and the parameters of models that it reads, each with its first value."""

    state: Mapping[str, float] = field(default_factory=dict)
    per_model: Mapping[str, float] = field(default_factory=dict)
    params: Mapping[str, float] = field(default_factory=dict)

    def check(self, policy: str) -> None:
        """Raises PolicyError for too many numbers, and for names or values of a wrong kind."""
        for option, most in (("state", facts.OWN_NAMES), ("per_model", facts.OWN_PER_MODEL), ("params", facts.PARAMS)):
            given = getattr(self, option)
            problem = None
            if not isinstance(given, Mapping) or len(given) > most:
                problem = f"it must be a dict of at most {most} names, each with its first value"
            elif wrong := [each for each in given if not isinstance(each, str) or not each.isidentifier()]:
                problem = f"{wrong[0]!r} must be a name like those of variables"
            elif infinite := [each for each, value in given.items() if not is_finite_number(value)]:
                problem = f"the value of {infinite[0]!r} must be a finite number"
            elif option == "per_model" and (twice := set(given) & set(self.state)):
                problem = f"{min(twice)!r} is in state too, so one of the two must have another name"
            if problem:
                raise PolicyError(f"policy {policy}: {option}={given!r}; {problem}", policy=policy, name=option)

    @property
    def own(self) -> np.dtype[Any]:
        """The record that functions receive as `own`."""
        once = [(name, "f8") for name in self.state]
        return np.dtype([*once, *((name, "f8", (facts.PER_MODEL,)) for name in self.per_model)], align=True)

    def new_own(self) -> np.ndarray[Any, Any]:
        made = np.zeros(1, self.own)
        for name, value in {**self.state, **self.per_model}.items():
            made[name] = value
        return made

    @property
    def job(self) -> np.dtype[Any]:
        """JOB, with names for the parameters."""
        names = [*self.params, *(f"_{k}" for k in range(facts.PARAMS - len(self.params)))]
        named = np.dtype({"names": names, "formats": ["f8"] * facts.PARAMS, "itemsize": facts.NO_NAMES.itemsize})
        columns = [(each, named if each == "params" else facts.JOB[each]) for each in facts.JOB.names or ()]
        return np.dtype(columns, align=True)

    def kind(self, argument: str) -> np.dtype[Any]:
        if argument in ("job", "own"):
            return self.job if argument == "job" else self.own
        kind: np.dtype[Any] = {"gpu": facts.GPU, "segment": facts.DONE, "model": facts.OWNER}[argument]
        return kind

    def fields(self, argument: str) -> Fields:
        found = _fields(self.kind(argument))
        return {**found, "params": dict.fromkeys(self.params)} if argument == "job" else found


def _fields(kind: np.dtype[Any]) -> dict[str, Any]:
    columns = {name: kind[name] for name in kind.names or ()}
    return {name: facts.PER_MODEL if each.shape else _fields(each) or None for name, each in columns.items()}


def Where(sms: float = 1.0) -> float:
    """The place of a segment, for a policy's `place`. If `sms`, a fraction of the GPU, is below 1, the segment runs in
    an SM partition; otherwise on all SMs. All partitions of an engine have the same size (`Engine(sm_partitions=8)`).

    >>> Where(sms=0.25)
    0.25
    """
    return float(sms)


def _compiled_where(sms: Any = 1.0) -> Callable[..., float]:
    def where(sms: Any = 1.0) -> float:
        return float(sms)

    return where


overload(Where)(_compiled_where)


def arguments(role: str, function: Any, layout: Layout) -> tuple[str, ...]:
    """The names of a function's arguments; PolicyError if the function cannot have that role."""
    takes, needs = ROLES[role].takes, ROLES[role].needs
    some = f"({', '.join(takes)})"
    if not inspect.isfunction(function):
        raise PolicyError(f"{role} is {function!r}: it must be a plain function {role}{some}", name=role)
    if inspect.iscoroutinefunction(function) or inspect.isgeneratorfunction(function):
        line, remedy = function.__code__.co_firstlineno, f"write {role} as a plain `def` that returns"
        raise fault(function, "is a coroutine or a generator", remedy, line=line)
    given = inspect.signature(function).parameters
    names = tuple(given)
    for name, parameter in given.items():
        if name not in takes:
            near = difflib.get_close_matches(name, takes, 1)
            remedy = f"did you mean `{near[0]}`?" if near else "use a number from outside, or params={…} of the models"
            if needs and needs not in names and len(names) == 1:
                remedy = f"name it `{needs}`"
            raise fault(function, f"has the argument `{name}`, but {role} takes {some}", remedy, name=name)
        if parameter.kind is not parameter.POSITIONAL_OR_KEYWORD:
            remedy = f"make it a plain argument, as in `def {role}({takes[0]})`"
            raise fault(function, f"has the argument `{name}` behind a * or before a /", remedy, name=name)
    if (needs and needs not in names) or list(names) != sorted(names, key=takes.index):
        always = f", `{needs}` always" if needs else ""
        raise fault(function, f"takes ({', '.join(names)}), but {role} takes {some} in this order{always}", name=needs)
    if "own" in names and not (layout.state or layout.per_model):
        remedy = "declare each with its first value, as in @policy(state={'limit': 0.5}, per_model={'used_ns': 0.0})"
        raise fault(function, "takes `own`, but the policy keeps no numbers", remedy, name="own")
    return names


# --- reading a function ----------------------------------------------------------------------------------------------


def tree_of(function: Any) -> Tree | None:
    """The function's syntax tree, with the lines of its file; None if its source cannot be read, or has changed."""
    try:
        lines, first = inspect.getsourcelines(function)
        module = ast.parse(textwrap.dedent("".join(lines)))
    except (OSError, TypeError, SyntaxError):  # the source of a lambda inside an expression may not parse alone
        return None
    ast.increment_lineno(module, max(first, 1) - 1)
    wanted = _contents(function.__code__)
    trees = [each for each in ast.walk(module) if isinstance(each, ast.FunctionDef | ast.Lambda)]
    return next((each for each in trees if (code := _code_of(each, function)) and _contents(code) == wanted), None)


def _code_of(tree: Tree, function: Any) -> CodeType | None:
    """The tree's code, with the variables that the function takes from functions around it."""
    code = function.__code__
    maker = ast.parse(f"def maker({', '.join(code.co_freevars)}): ...")
    body: list[ast.stmt] = [ast.Expr(tree) if isinstance(tree, ast.Lambda) else tree]
    if isinstance(tree, ast.FunctionDef) and tree.name not in code.co_freevars:
        body.insert(0, ast.Global([tree.name]))  # a function that calls itself finds itself there
    maker.body[0].body = body  # type: ignore[attr-defined]
    found: CodeType | None = compile(ast.fix_missing_locations(maker), code.co_filename, "exec")
    for name in ("maker", code.co_name):
        inside = found.co_consts if found else ()
        found = next((each for each in inside if isinstance(each, CodeType) and each.co_name == name), None)
    return found


def _contents(code: CodeType) -> tuple[Any, ...]:
    """What two codes have in common that come from one source, whatever their lines."""
    consts = [repr(each) for each in code.co_consts if not isinstance(each, CodeType)]
    return code.co_code, code.co_names, code.co_varnames, code.co_freevars, consts


def steps(code: CodeType) -> Iterator[tuple[dis.Instruction, int]]:
    """Instructions with their lines, including those of nested functions."""
    line = code.co_firstlineno
    for step in dis.get_instructions(code):
        line = getattr(step.positions, "lineno", None) or line
        yield step, line
        if isinstance(step.argval, CodeType):
            yield from steps(step.argval)


def outside(function: Any) -> dict[str, Any]:
    """The values of the names, other than builtins, that the function takes from outside, also in comprehensions."""
    # Python 3.11 compiles a comprehension to a function of its own, which inspect does not look into.
    read = {step.argval for step, _ in steps(function.__code__) if step.opname in ("LOAD_GLOBAL", "LOAD_NAME")}
    found = {name: function.__globals__[name] for name in read if name in function.__globals__}
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    for name, cell in cells:
        with contextlib.suppress(ValueError):  # of a name that has no value yet
            found[name] = cell.cell_contents
    return found


def with_helpers(function: Any) -> Iterator[Any]:
    """The function, and the functions compiled by Numba that it calls, each once."""
    waiting, seen = [function], {function}
    while waiting:
        each = waiting.pop()
        yield each
        for value in outside(each).values():
            helper = getattr(value, "py_func", None)
            if inspect.isfunction(helper) and helper not in seen:
                seen.add(helper)
                waiting.append(helper)


def calls_others(function: Any) -> bool:
    """Whether the function refers to any function that is neither a builtin nor from the math module."""
    known = {value for value in vars(math).values() if callable(value)}
    return any(callable(value) and value not in known for value in outside(function).values())


def may_loop(function: Any) -> bool:
    """Whether the function could run for ever: it jumps back, or calls a function that is not known to return."""
    jumps = (each.opname for each, _ in steps(function.__code__))
    return any(name in ("FOR_ITER", "JUMP_ABSOLUTE") or "BACKWARD" in name for name in jumps) or calls_others(function)


def paths_read(function: Any) -> set[str]:
    """The fields that the function reads of its arguments; the argument itself where it is used as a whole.

    >>> sorted(paths_read(lambda job: job["segment"]["ns"] + job.params.share))
    ['job.params.share', 'job.segment.ns']
    """
    names, found = set(inspect.signature(function).parameters), set()
    path: list[str] = []
    for step, _ in steps(function.__code__):
        *others, value = step.argval if isinstance(step.argval, tuple) and step.argval else (step.argval,)
        key = step.opname == "LOAD_CONST" and isinstance(value, str)  # job["batch"]
        if path and (key or step.opname in ("LOAD_ATTR", "LOAD_METHOD")):
            path.append(value)
        elif not (path and (step.opname == "BINARY_SUBSCR" or step.argrepr == "[]")):
            loads = "LOAD_FAST" in step.opname or "LOAD_DEREF" in step.opname  # Python 3.13 loads two in one step
            found |= {".".join(path), *(each for each in others if loads and each in names)}
            path = [value] if loads and value in names else []
    return found - {""}


def reads(function: Any, *fields: str) -> bool:
    """Whether the function reads one of these fields, such as "job.share", or all that it belongs to."""
    return any(
        path == each or path.startswith(f"{each}.") or each.startswith(f"{path}.")
        for path in paths_read(function)
        for each in fields
    )


_FACTS = {
    facts.READS_SEGMENT: ("job.segment",),
    facts.READS_TOP: ("gpu.top", "gpu.lower_ns"),
    facts.READS_PARAMS: ("job.params",),
    facts.READS_SHARES: tuple(f"{of}.{it}" for of in ("job.segment", "segment", "gpu.top")
                              for it in ("compute", "memory")),
    facts.READS_WEIGHTS: ("job.missing_bytes", "job.ready_ns"),
    facts.READS_DEFICIT: ("job.deficit_ns",),
    facts.READS_CLIENT: ("job.share", "job.client_deficit_ns"),
    facts.READS_USE: ("job.occupancy", "job.used_ns"),
    facts.READS_TERMS: ("job.deadline_ns", "job.priority"),
}  # fmt: skip


def facts_read(function: Any) -> int:
    """The facts that the core computes only for policies that read them: READS_SEGMENT …"""
    return sum(fact for fact, fields in _FACTS.items() if reads(function, *fields))


# --- indices ---------------------------------------------------------------------------------------------------------


def path_of(node: ast.expr) -> list[Any]:
    """The path from the root: a name, then names of fields and indices."""
    found: list[Any] = []
    while isinstance(node, ast.Attribute | ast.Subscript):
        step: Any = node.attr if isinstance(node, ast.Attribute) else node.slice
        is_key = isinstance(step, ast.Constant) and isinstance(step.value, str)
        found.append(step.value if is_key else step)
        node = node.value
    return [node, *reversed(found)]


def constant(node: ast.expr) -> int | None:
    """The value of an integer that is written out."""
    try:
        value = ast.literal_eval(node)
    except (ValueError, TypeError):
        return None
    return value if isinstance(value, int) else None


class _Bounds(ast.NodeTransformer):
    """Bounds each index that is computed: compiled code must not reach beyond an array, nor raise."""

    def __init__(self, arguments: tuple[str, ...]) -> None:
        self._arguments, self.changed = arguments, False

    def visit_Subscript(self, node: ast.Subscript) -> ast.AST:
        root, *path = path_of(node)
        index, of = path[-1], ast.unparse(node.value)
        own = isinstance(root, ast.Name) and root.id in self._arguments
        self.generic_visit(node)
        if isinstance(index, str | ast.Slice | ast.Tuple) or constant(index) is not None:
            return node
        if not own or ast.unparse(index) not in ("job.model", "model.model"):
            low, high = (0, facts.PER_MODEL - 1) if own else (f"-__len__({of})", f"__len__({of}) - 1")
            call = ast.parse(f"__min__(__max__({ast.unparse(node.slice)}, {low}), {high})", mode="eval").body
            for each in ast.walk(call):
                ast.copy_location(each, node.slice)
            node.slice, self.changed = call, True
        return node


def bounded(function: Any) -> Any:
    """The function with bounded indices, own.x[k] as own.x[min(max(k, 0), 255)]; the same function if none needs it."""
    code, tree = function.__code__, tree_of(function)
    bounds = _Bounds(code.co_varnames[: code.co_argcount])
    if tree is None or not (bounds.visit(tree), bounds.changed)[1]:
        return function
    found = _code_of(tree, function)
    assert found is not None
    cells = dict(zip(code.co_freevars, function.__closure__ or (), strict=True))
    names = {**function.__globals__, "__min__": min, "__max__": max, "__len__": len}
    made = FunctionType(found, names, closure=tuple(cells[name] for name in found.co_freevars))
    made.__module__ = function.__module__
    return made


# --- compiling -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Compiled:
    """A function of a policy for the core."""

    role: str
    function: Any  # as it was written
    bounded: Any  # as it was compiled
    names: tuple[str, ...]  # of its arguments
    code: Any  # keeps the compiled code at its address alive

    @property
    def address(self) -> int:
        return int(self.code.address)


def compile_function(role: str, function: Any, layout: Layout, cache: bool = False) -> Compiled:
    """The function as compiled code, which the core calls by its address. `cache`, for our own, keeps it on disk."""
    names = arguments(role, function, layout)
    returns = types.void if ROLES[role].returns == "nothing" else types.float64
    signature = returns(*(numba.from_dtype(layout.kind(name)) for name in names))
    plain = function if cache else bounded(function)
    # Functions from outside may make arrays; if a constant index is beyond one, the trial of the policy shows it.
    checks = not cache and bool(outside(function))
    failed: Exception | None = None
    with global_compiler_lock, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        before, config.ALWAYS_WARN_UNINIT_VAR = config.ALWAYS_WARN_UNINIT_VAR, 1
        try:
            compiler = numba.cfunc(signature, cache=cache, error_model="numpy", nogil=True, boundscheck=checks)
            code = compiler(plain)
        except Exception as e:  # not only errors of Numba's own classes
            failed = e
        finally:
            config.ALWAYS_WARN_UNINIT_VAR = before
    for each in caught:
        unset = re.match(r"Detected uninitialized variable (\w+)", str(each.message))
        loc = getattr(each.message, "loc", None)
        if unset is None and "uninitialized variable" in str(each.message):
            continue  # a temporary value, which has no name in the source
        if unset is None:
            warnings.warn_explicit(each.message, each.category, each.filename, each.lineno)
        elif loc and loc.filename == function.__code__.co_filename and unset[1] in plain.__code__.co_varnames:
            failed = NameError(f"Variable '{unset[1]}' is not defined")
            failed.loc = loc  # type: ignore[attr-defined]  # as errors of Numba have it
            break
    if failed is not None:
        raise _explained(failed, role, function, layout, names) from failed
    return Compiled(role, function, plain, names, code)


# What Numba says, the problem and the remedy; {0} is the first group in words. Without a remedy a general one is given.
_REASONS: list[tuple[str, str, str | None]] = [
    (r"index out of range", "has an index that is out of range", "bound it, as in T[int(x) % len(T)]"),
    (r"<built-in function getitem>", "has an index that is no integer", "convert it, as in own.used_ns[int(x)]"),
    (r"Variable '(\w+)' is not defined", "reads `{0}`, which has no value on some path", "set it before: `{0} = 0.0`"),
    # The name contains the interpreter's instruction: `return_value`, or `return_const` in Python 3.12 and 3.13.
    (r"No conversion from (.+?) to \w+ for '\$[\w.]*(?:return_(?:value|const)|load_const)", "returns {0}", None),
    (r"Cannot unify (.+?) and (.+?) for '", "sets a variable to {0} in one case and to {1} in another", None),
    (r"[cC]an'?t unify return type", "returns values of different kinds", None),
    (r"No implementation of function Function\(<(?:built-in )?function (\w+)",
     "applies `{0}` to a value that is not a number, or to too few or too many values", None),
    (r"NameError: (?:global )?name '(\w+)' is not defined|Untyped global name '(\w+)'", "uses the name `{0}`", None),
    (r"Unknown attribute '(\w+)' of type Module\(<module 'random'", "uses `{0}`, which compiled code does not have",
     "use random.random() or random.uniform(a, b), or count in `own` to take turns"),
    (r"Unknown attribute '(\w+)'", "uses `.{0}`, which compiled code does not have", None),
]  # fmt: skip
_KINDS = {
    r"none|omitted\(.*": "None",
    r"Literal\[str\].*|unicode_type": "a text",
    r"Literal\[bool\].*|bool(ean)?": "True or False",
    r"(Uni)?Tuple.*": "a tuple",
    r"(reflected )?list.*": "a list",
    r"Record.*": "the job itself",
    r"([nN]ested)?[aA]rray.*": "an array",
    r"complex\d+": "a complex number",
    r"Literal\[int\].*|u?int\d+|float\d+": "a number",
    r"range_\w+|.*\(.*": "a value that is not a number",
}


def _explained(error: Exception, role: str, function: Any, layout: Layout, names: tuple[str, ...]) -> PolicyError:
    """The error in plain words: Numba's own messages assume knowledge of Numba."""
    text, line = str(error), getattr(getattr(error, "loc", None), "line", None) or None
    if isinstance(error, KeyError):  # how Numba reports that a record has no such field
        fields = "; ".join(f"the fields of {each} are {', '.join(layout.fields(each))}" for each in names)
        return fault(function, f"reads the field {text}, which does not exist", fields, name=text.strip("'"))
    usual = f"use numbers, fields of ({', '.join(names)}) and `math`, and return {ROLES[role].returns} on every path"
    for pattern, problem, remedy in _REASONS:
        if found := re.search(pattern, text):
            groups = [each for each in found.groups() if each]
            words = [next((w for kind, w in _KINDS.items() if re.fullmatch(kind, each)), each) for each in groups]
            name = groups[0] if "`" in problem else None
            return fault(function, problem.format(*words), (remedy or usual).format(*words), line=line, name=name)
    source = linecache.getline(function.__code__.co_filename, line).strip() if line else ""
    problem = "has code that cannot be compiled" + (f", `{textwrap.shorten(source, 100)}`" if source else "")
    return fault(function, problem, usual, line=line)
