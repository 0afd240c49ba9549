"""Tables of the page for kernel developers, from benchmarks/results."""

from __future__ import annotations

import paper_report
from result_files import stored


def public() -> str:
    total = stored("public_kernels")["total"]
    rows = [
        ["right", f"{total['right']}", "assembled", f"{total['variants']}"],
        ["refused", f"{total['refused']}", "refused", f"{total['variants_refused']}"],
        ["wrong or crashed", f"{total['wrong'] + total['crashed']}", "failed", f"{total['variants_failed']}"],
    ]
    return paper_report.table(["operators", "", "variants of their kernels", ""], rows)


def sanitizer() -> str:
    rows = [
        [f"`{tool}`", variant, f"{found['kernels']}", f"{found['findings']}"]
        for tool, variants in stored("sanitize").items()
        for variant, found in sorted(variants.items())
    ]
    return paper_report.table(["tool", "kernels compiled as", "kernels", "findings"], rows)


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
    return {"public-kernels": public(), "sanitizer": sanitizer(), "range-code": range_code()}
