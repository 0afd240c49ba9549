"""`paellapy run --best-effort script.py …`: a script as it is, beside a running engine."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path
from typing import Annotated

import typer

from paellapy.instrument.errors import PaellaError


class RunError(PaellaError):
    """The script cannot be run so."""


def run(
    context: typer.Context,
    script: Annotated[str, typer.Argument(help="a Python script; what follows are its own arguments")],
    best_effort: Annotated[
        bool, typer.Option("--best-effort", help="its launches and copies wait while the engine wants the GPU")
    ] = False,
    share: Annotated[float, typer.Option(help="part of the time that its launches may go, above 0 and up to 1")] = 1.0,
    priority: Annotated[int, typer.Option(help="it waits for jobs of higher priority")] = -1,
    engine: Annotated[
        str | None, typer.Option(help="process number or socket of the engine; by default the newest of this user")
    ] = None,
    name: Annotated[str | None, typer.Option(help="what the engine calls it; by default the script's name")] = None,
) -> None:
    """Run a script beside an engine, which holds its GPU work back.

    An unmodified script: its launches and copies go on by themselves if the engine ends.
    """
    if not best_effort:
        raise RunError("how is it to run? `paellapy run --best-effort script.py` lets an engine hold its launches back")
    if not 0 < share <= 1:
        raise RunError(f"--share {share}: give a part of the time, above 0 and up to 1")
    path = Path(script)
    if not path.is_file():
        raise RunError(f"{script}: there is no such script")
    from paellapy.guest import Guest

    Guest(name or path.stem, priority, share, engine).join()
    sys.argv = [script, *context.args]
    sys.path[0] = str(path.resolve().parent)
    runpy.run_path(script, run_name="__main__")
