"""Loops that NumPy has no function for, compiled by Numba (cached on disk, without the GIL)."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np
from numba import njit
from numba.extending import intrinsic

from paellapy.instrument.numba_ext.link import loop

if TYPE_CHECKING:
    from collections.abc import Callable

    def jit(fn: Callable[..., Any]) -> Callable[..., Any]: ...
else:
    jit = njit(cache=True, nogil=True)

KINDS = {"add": 0, "fadd": 0, "max": 1, "umax": 1, "min": 2, "umin": 2, "and": 3, "or": 4, "xor": 5, "exch": 6}


@loop
def copy_runs(source: Any, target: Any, source_start: Any, target_start: Any, length: Any) -> None:
    """target[t : t + n] = source[s : s + n] for every run (s, t, n), in order."""
    for i in range(length.size):
        s, t = source_start[i], target_start[i]
        for k in range(length[i]):
            target[t + k] = source[s + k]


@loop
def gather(memory: Any, offset: Any, mask: Any, masked: bool, out: Any) -> bool:
    """out[b, i] = memory[offset[b, i]] where mask[b, i]; one row stands for all. False: an offset is outside."""
    for b in range(out.shape[0]):
        at, keep = (b if offset.shape[0] > 1 else 0), (b if mask.shape[0] > 1 else 0)
        for i in range(out.shape[1]):
            if masked and not mask[keep, i]:
                continue
            where = offset[at, i]
            if where < 0 or where >= memory.size:
                return False
            out[b, i] = memory[where]
    return True


@loop
def scatter(memory: Any, offset: Any, mask: Any, masked: bool, value: Any) -> None:
    """memory[offset[b, i]] = value[b, i] where mask[b, i], in order; the offsets have been checked."""
    for b in range(max(offset.shape[0], value.shape[0], mask.shape[0])):
        at, keep = (b if offset.shape[0] > 1 else 0), (b if mask.shape[0] > 1 else 0)
        own = b if value.shape[0] > 1 else 0
        for i in range(offset.shape[1]):
            if not masked or mask[keep, i]:
                memory[offset[at, i]] = value[own, i]


@jit
def atomic(memory: Any, index: Any, value: Any, kind: int, old: Any) -> None:
    """memory[index[i]] = op(memory[index[i]], value[i]) in order, with the old values stored in `old`."""
    for i in range(index.size):
        at = index[i]
        was = memory[at]
        old[i] = was
        v = value[i]
        if kind == 0:
            memory[at] = was + v
        elif kind == 1:
            memory[at] = max(was, v)
        elif kind == 2:
            memory[at] = min(was, v)
        elif kind == 6:
            memory[at] = v


@jit
def atomic_bits(memory: Any, index: Any, value: Any, kind: int, old: Any) -> None:
    """The bitwise kinds, which floats do not have."""
    for i in range(index.size):
        at = index[i]
        was = memory[at]
        old[i] = was
        if kind == 3:
            memory[at] = was & value[i]
        elif kind == 4:
            memory[at] = was | value[i]
        elif kind == 5:
            memory[at] = was ^ value[i]


@jit
def compare_and_swap(memory: Any, index: Any, expected: Any, value: Any, old: Any) -> None:
    for i in range(index.size):
        at = index[i]
        old[i] = memory[at]
        if memory[at] == expected[i]:
            memory[at] = value[i]


@loop
def sectors(offset: Any, mask: Any, masked: bool, size: int, sector: int, table: Any) -> Any:
    """The number of different sectors, and of elements; `table` has a power of two of entries, twice the elements."""
    table[:] = -1
    last, full = -1, table.size - 1
    found = used = 0
    for i in range(offset.size):
        if masked and not mask[i]:
            continue
        used += 1
        here = offset[i] * size // sector
        if here == last:
            continue
        last = here
        slot = here & full
        while table[slot] != -1 and table[slot] != here:
            slot = (slot + 1) & full
        if table[slot] == -1:
            table[slot] = here
            found += 1
    return found, used


_TABLE = 1 << 14  # lines, and addresses, that are told apart


@jit
def queues(offset: Any, mask: Any, blocks: int, vector: int, warp: int, per_sector: int, per_line: int) -> Any:
    """Turns at the busiest line, updates of the busiest address, and all updates.

    A request is one element of each lane, and a lane has `vector` elements in a row.
    """
    full = _TABLE - 1
    lines, addresses = np.zeros(_TABLE, np.int64), np.zeros(_TABLE, np.int64)
    lane_count, lane_request = np.zeros(_TABLE, np.int64), np.zeros(_TABLE, np.int64)
    sector_count, sector_request = np.zeros(_TABLE, np.int64), np.zeros(_TABLE, np.int64)
    elements, request, updates = offset.shape[1], 0, 0
    for b in range(blocks):
        at, keep = (b if offset.shape[0] > 1 else 0), (b if mask.shape[0] > 1 else 0)
        for first in range(0, elements, warp * vector):
            for r in range(vector):
                request += 1
                for i in range(first + r, min(first + warp * vector, elements), vector):
                    if not mask[keep, i if mask.shape[1] > 1 else 0]:
                        continue
                    updates += 1
                    where = offset[at, i]
                    a, s = where & full, (where // per_sector) & full
                    addresses[a] += 1
                    if lane_request[a] != request:
                        lane_request[a], lane_count[a] = request, 0
                    lane_count[a] += 1
                    if sector_request[s] != request:
                        sector_request[s], sector_count[s] = request, 0
                    if lane_count[a] > sector_count[s]:
                        sector_count[s] = lane_count[a]
                        lines[(where // (per_sector * per_line)) & full] += 1
    return lines.max(), addresses.max(), updates


# float16 and back. NumPy converts element by element (1.5 and 3 ns); the compiler vectorises these loops.

_ONE_HALF = np.uint32(0x3F000000)  # 0.5, whose last bit is worth 2**-24: float16's smallest subnormal
_SMALLEST_NORMAL = np.uint32(0x38800000)  # 2**-14
_TOO_LARGE = np.uint32(0x47800000)  # 2**16
_INFINITY = np.uint32(0x7F800000)
_REBIAS = np.uint32(112 << 23)  # difference of the exponents' biases, 127 - 15


@jit
def to_half(value: Any, bits: Any, out: Any) -> None:
    """out = value as float16 bits, rounded to nearest even; `bits` is `value` viewed as uint32."""
    for i in range(out.size):
        u = np.uint32(bits[i] & np.uint32(0x7FFFFFFF))
        sign = (bits[i] >> np.uint32(16)) & np.uint32(0x8000)
        odd = np.uint32((u >> np.uint32(13)) & np.uint32(1))
        normal = np.uint32(np.uint32(u + np.uint32(0xFFF) + odd - _REBIAS) >> np.uint32(13))
        special = np.uint32(0x7E00) if u > _INFINITY else np.uint32(0x7C00)
        tiny = np.float32(abs(value[i]) + np.float32(0.5)).view(np.uint32) - _ONE_HALF
        magnitude = special if u >= _TOO_LARGE else (tiny if u < _SMALLEST_NORMAL else normal)
        out[i] = np.uint16(sign | magnitude)


@jit
def from_half(half: Any, out: Any) -> None:
    """out (float32 viewed as uint32) = float16 bits."""
    for i in range(out.size):
        h = np.uint32(half[i])
        exponent = h & np.uint32(0x7C00)
        shifted = np.uint32((h & np.uint32(0x7FFF)) << np.uint32(13))
        # Scaling by 2**112 moves the exponent and normalises subnormals in one exact step.
        scaled = np.float32(shifted.view(np.float32) * np.float32(2.0**112)).view(np.uint32)
        magnitude = (shifted | _INFINITY) if exponent == np.uint32(0x7C00) else scaled
        out[i] = magnitude | ((h & np.uint32(0x8000)) << np.uint32(16))


@intrinsic  # type: ignore[untyped-decorator, unused-ignore]
def _fused(typing: Any, a: Any, b: Any, c: Any) -> Any:
    """a * b + c with one rounding: LLVM's intrinsic, which is the machine's instruction if it has one."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.fma(*args)

    return a(a, b, c), generate


@jit
def fma(a: Any, b: Any, c: Any, out: Any) -> None:
    for i in range(out.size):
        out[i] = _fused(a[i], b[i], c[i])


@jit
def erf(x: Any, out: Any) -> None:
    for i in range(out.size):
        out[i] = math.erf(x[i])


@jit
def erfc(x: Any, out: Any) -> None:
    for i in range(out.size):
        out[i] = math.erfc(x[i])


@jit
def lgamma(x: Any, out: Any) -> None:
    for i in range(out.size):
        out[i] = math.lgamma(x[i])


@jit
def tgamma(x: Any, out: Any) -> None:
    for i in range(out.size):
        out[i] = math.gamma(x[i])


@jit
def look_up(table: Any, index: Any, out: Any) -> None:
    """out = table[index] for one-byte indices."""
    for i in range(out.size):
        out[i] = table[index[i]]
