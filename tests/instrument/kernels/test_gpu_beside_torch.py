"""On a real GPU: kernels of ours in PyTorch's graphs, arrays of any library, and kernels that a trace cannot see."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import triton
import triton.language as tl

import paellapy as pp

pytestmark = pytest.mark.gpu


@triton.jit
def device_side(x, out, M, N, BM: tl.constexpr, BN: tl.constexpr):
    source = tl.make_tensor_descriptor(x, [M, N], [N, 1], [BM, BN])
    i, j = tl.program_id(0) * BM, tl.program_id(1) * BN
    tl.make_tensor_descriptor(out, [M, N], [N, 1], [BM, BN]).store([i, j], source.load([i, j]) * 2)


@triton.jit
def triple(x, out, n, B: tl.constexpr):
    i = tl.program_id(0) * B + tl.arange(0, B)
    tl.store(out + i, tl.load(x + i, mask=i < n) * 3, mask=i < n)


@pytest.mark.parametrize("report", [None, "count", "trace"])
def test_a_graph_of_torch_may_hold_kernels_that_need_scratch_memory(report: Any, gpu: pp.Device) -> None:
    torch = pytest.importorskip("torch")
    x, out = torch.randn(128, 64, device="cuda"), torch.zeros(128, 64, device="cuda")
    kernel = pp.kernel(device_side, report=None if report == "trace" else report)
    graph = torch.cuda.CUDAGraph()

    def capture() -> None:
        with torch.cuda.graph(graph):
            kernel[4, 2](x, out, 128, 64, 32, 32)

    if report != "trace":
        capture()
        for _ in range(3):
            x += 1
            graph.replay()
            torch.cuda.synchronize()
            assert torch.equal(out, 2 * x)
        return
    with pp.trace() as t:
        capture()
        graph.replay()
        graph.replay()
        torch.cuda.synchronize()
    assert torch.equal(out, 2 * x)
    assert np.bincount(t.blocks["block"]).tolist() == [2] * 8


class Foreign:
    """An array of a library that is not known, with CUDA's array interface."""

    def __init__(self, array: Any) -> None:
        self._array = array

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        array = self._array
        return {"shape": array.shape, "typestr": array.dtype.str, "data": (array.ptr, False), "version": 3}


@pytest.mark.parametrize("count", [1000, 0])
def test_any_array_with_cudas_interface_is_an_argument(count: int, gpu: pp.Device) -> None:
    x, out = gpu.array(np.arange(1000, dtype=np.float32)), gpu.array(np.zeros(1000, np.float32))
    pp.kernel(triple)[8,](Foreign(x), Foreign(out), count, B=128)
    np.testing.assert_array_equal(out.numpy(), 3 * x.numpy() * (np.arange(1000) < count))


def test_kernels_that_triton_launches_plainly_are_named(gpu: pp.Device) -> None:
    torch = pytest.importorskip("torch")
    x, out = torch.ones(1000, device="cuda"), torch.zeros(1000, device="cuda")
    with pp.trace() as t:
        triple[8,](x, out, 1000, B=128)
    assert torch.equal(out, 3 * x)
    assert t.unseen == ("triple",)


@pytest.mark.filterwarnings("default")
def test_kernels_that_inductor_compiled_before_are_named(gpu: pp.Device) -> None:
    torch = pytest.importorskip("torch")
    import torch._inductor.config as inductor

    x = torch.randn(4096, device="cuda")
    with inductor.patch(compile_threads=1):
        compiled = torch.compile(lambda a: a * 2 + 1)
        compiled(x)
        pp.instrument_torch()
        try:
            with pp.trace() as t:
                got = compiled(x)
        finally:
            pp.instrument_torch(False)
            torch._dynamo.reset()
    torch.testing.assert_close(got, x * 2 + 1)
    assert len(t.blocks) == 0
    assert len(t.unseen) == 1
    assert t.unseen[0].startswith("triton_")


SCALARS = """
struct Half { unsigned short bits; };
extern "C" __global__ void scalars(double* out, bool a, signed char b, short c, unsigned long long d, double e, float f,
                                   Half g, int h, const float* none) {
    float half;
    asm("cvt.f32.f16 %0, %1;" : "=f"(half) : "h"(g.bits));
    double values[] = {double(a), double(b), double(c), double(d), e, f, half, double(h), none ? 1. : 2.};
    if (threadIdx.x < 9 && threadIdx.y + threadIdx.z + blockIdx.y == 0) out[threadIdx.x] = values[threadIdx.x];
}
"""


@pytest.mark.parametrize("report", [None, "count", "trace"])
def test_cuda_c_takes_scalars_of_every_type(report: Any, gpu: pp.Device) -> None:
    kernel = pp.kernel(source=SCALARS, name="scalars", report=report)
    given = (True, -3, np.int16(-300), 2**63 + 2**12, 1 / 3, np.float32(0.1), np.float16(0.5), -7, 0)
    out = gpu.array(np.zeros(9))
    kernel[(1, 2), (16, 2, 2)](out, *given)
    wanted = [1, -3, -300, 2**63 + 2**12, 1 / 3, float(np.float32(0.1)), 0.5, -7, 2]
    assert out.numpy().tolist() == wanted


def test_an_assertion_that_fails_on_the_gpu_is_an_error(tmp_path: Path) -> None:
    # In a process of its own: the GPU's context is lost.
    script = tmp_path / "assertion.py"
    script.write_text(textwrap.dedent("""
        import numpy as np, triton, triton.language as tl
        import paellapy as pp

        @pp.kernel
        @triton.jit(debug=True)
        def checked(x):
            tl.device_assert(tl.load(x) == 0, "not zero")

        with pp.Device("cuda") as device:
            checked[1,](device.array(np.zeros(1, np.float32)))
            device.synchronize()
            print("zero passed")
            checked[1,](device.array(np.ones(1, np.float32)))
            try:
                device.synchronize()
            except pp.PaellaError as e:
                print("refused", e)
    """))  # fmt: skip
    found = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=120, check=False)
    assert "zero passed" in found.stdout, found.stderr
    assert "refused" in found.stdout, found.stderr
    assert "not zero" in found.stdout + found.stderr
