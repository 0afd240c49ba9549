"""The command line: `paellapy …`."""

from __future__ import annotations

import sys

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
