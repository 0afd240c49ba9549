"""`paellapy cluster …`: many GPUs behind one address."""

from __future__ import annotations

import signal
import threading
from pathlib import Path
from typing import Annotated

import typer

from paellapy.instrument.errors import ArgumentError

app = typer.Typer(no_args_is_help=True, help="Many GPUs behind one address: routers in front of engines.")


def _named(engines: list[str]) -> dict[str, str]:
    """`NAME=URL`, or a URL alone, which is named by its place."""
    found: dict[str, str] = {}
    for k, each in enumerate(engines):
        name, equals, url = each.partition("=")
        name, url = (name, url) if equals and "://" not in name else (f"engine-{k}", each)
        if name in found:
            raise ArgumentError(f"two engines are named {name!r}: give each a name of its own")
        found[name] = url
    return found


@app.command()
def route(
    engines: Annotated[list[str], typer.Argument(help="http://HOST:PORT of each engine, or NAME=http://…")],
    host: Annotated[str, typer.Option(help="address to listen on")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="port, 0 for any that is free")] = 8000,
    routers: Annotated[int, typer.Option(help="processes that share the port")] = 1,
    every_ms: Annotated[float, typer.Option(help="milliseconds between two reports of an engine")] = 5.0,
    hold_s: Annotated[float, typer.Option(help="seconds that a request waits for an engine with its model")] = 20.0,
    key: Annotated[str | None, typer.Option(envvar="PAELLAPY_ROUTER_KEY", help="API key for the engines")] = None,
) -> None:
    """Route requests to engines that run already, without Ray, until SIGTERM or Ctrl-C."""
    from paellapy.cluster.router import RouterOptions
    from paellapy.cluster.routers import run_routers

    options = RouterOptions(host=host, port=port, every_ms=every_ms, hold_s=hold_s, key=key)
    run_routers(_named(engines), options, routers, lambda url: typer.echo(f"routing at {url}"))


@app.command()
def serve(
    file: Annotated[Path, typer.Argument(help=r"TOML file: as for paellapy serve, and \[cluster] with engines, …")],
    detach: Annotated[bool, typer.Option("--detach", help="return once it is ready; needs a running Ray")] = False,
) -> None:
    """Place one engine per GPU on Ray, load models by the plan, and open the front door, until SIGTERM or Ctrl-C."""
    from paellapy.cluster import lifecycle

    typer.echo("bringing the cluster up; a first start on a machine compiles, which takes a minute …", err=True)
    url, started = lifecycle.bring_up(file)
    typer.echo(f"serving at {url}")
    if detach and not started:
        return
    if detach:
        typer.echo("Ray was started for this cluster, so it stays here: start Ray first to detach", err=True)
    stop = threading.Event()
    for each in (signal.SIGINT, signal.SIGTERM):
        signal.signal(each, lambda *_: stop.set())
    while not stop.wait(1.0):
        if not lifecycle.is_up():
            typer.echo("the cluster was taken down")
            return
    lifecycle.take_down()


@app.command()
def status() -> None:
    """Engines, their models, load, predicted lateness and memory."""
    from rich.console import Console

    from paellapy.cluster import lifecycle
    from paellapy.cluster.status import status_table

    lifecycle.connect()
    found = lifecycle.status()
    console = Console()
    if found["front_door"] is None:
        console.print(f"the front door at {found['url']} does not answer")
        raise typer.Exit(1)
    console.print(status_table(found["front_door"], found["url"]))


@app.command()
def scale(engines: Annotated[int, typer.Argument(help="number of engines wanted")]) -> None:
    """Add engines, or drain the newest."""
    from paellapy.cluster import lifecycle

    lifecycle.connect()
    typer.echo(f"{', '.join(lifecycle.scale(engines))}: `paellapy cluster status` says when new ones are up")


@app.command()
def drain(engine: Annotated[str, typer.Argument(help="its name, as in the status")]) -> None:
    """Take one engine out after it has finished its requests."""
    from paellapy.cluster import lifecycle

    lifecycle.connect()
    lifecycle.drain(engine)
    typer.echo(f"{engine} is out")


@app.command()
def down() -> None:
    """Take the cluster down; Ray goes on."""
    from paellapy.cluster import lifecycle

    lifecycle.connect()
    lifecycle.take_down()
    typer.echo("the cluster is down")


def plan(
    file: Annotated[Path, typer.Argument(help=r"TOML file: profiles, gpus, gpu_gb, \[models.NAME] with rate, …")],
) -> None:
    """Choose which models go on which GPUs, and predict how many requests will be within target."""
    from rich.console import Console

    from paellapy.cluster.plan import enough_gpus, load_fleet
    from paellapy.cluster.plan import plan as make

    fleet, goal = load_fleet(file)
    console = Console()
    with console.status("simulating placements"):
        found = make(fleet) if goal is None else enough_gpus(fleet, goal)
    console.print(found.table())
