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


def tables() -> dict[str, str]:
    return {"public-kernels": public(), "sanitizer": sanitizer()}
