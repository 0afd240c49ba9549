"""On a real GPU: ranges of kernels inside CUDA graphs are recorded when the graphs are replayed, once in each lane."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import triton
import triton.language as tl

import paellapy as pp
from paellapy.instrument.records import WHOLE_BLOCK

pytestmark = pytest.mark.gpu
BLOCKS, N = 8, 1000


@triton.jit
def block_ranges(x, out, n, B: tl.constexpr):
    i = tl.program_id(0) * B + tl.arange(0, B)
    with pp.range("load"):
        v = tl.load(x + i, mask=i < n)
    for _ in range(3):
        with pp.range("step"):
            v = tl.exp(tl.sin(v))
    tl.store(out + i, v, mask=i < n)


@triton.jit
def warp_ranges(x, out, n, B: tl.constexpr):
    i = tl.program_id(0) * B + tl.arange(0, B)
    with pp.range("load", per_warp=True):
        v = tl.load(x + i, mask=i < n)
    for _ in range(3):
        with pp.range("step", per_warp=True):
            v = tl.exp(tl.sin(v))
    tl.store(out + i, v, mask=i < n)


# The like in CUDA C. Loads keep their place between the markers; the compiler moves arithmetic out.
CUDA = r"""
extern "C" __global__ void NAME(const float* x, float* out, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    WORD_begin("load");
    float v = x[i % n];
    WORD_end("load");
    for (int k = 0; k < 3; ++k) {
        WORD_begin("step");
        v = __sinf(v) + x[(i + k) % n];
        WORD_end("step");
    }
    if (i < n) out[i] = v;
}
"""


@triton.jit
def triple(x, out, n, B: tl.constexpr):
    i = tl.program_id(0) * B + tl.arange(0, B)
    tl.store(out + i, tl.load(x + i, mask=i < n) * 3, mask=i < n)


def lanes(t: pp.Trace, kernel: str) -> Counter[Any]:
    """How often each range was recorded by each block and warp. All lie within a run of their block."""
    assert t.ranges.lost == 0
    r = t.ranges.records[t.ranges.records["kernel"] == t.kernels.index(kernel)]
    for one in r:
        own = t.blocks[(t.blocks["launch"] == one["launch"]) & (t.blocks["block"] == one["block"])]
        assert ((own["start_ns"] <= one["start_ns"]) & (one["end_ns"] <= own["end_ns"])).any()
    return Counter((int(one["block"]), int(one["warp"]), t.ranges.names[one["range"]]) for one in r)


def expected(per_warp: bool) -> Counter[Any]:
    warps = range(4) if per_warp else [WHOLE_BLOCK]
    times = {"load": 1, "step": 3}
    return Counter({(b, w, name): n for b in range(BLOCKS) for w in warps for name, n in times.items()})


def of_triton(per_warp: bool) -> tuple[str, Callable[[Any, Any], None]]:
    kernel = pp.kernel(warp_ranges if per_warp else block_ranges)
    return kernel.name, lambda x, out: kernel[BLOCKS,](x, out, N, B=128, num_warps=4)


def of_cuda(per_warp: bool) -> tuple[str, Callable[[Any, Any], None]]:
    name, word = ("cuda_warp_ranges", "pp_warp_range") if per_warp else ("cuda_block_ranges", "pp_range")
    kernel = pp.kernel(source=CUDA.replace("NAME", name).replace("WORD", word), name=name)
    return name, lambda x, out: kernel[BLOCKS, 128](x, out, N)


@pytest.fixture(params=[False, True], ids=["block_ranges", "warp_ranges"])
def per_warp(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


@pytest.fixture(params=[of_triton, of_cuda], ids=["triton", "cuda"])
def launch(request: pytest.FixtureRequest, per_warp: bool, gpu: pp.Device) -> Callable[[Any, Any], None]:
    name, start = request.param(per_warp)

    def call(x: Any, out: Any) -> None:
        start(x, out)

    call.kernel, call.per_warp = name, per_warp
    return call


def test_replays_of_a_captured_graph_have_the_ranges_of_a_launch(launch: Any) -> None:
    cupy = pytest.importorskip("cupy")
    x, out = cupy.ones(N, cupy.float32), cupy.empty(N, cupy.float32)
    stream = cupy.cuda.Stream(non_blocking=True)
    with pp.trace() as plain, stream:
        launch(x, out)
    assert lanes(plain, launch.kernel) == expected(launch.per_warp)
    with pp.trace() as first:
        with stream:
            stream.begin_capture()
            launch(x, out)
            graph = stream.end_capture()
        graph.launch(stream)
        stream.synchronize()
    assert lanes(first, launch.kernel) == expected(launch.per_warp)
    with pp.trace() as again:
        for _ in range(3):
            graph.launch(stream)
        stream.synchronize()
    assert len(again.blocks) == 3 * BLOCKS
    assert lanes(again, launch.kernel) == expected(launch.per_warp), "the ranges of the last replay"


def test_graphs_of_torch_have_ranges_beside_kernels_that_torch_launches(launch: Any) -> None:
    torch = pytest.importorskip("torch")
    x = torch.ones(N, device="cuda")
    out, others = torch.empty_like(x), torch.empty_like(x)
    pp.instrument_torch()
    try:
        triple[BLOCKS,](x, others, N, B=128)
        with pp.trace() as first:
            launch(x, out)  # compiles, before the capture
            wanted = out.clone()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                launch(x, out)
                triple[BLOCKS,](x, others, N, B=128)
        assert lanes(first, launch.kernel) == expected(launch.per_warp), "the launch before the capture"
        out.zero_()
        with pp.trace() as again:
            for _ in range(2):
                graph.replay()
            torch.cuda.synchronize()
    finally:
        pp.instrument_torch(False)
    assert torch.equal(out, wanted)
    assert torch.equal(others, 3 * x)
    assert lanes(again, launch.kernel) == expected(launch.per_warp)
    blocks = Counter(again.kernels[k] for k in again.blocks["kernel"])
    assert blocks == {launch.kernel: 2 * BLOCKS, "triple": 2 * BLOCKS}


def gpu_events(engine: pp.Engine) -> Any:
    return engine.device._events._captured


def test_an_engine_s_trace_has_the_ranges_of_its_models(launch: Any) -> None:
    vector = pp.TensorSpec((N,))

    def fn(weights: Any, inputs: Any, outputs: Any) -> None:
        launch(inputs["x"], outputs["y"])

    with pp.Engine(device="cuda") as engine:
        engine.load(pp.Model("m", fn, inputs={"x": vector}, outputs={"y": vector}, batch=(1,)))
        inputs = {"x": np.linspace(0, 1, N, dtype=np.float32)}
        wanted = engine.infer_sync("m", inputs)["y"]
        kept = set(gpu_events(engine))
        with engine.trace() as t:
            found = engine.infer_sync("m", inputs)["y"]
        assert set(gpu_events(engine)) == kept, "the memory for events goes with the graphs"
        np.testing.assert_array_equal(found, wanted)
        np.testing.assert_array_equal(engine.infer_sync("m", inputs)["y"], wanted)
    assert len(t.blocks) == BLOCKS
    assert lanes(t, launch.kernel) == expected(launch.per_warp)
    assert "step" in str(t.summary())
    assert t.explain().kernels
