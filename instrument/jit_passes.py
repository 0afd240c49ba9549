"""Numba's passes up to the types, without the work that the hot path does not need.

Compiled code here counts no references and has no `with`. So no pass looks for the end of a variable's life. A
signature is looked up once, and a type is worked out again only if one that it depends on has changed.

This uses Numba's internals: each class below overrides one of its passes.
"""

from __future__ import annotations

import operator
from typing import Any

from numba import types
from numba.core import errors, interpreter, transforms, typeinfer, utils
from numba.core.compiler_machinery import register_pass
from numba.core.ir_utils import build_definitions
from numba.core.rewrites import rewrite_registry
from numba.core.ssa import reconstruct_ssa
from numba.core.typed_passes import NopythonTypeInference, PreLowerStripPhis
from numba.core.typing import signature
from numba.core.untyped_passes import GenericRewrites, IRProcessing, ReconstructSSA, TranslateByteCode

from paellapy.instrument.table_set import TableSetType, TableType

_NUMBERS = (types.Integer, types.Float, types.IntegerLiteral)
# Types that a signature is looked up by: the same types always lead to the same signature.
FACTS = (
    *_NUMBERS, types.Boolean, types.BooleanLiteral, types.UniTuple, types.Record, types.Array, TableType, TableSetType
)  # fmt: skip
_known: dict[type, bool] = {}  # by class: `isinstance` is slow for Numba's, and asked thousands of times
EXTREMES = {max: operator.gt, min: operator.lt}  # Numba compiles a function for each combination of types
_signatures: dict[Any, Any] = {}


def are_facts(given: Any) -> bool:
    """Whether a signature or an implementation may be looked up by these types."""
    for each in given:
        kind = type(each)
        if kind not in _known:
            _known[kind] = issubclass(kind, FACTS)
        if not _known[kind]:
            return False
    return True


def signature_of(context: Any, function: Any, given: Any) -> Any:
    """The signature of a call, looked up once."""
    asked = function, tuple(given)
    if asked not in _signatures:
        if is_extreme(function, given):
            plain = [types.unliteral(each) for each in given]
            _signatures[asked] = signature(context.unify_types(*plain), *plain)
        else:
            _signatures[asked] = context.resolve_function_type(function, given, {})
    return _signatures[asked]


def is_extreme(function: Any, given: Any) -> bool:
    """Whether a call is for the largest or smallest of some numbers."""
    of_numbers = len(given) > 1 and all(isinstance(each, _NUMBERS) for each in given)
    return of_numbers and isinstance(function, types.Function) and function.typing_key in EXTREMES


class Typing:
    """Numba's typing context with a memory: each operation is resolved hundreds of times."""

    def __init__(self, context: Any) -> None:
        self._context = context

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._context, name)
        self.__dict__[name] = found  # a method, or a table that Numba only adds to
        return found

    def resolve_function_type(self, function: Any, given: Any, named: Any) -> Any:
        plain = type(function) is types.Function or function is operator.getitem
        if named or not plain or not are_facts(given):
            return self._context.resolve_function_type(function, given, named)
        return signature_of(self._context, function, given)


# --- Python's byte code to Numba's intermediate language --------------------------------------------------------------

_RARE = {"peep_hole_delete_with_exit", "peep_hole_fuse_dict_add_updates"}


class _Interpreter(interpreter.Interpreter):  # type: ignore[misc]
    def post_process(self, peepholes: Any, func_ir: Any) -> Any:
        return super().post_process([each for each in peepholes if each.__name__ not in _RARE], func_ir)


@register_pass(mutates_CFG=True, analysis_only=False)
class Translate(TranslateByteCode):  # type: ignore[misc]
    _name = "translate"

    def run_pass(self, state: Any) -> bool:
        state["func_ir"] = _Interpreter(state["func_id"]).interpret(state["bc"])
        return True


@register_pass(mutates_CFG=True, analysis_only=False)
class Canonical(IRProcessing):  # type: ignore[misc]
    """Loops with one edge back each."""

    _name = "canonical"

    def run_pass(self, state: Any) -> bool:
        state.func_ir.blocks = transforms.canonicalize_cfg(state.func_ir.blocks)
        return True


@register_pass(mutates_CFG=True, analysis_only=False)
class Rewrites(GenericRewrites):  # type: ignore[misc]
    """Constant indices and constant operands, as Numba's rewrites find them."""

    _name = "rewrites"

    def run_pass(self, state: Any) -> bool:
        blocks = state.func_ir.blocks
        for kind in rewrite_registry.rewrites["before-inference"]:
            rewrite = kind(state)
            left = list(blocks.items())
            while left:
                key, block = left.pop()
                if rewrite.match(state.func_ir, block, state.typemap, state.calltypes):
                    blocks[key] = rewrite.apply()
                    left.append((key, blocks[key]))
        return True


@register_pass(mutates_CFG=False, analysis_only=False)
class SingleAssignment(ReconstructSSA):  # type: ignore[misc]
    _name = "single_assignment"

    def run_pass(self, state: Any) -> bool:
        state.func_ir = reconstruct_ssa(state.func_ir)
        self._patch_locals(state)
        state.func_ir._definitions = build_definitions(state.func_ir.blocks)
        return True


@register_pass(mutates_CFG=False, analysis_only=False)
class StripPhis(PreLowerStripPhis):  # type: ignore[misc]
    _name = "without_phis"

    def run_pass(self, state: Any) -> bool:
        state.func_ir = self._strip_phi_nodes(state.func_ir)
        state.func_ir._definitions = build_definitions(state.func_ir.blocks)
        return True


# --- types ------------------------------------------------------------------------------------------------------------


class _Constraints(typeinfer.ConstraintNetwork):  # type: ignore[misc]
    """Numba applies all constraints until no type changes. Here one is applied again if its own variables changed."""

    def __init__(self) -> None:
        super().__init__()
        self._seen: dict[Any, Any] = {}

    def propagate(self, inferer: Any) -> list[Any]:
        failed: list[Any] = []
        known = inferer.typevars
        for each in self.constraints:
            names = _variables(each)
            now = None if names is None else [known[name].type for name in names]
            if now is not None and self._seen.get(each) == now:
                continue
            try:
                each(inferer)
            except errors.ForceLiteralArg as e:
                failed.append(e)
            except errors.TypingError as e:
                failed.append(utils.chain_exception(errors.TypingError(str(e), loc=each.loc, highlighting=False), e))
            else:
                self._seen[each] = names and [known[name].type for name in names]
        return failed


def _variables(constraint: Any) -> list[str] | None:
    """The variables that a constraint reads or writes; None if they are not known."""
    if isinstance(constraint, typeinfer.Propagate):
        return [constraint.src, constraint.dst]
    if isinstance(constraint, typeinfer.CallConstraint) and not constraint.kws and constraint.vararg is None:
        function = [] if isinstance(constraint, typeinfer.IntrinsicCallConstraint) else [constraint.func]
        return [constraint.target, *function, *(each.name for each in constraint.args)]
    if isinstance(constraint, typeinfer.GetAttrConstraint):
        return [constraint.target, constraint.value.name]
    if isinstance(constraint, typeinfer.StaticGetItemConstraint):
        index = [] if constraint.fallback is None else [each.name for each in constraint.fallback.args[1:]]
        return [constraint.target, constraint.value.name, *index]
    if isinstance(constraint, typeinfer.SetItemConstraint):
        return [constraint.target.name, constraint.index.name, constraint.value.name]
    if isinstance(constraint, typeinfer.SetAttrConstraint):
        return [constraint.target.name, constraint.value.name]
    return None


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


PASSES = {
    "TranslateByteCode": Translate, "IRProcessing": Canonical, "GenericRewrites": Rewrites,
    "ReconstructSSA": SingleAssignment, "PreLowerStripPhis": StripPhis, "NopythonTypeInference": Types,
}  # fmt: skip
