"""The table of published systems in docs/policies.md, from the stored results.

    python benchmarks/systems_table.py            # prints it
    python benchmarks/systems_table.py --write    # writes it into the page
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

from common import RESULTS

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "policies.md"
BEGIN, END = "<!-- systems: begin -->", "<!-- systems: end -->"
CLAIMS = {
    "token": "KubeShare, Gemini: each container gets its request, and no more than its limit",
    "quota": "GaiaGPU: measured usage follows the share that was asked for",
    "antman": "opportunistic jobs take only the time they are left",
    "fair": "Salus, CFS: GPU time by weight",
    "tgs": "little impact on production; best effort up to 15 times MPS's",
    "orion": "best effort beside unlike work: up to 7.3 times the requests of a GPU",
    "reef": "real time within 2 % of alone, best effort 7.7 times as fast",
    "tally": "p99 within 7.2 % of alone, 80 % of the throughput of sharing freely",
    "muxflow": "offline work uses what online work leaves",
    "mlfq": "XSched: short jobs pass long ones without being known",
    "lax": "more deadlines met than in order of arrival",
    "pack": "Salus: jobs that fit run at once",
}


def simulated(found: dict[str, Any]) -> dict[str, str]:
    def limits(name: str) -> str:
        rows = found[name]
        return "; ".join(f"{limit}: {each['alone']:.3f}, {each['contended']:.3f}" for limit, each in rows.items())

    def pair(rows: dict[str, Any], gate: str, policy: str) -> str:
        def show(name: str) -> str:
            return f"{rows[name]['p99 ÷ alone']['mean']:.2f}× and {rows[name]['best effort, of alone']['mean']:.2f}"

        return f"{show(policy)}; gate {show(gate)}"

    fair = found["fair"]
    tgs = {name: each for name, each in found["tgs"].items() if name.startswith("tgs")}
    return {
        **{name: f"alone, contended: {limits(name)}" for name in ("token", "quota", "antman")},
        "fair": "1 : 3 : 6 as " + "; ".join(
            f"{what} {' : '.join(f'{x:.3f}' for x in fair[what].values())}" for what in ("models", "tenants")
        ),
        "tgs": "; ".join(
            f"{name.partition(', ')[2]}: production {each['production, of alone']:.3f}, it {each['best effort']:.2f}"
            for name, each in tgs.items()
        ),
        "orion": f"unlike: {pair(found['orion']['unlike'], 'priority', 'orion')}; "
        f"like: {pair(found['orion']['like'], 'priority', 'orion')}",
        "reef": pair(found["reef"], "priority", "reef"),
        "tally": pair(found["tally"], "priority", "tally"),
        "muxflow": "; ".join(
            f"{name}: offline {each['best effort, of alone']['mean']:.2f}" for name, each in found["muxflow"].items()
        ),
        "mlfq": "p50 of the short one, ms: " + ", ".join(
            f"{name.partition(':')[0]} {value}" for name, value in found["mlfq"].items()
        ),
        "lax": "met: " + ", ".join(f"{name} {each['mean']:.3f}" for name, each in found["lax"].items()),
        "pack": "work of one GPU: " + ", ".join(f"{name} {value}" for name, value in found["pack"].items()),
    }  # fmt: skip


class Measured:
    """Points of systems_gpu.py, by key without the seed."""

    def __init__(self, points: dict[str, Any]) -> None:
        self._points: dict[str, list[Any]] = {}
        for key, value in points.items():
            self._points.setdefault(key.rpartition("|")[0], []).append(value)

    def has(self, key: str) -> bool:
        return key in self._points

    def median(self, key: str, read: Callable[[Any], float]) -> float:
        return statistics.median(read(each) for each in self._points[key])

    def keys(self, start: str) -> list[str]:
        return [key for key in self._points if key.startswith(start)]

    def slower(self, key: str, alone: str, what: str = "p99_us") -> float:
        return self.median(key, lambda p: p[what]) / self.median(alone, lambda p: p[what])


def measured(points: dict[str, Any]) -> dict[str, str]:
    seen = Measured(points)
    found: dict[str, str] = {}
    for name in ("token", "quota", "antman"):
        rows = []
        for limit in ("0.1", "0.25", "0.5"):
            keys = [f"limits|{name}|{limit}|{where}" for where in ("alone", "contended")]
            if all(map(seen.has, keys)):
                had = [seen.median(key, lambda p: next(iter(p["alone_share"].values()))) for key in keys]
                rows.append(f"{limit}: {had[0]:.3f}, {had[1]:.3f}")
        if rows:
            found[name] = "alone, contended: " + "; ".join(rows)
    rows = []
    for what in ("models", "tenants"):
        if seen.has(f"limits|fair|{what}"):
            per = [seen.median(f"limits|fair|{what}", lambda p, k=k: list(p["alone_share"].values())[k])
                   for k in range(3)]  # fmt: skip
            rows.append(f"{what} {' : '.join(f'{x / sum(per):.3f}' for x in per)}")
    if rows:
        found["fair"] = "1 : 3 : 6 as " + "; ".join(rows)
    if seen.has("limits|tgs|tgs|beside"):
        names = list(next(iter(points[k] for k in points if k.startswith("limits|tgs|tgs|beside")))["per_s"])
        production, low = names[2], names[1]
        rows = []
        for policy in ("tgs", "priority", "streams"):
            kept, own = (
                seen.median(f"limits|tgs|{policy}|beside", lambda p, n=n: p["per_s"][n])
                / seen.median(f"limits|tgs|streams|{alone}", lambda p, n=n: p["per_s"][n])
                for n, alone in ((production, "alone"), (low, "best effort alone"))
            )
            rows.append(f"{policy}: production {kept:.3f}, best effort {own:.2f}")
        found["tgs"] = "; ".join(rows)
    found |= _high(seen) | _pairs(seen) | _order(seen)
    rows = []
    for load in "ABCDE":
        if all(seen.has(f"disb|{load}|{policy}") for policy in ("reef", "priority", "alone")):
            reef, gate = (seen.slower(f"disb|{load}|{each}", f"disb|{load}|alone") for each in ("reef", "priority"))
            rows.append(f"{load} {reef:.2f}×, gate {gate:.2f}×")
    if rows:
        found["reef"] = "; ".join(filter(None, [found.get("reef"), "DISB: " + "; ".join(rows)]))
    return found


def _high(seen: Measured) -> dict[str, str]:
    """resnet50 (250 a second) beside two jobs of large batches: p99 ÷ alone, and their rate ÷ that of two alone."""
    found: dict[str, str] = {}
    for policy in ("reef", "tally", "muxflow"):
        rows = []
        for key in seen.keys("high|"):
            _, kind, name = (*key.split("|"), "", "")[:3]
            if name != policy:
                continue
            text = _pair(seen, kind, policy)
            if policy == "reef" and seen.has(f"high|{kind}|priority"):
                text += f", gate {_pair(seen, kind, 'priority')}"
            rows.append(f"beside {kind}: {text}")
        if rows:
            found[policy] = "; ".join(rows)
    return found


def _pair(seen: Measured, kind: str, policy: str) -> str:
    key = f"high|{kind}|{policy}"
    own = seen.median(key, lambda p: p["low_per_s"])
    own /= seen.median(f"high|{kind}|alone 2", lambda p: p["per_s"][kind])
    return f"{seen.slower(key, 'high|alone'):.2f}× and {own:.2f}"


def _pairs(seen: Measured) -> dict[str, str]:
    rows = []
    for key in seen.keys("pairs|"):
        parts = key.split("|")
        if len(parts) == 3 and parts[2] == "orion":
            pair, gate, alone = parts[1], f"pairs|{parts[1]}|priority", f"pairs|{parts[1]}|alone"
            won = seen.median(key, lambda p: p["low_per_s"]) / seen.median(gate, lambda p: p["low_per_s"])
            rows.append(
                f"{pair.replace('_', ' ')}: best effort {won:.2f} of the gate's, p99 {seen.slower(key, alone):.2f}×, "
                f"gate {seen.slower(gate, alone):.2f}×"
            )
    return {"orion": "; ".join(rows)} if rows else {}


def _order(seen: Measured) -> dict[str, str]:
    """A short model beside a long one, deadlines near capacity, and small models that fit together."""
    read: dict[str, tuple[str, Callable[[Any], float], tuple[str, ...], str]] = {
        "mlfq": ("p50 of the short one, ms: ", lambda p: p["p50_us"] / 1e3, ("mlfq", "fifo", "srpt", "alone"), ".2f"),
        "lax": ("met: ", lambda p: p["met"], ("lax", "edf", "fifo"), ".3f"),
        "pack": ("work of one GPU: ", lambda p: sum(p["alone_share"].values()), ("pack", "serial"), ".2f"),
    }
    found = {}
    for name, (what, value, policies, form) in read.items():
        keys = {policy: f"order|{name}|{policy}" for policy in policies}
        if all(map(seen.has, keys.values())):
            found[name] = what + ", ".join(f"{policy} {seen.median(key, value):{form}}" for policy, key in keys.items())
    return found


def table() -> str:
    stored = json.loads((RESULTS / "systems_simulated.json").read_text())["results"]["systems"]
    path = RESULTS / "systems_gpu.json"
    points = json.loads(path.read_text())["results"]["points"] if path.exists() else {}
    ours, real = simulated(stored), measured(points)
    lines = ["| system | its paper's claim | simulated | on an H200 | lines |", "|---|---|---|---|---|"]
    for name, claim in CLAIMS.items():
        size = len((ROOT / "scheduler" / "policies" / f"{name}.py").read_text().splitlines())
        lines.append(f"| `{name}` | {claim} | {ours[name]} | {real.get(name, 'not measured')} | {size} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="write the table into docs/policies.md")
    made = table()
    if parser.parse_args().write:
        before, _, rest = PAGE.read_text().partition(BEGIN)
        PAGE.write_text(f"{before}{BEGIN}\n{made}\n{END}{rest.partition(END)[2]}")
    print(made)


if __name__ == "__main__":
    main()
