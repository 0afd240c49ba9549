"""`paellapy trace script.py`: runs a script as Python would, and records every instrumented kernel it launches."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

from paellapy.as_main import run_as_main
from paellapy.instrument.device import Device
from paellapy.instrument.errors import TraceError
from paellapy.instrument.traces.trace import Trace
from paellapy.instrument.traces.tracing import trace


@dataclass(frozen=True, slots=True)
class Ran:
    trace: Trace
    exit_code: int  # of `python script.py`


def run_script(
    script: Path, arguments: Sequence[str] = (), device: str | None = None, records_per_sm: int = 1 << 14
) -> Ran:
    """Runs a script as `__main__` inside `trace()`; an exception of the script is printed as Python prints it."""
    if not script.is_file():
        raise TraceError(f"there is no script {script}: check its path")
    before = sys.argv, sys.path[:]
    sys.argv, sys.path[:] = [str(script), *arguments], [str(script.resolve().parent), *sys.path]
    try:
        with Device.open(device) if device else nullcontext(), trace(records_per_sm) as t:
            exit_code = run_as_main(script)
    finally:
        sys.argv, sys.path[:] = before
    return Ran(t, exit_code)
