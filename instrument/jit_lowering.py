"""Numba's translation to LLVM's intermediate language, without the work that the hot path does not need.

Compiled code here counts no references, and no part of it can fail. So a variable is overwritten without a look at its
old value, and no call checks the status of the part that it calls. Implementations of operations are looked up once.

This uses Numba's internals: its class that lowers a function, and the context of that function.
"""

from __future__ import annotations

import operator
from functools import partial
from typing import Any

from numba import types
from numba.core import base, errors, lowering
from numba.core.compiler_machinery import register_pass
from numba.core.typed_passes import NativeLowering
from numba.cpython.builtins import do_minmax

from paellapy.instrument.jit_passes import EXTREMES, are_facts, is_extreme, signature_of
from paellapy.instrument.jit_range import LOOPS

_operators: dict[Any, Any] = {}
_implementations: dict[Any, Any] = {}
_readers: dict[Any, Any] = {}
_writers: dict[Any, Any] = {}
_sizes: dict[str, int] = {}


class _Implementation(base._wrap_impl):  # type: ignore[misc]
    """An implementation of an operation, bound to the context of a function."""

    def __init__(self, found: Any, context: Any, signature: Any) -> None:
        self._imp, self._context, self._sig = found, context, signature


def _extreme(better: Any, context: Any, builder: Any, asked: Any, args: Any, loc: Any = None) -> Any:
    return do_minmax(context, builder, asked.args, args, better)


def _bind(context: Any) -> None:
    """Lets the context of one function remember implementations and sizes.

    Numba looks for the attribute's own implementation before the general one, and writes an error for each it lacks.
    """
    find, size, read, write = context.get_function, context.get_abi_sizeof, context.get_getattr, context._setattrs
    constant = context.get_constant_generic

    def get_function(function: Any, signature: Any, _firstcall: bool = True) -> Any:
        if isinstance(function, types.Dispatcher):
            return find(function, signature, _firstcall)
        asked = function, signature
        if asked not in _implementations:
            if is_extreme(function, signature.args):
                _implementations[asked] = partial(_extreme, EXTREMES[function.typing_key])
            elif isinstance(function, str) and (function, signature.args) in LOOPS:
                _implementations[asked] = LOOPS[function, signature.args]
            else:
                _implementations[asked] = find(function, signature, _firstcall)._imp
        return _Implementation(_implementations[asked], context, signature.as_function())

    def get_abi_sizeof(kind: Any) -> int:
        name = str(kind)
        if name not in _sizes:
            _sizes[name] = size(kind)
        return _sizes[name]

    def get_getattr(kind: Any, attribute: str) -> Any:
        if not are_facts((kind,)):
            return read(kind, attribute)
        asked = kind, attribute
        if asked not in _readers:
            _readers[asked] = read(kind, attribute)
        return _readers[asked]

    def get_setattr(attribute: str, signature: Any) -> Any:
        asked = attribute, signature.args
        if asked not in _writers:
            known = [write[name] for name in (attribute, None) if name in write]
            _writers[asked] = next(found for each in known if (found := _found(each, signature.args)))
        return lambda builder, args: _writers[asked](context, builder, signature, args, attribute)

    def get_constant_generic(builder: Any, kind: Any, value: Any) -> Any:
        if isinstance(kind, types.Dispatcher):  # a call names the function itself, and needs no object
            return context.get_dummy_value()
        return constant(builder, kind, value)

    context.get_function, context.get_abi_sizeof = get_function, get_abi_sizeof
    context.get_constant_generic = get_constant_generic
    context.get_getattr, context.get_setattr = get_getattr, get_setattr


def _found(overloads: Any, kinds: Any) -> Any:
    try:
        return overloads.find(kinds)
    except errors.NumbaNotImplementedError:
        return None


class _Lower(lowering.Lower):  # type: ignore[misc]
    def init(self) -> None:
        super().init()
        _bind(self.context)

    def lower_block(self, block: Any) -> None:
        self.pre_block(block)
        for each in block.body:
            self.loc = each.loc
            try:
                self.lower_inst(each)
            except Exception:
                said = 'lowering "{inst}" at {loc}'
                with errors.new_error_context(said, inst=each, loc=each.loc):  # type: ignore[attr-defined]
                    raise
        self.post_block(block)

    def _operation(self, op: Any, given: Any) -> tuple[Any, Any]:
        """An operation as a type, and its signature."""
        context = self.context.typing_context
        if op not in _operators:
            _operators[op] = context.resolve_value_type(op)
        return _operators[op], signature_of(context, _operators[op], given)

    def lower_binop(self, resty: Any, expr: Any, op: Any) -> Any:
        asked = self.fndesc.calltypes[expr]
        if op in (operator.pow, operator.ipow) or not are_facts(asked.args):
            return super().lower_binop(resty, expr, op)
        function, found = self._operation(op, asked.args)
        given = [
            self.context.cast(self.builder, self.loadvar(each.name), self.typeof(each.name), kind)
            for each, kind in zip((expr.lhs, expr.rhs), asked.args, strict=True)
        ]
        made = self.context.get_function(function, found)(self.builder, given)
        return self.context.cast(self.builder, made, asked.return_type, resty)

    def lower_getitem(self, resty: Any, expr: Any, value: Any, index: Any, signature: Any) -> Any:
        if not are_facts(signature.args):
            return super().lower_getitem(resty, expr, value, index, signature)
        function, found = self._operation(operator.getitem, signature.args)
        given = [
            self.context.cast(self.builder, self.loadvar(each.name), self.typeof(each.name), kind)
            for each, kind in zip((value, index), signature.args, strict=True)
        ]
        made = self.context.get_function(function, found)(self.builder, given)
        return self.context.cast(self.builder, made, signature.return_type, resty)

    def storevar(self, value: Any, name: str, argidx: int | None = None) -> None:
        """As Numba's, without a look at the value that is overwritten: nothing is reference-counted."""
        self._alloca_var(name, self.typeof(name))
        if name in self._singly_assigned_vars:
            self._blk_local_varmap[name] = value
        else:
            self.builder.store(value, self.getvar(name))


@register_pass(mutates_CFG=True, analysis_only=False)
class Lowering(NativeLowering):  # type: ignore[misc]
    _name = "lowering"

    @property
    def lowering_class(self) -> Any:
        return _Lower


def call_part(description: Any, libraries: Any) -> Any:
    """The code that calls a part. It does not look at the part's status, since no part can fail."""

    def call(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        callee = context.declare_function(builder.module, description)
        convention = context.call_conv
        with builder.goto_entry_block():
            result = builder.alloca(convention.get_return_type(description.restype).pointee)
        unused = convention._get_excinfo_argument(builder.function)  # the caller's own
        packed = convention._get_arg_packer(description.argtypes).as_arguments(builder, args)
        builder.call(callee, [result, unused, *packed])
        return context.get_returned_value(builder, description.restype, builder.load(result))

    call.signature = description.argtypes  # type: ignore[attr-defined]
    call.libs = tuple(libraries)  # type: ignore[attr-defined]
    return call
