"""Passes keep the plain kernel's blocks per SM, or the trace says how many they cost. ptxas tells the registers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

import paellapy as pp
from paellapy.instrument.errors import PtxError
from paellapy.instrument.gpu_model.parts import limits_for_capability, occupancy
from paellapy.instrument.kernels import torch_hook
from paellapy.instrument.kernels.triton_source import ptx_target, ptxas_options, triton_ptxas
from paellapy.instrument.ptx.compiled import Assembled, Compiled, Source, _with_most_registers, assemble
from paellapy.instrument.ptx.descriptor import PassConfig

HOPPER = limits_for_capability(90)
PASSES = {
    "count": PassConfig("count"),
    "trace": PassConfig("trace"),
    "count, sliced": PassConfig("count", sliced=True),
    "trace, sliced": PassConfig("trace", sliced=True),
    "notify, sliced": PassConfig("notify", sliced=True),
    "trace, sliced, preemptible": PassConfig("trace", sliced=True, preempt=True),
}


@triton.jit
def layer_norm_backward(x, w, dy, dx, dw, db, mean, rstd, rows, n, B: tl.constexpr, ROWS: tl.constexpr):
    """As flash-attention's: a block keeps the gradients of the weights in registers over many rows."""
    i = tl.arange(0, B)
    inside = i < n
    first = tl.program_id(0) * ROWS
    weight = tl.load(w + i, mask=inside).to(tl.float32)
    gw, gb = tl.zeros((B,), tl.float32), tl.zeros((B,), tl.float32)
    for row in range(first, min(first + ROWS, rows)):
        v = tl.load(x + row * n + i, mask=inside, other=0).to(tl.float32)
        g = tl.load(dy + row * n + i, mask=inside, other=0).to(tl.float32)
        hat = tl.where(inside, (v - tl.load(mean + row)) * tl.load(rstd + row), 0.0)
        wg = weight * g
        c1, c2 = tl.sum(hat * wg, 0) / n, tl.sum(wg, 0) / n
        tl.store(dx + row * n + i, (wg - (hat * c1 + c2)) * tl.load(rstd + row), mask=inside)
        gw += g * hat
        gb += g
    tl.store(dw + tl.program_id(0) * n + i, gw, mask=inside)
    tl.store(db + tl.program_id(0) * n + i, gb, mask=inside)


@triton.jit
def many_values(x, out, n, B: tl.constexpr, K: tl.constexpr):
    """Rounds that keep K values for each element of a tile."""
    i = tl.program_id(0) * B + tl.arange(0, B)
    k = tl.arange(0, K)
    held = tl.load(x + i[:, None] * K + k[None, :])
    for _ in range(n):
        held = held * tl.sum(held, 1)[:, None] + held
    tl.store(out + i[:, None] * K + k[None, :], held)


ROWS = ("*fp16", "*fp16", "*fp16", "*fp16", "*fp32", "*fp32", "*fp32", "*fp32", "i32", "i32")


def source_of(kernel: Any, *types: str, **given: int) -> Source:
    return pp.kernel(kernel).compile(*types, **given, target="sm_90", report=None).source


SOURCES = {
    **{f"layer norm, {b} by {w} warps": (layer_norm_backward, *ROWS, {"B": b, "ROWS": 64, "num_warps": w})
       for b, w in ((512, 1), (1024, 2), (1024, 4), (2048, 4), (2048, 8), (4096, 8), (8192, 8))},
    **{f"values, {k} by {w} warps": (many_values, "*fp32", "*fp32", "i32", {"B": 32 * w, "K": k, "num_warps": w})
       for k, w in ((16, 1), (16, 4), (32, 4), (32, 8), (64, 4), (128, 4))},
}  # fmt: skip


def blocks_per_sm(made: Compiled) -> int:
    assert made.source.threads is not None
    return occupancy(HOPPER, made.source.threads, made.registers, made.shared_bytes).blocks_per_sm


@pytest.mark.parametrize("name", SOURCES)
def test_passes_keep_the_blocks_per_sm_unless_registers_would_spill(name: str) -> None:
    kernel, *types, given = SOURCES[name]
    source = source_of(kernel, *types, **given)
    plain = source.build(PassConfig())
    for which, config in PASSES.items():
        made = source.build(config)
        assert made.code.spill_bytes <= plain.code.spill_bytes or plain.registers == 255, which
        if blocks_per_sm(made) < blocks_per_sm(plain):
            most = plain.registers + -plain.registers % 8
            limited = _with_most_registers(made.ptx, made.name, most)
            tried = assemble(limited, source.arch, source.name, source.ptxas_options, source.ptxas_path)
            assert tried.registers <= most, "ptxas follows the limit"
            assert tried.spill_bytes > plain.code.spill_bytes, which


def test_a_limit_of_registers_keeps_the_blocks_of_a_kernel_at_the_edge() -> None:
    kernel, *types, given = SOURCES["layer norm, 1024 by 4 warps"]
    source = source_of(kernel, *types, **given)
    made, plain = source.build(PASSES["trace, sliced"]), source.build(PassConfig())
    free = assemble(made.ptx, source.arch, source.name, source.ptxas_options, source.ptxas_path)
    if blocks_per_sm(replace(made, code=free)) >= blocks_per_sm(plain):
        pytest.skip("this ptxas needs no limit")
    assert blocks_per_sm(made) == blocks_per_sm(plain)


def test_a_trace_with_fewer_blocks_per_sm_says_so() -> None:
    kernel, given = pp.kernel(many_values), {"B": 128, "K": 32, "num_warps": 4}
    with pp.Device("virtual:h200"):
        x, out = pp.zeros(128 * 32 * 2000), pp.zeros(128 * 32 * 2000)
        with pp.trace() as t:
            kernel[2000,](x, out, 2, **given)
        allowed = kernel.theoretical_occupancy(x, out, 2, **given)
    plain, traced = (occupancy(HOPPER, 128, int(r), 0).blocks_per_sm for r in
                     (t.work["plain_registers"][0], t.launches["registers"][0]))  # fmt: skip
    said = [c.figures["plain"] for c in t.explain().kernels[0].claims if c.about == "reporting"]
    assert said == ([plain] if traced < plain else [])
    assert allowed.blocks_per_sm == plain
    assert allowed.reporting is not None


# ---- kernels that Triton compiles itself -----------------------------------------------------------------------------

AT_THE_EDGE = ("layer norm, 1024 by 4 warps", "values, 16 by 1 warps", "values, 64 by 4 warps")


@contextmanager
def torch_instrumented() -> Iterator[None]:
    pp.instrument_torch()
    try:
        yield
    finally:
        pp.instrument_torch(False)


def triton_compiled(kernel: Any, *types: str, num_warps: int, **constants: int) -> Any:
    """Compiles as Inductor does, by calling `triton.compile`."""
    signature = dict(zip(kernel.arg_names, (*types, *("constexpr" for _ in constants)), strict=True))
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants)
    options = {"enable_fp_fusion": True, "num_warps": num_warps}
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)


def assembled(built: Any, ptx: str = "") -> Assembled:
    ptx = ptx or built.asm["ptx"]
    return assemble(ptx, ptx_target(ptx, 90), built.metadata.name, ptxas_options(True), triton_ptxas(90))


@pytest.mark.parametrize("name", [*AT_THE_EDGE, "layer norm, 8192 by 8 warps"])
def test_kernels_of_triton_keep_their_blocks_too(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    kernel, *types, given = SOURCES[name]
    plain = triton_compiled(kernel, *types, **given)
    with torch_instrumented():
        reporting, cached = (triton_compiled(kernel, *types, **given) for _ in range(2))
    assert not hasattr(plain.metadata, "paellapy")
    before, after, threads = assembled(plain), assembled(reporting), 32 * given["num_warps"]
    facts = {"warps": given["num_warps"], "dynamic_shared_bytes": plain.metadata.shared,
             "spill_bytes": after.spill_bytes, "plain_registers": before.registers,
             "plain_spill_bytes": before.spill_bytes}  # fmt: skip
    assert reporting.metadata.paellapy == cached.metadata.paellapy == facts
    allowed, kept = (
        occupancy(HOPPER, threads, a.registers, plain.metadata.shared).blocks_per_sm for a in (before, after)
    )
    assert after.spill_bytes <= before.spill_bytes or before.registers == 255
    if kept < allowed:
        most = before.registers + -before.registers % 8
        limited = _with_most_registers(reporting.asm["ptx"], reporting.metadata.name, most)
        assert assembled(reporting, limited).spill_bytes > before.spill_bytes


def test_ptxas_may_fail_without_the_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> Any:
        raise PtxError("not this one")

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(torch_hook.Source, "assembled", refuse)
    with torch_instrumented():
        built = triton_compiled(many_values, "*fp32", "*fp32", "i32", B=128, K=32, num_warps=4)
    assert "%paellapy" in built.asm["ptx"]
    assert built.metadata.paellapy["plain_registers"] == 0


@pytest.mark.gpu
@pytest.mark.parametrize("name", AT_THE_EDGE)
def test_traces_of_torch_state_the_plain_registers(name: str, gpu: pp.Device) -> None:
    torch = pytest.importorskip("torch")
    kernel, *types, given = SOURCES[name]
    dtypes = {"*fp16": torch.float16, "*fp32": torch.float32}
    args = [torch.ones(1 << 17, dtype=dtypes[t], device="cuda") if t in dtypes else 2 for t in types]
    threads, keywords = 32 * given["num_warps"], {**given, "enable_fp_fusion": True}
    plain = kernel[8,](*args, **keywords)
    with torch_instrumented():
        reporting = kernel[8,](*args, **keywords)
        with pp.trace() as t:
            kernel[8,](*args, **keywords)
    (launch,), (work,) = t.launches, t.work
    assert (launch["warps"], launch["registers"]) == (given["num_warps"], reporting.n_regs)
    assert launch["shared_bytes"] == reporting.metadata.shared
    assert (work["launch"], work["plain_registers"]) == (launch["launch"], plain.n_regs)
    assert sorted(t.blocks["block"].tolist()) == list(range(8))
    allowed, kept = (occupancy(gpu.limits, threads, r, plain.metadata.shared).blocks_per_sm
                     for r in (plain.n_regs, reporting.n_regs))  # fmt: skip
    said = [c.figures["plain"] for c in t.explain().kernels[0].claims if c.about == "reporting"]
    assert said == ([allowed] if kept < allowed else [])
