"""The command line: `paellapy …`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from instrument.errors import PaellaError
from instrument.versions import versions

app = typer.Typer(no_args_is_help=True, add_completion=False, rich_markup_mode="rich", help=__doc__)


@app.command()
def doctor() -> None:
    """What GPU, driver, Triton, CuPy and ptxas were found, which features work here, what to install for the rest."""
    from paellapy import doctor as examination

    console = Console()
    with console.status("trying every feature…"):
        findings = examination.examine()
    console.print(examination.report(findings))
    console.print(examination.available())
    needed = ("instrument Triton kernels", "run and trace on the virtual GPU")
    if any(f.works is False and f.name in needed for f in findings):
        raise typer.Exit(1)


@app.command()
def serve(
    config: Annotated[Path | None, typer.Argument(help="TOML file; without one the demo models are served")] = None,
    host: Annotated[str | None, typer.Option(help="address to listen on  [dim](127.0.0.1)[/dim]")] = None,
    port: Annotated[int | None, typer.Option(help="port, 0 for any that is free  [dim](8000)[/dim]")] = None,
    device: Annotated[str | None, typer.Option(help='"auto", "cuda:0", "virtual:h200", …')] = None,
    policy: Annotated[str | None, typer.Option(help='"paella", "edf", "srpt", … or "package.module:function"')] = None,
    model: Annotated[
        list[str] | None, typer.Option(help="""a model: 'package.module:factory{argument="value"}'; may be repeated""")
    ] = None,
    setting: Annotated[
        list[str] | None,
        typer.Option("--set", "-s", help="any setting of the file, as in server.grace_s=2; may be repeated"),
    ] = None,
) -> None:
    """Serve models over HTTP (Open Inference Protocol v2) until SIGTERM or Ctrl-C, which finish what is in flight."""
    from paellapy import serve_demo
    from serving.api import serve_config
    from serving.config import load_config

    named = {"server.host": host, "server.port": port, "device": device, "policy": policy}
    overrides = [f"{key}={value}" for key, value in named.items() if value is not None] + (setting or [])
    with_demo = config is None and not model
    loaded, source = load_config(config, overrides, serve_demo.settings() if with_demo else None, model or ())
    serve_config(loaded, source, announce=serve_demo.announce if with_demo else None)


@app.command()
def version() -> None:
    """Versions of paellapy and of what it stands on."""
    for name, number in versions().items():
        typer.echo(f"{name} {number}")


def main() -> None:
    """Runs the command line; errors of ours are one line, not a traceback."""
    try:
        app()
    except PaellaError as e:
        typer.secho(f"paellapy: {e}", fg="red", err=True)
        sys.exit(1)
