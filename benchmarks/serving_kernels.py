"""The kernel of serving_floor.py. It has its own file, since Triton reads the source of its module."""

from __future__ import annotations

import triton
import triton.language as tl

import paellapy as pp


@pp.kernel
@triton.jit
def copy(x, out, n, B: tl.constexpr):
    i = tl.program_id(0) * B + tl.arange(0, B)
    tl.store(out + i, tl.load(x + i, mask=i < n), mask=i < n)
