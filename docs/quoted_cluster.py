"""Tables of the page on clusters, from benchmarks/results."""

from __future__ import annotations

import statistics

import paper_report
from result_files import stored


def kills() -> str:
    rows = [["aim", "", "0", "0", "", "", "", "", "≤ 15", ""]]
    rows += [
        [
            name, f"{row['answers']:,}", f"{row['wrong']}", f"{len(row['errors'])}",
            f"{row['marked_and_not_sent_again']}", f"{row['longest_pause_s']:.2f}", f"{row['slowest_s']:.2f}",
            f"{row['slowest_a_second_later_s']:.2f}", f"{row['full_again_s']:.1f}", f"{row['load_average']:.1f}",
        ]
        for name, row in stored("cluster_kills")["events"].items()
    ]  # fmt: skip
    head = ["event", "answers", "wrong", "errors", "marked, not sent again", "longest time without an answer, s",
            "slowest request, s", "slowest from 1 s after the event on, s", "all placed again after, s",
            "load average"]  # fmt: skip
    return paper_report.table(head, rows)


def simulated() -> str:
    rows = []
    for size in stored("cluster_sim")["sizes"]:
        found = size["by_router"]["predicted"]
        ratios = [size.get(f"predicted_to_{other}") for other in ("two_choices", "round_robin")]
        rows.append(
            [
                f"{size['gpus']:,}", f"{found['requests']:,}", f"{found['p99_ms']:.1f}",
                *("–" if each is None else f"{each:.2f}" for each in ratios),
                f"{found['wall_s']:.1f}", f"{1e3 * found['cpu_s'] / size['gpus']:.0f}",
            ]
        )  # fmt: skip
    head = ["GPUs", "requests", "p99 of `predicted`, ms", "÷ `two_choices`", "÷ `round_robin`", "seconds on two cores",
            "CPU-ms per GPU"]  # fmt: skip
    return paper_report.table(head, rows)


def measured() -> str:
    router, plans = stored("router"), stored("plan_check")
    apart = [each["points_apart"] for each in plans["fleets"]]
    mb = router["memory"]["mb"]
    rows = [
        ["p50 through a router ÷ direct, one client", f"{router['p50_ratio']:.2f}", "`router.json`"],
        ["requests per CPU-second of a router ÷ of a server that also computes the model",
         f"{router['throughput_ratio']:.1f}", "`router.json`"],
        [f"memory of a router over {router['memory']['requests']:,} requests, MB", f"{mb[0]:.1f} to {mb[-1]:.1f}",
         "`router.json`"],
        [f"`plan`'s expected attainment, points from the simulated one on {len(apart)} random fleets: median, most",
         f"{statistics.median(apart):.1f}, {max(apart):.1f}", "`plan_check.json`"],
    ]  # fmt: skip
    return paper_report.table(["", "", "stored as"], rows)


def tables() -> dict[str, str]:
    return {"cluster_kills": kills(), "cluster_sim": simulated(), "cluster_measured": measured()}
