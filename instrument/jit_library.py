"""How compiled functions are linked: each part is translated once, and each entry point optimised once.

Numba links and optimises every function with all functions that it calls, so code five calls deep is optimised five
times or more. Here a *part* is only translated to LLVM's intermediate language. An *entry point* links all parts below
it, each once, and lets LLVM optimise the whole once.

This uses Numba's internals: the classes below override only how its code libraries are finalised.
"""

from __future__ import annotations

from functools import partial
from typing import Any, ClassVar

import llvmlite.binding
from numba import _dynfunc
from numba.core import cgutils, codegen, compiler
from numba.core.compiler_machinery import _pass_registry
from numba.core.errors import NumbaError

from paellapy.instrument.collection import without_collection
from paellapy.instrument.jit_lowering import Lowering, call_part
from paellapy.instrument.jit_passes import PASSES, Typing


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

    def own_module(self) -> Any:
        """The function alone, to be linked with all functions that it calls."""
        module = llvmlite.binding.parse_assembly(self._text)
        module.data_layout = self._codegen._data_layout
        return module

    def _get_module_for_linking(self) -> Any:
        """The function with all that it calls, for functions that Numba compiles in its usual way, such as a test's."""
        module = self.own_module()
        link(module, self._linking_libraries)
        return module

    def get_pointer_to_function(self, name: str) -> int:
        return 0


class EntryLibrary(codegen.JITCodeLibrary):  # type: ignore[misc]
    """An entry point, called by Python, a thread or other entry points."""

    vectorises = False
    _linking_libraries: list[Any]

    def _optimize_functions(self, module: Any) -> None:
        module.data_layout = self._codegen._data_layout

    def _optimize_final_module(self) -> None:
        # Only the entry point calls the parts: LLVM may inline, specialise and drop them.
        for function in self._final_module.functions:
            if not function.is_declaration and str(function.linkage).endswith("linkonce_odr"):
                function.linkage = "internal"
        passes, builder = self._codegen._module_pass_manager(loop_vectorize=self.vectorises, slp_vectorize=False)
        with self._recorded_timings.record("Module passes", builder):
            passes.run(self._final_module, builder)

    def finalize(self) -> None:
        link(self._final_module, self._linking_libraries)
        self._linking_libraries = []
        super().finalize()


class LoopLibrary(EntryLibrary):
    """An entry point whose loops LLVM may vectorise."""

    vectorises = True


def callers_first(libraries: list[Any]) -> list[Any]:
    """These libraries and all parts that they call, each once; LLVM links only functions that are already referenced.
    """
    seen: set[Any] = set()
    order: list[Any] = []

    def visit(each: Any) -> None:
        if each not in seen:
            seen.add(each)
            if isinstance(each, PartLibrary):
                for below in each._linking_libraries:
                    visit(below)
            order.append(each)

    for each in libraries:
        visit(each)
    return order[::-1]


def link(module: Any, libraries: list[Any]) -> None:
    """Links all parts below a function, and functions that Numba has compiled in its usual way, into its module."""
    for each in callers_first(libraries):
        if isinstance(each, PartLibrary):
            module.link_in(each.own_module())
        else:
            module.link_in(each._get_module_for_linking(), preserve=True)


def _not_executable(library: Any, description: Any, environment: Any) -> Any:
    """Replaces the function that Python would call: a part has no machine code of its own."""
    name = description.qualname.split(".")[-1]
    return _dynfunc.make_function(description.lookup_module(), name, name, 0, environment, (library,))


def _insert_part(context: Any, function: Any, description: Any, libraries: Any) -> None:
    made = call_part(description, libraries)
    context._defns[function].append(made, made.signature)


class _Flags(compiler.Flags):  # type: ignore[misc]
    """Options of a compilation. Numba compares and hashes them for every call it examines, so copies are shared."""

    _copies: ClassVar[list[_Flags]] = []
    _hash: int | None = None

    def copy(self) -> _Flags:
        """A shared copy, which is never changed."""
        for known in self._copies:
            if self == known:
                return known
        made = type(self)(self)
        made.__dict__["_hash"] = hash(self)
        self._copies.append(made)
        return made

    def __hash__(self) -> int:
        return super().__hash__() if self._hash is None else self._hash

    def __eq__(self, other: object) -> bool:
        return self is other or bool(super().__eq__(other))


# Passes for features that this code does not use: closures, comprehensions, generated branches, array expressions,
# reference counts (legalisation finds where each variable ends), readers of annotations.
_UNNEEDED = {
    "WithLifting", "InlineClosureLikes", "RewriteSemanticConstants", "DeadBranchPrune", "MakeFunctionToJitFunction",
    "InlineInlinables", "FindLiterallyCalls", "LiteralUnroll", "InlineOverloads", "NopythonRewrites",
    "LiteralPropagationSubPipelinePass", "IRLegalization", "AnnotateTypes",
}  # fmt: skip


class _Passes(compiler.PassManager):  # type: ignore[misc]
    """Numba's passes in their order, without the account that Numba keeps of each: times, events, types as text."""

    def run(self, state: Any) -> None:
        for each, purpose in self.passes:
            made = _pass_registry.get(each).pass_inst
            made.analysis = self._analysis
            try:
                made.run_initialization(state)
                made.run_pass(state)
                made.run_finalizer(state)
            except NumbaError as e:
                self._patch_error(f"Failed to compile (step: {purpose})", e)
                raise


class EntryCompiler(compiler.CompilerBase):  # type: ignore[misc]
    """Numba's pipeline for an entry point, without unneeded passes."""

    library: type[EntryLibrary] = EntryLibrary
    _slim: ClassVar[list[Any]] = []

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.state.flags = _Flags(self.state.flags)
        self.state.typingctx = Typing(self.state.typingctx)
        self.state.library = self.new_library(self.state.targetctx.codegen())

    def new_library(self, codegen_: Any) -> Any:
        library = self.library(codegen_, "entry")
        library.enable_object_caching()
        return library

    def define_pipelines(self) -> list[Any]:
        if not self._slim:
            whole = compiler.DefaultPassBuilder.define_nopython_pipeline(self.state)
            slim = _Passes("slim")
            ours = {**PASSES, "NativeLowering": Lowering}
            named = [(each.__name__, each, *rest) for each, *rest in whole.passes]
            slim.passes = [(ours.get(name, each), *rest) for name, each, *rest in named if name not in _UNNEEDED]
            slim.finalize()
            self._slim.append(slim)
        return self._slim

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

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        context = self.state.targetctx
        self.state.targetctx = context.subtarget(
            get_executable=_not_executable, insert_user_function=partial(_insert_part, context)
        )

    def new_library(self, codegen_: Any) -> Any:
        return PartLibrary(codegen_, "part")
