"""`paellapy bench`: load on a v2 endpoint, or on an engine in this process."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from paellapy.cli.scripts import check_output

if TYPE_CHECKING:
    from rich.table import Table

    from paellapy.scheduler.engine.engine import Engine
    from paellapy.serving.bench.arrivals import Load

DEFAULT_CONCURRENCY = 8
TRIAL_S, MOST_REFUSED = 1.0, 0.02
LATE_MS = 10.0  # a timer and a turn of the event loop take less, even on a busy machine


def bench(
    url: Annotated[str | None, typer.Argument(help="URL of a v2 server, such as http://127.0.0.1:8000")] = None,
    engine: Annotated[
        str | None, typer.Option(help="load an engine in this process, on this device, instead of a server")
    ] = None,
    config: Annotated[
        Path | None, typer.Option(help="TOML file for --engine, as for serve  [dim](demo models)[/dim]")
    ] = None,
    policy: Annotated[str | None, typer.Option(help="policy for --engine  [dim](the file's or paella)[/dim]")] = None,
    model: Annotated[
        list[str] | None, typer.Option(help="model to ask for; may be repeated  [dim](all but those of texts)[/dim]")
    ] = None,
    rate: Annotated[float | None, typer.Option(help="open-loop: requests per second")] = None,
    concurrency: Annotated[
        int | None,
        typer.Option(help="closed-loop: clients that wait for each answer  [dim](8, if no load is given)[/dim]"),
    ] = None,
    trace: Annotated[
        Path | None, typer.Option(help="open-loop: CSV (t in s, model, …) or JSONL file of arrivals")
    ] = None,
    speed: Annotated[float, typer.Option(help="play the trace this many times as fast")] = 1.0,
    arrivals: Annotated[str, typer.Option(help="open-loop: gaps that are poisson, lognormal or even")] = "poisson",
    sigma: Annotated[float, typer.Option(help="spread of lognormal gaps; larger values give heavier bursts")] = 1.5,
    duration: Annotated[float | None, typer.Option(help="seconds to measure  [dim](10)[/dim]")] = None,
    warmup: Annotated[float | None, typer.Option(help="seconds of load before measuring  [dim](1)[/dim]")] = None,
    items: Annotated[int, typer.Option(help="items per request")] = 1,
    binary: Annotated[bool, typer.Option(help="send tensors in binary, or as JSON")] = True,
    timeout_us: Annotated[int | None, typer.Option(help="deadline of each request in µs  [dim](none)[/dim]")] = None,
    priority: Annotated[
        int | None, typer.Option(help="priority of each request; 1 goes first  [dim](the server's)[/dim]")
    ] = None,
    target_ms: Annotated[
        float | None, typer.Option(help="show the share of answers within this latency in ms, not each model's target")
    ] = None,
    connections: Annotated[int, typer.Option(help="open-loop: limit of connections at a time")] = 512,
    clients: Annotated[int, typer.Option(help="client processes, if one core is not enough")] = 1,
    header: Annotated[
        list[str] | None, typer.Option("--header", "-H", help='HTTP header "Name: value"; may be repeated')
    ] = None,
    ca: Annotated[Path | None, typer.Option(help="PEM file of certificates to trust, for https")] = None,
    seed: Annotated[int, typer.Option(help="random seed of arrivals and inputs")] = 0,
    json_file: Annotated[Path | None, typer.Option("--json", help="JSON file for all results")] = None,
) -> None:
    """Put load on a v2 server or an engine and show latency percentiles, refusals and errors."""
    from paellapy.serving.bench.arrivals import ARRIVALS, Load, read_trace
    from paellapy.serving.bench.client import BenchError

    if (url is None) == (engine is None):
        raise BenchError("give either the URL of a server or --engine with a device", field="url", given=url)
    if url is not None and (config is not None or policy is not None):
        raise BenchError("--config and --policy need --engine: a server at a URL has its own settings", field="engine")
    if arrivals not in ARRIVALS:
        said = f"--arrivals is {arrivals!r}: choose one of {', '.join(ARRIVALS)}"
        raise BenchError(said, field="arrivals", given=arrivals, limit=tuple(ARRIVALS))
    if clients < 1:
        raise BenchError(f"--clients is {clients}: give 1 or more", field="clients", given=clients, limit=1)
    if trace is not None and (duration is not None or warmup is not None):
        said = "the file of --trace sets the duration: leave out --duration and --warmup, or change --speed"
        raise BenchError(said, field="trace", given=trace)
    by_itself = rate is None and concurrency is None and trace is None
    if by_itself:
        concurrency = max(DEFAULT_CONCURRENCY, clients)
    headers = {}
    for each in header or []:
        name, colon, value = each.partition(":")
        if not colon:
            raise BenchError(f"{each!r} is not a header: write it as 'Name: value'", field="header", given=each)
        headers[name.strip()] = value.strip()
    load = Load(
        models=tuple(model or ()), rate=rate, concurrency=concurrency, trace=read_trace(trace) if trace else (),
        speed=speed, arrivals=ARRIVALS[arrivals], sigma=sigma, duration_s=10.0 if duration is None else duration,
        warmup_s=1.0 if warmup is None else warmup, items=items,
        binary=binary, timeout_us=timeout_us, priority=priority, target_ms=target_ms, connections=connections,
        seed=seed, headers=headers, ca=None if ca is None else str(ca),
    )  # fmt: skip
    load.check()
    if json_file is not None:
        check_output(json_file)
    console = Console()
    with contextlib.nullcontext(url) if engine is None else _engine(engine, config, policy, console) as target:
        assert target is not None
        if by_itself:
            load = bearable(target, load, console, clients)
        result = run(target, load, console, clients)
    console.print(table(result))
    if note := lateness(result):
        console.print(note, markup=False, highlight=False, soft_wrap=True)
    for reason, count in result["all"]["refused_because"].items():
        console.print(f"{count} refused: {reason}", markup=False, highlight=False, soft_wrap=True)
    for problem, count in result["all"]["errors"].items():
        console.print(f"{count} × {problem}", markup=False, highlight=False, soft_wrap=True)
    if json_file is not None:
        json_file.write_text(json.dumps(result, indent=1) + "\n")
    if result["all"]["errors"] and not result["all"]["answered"] and not result["all"]["refused"]:
        raise typer.Exit(1)


@contextlib.contextmanager
def _engine(device: str, config: Path | None, policy: str | None, console: Console) -> Iterator[Engine]:
    """An engine with the models of a configuration."""
    from paellapy.cli.serve import demo_settings
    from paellapy.serving.build import build_engine, build_entries
    from paellapy.serving.config import load_config
    from paellapy.serving.registry import Registry

    named = {"device": device, "policy": policy}
    overrides = [f"{key}={value}" for key, value in named.items() if value is not None]
    settings, source = load_config(config, overrides, None if config else demo_settings())
    entries = build_entries(settings, source)
    with build_engine(settings, source) as found:
        registry = Registry(found, entries)
        with console.status("loading models"):
            for entry in entries:
                registry.load(entry.name)
        yield found


def run(target: str | Engine, load: Load, console: Console, clients: int = 1) -> dict[str, Any]:
    """Runs the load under a progress bar."""
    from paellapy.serving.bench.load import run_bench

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
    from paellapy.serving.bench.load import run_bench

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
    from paellapy.scheduler.sim.results import number_table

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
    targets = any(each["target_ms"] is not None for each in result["models"].values())
    if targets:
        columns += ["target\nms", "in\ntarget"]
    found = dict(result["models"])
    several = len(found) > 1
    if several:
        found["all"] = result["all"]
    rows = []
    for name, each in found.items():
        latency = each.get("latency_ms", {})
        numbers = [_ms(latency[key]) if key in latency else "–" for key in ("p50", "p90", "p99", "p99.9", "max")]
        failed = sum(each["errors"].values())
        target = each["target_ms"]
        share = each.get("within_target", None if target is None else 0.0)
        within = ["–" if target is None else f"{target:g}", "–" if share is None else f"{share:.1%}"] if targets else []
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
