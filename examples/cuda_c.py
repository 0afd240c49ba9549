"""Trace a CUDA C kernel. Compiling it needs no GPU (extra cuda12 or cuda13, for NVRTC); running it does."""

import numpy as np

import paellapy as pp

SOURCE = """extern "C" __global__ void saxpy(int n, float a, const float* x, float* y) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) y[i] += a * x[i];
}"""

saxpy = pp.kernel(source=SOURCE, name="saxpy")
n = 1 << 20
x, y = (pp.array(np.ones(n, np.float32)) for _ in range(2))

try:
    with pp.trace() as t:
        saxpy[n // 256, 256](n, 2.0, x, y)
    print(t.summary())
    assert (y.numpy() == 3).all()
except pp.LaunchError as error:  # without a GPU: the virtual GPU runs only Triton kernels
    print(error)
