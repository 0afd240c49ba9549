"""`paellapy run --best-effort script.py …`: a script as it is, beside a running engine."""

from __future__ import annotations

import gc
import runpy
import sys
from pathlib import Path
from typing import Annotated

import typer

from paellapy.instrument.errors import PaellaError


class RunError(PaellaError):
    """`paellapy run` was given a script or an option that does not work."""


def run(
    context: typer.Context,
    script: Annotated[str, typer.Argument(help="Python script to run; arguments after it are passed to it")],
    best_effort: Annotated[
        bool, typer.Option("--best-effort", help="its launches and copies wait while the engine wants the GPU")
    ] = False,
    share: Annotated[float, typer.Option(help="part of the time in which it may launch, above 0 and up to 1")] = 1.0,
    priority: Annotated[int, typer.Option(help="it waits for jobs of higher priority")] = -1,
    engine: Annotated[
        str | None, typer.Option(help="process number or socket of the engine; by default the newest of this user")
    ] = None,
    in_flight: Annotated[
        int, typer.Option(help="kernels after which it waits for the GPU: what is queued cannot be held; 0: never")
    ] = 0,
    name: Annotated[str | None, typer.Option(help="name in the engine; by default the script's name")] = None,
) -> None:
    """Run a script beside an engine that holds its GPU work back while requests need the GPU.

    The script needs no change. If the engine ends, the script goes on without it.
    """
    if not best_effort:
        raise RunError("write `paellapy run --best-effort script.py`: an engine then holds the script's launches back")
    if not 0 < share <= 1:
        raise RunError(f"--share {share}: give a part of the time, above 0 and up to 1")
    if in_flight < 0:
        raise RunError(f"--in-flight {in_flight}: give a number of kernels, or 0 for no bound")
    path = Path(script)
    if not path.is_file():
        raise RunError(f"{script}: there is no such script")
    from paellapy.guest import Guest

    Guest(name or path.stem, priority, share, engine, in_flight).join()
    gc.collect()
    gc.freeze()  # what was imported for the gate is not looked through whenever the script's garbage is
    sys.argv = [script, *context.args]
    sys.path[0] = str(path.resolve().parent)
    runpy.run_path(script, run_name="__main__")
