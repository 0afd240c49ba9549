"""A script for `paellapy run`: it launches kernels on the virtual GPU again and again, and prints their number."""

import sys
import time

import numpy as np
import triton
import triton.language as tl

import paellapy as pp


@pp.kernel
@triton.jit
def double(x, out, n, B: tl.constexpr):
    i = tl.program_id(0) * B + tl.arange(0, B)
    tl.store(out + i, tl.load(x + i, mask=i < n) * 2, mask=i < n)


with pp.Device("virtual:h200"):
    x, out = pp.array(np.arange(64, dtype=np.float32)), pp.empty((64,))
    end = time.monotonic() + float(sys.argv[1])
    launches = 0
    while time.monotonic() < end:
        double[(1,)](x, out, 64, B=64)
        launches += 1
        if launches % 10 == 1:
            print(launches, flush=True)
    assert np.array_equal(out.numpy(), 2 * np.arange(64, dtype=np.float32))
    print("done", launches, *sys.argv[2:], flush=True)
