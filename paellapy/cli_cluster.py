"""`paellapy cluster …`: many GPUs behind one address."""

from __future__ import annotations

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
    every_ms: Annotated[float, typer.Option(help="between two reports of an engine")] = 5.0,
    hold_s: Annotated[float, typer.Option(help="a request waits so long for an engine with its model")] = 20.0,
    key: Annotated[str | None, typer.Option(envvar="PAELLAPY_ROUTER_KEY", help="API key for the engines")] = None,
) -> None:
    """Route requests to engines that run already, without Ray, until SIGTERM or Ctrl-C."""
    from paellapy.cluster.router import RouterOptions
    from paellapy.cluster.routers import run_routers

    options = RouterOptions(host=host, port=port, every_ms=every_ms, hold_s=hold_s, key=key)
    run_routers(_named(engines), options, routers, lambda url: typer.echo(f"routing at {url}"))
