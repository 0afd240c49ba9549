"""On the virtual GPU a kernel is compiled as far as somebody looks: results need TTIR, times need registers too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import triton
import triton.language as tl
from failing import failing
from hypothesis import given, settings
from hypothesis import strategies as st

import paellapy as pp
from paellapy.instrument.errors import CompileError, LaunchError, LaunchWarning, PaellaError
from paellapy.instrument.kernels import triton_source
from paellapy.instrument.kernels.triton_kernel import TritonKernel
from paellapy.instrument.ptx import compiled


@triton.jit
def scale(x, out, by, B: tl.constexpr):
    i = tl.program_id(0) * B + tl.arange(0, B)
    tl.store(out + i, tl.load(x + i) * by)


@pytest.fixture
def device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("PAELLAPY_CACHE_DIR", str(tmp_path))
    with pp.Device("virtual:h200") as opened:
        opened.synchronize()
        yield opened


@pytest.fixture
def assembled(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """PTX texts that were assembled."""
    seen: list[str] = []
    real = compiled.assemble

    def assemble(ptx: str, *rest: Any) -> Any:
        seen.append(ptx)
        return real(ptx, *rest)

    monkeypatch.setattr(compiled, "assemble", assemble)
    return seen


def launch(kernel: TritonKernel, blocks: int = 4, **options: Any) -> Any:
    x = np.arange(64 * blocks, dtype=np.float32)
    out = np.zeros_like(x)
    kernel[blocks,](x, out, 2.0, B=64, **options)
    assert (out == 2 * x).all()
    return out


def test_results_need_no_machine_code(device: Any, assembled: list[str]) -> None:
    kernel = pp.kernel(scale)
    for _ in range(3):
        launch(kernel)
    assert assembled == []
    device.synchronize()
    # As it reports, for the room it takes on an SM; and plain, since its time must not depend on what it reports.
    assert len(assembled) == len(set(assembled)) == 2


@pytest.mark.parametrize("look", [lambda d: d.synchronize(), lambda d: d.counts(), lambda d: d.record().synchronize()])
def test_whoever_looks_at_time_sees_every_launch(device: Any, look: Any) -> None:
    before = device.counts()["started"].sum()
    launch(pp.kernel(scale), 5)
    look(device)
    device.synchronize()
    blocks = (device.counts()["started"].sum() - before) & 0xFFFFFFFF
    assert blocks == 5


def test_launches_before_a_trace_are_not_in_it(device: Any) -> None:
    kernel = pp.kernel(scale)
    launch(kernel, 3)
    with pp.trace() as t:
        launch(kernel, 2)
    assert len(t.blocks) == 2


def test_times_do_not_depend_on_when_they_are_looked_at(device: Any) -> None:
    kernel, spans = pp.kernel(scale), []
    for look_often in (True, False):
        start = device.record()
        for _ in range(4):
            launch(kernel, 300)
            if look_often:
                _ = device.model
        spans.append(device.record().elapsed_ns(start))
    assert spans[0] == pytest.approx(spans[1], rel=1e-9)  # of sums of floats in another order


def test_another_process_compiles_nothing_again(device: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    launch(pp.kernel(scale))
    device.synchronize()
    monkeypatch.setattr(triton_source, "_run", None)
    launch(pp.kernel(scale))  # knows nothing of the first one, as in another process
    device.synchronize()


def test_tuning_assembles_no_variant_of_a_configuration_twice(device: Any, assembled: list[str]) -> None:
    configs = [triton.Config({"B": b}) for b in (32, 64, 128)]
    kernel = pp.kernel(triton.autotune(configs, key=["by"])(scale))
    x = np.ones(1024, np.float32)
    kernel[lambda m: (1024 // m["B"],)](x, np.zeros_like(x), 2.0)
    device.synchronize()
    assert len(assembled) == len(set(assembled)) == 2 * len(configs)


def test_what_others_want_to_see_between_the_stages_goes_through_triton(device: Any, monkeypatch: Any) -> None:
    asked = []
    real = triton.compile
    monkeypatch.setattr(triton, "compile", lambda *args, **kwargs: asked.append(1) or real(*args, **kwargs))
    monkeypatch.setattr(triton.knobs.compilation, "always_compile", True)
    launch(pp.kernel(scale))
    assert asked


# ---- a kernel that fails changes nothing for others ------------------------------------------------------------------


@triton.jit
def plus_one(x, y, B: tl.constexpr):
    i = tl.program_id(0) * B + tl.arange(0, B)
    tl.store(y + i, tl.load(x + i) + 1)


@triton.jit
def gather_rows(x, at, out, rows, B: tl.constexpr):
    tiles = tl.make_tensor_descriptor(x, [rows, B], [B, 1], [1, B])
    cells = tl.arange(0, B)[:, None] * B + tl.arange(0, B)[None, :]
    tl.store(out + cells, tiles.gather(tl.load(at + tl.arange(0, B)), 0))


@triton.jit
def of_another_gpu(x, B: tl.constexpr):
    i = tl.arange(0, B)
    value = tl.inline_asm_elementwise("tcgen05.wait::ld.sync.aligned; mov.b32 $0, $1;", "=r,r", [i], tl.int32, True, 1)
    tl.store(x + i, value)


@triton.jit
def far_outside(x, B: tl.constexpr):
    tl.store(x + 100_000 + tl.arange(0, B), 1.0)


@triton.jit
def too_much_shared(x, out, n, B: tl.constexpr):
    i, total = tl.arange(0, B), tl.zeros((B, B), tl.float32)
    for k in range(0, n, B):
        left, right = tl.load(x + i[:, None] * n + k + i), tl.load(x + (k + i[:, None]) * n + i)
        total = tl.dot(left, right, total)
    tl.store(out + i[:, None] * n + i, total)


BAD = (gather_rows, of_another_gpu, far_outside, too_much_shared)


@pytest.fixture
def kernels() -> dict[str, Any]:
    return {k.__name__: pp.kernel(k) for k in (plus_one, *BAD)}


def bad(kernels: dict[str, Any], which: str) -> None:
    kernel, square = kernels[which], np.zeros((256, 256), np.float32)
    args: Any = {
        "gather_rows": (np.zeros((64, 32), np.float32), np.zeros(32, np.int32), np.zeros((32, 32), np.float32), 64, 32),
        "of_another_gpu": (np.zeros(32, np.int32), 32), "far_outside": (np.zeros(8, np.float32), 8),
        "too_much_shared": (square, np.zeros_like(square), 256, 128),
    }  # fmt: skip
    kernel[1,](*args[which], num_stages=4)


def good(kernels: dict[str, Any], how: str) -> Any:
    x, y = np.arange(512, dtype=np.float32), np.zeros(512, np.float32)
    launch: Any = lambda: kernels["plus_one"][4,](x, y, 128)  # noqa: E731
    seen: Any = None
    if how == "trace":
        with pp.trace() as t:
            launch()
        seen = [(k.kernel, k.launches, k.blocks) for k in t.summary().kernels]
    elif how == "bench":
        seen = triton.testing.do_bench(launch, warmup=0.01, rep=0.02)
    elif how == "event":
        before = pp.Device.current().record()
        launch()
        seen = pp.Device.current().record().elapsed_ns(before)
    else:
        launch()
    return seen, y.tolist()


WAYS = ["launch", "trace", "bench", "event"]
steps = st.lists(st.sampled_from([*WAYS, *(k.__name__ for k in BAD)]), min_size=2, max_size=8)


@given(steps)
@settings(max_examples=12)
@pytest.mark.filterwarnings("ignore::paellapy.instrument.errors.LaunchWarning")
def test_good_kernels_do_the_same_among_bad_ones(todo: list[str]):
    kernels = {k.__name__: pp.kernel(k) for k in (plus_one, *BAD)}
    with pp.Device("virtual:h200"):
        alone = {how: good(kernels, how) for how in WAYS}
        failed: set[str] = set()
        for step in todo:
            if step in WAYS:
                assert good(kernels, step)[1] == alone[step][1]
                if step == "trace":
                    assert good(kernels, step) == alone[step]
                continue
            if step == "too_much_shared" and step not in failed:
                bad(kernels, step)  # computed before it is compiled
                pp.Device.current().clock_ns()
            else:
                with failing(PaellaError, kernel=step):
                    bad(kernels, step)
            failed.add(step)


def test_a_late_refusal_is_a_warning_elsewhere_and_an_error_at_the_next_launch(kernels: dict[str, Any]):
    with pp.Device("virtual:h200"):
        bad(kernels, "too_much_shared")
        with pytest.warns(LaunchWarning) as warned:
            assert good(kernels, "bench")[0] > 0
        assert [(w.message.kernel, w.message.error.field) for w in warned] == [("too_much_shared", "shared memory")]
        with failing(LaunchError, kernel="too_much_shared", field="shared memory"):
            bad(kernels, "too_much_shared")


def test_measuring_a_kernel_that_is_refused_raises(kernels: dict[str, Any]):
    with pp.Device("virtual:h200"), failing(LaunchError, kernel="too_much_shared"):
        triton.testing.do_bench(lambda: bad(kernels, "too_much_shared"), warmup=0.01, rep=0.02)


def test_rows_are_gathered_by_a_descriptor_only_where_the_gpu_can(kernels: dict[str, Any]):
    args = ("*fp32:16", "*i32:16", "*fp32:16", 64, 32)
    with failing(CompileError, kernel="gather_rows", field="target", given="sm_90", limit="sm_100"):
        kernels["gather_rows"].compile(*args, target="sm_90")
    assert "tt.descriptor_gather" in kernels["gather_rows"].compile(*args, target="sm_100").asm["ttir"]
