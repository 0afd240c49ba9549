"""`paellapy run --best-effort script.py …`: runs an unchanged script beside a running engine."""

from __future__ import annotations

import gc
import sys
from pathlib import Path
from typing import Annotated

import typer

from paellapy.instrument.errors import PaellaError


class RunError(PaellaError):
    """`paellapy run` was given a script or an option that it cannot use."""


def warn_of_own_options(context: typer.Context) -> None:
    """Warns of options behind the script that this command has too: the script gets them, and the command does not."""
    own = {name for parameter in context.command.params for name in parameter.opts}
    for name in dict.fromkeys(each.partition("=")[0] for each in context.args):
        if name.startswith("-") and name in own:
            said = f"warning: {name} stands behind the script, so the script gets it; `paellapy {context.info_name}` "
            typer.echo(f"{said}reads its own options before the script", err=True)


def run(
    context: typer.Context,
    script: Annotated[str, typer.Argument(help="Python script to run; it gets the arguments that follow")],
    best_effort: Annotated[
        bool, typer.Option("--best-effort", help="required: launches and copies wait while the engine needs the GPU")
    ] = False,
    share: Annotated[float, typer.Option(help="part of the time in which it may launch, from 0.01 to 1")] = 1.0,
    priority: Annotated[int, typer.Option(help="priority of the script: it waits for jobs of higher priority")] = -1,
    engine: Annotated[
        str | None, typer.Option(help="process id or socket of the engine  [dim](this user's newest)[/dim]")
    ] = None,
    in_flight: Annotated[
        int, typer.Option(help="queued kernels after which it waits for the GPU; 0: no limit")
    ] = 0,
    name: Annotated[str | None, typer.Option(help="name of the script in the engine  [dim](file name)[/dim]")] = None,
) -> None:
    """Run a script beside an engine that holds its GPU work back while requests need the GPU.

    The script needs no change. If the engine ends, the script continues without it.
    """
    if not best_effort:
        said = "`paellapy run` needs --best-effort: write `paellapy run --best-effort script.py`"
        raise RunError(said)
    from paellapy.instrument.device.gate import LEAST_SHARE

    if not LEAST_SHARE <= share <= 1:
        raise RunError(f"--share is {share}: give a part of the time, from {LEAST_SHARE} to 1")
    if in_flight < 0:
        raise RunError(f"--in-flight is {in_flight}: give a number of kernels, or 0 for no limit")
    path = Path(script)
    if not path.is_file():
        raise RunError(f"there is no script {script}: check its path")
    warn_of_own_options(context)
    from paellapy.as_main import run_as_main
    from paellapy.guest import Guest

    Guest(name or path.stem, priority, share, engine, in_flight).join()
    gc.collect()
    gc.freeze()  # the collector need not search the modules imported for the gate
    sys.argv = [script, *context.args]
    sys.path[0] = str(path.resolve().parent)
    sys.exit(run_as_main(path.absolute()))
