"""The cost of in-kernel ranges: a GEMM and attention with eight ranges, against the same kernels without.

    python benchmarks/range_cost.py [--quick]      # on a GPU; on the virtual one only to see that it runs

Each kernel runs plain, traced without ranges, traced with eight ranges, and plain again, in turns. Times are of whole
batches of launches, between two events, and ratios are medians over the rounds. Outside a trace ranges cost nothing,
which needs no timing: the machine code is compared.
"""

from __future__ import annotations

import statistics
from typing import Any

import numpy as np
import triton
import triton.language as tl
from harness import arguments, finish, medians

import paellapy as pp

WARMING = 10  # launches without ranges: while the host reads a trace the GPU is idle, and its clocks may fall


@triton.jit
def gemm_ranges(a, b, c, M, N, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    with pp.range("addresses"):
        pid = tl.program_id(0)
        across = tl.cdiv(N, BN)
        rm = pid // across * BM + tl.arange(0, BM)
        rn = pid % across * BN + tl.arange(0, BN)
        rk = tl.arange(0, BK)
    with pp.range("zero"):
        acc = tl.zeros((BM, BN), tl.float32)
    with pp.range("loop"):
        for k in range(0, K, BK):
            with pp.range("load a"):
                x = tl.load(a + rm[:, None] * K + k + rk[None, :])
            with pp.range("load b"):
                y = tl.load(b + (k + rk)[:, None] * N + rn[None, :])
            with pp.range("mma"):
                acc = tl.dot(x, y, acc)
    with pp.range("convert"):
        out = acc.to(tl.float16)
    with pp.range("store"):
        tl.store(c + rm[:, None] * N + rn[None, :], out)


@triton.jit
def attention_ranges(q, k, v, o, T, D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, scale: tl.constexpr):
    with pp.range("load q"):
        head = tl.program_id(1) * T * D
        rows, cols, d = tl.program_id(0) * BM + tl.arange(0, BM), tl.arange(0, BN), tl.arange(0, D)
        x = tl.load(q + head + rows[:, None] * D + d[None, :])
    m, total = tl.full((BM,), -1e30, tl.float32), tl.zeros((BM,), tl.float32)
    acc = tl.zeros((BM, D), tl.float32)
    with pp.range("loop"):
        for start in range(0, T, BN):
            with pp.range("load k"):
                kt = tl.load(k + head + (start + cols)[None, :] * D + d[:, None])
            with pp.range("scores"):
                s = tl.dot(x, kt) * scale
            with pp.range("softmax"):
                new = tl.maximum(m, tl.max(s, 1))
                p = tl.exp2(s - new[:, None])
                shrink = tl.exp2(m - new)
                total = total * shrink + tl.sum(p, 1)
                m = new
            with pp.range("load v"):
                y = tl.load(v + head + (start + cols)[:, None] * D + d[None, :])
            with pp.range("values"):
                acc = tl.dot(p.to(tl.float16), y, acc * shrink[:, None])
    with pp.range("store"):
        tl.store(o + head + rows[:, None] * D + d[None, :], (acc / total[:, None]).to(tl.float16))


def gemm_case(size: int) -> tuple[tuple[int, ...], tuple[Any, ...], dict[str, int], Any]:
    g = np.random.default_rng(0)
    a, b = (pp.array(g.standard_normal((size, size)).astype(np.float16)) for _ in range(2))
    c = pp.zeros((size, size), np.float16)
    return ((size // 128) ** 2,), (a, b, c, size, size, size, 128, 128, 64), {"num_warps": 8, "num_stages": 3}, c


def attention_case(tokens: int) -> tuple[tuple[int, ...], tuple[Any, ...], dict[str, int], Any]:
    g, heads, width = np.random.default_rng(0), 32, 64
    q, k, v = (pp.array(g.standard_normal((heads, tokens, width)).astype(np.float16)) for _ in range(3))
    o = pp.zeros((heads, tokens, width), np.float16)
    scale = 1.4426950408889634 * width**-0.5
    return (tokens // 128, heads), (q, k, v, o, tokens, width, 128, 64, scale), {"num_warps": 4, "num_stages": 3}, o


def measured(marked: Any, case: Any, rounds: int, times: int) -> dict[str, Any]:
    from corpus.ranged import without_ranges

    unmarked = without_ranges(marked)
    grid, args, options, out = case
    with_, without = pp.kernel(marked, report=None), pp.kernel(unmarked, report=None)

    def timed_us(kernel: Any) -> float:
        device = pp.Device.current()
        for _ in range(WARMING):
            without[grid](*args, **options)
        start = device.record()
        for _ in range(times):
            kernel[grid](*args, **options)
        end = device.record()
        end.synchronize()
        return end.elapsed_ns(start) / 1000 / times

    found: list[dict[str, float]] = []
    results: dict[str, Any] = {}
    for kernel in (with_, without):  # compiled and loaded before anything is timed
        kernel[grid](*args, **options)
        with pp.trace(records_per_sm=1 << 10):
            kernel[grid](*args, **options)
    for _ in range(rounds):
        before = timed_us(without)
        plain = out.numpy().copy()
        with pp.trace(records_per_sm=1 << 10):
            traced = timed_us(without)
        with pp.trace(records_per_sm=1 << 10) as t:
            ranged = timed_us(with_)
        results["same_bits"] = bool(np.array_equal(plain, out.numpy()))
        results["ranges"], results["lost"] = len(t.ranges), t.ranges.lost
        plain_us = (before + timed_us(without)) / 2
        found.append({"plain": plain_us, "traced": traced, "traced with ranges": ranged})
    results["us"] = medians(found)
    for kind in ("traced", "plain"):
        ratios = (each["traced with ranges"] / each[kind] for each in found)
        results[f"ranges_over_{kind}"] = statistics.median(ratios)
    codes = [_code(k.compile(*args, report=None, **options), fn) for k, fn in ((with_, marked), (without, unmarked))]
    results["same_code_off"] = codes[0] == codes[1]
    return results


def _code(compiled: Any, fn: Any) -> list[str]:
    """The instructions that ptxas is given: without lines and names, which differ."""
    text = compiled.ptx.replace(fn.__name__, "kernel")
    lines = (line.strip() for line in text[text.index(".entry") :].partition(".section")[0].splitlines())
    return [line for line in lines if line and not line.startswith((".loc", "//", "$L__tmp"))]


def main() -> None:
    o = arguments(__doc__, quick=True).parse_args()
    gemm, tokens, rounds, times = (256, 256, 1, 2) if o.quick else (4096, 4096, 7, 10)
    found = {
        "gemm": measured(gemm_ranges, gemm_case(gemm), rounds, times),
        "attention": measured(attention_ranges, attention_case(tokens), rounds, times),
    }
    kinds = ("plain", "traced", "traced with ranges")
    titles = {"gemm": f"GEMM of {gemm:,}", "attention": f"attention over {tokens:,} tokens"}
    rows = [[titles[name], *(f"{each['us'][kind]:.0f}" for kind in kinds), f"{each['ranges_over_plain']:.3f}"]
            for name, each in found.items()]  # fmt: skip
    head = ["kernel", *(f"{kind}, µs" for kind in kinds), "÷ plain"]
    finish(o, "range_cost", found, "ranges", [head, *rows], pp.Device.current())


if __name__ == "__main__":
    main()
