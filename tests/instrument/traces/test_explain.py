"""t.explain(): what limits a kernel, and the work of launches without their data."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import triton
import triton.language as tl
from corpus import TRITON_CASES, Case
from corpus.atomics import histogram_atomics

import paellapy as pp
from paellapy.instrument.arguments import Descriptor
from paellapy.instrument.gpu_model.costs import L2_SHARE
from paellapy.instrument.gpu_model.parts import PARTS
from paellapy.instrument.kernels.triton_kernel import split_options
from paellapy.instrument.records import PRODUCTS
from paellapy.instrument.traces import explain as counted_module
from paellapy.instrument.traces.explain import Claim, Counting
from paellapy.instrument.triton_ir import TtirProgram

N = 1 << 18


@triton.jit
def every(x, out, n, STRIDE: tl.constexpr, B: tl.constexpr):
    i = tl.program_id(0) * B + tl.arange(0, B)
    tl.store(out + i, tl.load(x + i * STRIDE, mask=i < n), mask=i < n)


def explained(kernel: Any, blocks: int, *args: Any, **constants: int) -> tuple[dict[str, Any], Any]:
    with pp.Device("virtual:h200"), pp.trace() as t:
        pp.kernel(kernel)[blocks,](*args, **constants)
    (found,) = t.explain().kernels
    return {claim.about: claim for claim in found.claims}, found


def counted(values: Any) -> tuple[dict[str, Any], Any]:
    bins = pp.zeros(4096, np.int32)
    return explained(histogram_atomics, N // 1024, pp.array(values.astype(np.int32)), bins, N, BLOCK=1024)


def strided(stride: int) -> tuple[dict[str, Any], Any]:
    return explained(every, N // 1024, pp.zeros(N * stride), pp.zeros(N), N, STRIDE=stride, B=1024)


def test_updates_of_one_address_are_named_with_their_number() -> None:
    claims, kernel = counted(np.full(N, 7))
    assert kernel.claims[0].about == "atomics"
    assert claims["atomics"].share > 0.9
    assert claims["atomics"].figures["updates"] == claims["atomics"].figures["at one address"] == N
    assert "tiles" not in str(kernel)


def test_updates_that_are_spread_out_take_less_time_and_are_not_the_limit() -> None:
    _, one = counted(np.full(N, 7))
    claims, many = counted(np.arange(N) % 4096)
    assert many.span_ns < one.span_ns / 10
    assert "atomics" not in claims or claims["atomics"].share < 0.25
    assert "tiles" in str(many)


def test_sectors_used_in_part_are_named_with_their_bytes() -> None:
    claims, kernel = strided(32)
    assert kernel.claims[0].about == "uncoalesced"
    figures = claims["uncoalesced"].figures
    assert figures["bytes used"] == 2 * 4 * N
    assert figures["bytes moved"] == (32 + 4) * N
    assert "tiles" not in str(kernel)
    assert kernel.span_ns > 1.5 * strided(1)[1].span_ns


def test_consecutive_elements_waste_nothing() -> None:
    claims, _ = strided(1)
    assert "uncoalesced" not in claims
    assert "atomics" not in claims


def test_pauses_between_launches_are_named_if_they_were_measured_and_nothing_else_runs() -> None:
    with pp.Device("virtual:h200"), pp.trace() as t:
        for _ in range(3):
            pp.kernel(every)[4,](pp.zeros(4096), pp.zeros(4096), 4096, STRIDE=1, B=1024)
    assert "gaps between launches" not in {claim.about for claim in t.explain().kernels[0].claims}
    t.device = replace(t.device, name="NVIDIA H200 SXM 141GB")
    (kernel,) = t.explain().kernels
    (gaps,) = (claim for claim in kernel.claims if claim.about == "gaps between launches")
    ran = sum(int(b["end_ns"].max() - b["start_ns"].min()) for b in (t.blocks[t.blocks["launch"] == i] for i in
                                                                     np.unique(t.blocks["launch"])))  # fmt: skip
    assert gaps.figures["idle ns"] == kernel.span_ns - ran
    assert gaps.figures["launches"] == 3


def test_occupancy_is_no_limit_of_a_launch_that_has_room() -> None:
    claims, _ = explained(every, 4, pp.zeros(4096), pp.zeros(4096), 4096, STRIDE=1, B=1024, num_warps=32)
    assert "small grid" in claims
    assert not {"occupancy", "reporting", "gaps between launches"} & set(claims)


def test_the_brief_form_has_a_line_for_each_of_the_longest_kernels() -> None:
    with pp.Device("virtual:h200"), pp.trace() as t:
        x, out = pp.zeros(N), pp.zeros(N)
        pp.kernel(every)[N // 1024,](x, out, N, STRIDE=1, B=1024)
        pp.kernel(histogram_atomics)[N // 1024,](pp.zeros(N, np.int32), pp.zeros(16, np.int32), N, BLOCK=1024)
    every_line, count_line = t.explain().brief().splitlines()
    assert every_line.startswith("every: ")
    assert count_line.startswith("histogram_atomics: atomics")
    one, rest = t.explain().brief(most=1).splitlines()
    assert one == count_line
    assert "1" in rest


def test_many_tiny_blocks_are_told_how_many_would_do() -> None:
    def took(tile: int) -> tuple[dict[str, Any], int]:
        x, out = pp.zeros(1 << 21), pp.zeros(1 << 21)
        claims, kernel = explained(every, (1 << 21) // tile, x, out, 1 << 21, STRIDE=1, B=tile)
        return claims, kernel.span_ns

    claims, tiny_ns = took(32)
    enough = claims["small tiles"].figures["enough blocks"]
    larger, ns = took(triton.next_power_of_2((1 << 21) // enough))
    assert "small tiles" not in larger
    assert 1 - ns / tiny_ns > claims["small tiles"].share


@triton.jit
def product(a, b, c, B: tl.constexpr, K: tl.constexpr, HOW: tl.constexpr, T: tl.constexpr):
    i, k = tl.arange(0, B), tl.arange(0, B)
    total = tl.zeros((B, B), T)
    for _ in range(K):
        left, right = tl.load(a + i[:, None] * B + k[None, :]), tl.load(b + i[:, None] + k[None, :] * B)
        total = tl.dot(left, right, total, out_dtype=T, input_precision=HOW)
    tl.store(c + i[:, None] * B + k[None, :], total)


@pytest.mark.parametrize(("dtype", "how", "kind", "rate"), [
    (np.float16, None, "f16", 989.4), (ml_dtypes.float8_e4m3fn, None, "e4m3", 1978.8), (np.int8, None, "s8", 1978.8),
    (np.float32, "tf32", "tf32", 494.7), (np.float32, "tf32x3", "tf32x3", 164.9), (np.float32, "ieee", "fma", 66.9),
])  # fmt: skip
def test_products_have_the_roof_of_the_instructions_that_compute_them(
    dtype: Any, how: str | None, kind: str, rate: float
) -> None:
    made, result = pp.kernel(product), (np.int32, tl.int32) if dtype == np.int8 else (np.float32, tl.float32)
    with pp.Device("virtual:h200"):
        a, b, c = (pp.zeros((64, 64), t) for t in (dtype, dtype, result[0]))
        with pp.trace() as t:
            made[1,](a, b, c, 64, 8, how, result[1])
    t.work["tensor_flops"] *= 10_000  # as if there were little else to do
    roof = next(c for c in t.explain().kernels[0].claims if c.about.startswith("roof"))
    assert roof.about == ("roof: arithmetic" if kind == "fma" else "roof: tensor cores")
    assert PRODUCTS[t.work["product"][0]] == kind
    span = int(t.blocks["end_ns"].max() - t.blocks["start_ns"].min())
    assert roof.figures["of the roof"] == pytest.approx(roof.figures["operations"] / rate / 1e3 / span, rel=0.02)
    t.work["product"] = 0  # of several kinds, say
    assert not any(c.about in ("roof: tensor cores", "roof: arithmetic") for c in t.explain().kernels[0].claims)


@pytest.mark.parametrize(("plain", "ours", "about"), [(0, 64, ["reporting"]), (64, 64, ["spills"]), (0, 0, [])])
def test_spills_that_reports_cause_are_not_blamed_on_the_kernel(plain: int, ours: int, about: list[str]) -> None:
    t = traced_as_on_a_gpu(8)
    t.work["plain_spill_bytes"], t.work["spill_bytes"] = plain, ours
    found = [c for c in t.explain().kernels[0].claims if c.about in ("spills", "reporting")]
    assert [c.about for c in found] == about
    assert all(c.figures == {"bytes": 64} for c in found)


def test_an_explanation_as_json_has_all_of_it() -> None:
    t = traced_as_on_a_gpu()
    (kernel,), (found,) = t.explain().kernels, json.loads(t.explain(json=True))
    assert found["kernel"] == kernel.kernel
    assert [Claim(**each) for each in found["claims"]] == list(kernel.claims)


def test_the_example_of_the_readme_is_limited_by_memory_whatever_is_rounded() -> None:
    text = (Path(__file__).parents[3] / "README.md").read_text()
    found = re.search(r"^n = 1 << (\d+)$", text, re.M)
    assert found is not None
    moved = 3 * 4 << int(found[1])
    assert not 0.75 < moved / (L2_SHARE * PARTS["h200"].l2_bytes) < 1.33


# Data decide how much these do; the sign of a number decides by which instruction Triton takes its maximum.
UNKNOWN = {"paged_decode", "two_returns", "collatz", "bisect", "helpers", "work_queue", "last_block_sums", "spin_lock",
           "grid_barrier", "float_atomics"}  # fmt: skip


def address(value: Any) -> Any:
    """An argument as a real GPU has it: with an address in place of an array."""
    if isinstance(value, tuple):
        return tuple(map(address, value))
    if isinstance(value, Descriptor):
        return replace(value, base=4096)
    return 4096 if isinstance(value, np.ndarray) else value


def count(kernel: Any, grid: tuple[int, ...], given: dict[str, Any]) -> Any:
    made = pp.kernel(kernel)
    values, key, options = made._bind(pp.Device.current(), (), given)
    taken = split_options(options, made.name, made.arg_names)
    source = made._source.source(values, made._with_options(key, options), taken, "sm_90")
    x, y, z = (*grid, 1, 1)[:3]
    x *= source.cluster
    return Counting().count(source, [address(v) for v in values], (x, y, z), 0, x * y * z)


@pytest.mark.parametrize("case", [c for c in TRITON_CASES if c.evaluable and not c.scratch], ids=str)
def test_work_is_counted_without_data(case: Case) -> None:
    call = case.make(np.random.default_rng(0), 1.0)
    arrays = {n: pp.array(v) if isinstance(v, np.ndarray) else v for n, v in call.args.items()}
    given = {**arrays, **call.constexprs, **call.options}
    with pp.Device("virtual:h200"):
        found = count(case.kernel, call.grid, given)
        if case.name in UNKNOWN:
            assert found is None
            return
        with pp.trace() as t:
            pp.kernel(case.kernel)[call.grid](**given)
    assert found == tuple(t.work[name][0] for name in ("bytes", "flops", "tensor_flops"))


@triton.jit
def rows(x, out, n, B: tl.constexpr):
    i = tl.program_id(0) * B + tl.arange(0, B)
    tl.device_print("block", tl.program_id(0))
    tl.store(out + i, tl.load(x + i, mask=i < n), mask=i < n)


@triton.jit
def rows_quietly(x, out, n, B: tl.constexpr):
    i = tl.program_id(0) * B + tl.arange(0, B)
    tl.store(out + i, tl.load(x + i, mask=i < n), mask=i < n)


@triton.jit
def gemm(a, b, c, n, B: tl.constexpr, K: tl.constexpr):
    i, j, k = tl.program_id(0) * B + tl.arange(0, B), tl.program_id(1) * B + tl.arange(0, B), tl.arange(0, K)
    total = tl.zeros((B, B), tl.float32)
    for start in range(0, n, K):
        left = tl.load(a + i[:, None] * n + start + k[None, :])
        total = tl.dot(left, tl.load(b + (start + k[:, None]) * n + j[None, :]), total)
    tl.store(c + i[:, None] * n + j[None, :], total.to(tl.float16))


@triton.jit
def products(out, rounds):
    """Products of tiles that need no memory: the operand of each is the result of the last."""
    i = tl.arange(0, 128)
    one = (i[:, None] == i[None, :]).to(tl.float16)
    total = tl.zeros((128, 128), tl.float32)
    for _ in range(rounds):
        total = tl.dot(one, one, total)
    tl.store(out + tl.program_id(0) * 128 * 128 + i[:, None] * 128 + i[None, :], total)


def test_some_blocks_stand_for_a_large_grid_and_print_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    n = 10_000 * 256 - 100
    with pp.Device("virtual:h200"):
        moved, flops, _ = count(rows, (10_000,), {"x": pp.zeros(1), "out": pp.zeros(1), "n": n, "B": 256})
    assert moved == pytest.approx(8 * n, rel=0.01)
    assert flops == 0
    assert capsys.readouterr().out == ""


def test_a_launch_with_addresses_has_the_roof_of_one_with_arrays() -> None:
    """A real GPU evaluates nothing; its launches have addresses."""
    with pp.Device("virtual:h200"):
        x, out = pp.zeros(1 << 24), pp.zeros(1 << 24)
        with pp.trace() as t:
            pp.kernel(rows_quietly)[1 << 14,](x, out, 1 << 24, B=1024)
    session, launches = t.count_work.func.__self__, t.launches["launch"]
    counted = t.explain()
    made, _ = session._made[launches[0]]
    session._made[launches[0]] = made, (4096, 1 << 30, 1 << 24, 1024)
    session.counted.clear()
    del t.work
    assert str(t.explain()) == str(counted)
    assert t.explain().kernels[0].claims[0].about == "roof: memory"


def test_work_is_multiplied_for_launches_that_a_graph_replayed() -> None:
    with pp.Device("virtual:h200"):
        x, out = pp.zeros(1 << 20), pp.zeros(1 << 20)
        with pp.trace() as t:
            pp.kernel(rows_quietly)[1 << 12,](x, out, 1 << 20, B=256)
    again = t.blocks.copy()
    for column in ("start_ns", "end_ns"):
        again[column] += 10**9
    twice = pp.Trace(np.concatenate([t.blocks, again]), t.launches, t.kernels, t.device)
    twice.work = t.work

    assert roof(twice).figures["bytes"] == 2 * roof(t).figures["bytes"]
    assert roof(twice).share == pytest.approx(roof(t).share, rel=0.01)


def traced_as_on_a_gpu(blocks: int = 1 << 12) -> pp.Trace:
    """A trace whose launch has addresses in place of arrays, and whose work is not counted yet."""
    n = 256 * blocks
    with pp.Device("virtual:h200"):
        x, out = pp.zeros(n), pp.zeros(n)
        with pp.trace() as t:
            pp.kernel(rows_quietly)[blocks,](x, out, n, B=256)
    session, launch = t.count_work.func.__self__, int(t.launches["launch"][0])
    session._made[launch] = session._made[launch][0], (4096, 1 << 30, n, 256)
    session.counted.clear()
    return t


def roof(trace: pp.Trace) -> Any:
    (found,) = (c for c in trace.explain().kernels[0].claims if c.about.startswith("roof"))
    return found


def test_blocks_that_did_not_run_do_not_count() -> None:
    """As of a launch that was preempted: the launch of the rest counts the others."""
    t = traced_as_on_a_gpu()
    some = pp.Trace(t.blocks[: len(t.blocks) // 4], t.launches, t.kernels, t.device)
    some.work = t.work
    assert roof(t).figures["bytes"] == 8 * 256 * len(t.blocks)
    assert roof(some).figures["bytes"] == roof(t).figures["bytes"] / 4


@pytest.mark.parametrize("name", ["virtual:h200", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_preempted_launch_and_the_launch_of_the_rest_count_once(name: str) -> None:
    n = 1 << 24 if name == "cuda" else 1 << 22
    with pp.Device(name) as device:
        x, out = pp.zeros(n), pp.zeros(n)
        with pp.trace() as t:
            job = pp.kernel(rows_quietly).preemptible(flag=device.flag())[n // 256,](x, out, n, B=256)
            job.preempt()
            if not job.done:
                job.resume()
            job.synchronize()
    assert len(t.launches) == 2 or name == "cuda"
    assert roof(t).figures["bytes"] == pytest.approx(8 * n, rel=1e-3)


@pytest.mark.parametrize("error", [ZeroDivisionError, RecursionError, MemoryError, OSError, KeyError])
def test_no_error_of_the_evaluator_reaches_an_explanation(
    monkeypatch: pytest.MonkeyPatch, error: type[Exception]
) -> None:
    def fails(*args: Any, **keywords: Any) -> None:
        raise error("evaluating")

    t = traced_as_on_a_gpu()
    monkeypatch.setattr(TtirProgram, "run", fails)
    assert t.explain().kernels[0].kernel == "rows_quietly"
    assert not t.work["bytes"].any()


@pytest.mark.parametrize(("limit", "evaluations"), [("_LAUNCH_S", 2), ("_TRACE_S", 0)])
def test_work_that_takes_too_long_to_count_is_unknown(
    monkeypatch: pytest.MonkeyPatch, limit: str, evaluations: int
) -> None:
    asked, run = [], TtirProgram.run

    def counting(self: TtirProgram, *args: Any, **keywords: Any) -> Any:
        asked.append(args)
        return run(self, *args, **keywords)

    t = traced_as_on_a_gpu()
    monkeypatch.setattr(TtirProgram, "run", counting)
    monkeypatch.setattr(counted_module, limit, 0.0)
    assert not t.work["bytes"].any()
    assert len(asked) == evaluations


def test_saving_evaluates_nothing_and_keeps_work_that_is_known(tmp_path: Path) -> None:
    t = traced_as_on_a_gpu()
    t.save(tmp_path / "before")
    assert "work" not in vars(t)
    assert not len(pp.Trace.load(tmp_path / "before").work)
    t.explain()
    t.save(tmp_path / "after")
    assert np.array_equal(pp.Trace.load(tmp_path / "after").work, t.work)


def roofs_of(launch: Any) -> dict[str, list[Any]]:
    """The roofs that a trace names for each kernel, the nearest first."""
    launch()
    with pp.trace() as t:
        launch()
    return {k.kernel: [c for c in k.claims if c.about.startswith("roof")] for k in t.explain().kernels}


@pytest.mark.parametrize("name", ["virtual:h200", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_copy_is_limited_by_memory_and_products_by_tensor_cores(name: str) -> None:
    blocks, rounds, n = (528, 200, 1 << 26) if name == "cuda" else (132, 60, 1 << 23)  # more than L2 holds
    with pp.Device(name):
        x, out, small = pp.zeros(n), pp.zeros(n), pp.zeros(blocks * 128 * 128)

        def launch() -> None:
            pp.kernel(rows_quietly)[n // 1024,](x, out, n, B=1024)
            pp.kernel(products)[blocks,](small, rounds, num_warps=4)

        found = roofs_of(launch)
    (memory,), (tensor, *_) = found["rows_quietly"], found["products"]
    assert memory.about == "roof: memory"
    assert memory.figures["bytes"] == 8 * n
    assert 0.3 < memory.figures["of the roof"] <= 1
    assert tensor.about == "roof: tensor cores"
    assert tensor.figures["operations"] == 2 * 128**3 * rounds * blocks
    assert 0.1 < tensor.figures["of the roof"] < 1.1


def test_arrays_in_l2_are_limited_by_caches() -> None:
    with pp.Device("virtual:h200"):
        x, out = pp.zeros(1 << 22), pp.zeros(1 << 22)
        (found,) = roofs_of(lambda: pp.kernel(rows_quietly)[1 << 12,](x, out, 1 << 22, B=1024))["rows_quietly"]
    assert found.about == "roof: caches"
    assert 0.3 < found.figures["of the roof"] <= 1


@pytest.mark.gpu
def test_a_gpu_counts_the_operations_of_a_product_of_matrices(gpu: pp.Device) -> None:
    a, b, c = (pp.zeros((2048, 2048), np.float16) for _ in range(3))
    found = roofs_of(lambda: pp.kernel(gemm)[16, 16](a, b, c, 2048, B=128, K=64, num_warps=8))["gemm"]
    (tensor,) = (claim for claim in found if claim.about == "roof: tensor cores")
    assert tensor.figures["operations"] == 2 * 2048**3
    assert 0.1 < tensor.figures["of the roof"] < 1.1


@pytest.mark.gpu
def test_a_gpu_counts_the_work_of_replayed_graphs(gpu: pp.Device) -> None:
    cupy = pytest.importorskip("cupy")
    n = 1 << 24
    x, out = cupy.zeros(n, cupy.float32), cupy.zeros(n, cupy.float32)
    kernel = pp.kernel(rows_quietly)
    stream = cupy.cuda.Stream(non_blocking=True)
    with pp.trace(), stream:
        kernel[n // 1024,](x, out, n, B=1024)
        stream.begin_capture()
        kernel[n // 1024,](x, out, n, B=1024)
        graph = stream.end_capture()
    with pp.trace() as t:
        for _ in range(5):
            graph.launch(stream)
        stream.synchronize()
    (found,) = (c for c in t.explain().kernels[0].claims if c.about.startswith("roof"))
    assert found.figures["bytes"] == 5 * 8 * n
