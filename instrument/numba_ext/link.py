"""How the hot path is compiled: each part is translated once, and each entry point linked and optimised once.

Numba links and optimises every function with all functions that it calls, so code five calls deep is optimised five
times or more. Here a *part* is only translated to LLVM's intermediate language. An *entry point* links all parts below
it, each once, and LLVM optimises the whole once.

Two more things keep the first use of a machine short: passes that this code does not need are left out, and a type is
worked out again only if one that it depends on has changed. Each saves about three seconds.

This uses Numba's internals: how its code libraries are finalised, how a call is written, and how types are propagated.
Numba's upper bound in pyproject.toml is the newest version that .ci/matrix has tested.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, TypeVar

import llvmlite.binding
import numba
from llvmlite import ir as llvm
from numba import _dynfunc, types
from numba.core import cgutils, codegen, compiler, errors, event, ir, typeinfer
from numba.core.compiler_machinery import register_pass
from numba.core.typed_passes import NopythonTypeInference
from numba.extending import intrinsic

from paellapy.instrument.env import erase_progress, show_progress, without_collection
from paellapy.instrument.numba_ext.cache import EntryCache

Function = TypeVar("Function", bound=Callable[..., Any])
Generated = tuple[Any, Callable[..., Any]]

# Reference counts on the arrays of a state would cost ten times the work on them, and nothing here allocates: no NRT.
_OPTIONS = {"nogil": True, "_nrt": False, "error_model": "numpy", "no_cfunc_wrapper": True}

# --- libraries: machine code, and parts that have none ----------------------------------------------------------------


class PartLibrary(codegen.JITCodeLibrary):  # type: ignore[misc]
    """A function that is not compiled by itself: entry points link it."""

    def __init__(self, codegen_: Any, name: str) -> None:
        codegen.CodeLibrary.__init__(self, codegen_, name)  # without an empty module, which is never filled here
        self._linking_libraries: list[Any] = []
        self._text = ""

    def add_ir_module(self, module: Any) -> None:
        for function in module.functions:
            if not function.is_declaration:
                function.linkage = "linkonce_odr"
        self._text = cgutils.normalize_ir_text(str(module))

    def finalize(self) -> None:
        self._raise_if_finalized()
        self._finalized = True

    def link_into(self, module: Any) -> None:
        """Links the function alone; the functions that it calls follow by themselves."""
        own = llvmlite.binding.parse_assembly(self._text)
        own.data_layout = module.data_layout
        module.link_in(own)

    def parts_below(self) -> list[Any]:
        return self._linking_libraries

    def _get_module_for_linking(self) -> Any:
        """The function with all that it calls, for functions that Numba compiles in its usual way, such as a test's."""
        module = llvmlite.binding.parse_assembly(self._text)
        module.data_layout = self._codegen._data_layout  # noqa: SLF001  Numba's own
        link(module, self._linking_libraries)
        return module

    def get_pointer_to_function(self, name: str) -> int:
        return 0


class EntryLibrary(codegen.JITCodeLibrary):  # type: ignore[misc]
    """An entry point, called by Python, a thread or other entry points."""

    vectorises = False
    _linking_libraries: list[Any]

    def _optimize_functions(self, module: Any) -> None:
        module.data_layout = self._codegen._data_layout  # noqa: SLF001  Numba's own

    def _optimize_final_module(self) -> None:
        # Only the entry point calls the parts: LLVM may inline, specialise and drop them.
        for function in self._final_module.functions:
            if not function.is_declaration and str(function.linkage).endswith("linkonce_odr"):
                function.linkage = "internal"
        make = self._codegen._module_pass_manager  # noqa: SLF001  Numba's own
        passes, builder = make(loop_vectorize=self.vectorises, slp_vectorize=False)
        with self._recorded_timings.record("Module passes", builder):
            passes.run(self._final_module, builder)

    def finalize(self) -> None:
        link(self._final_module, self._linking_libraries)
        self._linking_libraries = []
        super().finalize()


class LoopLibrary(EntryLibrary):
    """An entry point whose loops LLVM may vectorise."""

    vectorises = True


def link(module: Any, libraries: list[Any]) -> None:
    """Links all parts below a function, and functions that Numba has compiled in its usual way, into its module."""
    for each in _callers_first(libraries):
        if isinstance(each, PartLibrary):
            each.link_into(module)
        else:
            module.link_in(each._get_module_for_linking(), preserve=True)  # noqa: SLF001  Numba's own


def _callers_first(libraries: list[Any]) -> list[Any]:
    """These libraries and all parts that they call, each once; LLVM links only functions that are already referenced.
    """
    seen: set[Any] = set()
    order: list[Any] = []

    def visit(each: Any) -> None:
        if each not in seen:
            seen.add(each)
            if isinstance(each, PartLibrary):
                for below in each.parts_below():
                    visit(below)
            order.append(each)

    for each in libraries:
        visit(each)
    return order[::-1]


# --- types: worked out again only after a change ----------------------------------------------------------------------


class _Constraints(typeinfer.ConstraintNetwork):  # type: ignore[misc]
    """Numba applies all constraints until no type changes. Here one is applied again if its own variables changed."""

    constraints: list[_Constraint]

    def append(self, constraint: Any) -> None:
        super().append(_Constraint(constraint))

    def propagate(self, inferer: Any) -> Any:
        known = inferer.typevars
        whole = self.constraints
        self.constraints = [each for each in whole if each.changed(known)]
        try:
            return super().propagate(inferer)
        finally:
            self.constraints = whole


class _Constraint:
    """One of Numba's constraints, with the types that its variables had after it was last applied."""

    def __init__(self, constraint: Any) -> None:
        self.loc = constraint.loc
        self._constraint = constraint
        self._names = set(_names(vars(constraint)))
        self._seen: Any = None

    def changed(self, known: Any) -> bool:
        return self._seen is None or self._seen != self._types(known)

    def __call__(self, inferer: Any) -> None:
        self._constraint(inferer)
        self._seen = self._types(inferer.typevars)

    def _types(self, known: Any) -> list[Any]:
        return [known[name].type for name in self._names if name in known]


def _names(value: Any) -> Iterator[str]:
    """Everything in a constraint that may be the name of a variable which it reads or writes."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, ir.Var):
        yield value.name
    elif isinstance(value, ir.Expr):
        yield from _names(value.list_vars())
    elif isinstance(value, dict):
        yield from _names(list(value.values()))
    elif isinstance(value, list | tuple | set | frozenset):
        for each in value:
            yield from _names(each)
    elif hasattr(value, "loc") and callable(value):  # a constraint inside another
        yield from _names(vars(value))


@register_pass(mutates_CFG=True, analysis_only=False)
class Types(NopythonTypeInference):  # type: ignore[misc]
    _name = "types"

    def run_pass(self, state: Any) -> bool:
        noted = errors.WarningsFixer(errors.NumbaWarning)  # type: ignore[attr-defined]
        inferer = typeinfer.TypeInferer(state.typingctx, state.func_ir, noted)
        inferer.constraints = _Constraints()
        with state.typingctx.callstack.register(state.targetctx.target, inferer, state.func_ir.func_id, state.args):
            for k, (name, kind) in enumerate(zip(state.func_ir.arg_names, state.args, strict=True)):
                inferer.seed_argument(name, k, kind)
            inferer.build_constraint()
            state.typing_errors = inferer.propagate()
            state.typemap, state.return_type, state.calltypes = inferer.unify()
        return True


# --- pipelines --------------------------------------------------------------------------------------------------------

# Passes for features that this code does not use: closures, comprehensions, generated branches, array expressions,
# reference counts (legalisation finds where each variable ends), readers of annotations.
_UNNEEDED = {
    "WithLifting", "InlineClosureLikes", "RewriteSemanticConstants", "DeadBranchPrune", "MakeFunctionToJitFunction",
    "InlineInlinables", "FindLiterallyCalls", "LiteralUnroll", "InlineOverloads", "NopythonRewrites",
    "LiteralPropagationSubPipelinePass", "IRLegalization", "AnnotateTypes",
}  # fmt: skip


class EntryCompiler(compiler.CompilerBase):  # type: ignore[misc]
    """Numba's pipeline for an entry point, without unneeded passes."""

    library: type[codegen.JITCodeLibrary] = EntryLibrary

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.state.library = self.library(self.state.targetctx.codegen(), "entry")
        self.state.library.enable_object_caching()

    def define_pipelines(self) -> list[Any]:
        whole = compiler.DefaultPassBuilder.define_nopython_pipeline(self.state)
        slim = compiler.PassManager("slim")
        slim.passes = [
            (Types if each is NopythonTypeInference else each, purpose)
            for each, purpose in whole.passes
            if each.__name__ not in _UNNEEDED
        ]
        slim.finalize()
        return [slim]

    def _compile_core(self) -> Any:
        """Compiles without Python's garbage collection, which would look at all of Numba's objects again and again."""
        with without_collection():
            made = super()._compile_core()
            made.fndesc.typemap = made.fndesc.calltypes = None  # as in Numba's cache: they refer to the whole function
            return made


class LoopCompiler(EntryCompiler):
    """The same for a loop over arrays."""

    library = LoopLibrary


class PartCompiler(EntryCompiler):
    """The same for a part, which gets no machine code."""

    library = PartLibrary

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        context = self.state.targetctx
        self.state.targetctx = context.subtarget(
            get_executable=_not_executable, insert_user_function=partial(_insert_part, context)
        )


def _not_executable(library: Any, description: Any, environment: Any) -> Any:
    """Replaces the function that Python would call: a part has no machine code of its own."""
    name = description.qualname.split(".")[-1]
    return _dynfunc.make_function(description.lookup_module(), name, name, 0, environment, (library,))


def _insert_part(context: Any, function: Any, description: Any, libraries: Any) -> None:
    made = _call_part(description, libraries)
    context._defns[function].append(made, made.signature)  # noqa: SLF001  Numba's own


def _call_part(description: Any, libraries: Any) -> Any:
    """The code that calls a part. It does not look at the part's status, since no part can fail."""

    def call(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        callee = context.declare_function(builder.module, description)
        convention = context.call_conv
        with builder.goto_entry_block():
            result = builder.alloca(convention.get_return_type(description.restype).pointee)
        unused = convention._get_excinfo_argument(builder.function)  # noqa: SLF001  Numba's own
        packed = convention._get_arg_packer(description.argtypes).as_arguments(builder, args)  # noqa: SLF001
        builder.call(callee, [result, unused, *packed])
        return context.get_returned_value(builder, description.restype, builder.load(result))

    call.signature = description.argtypes  # type: ignore[attr-defined]
    call.libs = tuple(libraries)  # type: ignore[attr-defined]
    return call


# --- decorators -------------------------------------------------------------------------------------------------------


def compiled(function: Function) -> Function:
    """Compiles an entry point: without Python objects and the GIL, cached on disk."""
    return _entry(function)


def brief(function: Function) -> Function:
    """As `compiled`, for an entry point that takes less time than giving the GIL away and waiting for it again."""
    return _entry(function, nogil=False)


def loop(function: Function) -> Function:
    """As `compiled`, for a loop over arrays, which LLVM may vectorise. The loop must not allocate, and cannot fail."""
    return _entry(function, LoopCompiler)


def reachable(function: Function) -> Function:
    """An entry point that others call by its address (`address_of`), and therefore need not contain."""
    return _entry(function, no_cfunc_wrapper=False)


def part(function: Function) -> Function:
    """A part of entry points, which LLVM inlines where that pays.

    It has no machine code of its own, so Python reaches it only as `.py_func`. On disk it is stored with the entry
    points.
    """
    made = numba.njit(no_cpython_wrapper=True, pipeline_class=PartCompiler, **_OPTIONS)(function)
    return _called_with_plain_numbers(made)  # type: ignore[no-any-return]


def _entry(function: Function, pipeline_class: type = EntryCompiler, **options: Any) -> Function:
    entry: Any = numba.njit(pipeline_class=pipeline_class, **_OPTIONS | options)(function)
    way = pipeline_class.__name__, *sorted(map(str, options.items()))
    entry._cache = EntryCache(function, way)  # noqa: SLF001  Numba's own
    return _called_with_plain_numbers(entry)  # type: ignore[no-any-return]


def _called_with_plain_numbers(entry: Any) -> Any:
    """Compiles a function once for all integers with which other compiled functions call it.

    Numba would compile it again for every constant, even for constants that appear only during type inference. LLVM
    still folds constants where it inlines the function.
    """
    resolve = entry.get_call_template

    def get_call_template(given: Any, named: Any) -> Any:
        return resolve(tuple(map(_plain, given)), {name: _plain(kind) for name, kind in named.items()})

    entry.get_call_template = get_call_template
    return entry


def _plain(kind: Any) -> Any:
    """A 64-bit number type in place of a constant or a shorter number."""
    kind = types.unliteral(kind)
    return types.int64 if isinstance(kind, types.Integer) and kind.signed else kind


def compile_for(entry: Any, *given: Any) -> None:
    """Makes an entry point ready for these arguments, from disk or by compiling it now, without calling it."""
    entry.compile(tuple(entry.typeof_pyval(each) for each in given))


# --- calls by address -------------------------------------------------------------------------------------------------
# A caller need not contain a function that it calls by its address, nor wait until it is compiled. Such a caller can be
# cached on disk; the caller of a ctypes function cannot.

_I64 = llvm.IntType(64)


def address_of(entry: Any, *kinds: Any) -> int:
    """The address of the machine code of a reachable entry point, for arguments of these types: a C function."""
    entry.compile(kinds)
    made = entry.overloads[kinds]
    return int(made.library.get_pointer_to_function(made.fndesc.llvm_cfunc_wrapper_name))


def call(returns: Any, parameters: list[Any], signature: Any) -> Generated:
    """Code for a call of args[0] with the other arguments; u64 arguments become pointers where C takes them."""

    def generate(context: Any, builder: Any, _: Any, args: Any) -> Any:
        function = builder.inttoptr(args[0], llvm.FunctionType(returns, parameters).as_pointer())
        passed = [
            builder.inttoptr(arg, parameter) if isinstance(parameter, llvm.PointerType) and arg.type == _I64 else arg
            for arg, parameter in zip(args[1:], parameters, strict=True)
        ]
        result = builder.call(function, passed)
        return context.get_dummy_value() if isinstance(returns, llvm.VoidType) else result

    return signature, generate


@intrinsic  # type: ignore[untyped-decorator]
def call_with(typing: Any, function: Any, tables: Any, number: Any) -> Generated:
    """int64 f(tables, int64): a reachable entry point that takes a state and one number"""
    return call(_I64, [_I64.as_pointer(), _I64], types.int64(types.uint64, tables, types.int64))


# --- progress ---------------------------------------------------------------------------------------------------------
# A line on stderr while code is compiled that is not cached: only if compiling takes long, and only once.

_OURS = __name__.partition(".")[0] + "."
PATIENCE_S = 1.0  # a shorter compilation shows no line
_PAUSE_S = 2.0  # pause after which a new compilation counts as a new one
COMPILING = "paellapy: compiling for this machine, once; this takes some seconds …"


class Announcer(event.Listener):  # type: ignore[misc]
    """Listens to Numba's events for functions of this package, which may be compiled one inside the other."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._depth = 0
        self._began = self._ended = -_PAUSE_S
        self._timer: threading.Timer | None = None
        self._shown = self._said = False

    def on_start(self, event: Any) -> None:
        if not _is_ours(event):
            return
        with self._lock:
            self._depth += 1
            if self._depth > 1:
                return
            now = time.monotonic()
            if now - self._ended > _PAUSE_S:
                self._began = now
            self._timer = threading.Timer(max(0.0, self._began + PATIENCE_S - now), self._show)
            self._timer.daemon = True
            self._timer.start()

    def on_end(self, event: Any) -> None:
        if not _is_ours(event):
            return
        with self._lock:
            self._depth -= 1
            if self._depth > 0:
                return
            self._ended = time.monotonic()
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None
            if self._shown:
                self._shown = False
                erase_progress()

    def _show(self) -> None:
        with self._lock:
            if self._depth > 0 and not self._shown and (sys.stderr.isatty() or not self._said):
                self._said = True
                self._shown = show_progress(COMPILING)


def _is_ours(event: Any) -> bool:
    return str(event.data["dispatcher"].py_func.__module__).startswith(_OURS)


event.register("numba:compile", Announcer())
