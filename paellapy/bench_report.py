"""`paellapy bench` on the terminal: a bar while it runs, a table when it is done."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from scheduler.engine import Engine
from serving.bench import Load, run_bench


def run(target: str | Engine, load: Load, console: Console, clients: int = 1) -> dict[str, Any]:
    """Runs it under a progress bar."""
    counts = TextColumn("{task.fields[counts]}")
    columns = (TextColumn("{task.description}"), BarColumn(), counts, TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("warming up", total=load.uncounted_s + load.counted_s, counts="")

        def progress(elapsed_s: float, counted: int, refused: int) -> None:
            phase = "warming up" if elapsed_s < load.uncounted_s else "measuring"
            bar.update(task, completed=elapsed_s, description=phase, counts=f"{counted} done, {refused} refused")

        return run_bench(target, load, progress, clients)


def table(result: dict[str, Any]) -> Table:
    """One row per model, and one for all where there are several."""
    load = result["load"]
    if load["trace"]:
        how = f"{load['trace']} requests of a trace, latency from intended arrival"
    elif load["rate"] is not None:
        how = f"open-loop, {load['rate']:g}/s {load['arrivals']}, latency from intended arrival"
    else:
        how = f"closed-loop, {load['concurrency']} clients"
    if result["clients"] > 1:
        how += f", {result['clients']} client processes"
    found = Table(title=f"{result['url']}: {how}, {result['seconds']:.1f} s", title_justify="left")
    found.add_column("model")
    for name in ("answered/s", "p50 ms", "p90", "p99", "p99.9", "max", "refused", "errors"):
        found.add_column(name, justify="right")
    if load["target_ms"] is not None:
        found.add_column(f"≤ {load['target_ms']:g} ms", justify="right")
    rows = dict(result["models"])
    if len(rows) > 1:
        rows["all"] = result["all"]
    for name, each in rows.items():
        latency = each.get("latency_ms", {})
        numbers = [f"{latency[key]:.3g}" if key in latency else "–" for key in ("p50", "p90", "p99", "p99.9", "max")]
        failed = sum(each["errors"].values())
        within = [f"{each.get('within_target', 0.0):.2%}"] if load["target_ms"] is not None else []
        found.add_row(name, f"{each['answered_per_s']:.1f}", *numbers, str(each["refused"]), str(failed), *within)
    return found
