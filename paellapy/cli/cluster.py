"""`paellapy cluster …`: many GPUs behind one address."""

from __future__ import annotations

import math
import signal
import threading
from pathlib import Path
from typing import Annotated

import typer

from paellapy.instrument.errors import ArgumentError

app = typer.Typer(no_args_is_help=True, help="Many GPUs behind one address: routers in front of engines.")


def named_engines(engines: list[str]) -> dict[str, str]:
    """Engines by name, from `NAME=URL`; a URL alone is named by its position."""
    found: dict[str, str] = {}
    for k, each in enumerate(engines):
        name, equals, url = each.partition("=")
        name, url = (name, url) if equals and "://" not in name else (f"engine-{k}", each)
        if name in found:
            raise ArgumentError(f"two engines are named {name!r}: give each a different name", given=name)
        found[name] = url
    return found


@app.command()
def route(
    engines: Annotated[list[str], typer.Argument(help="http://HOST:PORT of each engine, or NAME=http://…")],
    host: Annotated[str, typer.Option(help="address to listen on")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="port to listen on; 0: any free port")] = 8000,
    routers: Annotated[int, typer.Option(help="number of router processes, which share the port")] = 1,
    every_ms: Annotated[float, typer.Option(help="milliseconds between two outlooks of an engine")] = 5.0,
    hold_s: Annotated[float, typer.Option(help="seconds a request may wait for an engine with its model")] = 20.0,
    held_mb: Annotated[
        float, typer.Option(help="megabytes of requests that a router holds at once; more are refused with 503")
    ] = 256.0,
    key: Annotated[
        str | None, typer.Option(envvar="PAELLAPY_ROUTER_KEY", help="API key for the engines, if they need one")
    ] = None,
) -> None:
    """Route requests to running engines, without Ray, until SIGTERM or Ctrl-C."""
    from paellapy.cluster.listener import run_routers
    from paellapy.cluster.router import RouterOptions

    if not 0 < held_mb < math.inf:
        raise ArgumentError(f"--held-mb is {held_mb:g}: give a finite number above 0", field="held_mb", given=held_mb)
    options = RouterOptions(
        host=host, port=port, every_ms=every_ms, hold_s=hold_s, key=key, max_held_bytes=round(held_mb * 1e6)
    )  # fmt: skip
    run_routers(named_engines(engines), options, routers, lambda url: typer.echo(f"routing at {url}"))


@app.command()
def serve(
    file: Annotated[Path, typer.Argument(help=r"TOML file as for paellapy serve, with a table \[cluster]")],
    detach: Annotated[
        bool, typer.Option("--detach", help="return once the cluster is ready; needs a running Ray")
    ] = False,
) -> None:
    """Start engines on Ray, each with a GPU of its own, and serve their models at one address until SIGTERM
    or Ctrl-C.
    """
    from paellapy.cluster import control

    typer.echo("starting the cluster; the first start on a machine compiles, which takes a minute …", err=True)
    url, started = control.bring_up(file)
    typer.echo(f"serving at {url}")
    if detach and not started:
        return
    if detach:
        typer.echo("this process started Ray and cannot detach: run `ray start --head` first to detach", err=True)
    stop = threading.Event()
    for each in (signal.SIGINT, signal.SIGTERM):
        signal.signal(each, lambda *_: stop.set())
    while not stop.wait(1.0):
        if not control.is_up():
            typer.echo("the cluster has been taken down")
            return
    control.take_down()


@app.command()
def apply(
    file: Annotated[Path, typer.Argument(help="the cluster file, changed")],
    dry_run: Annotated[bool, typer.Option("--dry-run", help="show the difference and change nothing")] = False,
) -> None:
    """Change a running cluster into that of the file, engine by engine, without refusing a request."""
    from paellapy.cluster import control

    def show(changes: list[str]) -> None:
        typer.echo("\n".join(changes) or "nothing changes")

    control.connect()
    if control.apply(file, show, dry_run):
        typer.echo("the cluster has changed")


@app.command()
def status() -> None:
    """Show the engines with their models, load, predicted time and memory."""
    from rich.console import Console
    from rich.table import Table

    from paellapy.cluster import control

    control.connect()
    found = control.status()
    console = Console()
    if found["front_door"] is None:
        console.print(f"the front door at {found['url']} does not answer")
        raise typer.Exit(1)
    table = Table(title=found["url"])
    for column in ("engine", "state", "models", "live", "slowest\nms", "memory", "sent"):
        table.add_column(column)
    for each in found["front_door"]["engines"]:
        ready = [name for name, model in each["models"].items() if model["state"] == "READY"]
        late = max((each["models"][name]["estimate_ms"] for name in ready), default=0.0)
        memory = f"{each.get('held_bytes', 0) / 1e9:.2f}/{each.get('budget_bytes', 0) / 1e9:.0f} GB"
        state = "up" if each["up"] else each.get("why", "away")
        live, sent = str(each.get("live", 0)), str(each["sent"])
        table.add_row(each["name"], state, ", ".join(ready), live, f"{late:.2f}", memory, sent)
    console.print(table)


@app.command()
def scale(engines: Annotated[int, typer.Argument(help="new number of engines")]) -> None:
    """Add engines, or drain the newest."""
    from paellapy.cluster import control

    control.connect()
    control.scale(engines)
    typer.echo("`paellapy cluster status` shows when new engines are ready")


@app.command()
def drain(engine: Annotated[str, typer.Argument(help="name of the engine, as shown by status")]) -> None:
    """Take one engine out after it has finished its requests."""
    from paellapy.cluster import control

    control.connect()
    control.drain(engine)
    typer.echo(f"{engine} has left the cluster")


@app.command()
def down() -> None:
    """Take the cluster down; Ray keeps running."""
    from paellapy.cluster import control

    control.connect()
    control.take_down()
    typer.echo("the cluster is down")


def plan(
    file: Annotated[Path, typer.Argument(help=r"TOML file with profiles, gpus, gpu_gb and \[models.NAME] tables")],
) -> None:
    """Choose models for each GPU, and predict the share of requests within target."""
    from rich.console import Console

    from paellapy.scheduler.sim.plan import enough_gpus, load_fleet
    from paellapy.scheduler.sim.plan import plan as make

    fleet, goal = load_fleet(file)
    console = Console()
    with console.status("simulating placements"):
        found = make(fleet) if goal is None else enough_gpus(fleet, goal)
    console.print(found.table())
