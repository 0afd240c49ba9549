"""The virtual GPU: the same kernels, blocks, records and errors, without hardware."""

from __future__ import annotations

import inspect
import itertools
import runpy
import subprocess
import sys
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import triton
import triton.language as tl
from corpus import CUDA_CASES, TRITON_CASES, Case, assert_right, relative_error
from failing import failing
from hypothesis import given, settings
from hypothesis import strategies as st

import paellapy as pp
from paellapy.instrument.errors import PaellaError
from paellapy.instrument.gpu_model.parts import PARTS, occupancy


@pytest.fixture
def device() -> Any:
    with pp.Device("virtual:h200") as opened:
        yield opened


@triton.jit
def shift(x, out, n, by, B: tl.constexpr):
    i = tl.program_id(0) * B + tl.arange(0, B)
    tl.store(out + i, tl.load(x + i + by, mask=i < n), mask=i < n)


@triton.jit
def wide(x, out, B: tl.constexpr):
    i = tl.program_id(0) * B + tl.arange(0, B)
    tl.store(out + i, tl.load(x + i) * 2)


def _call(kernel: Any, call: Any, part: tuple[int, int] | None = None) -> None:
    rest = {**call.args, **call.constexprs, **call.options}
    if part is None:
        kernel[call.grid](**rest)
    else:
        kernel.slice(call.grid, *part)(**rest)


@pytest.mark.parametrize("case", [c for c in TRITON_CASES if c.evaluable], ids=str)
def test_decorated_corpus_kernels_are_right_and_traced(case: Case, device: Any) -> None:
    call = case.make(np.random.default_rng(zlib.crc32(case.name.encode())), 0.5)
    with pp.trace() as trace:
        _call(pp.kernel(case.kernel), call)
    assert_right(call)
    total = int(np.prod(call.grid)) * call.options.get("num_ctas", 1)
    assert np.array_equal(np.sort(trace.blocks["block"]), np.arange(total))
    assert (trace.blocks["start_ns"] < trace.blocks["end_ns"]).all()
    launch = trace.launches[0]
    limit = occupancy(
        device.part, 32 * int(launch["warps"]), int(launch["registers"]), int(launch["shared_bytes"]),
        call.options.get("num_ctas", 1),
    )  # fmt: skip
    assert trace.residency().max_blocks.max() <= limit.blocks_per_sm


@pytest.mark.parametrize("name", ["gather_rows", "transposed_copy", "conv3x3", "attention_fp32", "paged_decode"])
def test_arrays_of_the_device_serve_as_well_as_numpys_launch_after_launch(name: str, device: Any) -> None:
    case = next(c for c in TRITON_CASES if c.name == name)
    call = case.make(np.random.default_rng(1), 0.5)
    args = {k: pp.array(v) if isinstance(v, np.ndarray) else v for k, v in call.args.items()}
    kernel = pp.kernel(case.kernel)
    for _ in range(3):  # evaluated, recorded, replayed
        kernel[call.grid](**args, **call.constexprs, **call.options)
        for output, expected in call.reference().items():
            assert relative_error(args[output].numpy(), expected) <= call.tolerance


@settings(max_examples=15, deadline=None)
@given(st.sampled_from([c for c in TRITON_CASES if c.evaluable and c.sliceable and c.deterministic]), st.randoms())
def test_random_slices_in_random_order_equal_the_whole(case: Case, random: Any) -> None:
    with pp.Device("virtual:h200"):
        call = case.make(np.random.default_rng(random.randrange(1 << 30)), 0.4)
        if call.options.get("num_ctas", 1) > 1:
            return
        total = int(np.prod(call.grid))
        cuts = sorted({0, total, *(random.randrange(total) for _ in range(3))})
        parts = [(a, b - a) for a, b in itertools.pairwise(cuts)]
        random.shuffle(parts)
        kernel = pp.kernel(case.kernel)
        for part in parts:
            _call(kernel, call, part)
        assert_right(call)


def test_streams_run_in_order_and_beside_each_other(device: Any) -> None:
    kernel = pp.kernel(shift)
    x, out = np.arange(4096, dtype=np.float32), pp.empty(4096)
    first, second = pp.stream(), pp.stream(priority=1)
    with pp.trace() as trace:
        with first:
            kernel[(4,)](x, out, 4096, 0, B=1024)
            begin = first.record()
            kernel[(4,)](out, x, 4096, 0, B=1024)
            done = first.record()
        second.wait(done)
        with second:
            kernel[(4,)](x, out, 4096, 0, B=1024)
        second.synchronize()
    assert done.done()
    assert done.elapsed_ns(begin) > 0
    spans = [
        (int(b["start_ns"].min()), int(b["end_ns"].max()))
        for b in (trace.blocks[trace.blocks["launch"] == i] for i in trace.launches["launch"])
    ]
    assert all(a[1] <= b[0] for a, b in itertools.pairwise(spans)), "a stream's kernels, and waits, are in order"


def test_counters_and_notifications_are_those_of_a_real_kernel(device: Any) -> None:
    x, out = np.arange(4096, dtype=np.float32), pp.empty(4096)
    device.synchronize()
    before = pp.counts()
    pp.kernel(shift, report="count")[(4,)](x, out, 4096, 0, B=1024)
    device.synchronize()
    after = pp.counts()
    assert (after.started - before.started).sum() == (after.ended - before.ended).sum() == 4
    assert after.resident_blocks.sum() == 0
    pp.kernel(shift, report=None)[(4,)](x, out, 4096, 0, B=1024)
    pp.kernel(shift, report="notify")[(4,)](x, out, 4096, 0, B=1024)
    device.synchronize()
    assert (pp.counts().started == after.started).all(), "only kernels that report at level count are counted"
    with pp.trace():
        pp.kernel(shift, report="count")[(4,)](x, out, 4096, 0, B=1024)
    assert not pp.counts().started.any(), "a trace begins anew, and its kernels write records"
    told = pp.kernel(shift, report="notify")[(4,)](x, out, 4096, 0, B=1024)
    assert not told
    device.synchronize()
    assert told
    assert told.time_ns > 0


def test_the_same_program_gives_the_same_trace_anywhere(tmp_path: Path) -> None:
    script = tmp_path / "program.py"
    script.write_text(
        "import sys, numpy as np, paellapy as pp\n"
        "from paellapy.demo.kernels import max_pool2x2 as pool\n"
        "x = np.ones((300, 32, 32, 1), np.float32)\n"
        "with pp.Device('virtual:a100'), pp.trace() as t:\n"
        "    for _ in range(3): pool[(300,)](x, pp.empty((300, 16, 16, 1)), 300, H=32, W=32, C=1, BLOCK=256)\n"
        "sys.stdout.buffer.write(t.blocks.tobytes())\n"
    )
    runs = [subprocess.run([sys.executable, str(script)], capture_output=True, check=True).stdout for _ in range(2)]
    assert runs[0] == runs[1] != b""


def test_a_small_ring_counts_what_it_lost(device: Any) -> None:
    kernel = pp.kernel(shift)
    x, out = np.arange(1 << 15, dtype=np.float32), pp.empty(1 << 15)
    launches = 1 + 16 * device.sm_count // 32
    with pp.trace(records_per_sm=16) as trace:
        for _ in range(launches):
            kernel[(256,)](x, out, 1 << 15, 0, B=128)
    assert trace.dropped > 0
    assert trace.dropped + len(trace.blocks) == launches * 256


@triton.jit
def of_a_newer_part(x, out):
    text: tl.constexpr = "{ .reg .b16 h; cvt.rn.satfinite.e4m3x2.f32 h, $1, $1; cvt.u32.u16 $0, h; }"
    tl.store(out, tl.inline_asm_elementwise(text, "=r,r", [tl.load(x)], tl.int32, True, 1))


def test_a_kernel_with_instructions_of_a_newer_part_is_refused_and_hides_no_other() -> None:
    with pp.Device("virtual:a100"):
        x, out = np.ones(1000, np.float32), pp.empty(1000)
        with failing(PaellaError, kernel="of_a_newer_part"):
            pp.kernel(of_a_newer_part)[1,](x, np.zeros(1, np.int32))
        with pp.trace() as trace:
            pp.kernel(shift)[(8,)](x, out, 1000, 0, B=128)
        assert len(trace.blocks) == 8


def test_every_part_can_be_opened_and_runs_kernels() -> None:
    for name in PARTS:
        with pp.Device(f"virtual:{name}") as device:
            x, out = np.arange(1000, dtype=np.float32), pp.empty(1000)
            with pp.trace() as trace:
                pp.kernel(shift)[(8,)](x, out, 1000, 0, B=128)
            assert np.array_equal(out, x)
            assert trace.device.n_sm == device.sm_count
            assert f"virtual:{name}" in pp.devices()


def test_an_access_outside_an_array_is_named(device: Any) -> None:
    x, out = np.arange(1000, dtype=np.float32), pp.empty(1000)
    with pytest.raises(pp.OutOfBoundsError) as caught:
        pp.kernel(shift)[(8,)](x, out, 1000, 500, B=128)
    message = str(caught.value)
    for part in ("shift", "test_virtual.py", "block 3", "1000"):
        assert part in message
    with pytest.raises(pp.OutOfBoundsError):
        pp.kernel(wide)[(8,)](x, out, B=128)


def test_equal_kernels_in_two_files_each_name_their_own_file(device: Any, tmp_path: Path) -> None:
    text = "import triton\nimport triton.language as tl\n\n" + inspect.getsource(shift.fn)
    for name in ("first.py", "second.py"):
        (tmp_path / name).write_text(text)
        kernel = pp.kernel(runpy.run_path(str(tmp_path / name))["shift"])
        with pytest.raises(pp.OutOfBoundsError) as caught:
            kernel[(8,)](np.zeros(1000, np.float32), pp.empty(1000), 1000, 500, B=128)
        assert f"{tmp_path / name}:" in str(caught.value)


@pytest.mark.parametrize("grid", [(1, 70_000), (1, 1, 70_000), (2**31,), (-1,)])
def test_grids_that_a_gpu_would_refuse_are_refused(device: Any, grid: tuple[int, ...]) -> None:
    x = np.zeros(64, np.float32)
    with failing(pp.ArgumentError, kernel="wide", field="grid"):
        pp.kernel(wide)[grid](x, x, B=64)


def test_a_tensor_that_is_not_of_the_cpu_is_told_how_it_can_be_given(device: Any) -> None:
    torch = pytest.importorskip("torch", reason="PyTorch is not installed: pip install torch==2.13.0")
    x = np.zeros(64, np.float32)
    with failing(pp.ArgumentError, argument="x", field="device", given="meta"):
        pp.kernel(wide)[(1,)](torch.zeros(64, device="meta"), x, B=64)


def test_unknown_parts_and_kinds_say_what_exists() -> None:
    with failing(pp.NoDeviceError, field="device", given=3):
        pp.Device(3)  # type: ignore[arg-type]
    with failing(pp.NoDeviceError, field="part", given="h900"):
        pp.Device("virtual:h900")
    with failing(pp.NoDeviceError, field="device", given="quantum:0"):
        pp.Device("quantum:0")


def test_resources_that_fit_no_sm_are_refused_with_the_figures() -> None:
    matmul = next(c for c in TRITON_CASES if c.name == "gemm_fp16")
    call = matmul.make(np.random.default_rng(0), 0.5)
    deep = {**call.constexprs, "BM": 128, "BN": 128, "BK": 256}  # 128 KiB of tiles, an L4 has 99
    with pp.Device("virtual:l4") as small:
        pp.kernel(matmul.kernel)[call.grid](**call.args, **deep, num_warps=8)
        with failing(pp.LaunchError, field="shared memory", given=131072):
            small.synchronize()
        small.synchronize()  # it was refused, and is gone


def test_cuda_c_says_that_it_needs_a_real_gpu(device: Any) -> None:
    case = CUDA_CASES[0]
    call = case.make(np.random.default_rng(0), 1.0)
    kernel = pp.kernel(source=case.source, name=case.entry)
    with failing(pp.LaunchError, kernel="saxpy", field="source"):
        kernel[call.grid, call.block](*call.args)


def test_rings_cannot_be_too_small(device: Any) -> None:
    for size in (0, 8, 1000, 1 << 30):
        with failing(pp.TraceError, field="records_per_sm", limit=(16, 4194304)):
            pp.trace(records_per_sm=size)


def test_an_error_inside_a_trace_is_the_error_one_sees(device: Any) -> None:
    with pytest.raises(pp.OutOfBoundsError), pp.trace():
        pp.kernel(wide)[(8,)](np.zeros(10, np.float32), pp.empty(10), B=128)
    with pp.trace() as again:  # and the device can be traced again
        pass
    assert len(again.blocks) == 0


def test_a_kernel_that_fits_on_no_sm_is_named(device: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    # The launch itself needs no machine code: the error comes later, perhaps after other launches.
    def too_large(*_: Any) -> None:
        raise pp.LaunchError("9 bytes of shared memory too many", given=9)

    monkeypatch.setattr("paellapy.instrument.device.virtual_launch.occupancy", too_large)
    with failing(pp.LaunchError, kernel="wide", given=9), pp.trace():
        pp.kernel(wide)[1,](pp.zeros(128), pp.zeros(128), B=128)
