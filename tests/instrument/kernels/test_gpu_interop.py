"""On a real GPU: arrays of other libraries, graphs, PyTorch's own launches."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import triton
import triton.language as tl
from failing import failing

import paellapy as pp

pytestmark = pytest.mark.gpu


@triton.jit
def double(x, out, n, B: tl.constexpr):
    i = tl.program_id(0) * B + tl.arange(0, B)
    tl.store(out + i, tl.load(x + i, mask=i < n) * 2, mask=i < n)


@triton.jit
def triple(x, out, n, B: tl.constexpr):
    i = tl.program_id(0) * B + tl.arange(0, B)
    tl.store(out + i, tl.load(x + i, mask=i < n) * 3, mask=i < n)


def test_cupy_arrays_and_streams(gpu: pp.Device) -> None:
    cupy = pytest.importorskip("cupy")
    kernel = pp.kernel(double)
    x = cupy.arange(1000, dtype=cupy.float32)
    out = cupy.empty_like(x)
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream, pp.trace() as trace:
        kernel[(8,)](x, out, 1000, B=128)
        assert gpu.current_stream() == stream.ptr
    np.testing.assert_array_equal(out.get(), x.get() * 2)
    assert len(trace.blocks) == 8
    assert int(trace.launches["stream"][0]) == stream.ptr


def test_torch_tensors_unaligned_views_and_streams(gpu: pp.Device) -> None:
    torch = pytest.importorskip("torch")
    kernel = pp.kernel(double)
    base = torch.arange(1001, dtype=torch.float32, device="cuda")
    x = base[1:]  # four bytes off: another specialisation
    out = torch.empty_like(x)
    with torch.cuda.stream(torch.cuda.Stream()) as _:
        kernel[(8,)](x, out, 1000, B=128)
    torch.cuda.synchronize()
    assert torch.equal(out, x * 2)
    with failing(pp.ArgumentError, argument="x", field="device", given="cpu"):
        kernel[(8,)](x.cpu(), out, 1000, B=128)


def test_warmup_compiles_as_tritons_own_and_launches_nothing(gpu: pp.Device) -> None:
    torch = pytest.importorskip("torch")
    kernel = pp.kernel(double, report=None)
    base, out = torch.ones(1001, device="cuda"), torch.zeros(1000, device="cuda")
    for x in (torch.float32, base[:1000], base[1:]):
        given = (x, torch.float32 if x is torch.float32 else out, 1000)
        made, theirs = (fn.warmup(*given, B=128, grid=(8,)) for fn in (kernel, double))
        assert made.metadata.num_warps == theirs.metadata.num_warps
        assert made.asm["ttir"].count("tt.divisibility") == theirs.asm["ttir"].count("tt.divisibility")
    torch.cuda.synchronize()
    assert not out.any()


def test_cupy_raw_kernels(gpu: pp.Device) -> None:
    cupy = pytest.importorskip("cupy")
    code = 'extern "C" __global__ void scale(float* x, float a, int n)'
    code += "{ int i = blockIdx.x * blockDim.x + threadIdx.x; if (i < n) x[i] *= a; }"
    for raw, name in ((cupy.RawKernel(code, "scale"), None), (cupy.RawModule(code=code), "scale")):
        kernel = pp.kernel(raw, name=name)
        x = cupy.ones(1000, dtype=cupy.float32)
        with pp.trace() as trace:
            kernel[8, 128](x, 3.0, 1000)
        assert float(x.sum()) == 3000
        assert len(trace.blocks) == 8


def test_replays_of_a_captured_graph_are_traced(gpu: pp.Device) -> None:
    cupy = pytest.importorskip("cupy")
    kernel = pp.kernel(double)
    x = cupy.arange(1000, dtype=cupy.float32)
    out = cupy.empty_like(x)
    kernel[(8,)](x, out, 1000, B=128)
    stream = cupy.cuda.Stream(non_blocking=True)
    with pp.trace() as first:
        with stream:
            kernel[(8,)](x, out, 1000, B=128)  # compiled before the capture begins
            stream.begin_capture()
            kernel[(8,)](x, out, 1000, B=128)
            graph = stream.end_capture()
        for _ in range(5):
            graph.launch(stream)
        stream.synchronize()
    assert len(first.blocks) == 8 + 5 * 8
    with pp.trace() as again:
        graph.launch(stream)
        stream.synchronize()
    assert len(again.blocks) == 8
    assert again.kernels == ("double",)


def test_kernels_launched_by_triton_are_traced(gpu: pp.Device) -> None:
    torch = pytest.importorskip("torch")
    x = torch.arange(1000, dtype=torch.float32, device="cuda")
    out = torch.empty_like(x)
    pp.instrument_torch()
    try:
        triple[(8,)](x, out, 1000, B=128)  # compiles; no trace runs
        with pp.trace() as trace:
            for _ in range(3):
                triple[(8,)](x, out, 1000, B=128)
        assert torch.equal(out, x * 3)
        assert trace.kernels == ("triple",)
        assert len(trace.launches) == 3
        assert len(trace.blocks) == 24
        assert trace.dropped == 0
    finally:
        pp.instrument_torch(False)


def test_graphs_that_torch_captures_are_traced_whenever_they_replay(gpu: pp.Device) -> None:
    torch = pytest.importorskip("torch")
    x = torch.arange(1000, dtype=torch.float32, device="cuda")
    outs = [torch.empty_like(x) for _ in range(3)]
    pp.instrument_torch()
    try:
        triple[(8,)](x, outs[0], 1000, B=128)  # compiles; no trace runs

        def captured(out: Any) -> Any:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                triple[(8,)](x, out, 1000, B=128)
            return graph

        before = captured(outs[1])
        with pp.trace() as first:
            inside = captured(outs[2])  # the first launch of the trace is captured
            for graph in (before, inside, inside):
                graph.replay()
            torch.cuda.synchronize()
        with pp.trace(records_per_sm=1 << 10) as second:  # in other rings
            triple[(8,)](x, outs[0], 1000, B=128)
            for graph in (before, before, inside):
                graph.replay()
            torch.cuda.synchronize()
    finally:
        pp.instrument_torch(False)
    assert all(torch.equal(out, x * 3) for out in outs)
    for trace, replays in ((first, [8, 16]), (second, [8, 8, 16])):
        assert sorted(np.unique(trace.blocks["launch"], return_counts=True)[1].tolist()) == replays
        assert trace.kernels == ("triple",)
        assert trace.dropped == 0


@pytest.mark.filterwarnings("default")
def test_torch_compile_is_traced(gpu: pp.Device) -> None:
    torch = pytest.importorskip("torch")
    import torch._inductor.config as inductor

    def f(a: Any, b: Any) -> Any:
        return torch.nn.functional.gelu(a * b + a).sum(dim=-1)

    a, b = (torch.randn(512, 2048, device="cuda") for _ in range(2))
    pp.instrument_torch()
    try:
        with inductor.patch(compile_threads=1, force_disable_caches=True):
            compiled = torch.compile(f)
            compiled(a, b)
            with pp.trace() as trace:
                got = compiled(a, b)
        torch.testing.assert_close(got, f(a, b), rtol=1e-4, atol=1e-4)
        assert len(trace.blocks) > 0
        assert all(name.startswith("triton_") for name in trace.kernels)
    finally:
        pp.instrument_torch(False)
        torch._dynamo.reset()


def test_autotuned_kernels_choose_once(gpu: pp.Device) -> None:
    configs = [triton.Config({"B": b}, num_warps=w) for b in (64, 256) for w in (2, 4)]
    tuned = pp.kernel(triton.autotune(configs=configs, key=["n"])(double))
    x = gpu.array(np.arange(5000, dtype=np.float32))
    out = gpu.empty(5000)
    for _ in range(2):
        tuned[lambda meta: (triton.cdiv(5000, meta["B"]),)](x, out, 5000)
    np.testing.assert_array_equal(out.numpy(), x.numpy() * 2)
    assert len(tuned._tuner._best) == 1


def test_streams_and_events(gpu: pp.Device) -> None:
    kernel = pp.kernel(double)
    x = gpu.array(np.arange(1000, dtype=np.float32))
    out = gpu.empty(1000)
    first, second = gpu.stream(), gpu.stream(priority=1)
    with first:
        start = first.record()
        kernel[(8,)](x, out, 1000, B=128)
        done = first.record()
    second.wait(done)
    with second:
        kernel[(8,)](out, x, 1000, B=128)
    second.synchronize()
    assert done.done()
    assert done.elapsed_ns(start) > 0
    np.testing.assert_array_equal(x.numpy(), np.arange(1000) * 4)
