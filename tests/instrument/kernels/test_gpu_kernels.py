"""On a real GPU: passes change no result, every block is reported once, nothing is lost."""

from __future__ import annotations

import itertools
import zlib
from typing import Any

import numpy as np
import pytest
from corpus import CUDA_CASES, TRITON_CASES, assert_same, upload

import paellapy as pp
from paellapy.instrument.gpu_model.parts import occupancy

pytestmark = pytest.mark.gpu
LEVELS = (None, "count", "notify")


def _rng(name: str) -> np.random.Generator:
    return np.random.default_rng(zlib.crc32(name.encode()))


def _cases(device_sm: int = 90) -> list[Any]:
    return [c for c in TRITON_CASES if c.min_sm <= device_sm]


def _run_triton(device: pp.Device, kernel: Any, call: Any, parts: Any = None) -> dict[str, np.ndarray]:
    args = {name: upload(device, value) for name, value in call.args.items()}
    rest = {**call.constexprs, **call.options}
    if parts is None:
        kernel[call.grid](**args, **rest)
    else:
        for first, count in parts:
            kernel.slice(call.grid, first, count)(**args, **rest)
    return {name: args[name].numpy() for name in call.outputs}


def _parts(rng: np.random.Generator, total: int) -> list[tuple[int, int]]:
    cuts = np.unique(rng.integers(1, total, min(total - 1, 5))) if total > 1 else []
    edges = [0, *map(int, cuts), total]
    parts = [(a, b - a) for a, b in itertools.pairwise(edges)]
    rng.shuffle(parts)
    return [tuple(map(int, p)) for p in parts]


def _check_trace(device: pp.Device, trace: pp.Trace, total: int) -> None:
    blocks = trace.blocks
    assert trace.dropped == 0
    assert trace.unfinished == 0
    launch = trace.launches[0]
    assert np.array_equal(np.sort(blocks["block"]), np.arange(total)), "every block exactly once"
    assert (blocks["sm"] < device.sm_count).all()
    assert (blocks["start_ns"] <= blocks["end_ns"]).all()
    limit = occupancy(device.limits, 32 * int(launch["warps"]), int(launch["registers"]), int(launch["shared_bytes"]))
    assert trace.residency().max_blocks.max() <= limit.blocks_per_sm


@pytest.mark.parametrize("case", _cases(), ids=str)
def test_triton_kernels_are_unchanged_and_reported(case: Any, gpu: pp.Device) -> None:
    call = case.make(_rng(case.name), 1.0)
    plain = _run_triton(gpu, pp.kernel(case.kernel, report=None), call)
    for level in LEVELS:
        assert_same(case, call, _run_triton(gpu, pp.kernel(case.kernel, report=level), call), plain)
    kernel = pp.kernel(case.kernel, report=None)
    with pp.trace() as trace:
        traced = _run_triton(gpu, kernel, call)
    assert_same(case, call, traced, plain)
    total = int(np.prod(call.grid)) * call.options.get("num_ctas", 1)
    _check_trace(gpu, trace, total)
    if case.sliceable and call.options.get("num_ctas", 1) == 1:
        parts = _parts(_rng(case.name + "parts"), total)
        assert_same(case, call, _run_triton(gpu, kernel, call, parts), plain)
        with pp.trace() as sliced:
            assert_same(case, call, _run_triton(gpu, kernel, call, parts), plain)
        assert np.array_equal(np.sort(sliced.blocks["block"]), np.arange(total))


def _run_cuda(device: pp.Device, kernel: Any, call: Any, parts: Any = None) -> dict[int, np.ndarray]:
    args = [upload(device, a) for a in call.args]
    config = (call.grid, call.block, call.shared_bytes)
    if parts is None:
        kernel[config](*args)
    else:
        for first, count in parts:
            kernel.slice(config, first, count)(*args)
    return {i: args[i].numpy() for i in call.outputs}


@pytest.mark.parametrize("case", [c for c in CUDA_CASES if c.instrumentable and c.launchable], ids=str)
def test_cuda_kernels_are_unchanged_and_reported(case: Any, gpu: pp.Device) -> None:
    call = case.make(_rng(case.name), 1.0)

    def kernel(level: Any) -> Any:
        return pp.kernel(
            source=case.source, name=case.name_expression or case.entry, options=case.options, report=level
        )

    plain = _run_cuda(gpu, kernel(None), call)
    for level in LEVELS:
        assert_same(case, call, _run_cuda(gpu, kernel(level), call), plain)
    instrumented = kernel(None)
    with pp.trace() as trace:
        traced = _run_cuda(gpu, instrumented, call)
    assert_same(case, call, traced, plain)
    total = int(np.prod(call.grid))
    _check_trace(gpu, trace, total)
    if case.sliceable:
        parts = _parts(_rng(case.name + "parts"), total)
        assert_same(case, call, _run_cuda(gpu, instrumented, call, parts), plain)


def test_a_thousand_launches_from_several_streams_lose_nothing(gpu: pp.Device) -> None:
    add = pp.kernel(TRITON_CASES[0].kernel)
    call = TRITON_CASES[0].make(_rng("streams"), 1.0)
    rest = {**call.constexprs, **call.options}
    lanes = [({n: upload(gpu, v) for n, v in call.args.items()}, gpu.stream()) for _ in range(4)]
    before = pp.counts()
    with pp.trace() as trace:
        for i in range(1000):
            args, stream = lanes[i % 4]
            with stream:
                add[call.grid](**args, **rest)
    total = int(np.prod(call.grid))
    assert trace.dropped == 0
    assert len(trace.launches) == 1000
    assert len(trace.blocks) == 1000 * total
    pairs = np.unique(trace.blocks[["launch", "block"]])
    assert len(pairs) == 1000 * total
    assert before.occupancy.shape == (gpu.sm_ids,)
    assert len({int(s) for s in trace.launches["stream"]}) == 4


def test_counters_agree_with_the_grid(gpu: pp.Device) -> None:
    case = TRITON_CASES[0]
    call = case.make(_rng("counters"), 1.0)
    gpu.synchronize()
    before = pp.counts()
    _run_triton(gpu, pp.kernel(case.kernel, report="count"), call)
    after = pp.counts()
    total = int(np.prod(call.grid))
    assert (after.started - before.started).sum() == total
    assert (after.ended - before.ended).sum() == total
    assert after.resident_blocks.sum() == 0
    _run_triton(gpu, pp.kernel(case.kernel, report=None), call)
    _run_triton(gpu, pp.kernel(case.kernel, report="notify"), call)
    assert (pp.counts().started == after.started).all(), "only kernels that report at level count are counted"
    with pp.trace():
        _run_triton(gpu, pp.kernel(case.kernel, report="count"), call)
    assert not pp.counts().started.any(), "a trace begins anew, and its kernels write records"


def test_a_small_ring_keeps_the_newest_and_counts_the_rest(gpu: pp.Device) -> None:
    case = TRITON_CASES[0]
    call = case.make(_rng("ring"), 1.0)
    kernel = pp.kernel(case.kernel)
    repeats = 1 + 16 * 4 * gpu.sm_count // int(np.prod(call.grid))
    with pp.trace(records_per_sm=16) as trace:
        for _ in range(repeats):
            _run_triton(gpu, kernel, call)
    assert trace.dropped > 0
    assert trace.dropped + len(trace.blocks) == repeats * int(np.prod(call.grid))


def test_notify_tells_that_the_last_block_started(gpu: pp.Device) -> None:
    case = TRITON_CASES[0]
    call = case.make(_rng("notify"), 1.0)
    args = {n: upload(gpu, v) for n, v in call.args.items()}
    told = pp.kernel(case.kernel, report="notify")[call.grid](**args, **call.constexprs, **call.options)
    gpu.synchronize()
    assert told
    assert told.time_ns > 0


ALIGNED = """
struct alignas(64) Row { float at[20]; };
extern "C" __global__ void rows(float* out, const __grid_constant__ Row a, int n, const __grid_constant__ Row b) {
    if (threadIdx.x < n) out[threadIdx.x] = a.at[threadIdx.x] - b.at[threadIdx.x];
}
"""


@pytest.mark.parametrize("report", [None, "count", "trace"])
def test_structures_aligned_beyond_the_place_of_parameters_arrive(report: Any, gpu: pp.Device) -> None:
    kernel = pp.kernel(source=ALIGNED, name="rows", report=report)
    first, last = np.arange(32, dtype=np.float32), np.full(32, 2, np.float32)  # 80 bytes are filled up to 128
    out = gpu.array(np.zeros(20, np.float32))
    kernel[1, 32](out, first, 20, last)
    np.testing.assert_array_equal(out.numpy(), first[:20] - 2)
