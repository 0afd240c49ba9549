"""Arguments of Triton kernels: bound by code generated for the signature, and passed on as the PTX takes them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from triton import language as tl
from triton.runtime.jit import JITFunction

from paellapy.instrument.arguments import SCALARS, STRUCT_CODES, Descriptor, Handler, Handlers, PointerKey, triton_dtype
from paellapy.instrument.errors import ArgumentError
from paellapy.instrument.kernels.triton_ptx import TRITON_VERSION

Binder = Callable[..., tuple[tuple[Any, ...], tuple[Any, ...], dict[str, Any]]]
_FLAGS = 1 if TRITON_VERSION < (3, 7) else 2  # of a descriptor in parts: NaN padding; since 3.7 rounding to tf32


def generate_binder(fn: JITFunction) -> tuple[Binder, Callable[..., dict[str, Any]]]:
    """`bind(handlers, *args, **kwargs)` → (values, key, launch options), and `named(*args, **kwargs)` → the arguments
    by name as they were given, both generated for this signature.

    They are generated because binding by `inspect` costs more than the launch itself. Our own names start with `_pp_`,
    so that no parameter hides them.
    """
    arguments, lines, values, keys = [], [], [], []
    scope: dict[str, Any] = {"_pp_simple": (int, bool, str, type(None)), "_pp_constant_key": constant_key}
    keyword_only = False
    for i, (name, param) in enumerate(fn.signature.parameters.items()):
        if param.kind is inspect.Parameter.VAR_POSITIONAL:
            arguments.append(f"*{name}")
            keyword_only = True
        else:
            if param.kind is inspect.Parameter.KEYWORD_ONLY and not keyword_only:
                arguments.append("*")
                keyword_only = True
            if param.default is inspect.Parameter.empty:
                arguments.append(name)
            else:
                scope[f"_pp_default{i}"] = param.default
                arguments.append(f"{name}=_pp_default{i}")
        if fn.params[i].is_constexpr:
            # 1 and True are equal, but not the same constant.
            values.append(name)
            simple = f"{name} if {name}.__class__ in _pp_simple else _pp_constant_key({name})"
            keys.append(f"({name}.__class__, {simple})")
        else:
            handler = f"(_pp_handlers.get({name}.__class__) or _pp_handlers.missing)"
            lines.append(f"    _pp_v{i}, _pp_k{i} = {handler}({name})")
            values.append(f"_pp_v{i}")
            keys.append(f"_pp_k{i}")
    body = "\n".join(lines)
    signature = ", ".join(["_pp_handlers", *arguments, "**_pp_options"])
    results = [f"({', '.join(items)}{',' if items else ''})" for items in (values, keys)]
    code = f"def bind({signature}):\n{body}\n    return {', '.join(results)}, _pp_options\n"
    pairs = ", ".join(f"{name!r}: {name}" for name in fn.signature.parameters)
    code += f"def named({', '.join([*arguments, '**_pp_options'])}):\n    return {{{pairs}}}\n"
    exec(code, scope)
    return scope["bind"], scope["named"]


def constant_key(value: Any) -> Any:
    """A constant as part of a key: values that Python considers equal (0.0 and -0.0, (1,) and (True,)) may differ."""
    if isinstance(value, float):
        return value.hex()
    if isinstance(value, tuple):
        return tuple((v.__class__, constant_key(v)) for v in value)
    if isinstance(value, tl.constexpr):
        return value.value.__class__, constant_key(value.value)
    try:
        hash(value)
    except TypeError:
        raise ArgumentError(
            f"a constant must be a number, string, tuple, type or function, not {value!r:.60}"
        ) from None
    return value


class TypeHandlers(Handlers):
    """Arguments given as types, for compiling without arrays: "*fp32" is an aligned pointer, "*fp32:1" an unaligned
    one, "i32" and "fp32" are numbers. NumPy arrays stand for their type."""

    def __init__(self) -> None:
        super().__init__({**SCALARS, str: self._of_text}, self._find)

    @staticmethod
    def _of_text(text: str) -> tuple[Any, Any]:
        kind, _, alignment = text.partition(":")
        if kind.startswith("*"):
            return 16, PointerKey.of(triton_dtype(kind[1:]), alignment in ("", "16"))
        if kind in ("i32", "i64", "u64"):
            return {"i32": (2, 2), "i64": (1 << 40 | 1, 4), "u64": (1 << 63 | 1, 6)}[kind]
        if kind in ("fp32", "u1"):
            return (0.5, kind) if kind == "fp32" else (False, kind)
        raise ArgumentError(f"unknown argument type {text!r}; use '*fp32', 'i32', 'fp32' or similar")

    @staticmethod
    def _find(kind: type) -> Handler | None:
        def of_array(a: Any) -> tuple[Any, Any]:
            return 16, PointerKey.of(triton_dtype(a.dtype), True)

        return of_array if hasattr(kind, "dtype") and not issubclass(kind, np.generic) else None


def struct_codes(types: Sequence[Any], tiles: bool) -> list[str]:
    """The struct codes. `tiles`: descriptors are passed as the 128 bytes of a CUtensorMap; before sm_90 in parts."""
    codes: list[str] = []
    for kind in types:
        if isinstance(kind, (tuple, list)):
            codes += struct_codes(kind, tiles)
        elif kind.startswith("tensordesc"):
            rank = kind.partition("[")[2].partition("]")[0].count(",") + 1
            codes += ["128s@64"] if tiles else ["Q", *"q" * (2 * rank), *"B" * _FLAGS]
            codes += [*"i" * rank, *"q" * rank]
        elif kind == "constexpr":
            continue
        elif kind.startswith("*"):
            codes.append("Q")
        elif kind in STRUCT_CODES:
            codes.append(STRUCT_CODES[kind])
        else:
            raise ArgumentError(
                f"kernel parameters of type {kind} are not supported: pass arrays, numbers, tuples or tensor "
                "descriptors"
            )
    return codes


def launch_values(
    signature: dict[str, Any], tiles: Sequence[Any], tile: Callable[[Descriptor, Any], Any], values: Sequence[Any]
) -> list[Any]:
    """The values that are passed to the kernel: without constants, with tuples flattened and descriptors in parts.

    `tile` converts a descriptor, with the compiler's facts about it, to the form that the device's kernels take.
    """
    facts = iter(tiles)

    def walk(kind: Any, value: Any) -> list[Any]:
        if isinstance(kind, (tuple, list)):
            return [leaf for k, v in zip(kind, value, strict=True) for leaf in walk(k, v)]
        if isinstance(value, Descriptor):
            parts = [*value.shape, *value.strides]
            if tiles:
                return [tile(value, next(facts)), *parts]
            return [value.base, *parts, *(value.nan_padding, value.tf32)[:_FLAGS], *parts]
        return [] if kind == "constexpr" else [value]

    return [leaf for k, v in zip(signature.values(), values, strict=True) for leaf in walk(k, v)]
