"""Tables of docs/scheduling.md, from the result files of the engine, of windows of SMs and of the core."""

from __future__ import annotations

import numpy as np
from paper_report import table
from result_files import stored


def engine() -> str:
    """Aims of the engine on four models of Triton kernels."""
    rows = []
    for what, found in stored("engine_h200")["targets"].items():
        digits = 3 if found["median"] < 1.1 else 2
        least, median, most = (f"{found[each]:.{digits}f}" for each in ("least", "median", "most"))
        aim = found["target"].replace("<=", "≤").replace(">=", "≥")
        rows.append([what.replace("/", "÷"), median, f"{least} … {most}", aim])
    return table(["figure", "median", "least … most", "aim"], rows)


def queues() -> str:
    """p99 slowdown of streams with 8 and with 32 hardware queues, and of srpt."""
    mixed = stored("engine_h200")["mixed"]
    rows = []
    for system in ("streams", "streams, 32 queues", "srpt"):
        row = [f"`{system}`" if system == "srpt" else system]
        for load in (0.6, 0.8, 0.95):
            p99 = sorted(each["p99"] for each in mixed if each["policy"] == system and each["load"] == load)
            row.append(f"{p99[0]:.1f} … {p99[-1]:.1f}" if p99 else "–")
        rows.append(row)
    return table(["p99 slowdown", "60 % of saturation", "80 %", "95 %"], rows)


def beside_long() -> str:
    found = stored("short_beside_long")
    rows = []
    for policy in ("streams", "fifo", "srpt", "edf", "paella", "slack"):
        row = [f"`{policy}`"]
        for kind in ("segments", "blocks"):
            each = found[kind].get(policy)
            row.append(f"{each['p99_ratio_to_streams_and_fifo'][0]:.2f}" if each else "–")
        row.append(f"{found['segments'][policy]['throughput_ratio_to_streams_and_fifo'][0]:.3f}")
        rows.append(row)
    head = ["policy", "p99 of the short model ÷ streams", "the same, every block placed", "throughput ÷ streams"]
    return table(head, rows)


def flood() -> str:
    found = stored("flood")
    most = found["streams"]["long_per_s"]
    rows = [[name, f"{each['short_p99_ms']:.1f}", f"{each['long_per_s'] / most:.2f}"] for name, each in found.items()]
    return table(["system", "p99 of squeezenet1_1, ms", "throughput of densenet121 ÷ streams"], rows)


def windows() -> str:
    rows = [
        [each["name"], f"{np.mean(each['alone']):.2f}", f"{each['saturation']:,.0f}/s",
         f"{np.median(each['p99_4000']):.2f}", f"{np.median(each['p99_5000']):.2f}"]
        for each in stored("sm_partitions")
    ]  # fmt: skip
    return table(["confined to", "time alone ×", "saturation", "p99 slowdown at 4000/s", "at 5000/s"], rows)


def starts() -> str:
    models = stored("window_starts")["models"]
    rows = []
    for where in ("all SMs", "in a window", "in a window, from its own stream"):
        us = sorted(each[where]["start_us"] for each in models.values())
        rows.append([where, f"{us[0]:.0f} to {us[-1]:.0f}"])
    return table(["one more graph", "µs"], rows)


def core() -> str:
    found = stored("core_speed")
    rows = []
    for waiting, aim in ((1_000, 1), (100_000, 2)):
        us = [each["ns_per_decision_median"] / 1e3 for each in found["decision"] if each["waiting_requests"] == waiting]
        rows.append([f"decision with {waiting:,} waiting requests, µs", f"{min(us):.2f} to {max(us):.2f}", f"≤ {aim}"])
    rates = [each["segment_events_per_s_median"] / 1e6 for each in found["simulation"]]
    rows.append(["simulated segment events a second, millions", f"{min(rates):.2f} to {max(rates):.2f}", "≥ 0.5"])
    return table(["figure", "range over policies", "aim"], rows)


def core_before() -> str:
    """The time of a decision ÷ that of the version before the rooms, in the same run on each processor."""
    found: dict[str, dict[str, list[float]]] = {}
    for file, processor in (("core_speed_neoverse_n1", "Neoverse N1"), ("core_speed_xeon", "Xeon")):
        now, runs = stored(file)["decision"], [run["decision"] for run in stored(file)["base"]["runs"]]
        for k, each in enumerate(now):
            before = sum(run[k]["ns_per_decision_median"] for run in runs) / len(runs)
            by = found.setdefault(each["policy"], {})
            by.setdefault(processor, []).append(each["ns_per_decision_median"] / before)
    rows = [[f"`{policy}`", *(f"{np.median(r):.2f} ({min(r):.2f}–{max(r):.2f})" for r in by.values())]
            for policy, by in found.items()]  # fmt: skip
    return table(["policy", *next(iter(found.values()))], [["aim", "≤ 1.1", "≤ 1.1"], *rows])


def tables() -> dict[str, str]:
    return {
        "core-before": core_before(),
        "engine": engine(), "queues": queues(), "beside-long": beside_long(), "flood": flood(), "windows": windows(),
        "window-starts": starts(), "core": core(),
    }  # fmt: skip
