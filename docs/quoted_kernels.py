"""Tables of the page for kernel developers, from benchmarks/results."""

from __future__ import annotations

import collections

import paper_report
from result_files import RESULTS, stored


def public() -> str:
    total = stored("public_kernels")["total"]
    rows = [
        ["right", f"{total['right']}", "assembled", f"{total['variants']}"],
        ["refused", f"{total['refused']}", "refused", f"{total['variants_refused']}"],
        ["wrong or crashed", f"{total['wrong'] + total['crashed']}", "failed", f"{total['variants_failed']}"],
    ]
    return paper_report.table(["operators", "", "variants of their kernels", ""], rows)


def public_gpu() -> str:
    """The operators on a GPU: what came of them, and how many launches and kernels they made."""
    runs = [list(stored(name).values()) for name in ("public_kernels_gpu", "public_kernels_ranges")]
    kinds = {
        "same bits as plain": "same bits",
        "other bits in every plain run too (liger's group norm: atomic sums)": "bits vary plain too",
        "other bits": "other bits",
        "failed": "crashed",
        "refused by the package itself with this version of Triton": "does not run plain",
    }
    counts = [collections.Counter(each["result"] for each in results) for results in runs]
    rows = [[title, *(f"{count[kind]}" for count in counts)] for title, kind in kinds.items()]
    ran = [[each for each in results if "launches" in each] for results in runs]
    rows.append(["kernels", *(f"{len({kernel for each in rs for kernel in each['kernels']})}" for rs in ran)])
    sums = {
        "launches": "launches", "launches with every block exactly once in their trace": "every_block_once",
        "ranges": "ranges", "blocks": "blocks", "blocks with the range of the whole kernel": "bodies",
    }  # fmt: skip
    for title, key in sums.items():
        totals = [sum(each[key] for each in rs) if key in rs[0] else None for rs in ran]
        rows.append([title, *("–" if total is None else f"{total:,}" for total in totals)])
    return paper_report.table(["operators", "reporting", "reporting with ranges"], rows)


def sanitizer() -> str:
    """Findings under compute-sanitizer, in Triton kernels and in CUDA C kernels where these were run."""
    names = {"Triton": "sanitize", "CUDA C": "sanitize_cuda"}
    kinds = {kind: stored(name) for kind, name in names.items() if (RESULTS / f"{name}.json").exists()}
    variants = sorted({v for at in kinds.values() for rows in at.values() for v in rows} - {"plain"})

    def more(row: dict[str, int]) -> str:
        return f"{row['findings'] - row['of_plain_kernels']} in {row['kernels']}"

    rows = [
        [kind, f"`{tool}`", f"{at['plain']['findings']}", *(more(at[v]) for v in variants)]
        for kind, tools in kinds.items()
        for tool, at in tools.items()
    ]
    head = ["kernels", "tool", "findings in plain kernels", *(f"more, {v}" for v in variants)]
    return paper_report.table(head, rows)


def range_cost() -> str:
    """The time of two kernels without ranges and with eight."""
    rows = []
    for case, title in (("gemm", "GEMM of 4,096"), ("attention", "attention over 4,096 tokens")):
        found = stored("range_cost")[case]
        us = found["us"]
        over = [found[f"ranges_over_{what}"] for what in ("plain", "traced")]
        rows.append([title, *(f"{us[k]:.0f} µs" for k in ("plain", "traced", "traced with ranges")),
                     *(f"{each:.3f}" for each in over)])  # fmt: skip
    return paper_report.table(["kernel", "plain", "traced", "traced with ranges", "÷ plain", "÷ traced"], rows)


def range_code() -> str:
    """What ranges add to the main loops of two kernels."""
    found = stored("range_code")
    cases = ("gemm", "attention")
    head = ["per round of the main loop, for a warp", "GEMM", "attention"]
    rows = [
        [what, *(f"{found[case]['with'][count]}" for case in cases)]
        for what, count in (("events", "events"), ("readings of the clock", "clocks"), ("stores", "stores"))
    ]
    for what, count in (("instructions", "instructions"), ("issue cycles", "issue_cycles"), ("registers", "registers")):
        without, with_ = ([found[case][kind][count] for case in cases] for kind in ("without", "with"))
        earlier = [found["earlier"][case][count] for case in cases]
        rows.append([f"{what} without ranges", *map(str, without)])
        rows.append([f"{what} with ranges", *map(str, with_)])
        rows.append([f"{what} with one store for each event", *map(str, earlier)])
    return paper_report.table(head, rows)


def tables() -> dict[str, str]:
    return {
        "public-kernels": public(), "public-gpu": public_gpu(), "sanitizer": sanitizer(), "range-code": range_code(),
        "range-cost": range_cost(),
    }  # fmt: skip
