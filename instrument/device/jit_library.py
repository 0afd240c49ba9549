"""How compiled functions are linked: each part is translated once, and each entry point optimised once.

Numba links and optimises every function with all functions that it calls, so code five calls deep is optimised five
times or more. Here a *part* is only translated to LLVM's intermediate language. An *entry point* links all parts below
it, each once, and lets LLVM optimise the whole once.

This uses Numba's internals: the classes below override only how its code libraries are finalised.
"""

from __future__ import annotations

from typing import Any, ClassVar

from numba import _dynfunc, types
from numba.core import codegen, compiler


class PartLibrary(codegen.JITCodeLibrary):  # type: ignore[misc]
    """A function that is not compiled by itself: entry points link it."""

    def _optimize_functions(self, module: Any) -> None:
        module.data_layout = self._codegen._data_layout

    def finalize(self) -> None:
        self._raise_if_finalized()
        self._finalized = True

    def own_module(self) -> Any:
        """The function alone, to be linked with all functions that it calls."""
        return super()._get_module_for_linking()

    def _get_module_for_linking(self) -> Any:
        """The function with all that it calls, for functions that Numba compiles in its usual way, such as a test's."""
        module = self.own_module().clone()
        for each in callers_first(self._linking_libraries):
            module.link_in(module_of(each), preserve=True)
        return module

    def get_pointer_to_function(self, name: str) -> int:
        return 0


class EntryLibrary(codegen.JITCodeLibrary):  # type: ignore[misc]
    """An entry point, called by Python, a thread or other entry points."""

    _linking_libraries: list[Any]

    def _optimize_functions(self, module: Any) -> None:
        module.data_layout = self._codegen._data_layout

    def _optimize_final_module(self) -> None:
        # Only the entry point calls the parts: LLVM may inline, specialise and drop them.
        for function in self._final_module.functions:
            if not function.is_declaration and str(function.linkage).endswith("linkonce_odr"):
                function.linkage = "internal"
        passes, builder = self._codegen._module_pass_manager(loop_vectorize=False, slp_vectorize=False)
        with self._recorded_timings.record("Module passes", builder):
            passes.run(self._final_module, builder)

    def finalize(self) -> None:
        for each in callers_first(self._linking_libraries):
            self._final_module.link_in(module_of(each), preserve=True)
        self._linking_libraries = []
        super().finalize()


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


def module_of(library: Any) -> Any:
    return library.own_module() if isinstance(library, PartLibrary) else library._get_module_for_linking()


def _not_executable(library: Any, description: Any, environment: Any) -> Any:
    """Replaces the function that Python would call: a part has no machine code of its own."""
    name = description.qualname.split(".")[-1]
    return _dynfunc.make_function(description.lookup_module(), name, name, 0, environment, (library,))


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


class _Typing:
    """Numba's typing context with a cache for arithmetic: each operation is resolved hundreds of times."""

    _known: ClassVar[dict[Any, Any]] = {}

    def __init__(self, context: Any) -> None:
        self._context = context

    def __getattr__(self, name: str) -> Any:
        return getattr(self._context, name)

    def resolve_function_type(self, function: Any, given: Any, named: Any) -> Any:
        if named or type(function) is not types.Function or not all(isinstance(each, _NUMBERS) for each in given):
            return self._context.resolve_function_type(function, given, named)
        asked = function, tuple(given)
        if asked not in self._known:
            self._known[asked] = self._context.resolve_function_type(function, given, named)
        return self._known[asked]


_NUMBERS = (types.Integer, types.Float, types.Boolean, types.IntegerLiteral, types.BooleanLiteral)

# Passes for features that this code does not use: closures, comprehensions, generated branches, array expressions,
# reference counts (legalisation finds where each variable ends), readers of annotations.
_UNNEEDED = {
    "WithLift", "InlineClosureLikes", "RewriteSemanticConstants", "DeadBranchPrune", "MakeFunctionToJitFunction",
    "InlineInlinables", "FindLiterallyCalls", "LiteralUnroll", "InlineOverloads", "NopythonRewrites",
    "LiteralPropagationSubPipelinePass", "IRLegalization", "AnnotateTypes",
}  # fmt: skip


class EntryCompiler(compiler.CompilerBase):  # type: ignore[misc]
    """Numba's pipeline for an entry point, without unneeded passes."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.state.flags = _Flags(self.state.flags)
        self.state.typingctx = _Typing(self.state.typingctx)
        self.state.library = self.new_library(self.state.targetctx.codegen())

    def new_library(self, codegen_: Any) -> Any:
        library = EntryLibrary(codegen_, "entry")
        library.enable_object_caching()
        return library

    def define_pipelines(self) -> list[Any]:
        whole = compiler.DefaultPassBuilder.define_nopython_pipeline(self.state)
        slim = compiler.PassManager("slim")
        slim.passes = [each for each in whole.passes if each[0].__name__ not in _UNNEEDED]
        slim.finalize()
        return [slim]


class PartCompiler(EntryCompiler):
    """The same for a part, which gets no machine code."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.state.targetctx = self.state.targetctx.subtarget(get_executable=_not_executable)

    def new_library(self, codegen_: Any) -> Any:
        return PartLibrary(codegen_, "part")
