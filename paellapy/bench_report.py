"""`paellapy bench` on the terminal: a progress bar while it runs, a table when it is done."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from paellapy.scheduler.engine.engine import Engine
from paellapy.scheduler.sim.number_table import number_table
from paellapy.serving.bench.load import Load
from paellapy.serving.bench.run import run_bench

TRIAL_S, MOST_REFUSED = 1.0, 0.02
LATE_MS = 10.0  # a timer and a turn of the event loop take less, even on a busy machine


def run(target: str | Engine, load: Load, console: Console, clients: int = 1) -> dict[str, Any]:
    """Runs the load under a progress bar."""
    counts = TextColumn("{task.fields[counts]}")
    columns = (TextColumn("{task.description}"), BarColumn(), counts, TimeRemainingColumn())
    # Without a terminal, rich would print an empty line in place of the bar.
    with Progress(*columns, console=console, transient=True, disable=not console.is_interactive) as bar:
        task = bar.add_task("warming up", total=load.uncounted_s + load.counted_s, counts="")

        def progress(elapsed_s: float, counted: int, refused: int) -> None:
            phase = "warming up" if elapsed_s < load.uncounted_s else "measuring"
            bar.update(task, completed=elapsed_s, description=phase, counts=f"{counted} done, {refused} refused")

        return run_bench(target, load, progress, clients)


def bearable(target: str | Engine, load: Load, console: Console, clients: int) -> Load:
    """Finds by short trials how many clients the target takes almost without refusals, if no number was given."""
    assert load.concurrency is not None
    while load.concurrency > clients:
        trial = run_bench(target, replace(load, warmup_s=TRIAL_S / 2, duration_s=TRIAL_S), None, clients)["all"]
        if trial["refused"] <= MOST_REFUSED * (trial["answered"] + trial["refused"]):
            return load
        fewer = max(clients, load.concurrency // 2)
        console.print(f"{load.concurrency} clients at once are too many for this server: trying {fewer}")
        load = replace(load, concurrency=fewer)
    return load


def table(result: dict[str, Any]) -> Table:
    """One row per model, and a row for all models if there are several."""
    load = result["load"]
    if load["trace"]:
        how = f"{load['trace']} requests of a trace, latency from intended arrival"
    elif load["rate"] is not None:
        how = f"open-loop, {load['rate']:g}/s {load['arrivals']}, latency from intended arrival"
    else:
        how = f"closed-loop, {load['concurrency']} clients"
    if result["clients"] > 1:
        how += f", {result['clients']} client processes"
    columns = ["model", "answered\n/s", "p50\nms", "p90\nms", "p99\nms", "p99.9\nms", "max\nms", "refused", "errors"]
    if load["target_ms"] is not None:
        columns.append(f"within\n{load['target_ms']:g} ms")
    found = dict(result["models"])
    several = len(found) > 1
    if several:
        found["all"] = result["all"]
    rows = []
    for name, each in found.items():
        latency = each.get("latency_ms", {})
        numbers = [_ms(latency[key]) if key in latency else "–" for key in ("p50", "p90", "p99", "p99.9", "max")]
        failed = sum(each["errors"].values())
        within = [f"{each.get('within_target', 0.0):.2%}"] if load["target_ms"] is not None else []
        rows.append([name, f"{each['answered_per_s']:.1f}", *numbers, str(each["refused"]), str(failed), *within])
    return number_table(f"{result['url']}: {how}, {result['seconds']:.1f} s", columns, rows, total=several)


def lateness(result: dict[str, Any]) -> str:
    """Says how late the client itself was, so that its delay is not mistaken for the server's.

    >>> lateness({"client_late_ms": 250.0})[:52]
    'this client itself sent requests up to 250 ms late, '
    """
    late_ms = result["client_late_ms"]
    if late_ms < LATE_MS:
        return ""
    return (
        f"this client itself sent requests up to {_ms(late_ms)} ms late, which is part of the latencies: "
        "lower --rate, or use several processes with --clients"
    )


def _ms(value: float) -> str:
    """Three digits, or all digits before the decimal point."""
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"
