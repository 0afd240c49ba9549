"""Tables of the page on policies, from benchmarks/results."""

from __future__ import annotations

import paper_report
from result_files import RESULTS, stored

WAYS = {"engine": "an engine", "http": "HTTP", "simulate": "`simulate`"}


def shares() -> str:
    """What tenants of shares 1, 3 and 6 get, by way and device."""
    rows = []
    for device, title in (("virtual", "virtual GPU"), ("cuda", "H200")):
        if (RESULTS / f"tenant_shares_{device}.json").exists():
            found = stored(f"tenant_shares_{device}")
            for way, name in WAYS.items():
                had, off = found[way]["shares"].values(), 100 * found[way]["furthest_off"]
                rows.append([name, title, " : ".join(f"{x:.3f}" for x in had), f"{off:.1f} %"])
    return paper_report.table(["asked over", "on", "part of the GPU's time", "furthest off"], rows)


def stretches() -> str:
    """How much two models that always run slow each other: simulated from their profiles, and measured."""
    rows = []
    for pair, found in stored("systems_stretch").items():
        for name, each in found.items():
            (other,) = set(pair.split("+")) - {name}
            off = each["predicted"] / each["measured"] - 1
            named = [f"`{which}`" for which in (name, other)]
            rows.append([*named, f"{each['predicted']:.2f}", f"{each['measured']:.2f}", f"{100 * off:+.0f} %"])
    return paper_report.table(["model", "beside", "simulated ÷ alone", "measured ÷ alone", "off"], rows)


def sharing() -> str:
    switch, latency = stored("policy_switch"), stored("preempt_latency")
    points = stored("systems_gpu")["points"].values()
    accounted = [each["accounted"] for each in points if "accounted" in each]
    short, long = ([each["free p99"] for name, each in latency.items() if each["held"] and of(name)]
                   for of in (lambda name: "of 50" not in name, lambda name: "of 50" in name))  # fmt: skip
    flags = [each["preempt"]["ratio"] for each in stored("preempt_cost").values()]
    cost = stored("accounting_cost")
    account = [cost[name] for name in ("decision", "segment")]
    same = ", ".join(f"{each['same_build_ratio']:.3f}" for each in account)
    rows = [
        ["seconds to change the policy of a busy virtual engine: median, longest", "< 1",
         f"{switch['median_s']:.2f}, {switch['longest_s']:.2f}", "`policy_switch.json`"],
        ["GPU time of all models ÷ busy time, H200: least, most", "0.97 to 1.03",
         f"{min(accounted):.3f}, {max(accounted):.3f}", "`systems_gpu.json`"],
        ["CPU time of the core with its account of GPU time ÷ without it: a decision, a simulated segment "
         f"(the same core twice: {same})", "≤ 1.01",
         ", ".join(f"{each['ratio']:.3f}" for each in account), "`accounting_cost.json`"],
        ["µs from `preempt()` until the GPU is free, p99: kernels of blocks of 2 to 10 µs, least, most", "< 100",
         f"{min(short):.0f}, {max(short):.0f}", "`preempt_latency.json`"],
        ["the same, blocks of 50 µs, which run to their end: least, most", "< 100",
         f"{min(long):.0f}, {max(long):.0f}", "`preempt_latency.json`"],
        ["kernel that can be preempted ÷ plain kernel: least, most", "≤ 1.02", f"{min(flags):.3f}, {max(flags):.3f}",
         "`preempt_cost.json`"],
    ]  # fmt: skip
    return paper_report.table(["what", "aim", "reached", "file"], rows)


FLAGS = {
    "preempt": "preemptible ÷ plain",
    "one flag": "all blocks read one flag",
    "at the start": "decided at the start",
}


def flags() -> str:
    found = stored("preempt_cost")
    measured = [name for name in FLAGS if all(name in row for row in found.values())]
    rows = [
        [kernel, f"{row['plain_us']:.1f}", *(f"{row[name]['ratio']:.3f}" for name in measured)]
        for kernel, row in found.items()
    ]
    return paper_report.table(["kernel", "plain, µs", *(FLAGS[name] for name in measured)], rows)


def tables() -> dict[str, str]:
    return {"tenant-shares": shares(), "sharing": sharing(), "flags": flags(), "stretches": stretches()}
