"""Many tables behind one address: compiled code receives a state of fifty arrays as a single number.

A `TableSet` is a frozen dataclass of NumPy arrays. It also has a *directory*: the address and the shape of each table.
Compiled code receives the directory's address and reads from it: `s.lane` is an array there, as it is in Python. A
compiled function with fifty array arguments would take a hundred times as long to compile and to call.
"""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Iterator, Mapping
from dataclasses import Field, dataclass, field, fields, replace
from typing import Any, ClassVar, Self, TypeVar, dataclass_transform

import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.imputils import lower_builtin, lower_getattr_generic
from numba.core.typing import signature
from numba.core.typing.templates import AbstractTemplate, AttributeTemplate, infer, infer_getattr, infer_global
from numba.extending import NativeValue, intrinsic, models, register_model, typeof_impl, unbox
from numpy.typing import NDArray

_I32, _I64 = ir.IntType(32), ir.IntType(64)
_WORD = 8  # bytes


def table(kind: Any, *dimensions: str | int) -> Any:
    """Declares a table: its element type, and its dimensions, as numbers or as names."""
    return field(metadata={"dtype": np.dtype(kind), "dimensions": dimensions})


class TableType(types.Type):  # type: ignore[misc]
    """A table as compiled code sees it: the place in the directory of its address and extents.

    An element or a row is reached with a few instructions. All other operations on arrays (slices, columns, attributes)
    are left to Numba's arrays. An index is never negative.
    """

    def __init__(self, array: Any, item_bytes: int) -> None:
        self.array, self.item_bytes = array, item_bytes
        super().__init__(name=f"Table({_digest(array.name)})")


class TableSetType(types.Type):  # type: ignore[misc]
    """The Numba type of one class of table sets. Two types are equal only if all their tables are."""

    def __init__(self, name: str, tables: dict[str, tuple[int, TableType]]) -> None:
        self.tables = tables  # by name: the start of its entry in the directory, and its type
        super().__init__(name=f"{name}({_digest(repr(tables))})")


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


class TableSet:
    """A base class: decorate derived classes with `table_set`."""

    numba_type: ClassVar[TableSetType]
    address: int
    _directory: NDArray[np.int64]

    def __post_init__(self) -> None:
        entries: list[int] = []
        for each in _tables(type(self)):
            array, dtype = getattr(self, each.name), each.metadata["dtype"]
            wanted = len(each.metadata["dimensions"])
            if array.dtype != dtype or array.ndim != wanted or not array.flags.c_contiguous:
                raise TypeError(f"{each.name} must be a contiguous array of {dtype} with {wanted} dimensions")
            entries += (array.ctypes.data, *array.shape)
        directory = np.array(entries, np.int64)
        object.__setattr__(self, "_directory", directory)
        object.__setattr__(self, "address", int(directory.ctypes.data))

    @classmethod
    def zeros(cls, extents: Mapping[str, int], **given: NDArray[Any]) -> Self:
        """A set of the given tables; the others are zero, and have the extents of their dimensions' names."""
        made = {
            each.name: np.zeros([extents[n] if isinstance(n, str) else n for n in each.metadata["dimensions"]],
                                each.metadata["dtype"])
            for each in _tables(cls) if each.name not in given
        }  # fmt: skip
        return cls(**given, **made)

    def _replace(self, **tables: NDArray[Any]) -> Self:
        """The same set with other arrays for these tables."""
        return replace(self, **tables)  # type: ignore[type-var]


Kind = TypeVar("Kind", bound=type[TableSet])


def _tables(kind: type[TableSet]) -> Iterator[Field[Any]]:
    return (each for each in fields(kind) if "dtype" in each.metadata)  # type: ignore[arg-type]


@dataclass_transform(frozen_default=True, eq_default=False, kw_only_default=True, field_specifiers=(table,))
def table_set(kind: Kind) -> Kind:
    """Makes a frozen dataclass of a class of tables, and registers it with Numba."""
    made: Any = dataclass(frozen=True, eq=False, repr=False, kw_only=True)(kind)
    columns, at = {}, 0
    for each in _tables(made):
        dimensions = len(each.metadata["dimensions"])
        dtype = each.metadata["dtype"]
        array = types.Array(numba.from_dtype(dtype), dimensions, "C")
        columns[each.name] = (at, TableType(array, dtype.itemsize))
        at += 1 + dimensions
    made.numba_type = TableSetType(kind.__name__, columns)
    return made  # type: ignore[no-any-return]


def found_at(kind: type[TableSet]) -> Any:
    """A function for compiled code: the table set of this kind whose directory is at an address.

    A function that is called very often takes a number from Python instead of a table set, since Numba recognises
    numbers fastest.
    """

    def at(typing: Any, address: Any) -> tuple[Any, Any]:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            return builder.inttoptr(args[0], _I64.as_pointer())

        return kind.numba_type(types.uint64), generate

    made = intrinsic(at)
    made.made_for = kind.numba_type.name
    return made


# --- registration with Numba ------------------------------------------------------------------------------------------


@typeof_impl.register(TableSet)  # type: ignore[untyped-decorator]
def _typeof(value: TableSet, _: Any) -> TableSetType:
    return type(value).numba_type


@register_model(TableSetType)
@register_model(TableType)
class _Model(models.PrimitiveModel):  # type: ignore[misc]
    """An address in the directory: of its beginning, or of a table's entry."""

    def __init__(self, manager: Any, kind: Any) -> None:
        super().__init__(manager, kind, _I64.as_pointer())


@unbox(TableSetType)  # type: ignore[untyped-decorator]
def _unbox(kind: TableSetType, value: Any, c: Any) -> Any:
    address = c.pyapi.object_getattr_string(value, "address")
    number = c.pyapi.long_as_longlong(address)
    c.pyapi.decref(address)
    failed = cgutils.is_not_null(c.builder, c.pyapi.err_occurred())
    return NativeValue(c.builder.inttoptr(number, _I64.as_pointer()), is_error=failed)


@infer_getattr
class _TableOfSet(AttributeTemplate):  # type: ignore[misc]
    key = TableSetType

    def generic_resolve(self, kind: TableSetType, name: str) -> Any:
        return kind.tables[name][1] if name in kind.tables else None


@lower_getattr_generic(TableSetType)  # type: ignore[untyped-decorator]
def _table_of_set(context: Any, builder: Any, kind: TableSetType, directory: Any, name: str) -> Any:
    return builder.gep(directory, [ir.Constant(_I32, kind.tables[name][0])])


# A table's elements and rows


def _is_element(kind: TableType, index: Any) -> bool:
    """Whether an index has a number for each dimension."""
    each = index.types if isinstance(index, types.BaseTuple) else (index,)
    return len(each) == kind.array.ndim and all(isinstance(one, types.Integer) for one in each)


def _plain(index: Any) -> Any:
    """The type to which an element's index is converted."""
    return types.UniTuple(types.intp, len(index)) if isinstance(index, types.BaseTuple) else types.intp


@infer_global(operator.getitem)
class _GetItem(AbstractTemplate):  # type: ignore[misc]
    def generic(self, args: Any, kws: Any) -> Any:
        if not isinstance(args[0], TableType):
            return None
        kind, index = args
        if _is_element(kind, index):
            return signature(kind.array.dtype, kind, _plain(index))
        found = self.context.resolve_function_type(operator.getitem, (kind.array, index), {})
        return signature(found.return_type, kind, *found.args[1:])


@infer_global(operator.setitem)
class _SetItem(AbstractTemplate):  # type: ignore[misc]
    def generic(self, args: Any, kws: Any) -> Any:
        if not isinstance(args[0], TableType):
            return None
        kind, index, value = args
        if _is_element(kind, index) and not isinstance(kind.array.dtype, types.Record):
            return signature(types.none, kind, _plain(index), kind.array.dtype)
        found = self.context.resolve_setitem(kind.array, index, value)
        return signature(types.none, kind, *found.args[1:])


@infer
class _StaticGetItem(AbstractTemplate):  # type: ignore[misc]
    key = "static_getitem"

    def generic(self, args: Any, kws: Any) -> Any:
        kind, index = args
        if not isinstance(kind, TableType):
            return None
        if isinstance(index, int) and kind.array.ndim == 1:
            return signature(kind.array.dtype, *args)
        if isinstance(index, str):
            found = self.context.resolve_static_getitem(kind.array, index)
            return signature(found.return_type, *args)
        return None


def _read(builder: Any, entry: Any, at: int) -> Any:
    """A number of a table's entry. It never changes, so LLVM reads it once, regardless of writes in between."""
    value = builder.load(builder.gep(entry, [ir.Constant(_I32, at)]) if at else entry, align=_WORD)
    value.set_metadata("invariant.load", builder.module.add_metadata([]))
    return value


def _element(context: Any, builder: Any, kind: TableType, entry: Any, indices: list[Any]) -> Any:
    """The address of an element, as a pointer to it."""
    at = indices[0]
    for k, index in enumerate(indices[1:]):
        at = builder.add(builder.mul(at, _read(builder, entry, 2 + k), flags=("nsw",)), index, flags=("nsw",))
    data_type = context.get_data_type(kind.array.dtype)
    address = _read(builder, entry, 0)
    if not isinstance(at, ir.Constant) or at.constant != 0:  # most tables of one row are read at 0
        address = builder.add(address, builder.mul(at, ir.Constant(_I64, kind.item_bytes), flags=("nsw",)))
    return builder.inttoptr(address, data_type.as_pointer())


def _indices(builder: Any, kind: Any, index: Any) -> list[Any]:
    return cgutils.unpack_tuple(builder, index) if isinstance(kind, types.BaseTuple) else [index]


def _get(context: Any, builder: Any, kind: TableType, entry: Any, indices: list[Any]) -> Any:
    dtype = kind.array.dtype
    pointer = _element(context, builder, kind, entry, indices)
    return pointer if isinstance(dtype, types.Record) else context.unpack_value(builder, dtype, pointer)


def _as_array(context: Any, builder: Any, kind: TableType, entry: Any) -> Any:
    """The table as one of Numba's arrays."""
    array = kind.array
    model = context.data_model_manager[array]
    value_type = context.get_value_type(array)
    item = ir.Constant(_I64, kind.item_bytes)
    extents = [_read(builder, entry, 1 + k) for k in range(array.ndim)]
    strides = [item]
    for extent in extents[:0:-1]:
        strides.insert(0, builder.mul(extent, strides[0], flags=("nsw",)))
    elements = {name: value_type.elements[model.get_field_position(name)] for name in ("meminfo", "parent", "data")}
    parts = {
        "meminfo": ir.Constant(elements["meminfo"], None),
        "parent": ir.Constant(elements["parent"], None),
        "nitems": builder.sdiv(builder.mul(extents[0], strides[0]), item),
        "itemsize": item,
        "data": builder.inttoptr(_read(builder, entry, 0), elements["data"]),
        "shape": cgutils.pack_array(builder, extents),
        "strides": cgutils.pack_array(builder, strides),
    }
    value = ir.Constant(value_type, ir.Undefined)
    for name, part in parts.items():
        value = builder.insert_value(value, part, model.get_field_position(name))
    return value


@lower_builtin(operator.getitem, TableType, types.Any)  # type: ignore[untyped-decorator]
def _lower_getitem(context: Any, builder: Any, sig: Any, args: Any) -> Any:
    kind, index = sig.args
    if _is_element(kind, index):
        return _get(context, builder, kind, args[0], _indices(builder, index, args[1]))
    implementation = context.get_function(operator.getitem, signature(sig.return_type, kind.array, index))
    return implementation(builder, (_as_array(context, builder, kind, args[0]), args[1]))


@lower_builtin(operator.setitem, TableType, types.Any, types.Any)  # type: ignore[untyped-decorator]
def _lower_setitem(context: Any, builder: Any, sig: Any, args: Any) -> Any:
    kind, index, value = sig.args
    if _is_element(kind, index) and not isinstance(kind.array.dtype, types.Record):
        pointer = _element(context, builder, kind, args[0], _indices(builder, index, args[1]))
        context.pack_value(builder, value, args[2], pointer)
        return context.get_dummy_value()
    implementation = context.get_function(operator.setitem, signature(types.none, kind.array, index, value))
    return implementation(builder, (_as_array(context, builder, kind, args[0]), *args[1:]))


@lower_builtin("static_getitem", TableType, types.Any)  # type: ignore[untyped-decorator]
def _lower_static_getitem(context: Any, builder: Any, sig: Any, args: Any) -> Any:
    kind, index = sig.args
    if isinstance(index, types.IntegerLiteral):
        if kind.array.ndim != 1:
            raise NotImplementedError  # Numba then uses `getitem`
        return _get(context, builder, kind, args[0], [ir.Constant(_I64, index.literal_value)])
    implementation = context.get_function("static_getitem", signature(sig.return_type, kind.array, index))
    return implementation(builder, (_as_array(context, builder, kind, args[0]), args[1]))


@infer_getattr
class _OfTable(AttributeTemplate):  # type: ignore[misc]
    key = TableType

    def generic_resolve(self, kind: TableType, name: str) -> Any:
        return self.context.resolve_getattr(kind.array, name)


@lower_getattr_generic(TableType)  # type: ignore[untyped-decorator]
def _of_table(context: Any, builder: Any, kind: TableType, entry: Any, name: str) -> Any:
    if name == "shape":
        return cgutils.pack_array(builder, [_read(builder, entry, 1 + k) for k in range(kind.array.ndim)])
    implementation = context.get_getattr(kind.array, name)
    return implementation(context, builder, kind.array, _as_array(context, builder, kind, entry), name)
