"""`tl.dot_scaled`: products of narrow floats, with a scale for each group along k (the OCP formats)."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from paellapy.instrument.ttir.code import Run, Slots
from paellapy.instrument.ttir.lower import Lowering, builds
from paellapy.instrument.ttir.machine import Active
from paellapy.instrument.ttir.reduction import Dot
from paellapy.instrument.ttir.tree import Op
from paellapy.instrument.ttir.types import Type
from paellapy.instrument.ttir.values import full

Ints = tuple[int, ...]
# fp4 (e2m1): sign, two bits of exponent, one of fraction.
_FP4 = np.array([s * m for s in (1, -1) for m in (0, 0.5, 1, 1.5, 2, 3, 4, 6)], np.float32)
_TEXT = re.compile(r"lhs = (\w+) rhs = (\w+)")


@dataclass(frozen=True, slots=True)
class Operand:
    """One side: its elements as float32, with k along `axis` (counted from the end), and its scales with k last."""

    type: Type
    format: str
    scale: Type | None
    axis: int
    packed_along_k: bool

    def value(self, x: Any, scale: Any) -> Any:
        x = full(x, self.type.shape)
        axis = self.axis
        if self.format == "e2m1":
            bits = x.view(np.uint8)
            pair = _FP4[np.stack([bits & 15, bits >> 4], -1)]  # low half first
            along = axis if self.packed_along_k else -3 - axis
            pair = np.moveaxis(pair, -1, along % (x.ndim) + 1)
            shape = list(x.shape)
            shape[along % x.ndim] *= 2
            x = pair.reshape(shape)
        if self.scale is None:
            return x
        s = full(scale, self.scale.shape)
        if not self.scale.element.is_float:  # e8m0: an exponent; 255 stands for NaN
            e = s.view(np.uint8).astype(np.float64)
            s = np.where(e == 255, np.nan, np.exp2(e - 127)).astype(np.float32)
        s = np.repeat(s, x.shape[axis] // s.shape[-1], axis=-1)
        return x * (s if axis == -1 else np.swapaxes(s, -1, -2))

    @property
    def shape(self) -> tuple[int, ...]:
        if self.format != "e2m1":
            return self.type.shape
        shape = list(self.type.shape)
        shape[self.axis if self.packed_along_k else -3 - self.axis] *= 2
        return tuple(shape)


def _operands(op: Op) -> tuple[Operand, Operand, list[int | None]]:
    """Both sides, and the positions of a, its scales, b, its scales and c among the op's operands."""
    m = _TEXT.search(op.body)
    assert m is not None
    names = re.findall(r"(%[\w$.\-#]+)( scale)?", op.body.partition(" lhs = ")[0])
    types, at, places = iter(op.in_types), 0, []
    sides: list[tuple[Type, Type | None]] = []
    for _ in range(2):
        scaled = bool(names[at][1])
        places += [at, at + 1 if scaled else None]
        sides.append((next(types), next(types) if scaled else None))
        at += 1 + scaled
    places.append(at)
    packed = [op.attributes.get(name, "true") != "false" for name in ("lhs_k_pack", "rhs_k_pack")]
    a = Operand(sides[0][0], m[1], sides[0][1], -1, packed[0])
    b = Operand(sides[1][0], m[2], sides[1][1], -2, packed[1])
    return a, b, places


@builds("tt.dot_scaled")
def dot_scaled(low: Lowering, op: Op, args: Ints, outs: Ints) -> Run:
    a, b, places = _operands(op)
    result, (out,) = op.out_types[0], outs
    low.facts.dot_dtype = low.facts.dot_dtype or ("f8" if a.format[0] == b.format[0] == "e" else "bf16")
    product: Callable[..., Any] = Dot(a.shape, b.shape, False, result.element.compute)
    flops = 2 * result.size * a.shape[-1]

    def fn(x: Any, sx: Any, y: Any, sy: Any, c: Any) -> Any:
        return product(a.value(x, sx), b.value(y, sy), c)

    def run(active: Active, slots: Slots) -> None:
        slots[out] = active.machine.call(fn, *[None if p is None else slots[args[p]] for p in places])
        active.dot_flops += flops

    return run
