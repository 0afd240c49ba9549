"""On the virtual GPU a kernel is compiled as far as somebody looks: results need TTIR, times need registers too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import triton
import triton.language as tl

import paellapy as pp
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
