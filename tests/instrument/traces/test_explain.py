"""`t.explain()` on kernels that are limited by their addresses: atomic updates that queue, and sectors used in part."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import triton
import triton.language as tl
from corpus.atomics import histogram_atomics

import paellapy as pp
from paellapy.instrument.gpu_model.costs import _L2_SHARE
from paellapy.instrument.gpu_model.parts import PARTS

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


def test_pauses_between_launches_are_named_if_nothing_else_runs() -> None:
    with pp.Device("virtual:h200"), pp.trace() as t:
        for _ in range(3):
            pp.kernel(every)[4,](pp.zeros(4096), pp.zeros(4096), 4096, STRIDE=1, B=1024)
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


def test_the_example_of_the_readme_is_limited_by_memory_whatever_is_rounded() -> None:
    text = (Path(__file__).parents[3] / "README.md").read_text()
    found = re.search(r"^n = 1 << (\d+)$", text, re.M)
    assert found is not None
    moved = 3 * 4 << int(found[1])
    assert not 0.75 < moved / (_L2_SHARE * PARTS["h200"].l2_bytes) < 1.33
