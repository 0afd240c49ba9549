"""Ratios of a server to that of an earlier version, for `serving_floor.py --against`, and the time of its loads."""

from __future__ import annotations

import statistics
import subprocess
from pathlib import Path
from typing import Any

BEFORE = " before"  # behind the name of a server of an earlier version
WARM_S = 0.3  # of each load in the first round, where the time of the others follows from --within
LEAST_S = 0.4  # of a load; shorter ones say little
END_S = 12.0  # of --within for the start of the script and the end of the servers
WARMUP = 0.25  # of each load's time, before it is counted

Runs = dict[str, dict[str, list[dict[str, Any]]]]  # by case and server


def commit_of(checkout: Path, named: str | None) -> str:
    """`named`: for a copy without git."""
    command = ["git", "-C", str(checkout), "rev-parse", "--show-toplevel", "--short", "HEAD"]
    said = subprocess.run(command, capture_output=True, text=True, check=False).stdout.split("\n")
    if named is not None:
        return named
    if len(said) < 2 or Path(said[0]).resolve() != checkout:
        raise SystemExit(f"{checkout} is not the top of a git checkout: name its commit with --before")
    return said[1]


def load_seconds(left_s: float, warm_s: float, runs: int, rounds: int) -> float:
    """The time of each load such that `rounds` rounds of `runs` loads fit into `left_s`.

    The first round took `warm_s` with loads of WARM_S, so a load takes a little longer than its time.
    """
    added_s = max(0.0, warm_s / runs - WARM_S * (1 + WARMUP))
    seconds = ((left_s - END_S) / (runs * rounds) - added_s) / (1 + WARMUP)
    if seconds < LEAST_S:
        raise SystemExit(f"{seconds:.2f} s are left for each load: raise --within, or lower --rounds or --servers")
    return seconds


def _server_us(run: dict[str, Any]) -> float:
    """CPU time of the server's processes, a request."""
    return float(sum(us for name, us in run["cpu_us"].items() if name != "client"))


def both(runs: Runs) -> dict[str, Any]:
    """Medians over the rounds of both versions, for each case and server."""

    def medians(rounds: list[dict[str, Any]]) -> dict[str, float]:
        found = {key: statistics.median(each[key] for each in rounds) for key in ("per_s", "p50_ms")}
        found["cpu_us"] = statistics.median(_server_us(each) for each in rounds)
        return {key: round(value, 4) for key, value in found.items()}

    return {label: {kind: medians(rounds) for kind, rounds in by_kind.items()} for label, by_kind in runs.items()}


def beside_before(runs: Runs) -> dict[str, Any]:
    """Ratios of this version to the earlier one, for each case and server: the median, and that of every round."""

    def ratios(now: list[dict[str, Any]], before: list[dict[str, Any]]) -> dict[str, Any]:
        pairs = list(zip(now, before, strict=True))
        every = {
            "per_s": [a["per_s"] / b["per_s"] for a, b in pairs],
            "p50": [a["p50_ms"] / b["p50_ms"] for a, b in pairs],
            "cpu": [_server_us(a) / _server_us(b) for a, b in pairs],
        }
        found: dict[str, Any] = {name: round(statistics.median(values), 3) for name, values in every.items()}
        return found | {f"rounds_{name}": [round(each, 3) for each in values] for name, values in every.items()}

    return {label: {kind: ratios(each, by_kind[kind + BEFORE]) for kind, each in by_kind.items()
                    if kind + BEFORE in by_kind} for label, by_kind in runs.items()}  # fmt: skip


def show(found: dict[str, Any]) -> None:
    for label, by_kind in found.items():
        said = [
            f"{kind}: {each['per_s']:.2f}x ({min(each['rounds_per_s']):.2f} to {max(each['rounds_per_s']):.2f}), "
            f"CPU {each['cpu']:.2f}x"
            for kind, each in by_kind.items()
        ]
        print(f"{label:26s}", *said, sep="   ")
