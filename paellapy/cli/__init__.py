"""The command line: `paellapy …`. Modules of heavy commands are imported when a command runs."""

from __future__ import annotations

import importlib
import sys
from typing import Annotated

import typer
from rich.console import Console

from paellapy.cli import bench, cluster, scripts, serve, simulate
from paellapy.instrument.env import progress, versions
from paellapy.instrument.errors import PaellaError

# Arguments after a script's name belong to the script.
_SCRIPT = {"allow_extra_args": True, "ignore_unknown_options": True, "allow_interspersed_args": False}
app = typer.Typer(no_args_is_help=True, add_completion=False, rich_markup_mode="rich")
app.command()(simulate.simulate)
app.command()(simulate.tune)
app.command()(bench.bench)
app.command(context_settings=_SCRIPT)(scripts.run)
app.command()(cluster.plan)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"paellapy {versions()['paellapy']}")
        raise typer.Exit


# What a command imports that takes seconds before the first line of output
_SLOW = {
    "simulate": ("paellapy.simulation", "paellapy.viz.static"), "tune": ("paellapy.scheduler.sim.tune",),
    "trace": ("paellapy.instrument.traces.session",), "bench": ("paellapy.serving.bench.load",),
}  # fmt: skip


@app.callback()
def paellapy(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="show the version and exit")
    ] = False,
) -> None:
    """See which block of which kernel ran on which SM. Decide which work enters the GPU next.

    Trace kernels and view the traces, serve models under a scheduling policy, and compare policies, with or without a
    GPU.
    """
    if "--help" not in sys.argv:
        with progress("paellapy: starting …"):
            for name in _SLOW.get(context.invoked_subcommand or "", ()):
                importlib.import_module(name)


@app.command()
def doctor(
    verbose: Annotated[bool, typer.Option(help="also print the scheduler's tuning values and their sources")] = False,
) -> None:
    """Show which GPU, driver and tools were found, which features work, and what to install for the others."""
    from paellapy import doctor as examination

    console = Console()
    with console.status("looking around…") as status:
        findings = examination.examine(lambda what: status.update(f"trying to {what}…"))
    console.print(examination.report(findings))
    if verbose:
        console.print(examination.tuning_report(examination.tuning_here()))
    console.print(examination.available())
    needed = ("instrument Triton kernels", "run and trace on the virtual GPU")
    if any(f.works is False and f.name in needed for f in findings):
        raise typer.Exit(1)


app.command()(serve.serve)
app.command()(serve.reload)
app.command("trace", context_settings=_SCRIPT)(scripts.trace_script)
app.command()(scripts.view)


@app.command()
def version() -> None:
    """Show the versions of paellapy and of the packages it uses."""
    for name, number in versions().items():
        typer.echo(f"{name} {number}")


app.add_typer(cluster.app, name="cluster")


def main() -> None:
    """Runs the command line. Errors of paellapy are printed in one line, without a traceback."""
    try:
        app()
    except PaellaError as e:
        typer.secho(f"paellapy: {e}", fg="red", err=True)
        sys.exit(1)
