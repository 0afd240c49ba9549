"""Trace a Triton kernel: which block ran on which SM, and when."""

import numpy as np
import triton
import triton.language as tl

import paellapy as pp


@pp.kernel
@triton.jit
def add(x, y, out, n, B: tl.constexpr):
    i = tl.program_id(0) * B + tl.arange(0, B)
    tl.store(out + i, tl.load(x + i, mask=i < n) + tl.load(y + i, mask=i < n), mask=i < n)


n = 1 << 20
x, y = (pp.array(np.random.default_rng(0).random(n, np.float32)) for _ in range(2))
out = pp.empty(n, np.float32)

with pp.trace() as t:
    add[(triton.cdiv(n, 1024),)](x, y, out, n, B=1024)

print(t.summary())  # one row per kernel
print(t.blocks[:3])  # one row per block: launch, kernel, block, sm, start_ns, end_ns
assert np.array_equal(out.numpy(), x.numpy() + y.numpy())
