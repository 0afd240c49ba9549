"""`paellapy trace script.py`: runs a script as Python would, and records every instrumented kernel it launches."""

from __future__ import annotations

import runpy
import sys
import traceback
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from paellapy.instrument.device import Device
from paellapy.instrument.errors import TraceError
from paellapy.instrument.traces.trace import Trace
from paellapy.instrument.traces.tracing import trace

_INTERRUPTED = 130  # exit code that shells expect after Ctrl-C


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
            exit_code = _run(script)
    finally:
        sys.argv, sys.path[:] = before
    return Ran(t, exit_code)


def _run(script: Path) -> int:
    try:
        runpy.run_path(str(script), run_name="__main__")
    except SystemExit as leaving:
        if leaving.code is None or isinstance(leaving.code, int):
            return leaving.code or 0
        print(leaving.code, file=sys.stderr)
        return 1
    except BaseException as error:
        traceback.print_exception(error.with_traceback(_from_script(error.__traceback__, script)))
        return _INTERRUPTED if isinstance(error, KeyboardInterrupt) else 1
    return 0


def _from_script(frames: TracebackType | None, script: Path) -> TracebackType | None:
    """The traceback without the frames that led into the script; empty for a script that does not compile."""
    while frames is not None and frames.tb_frame.f_code.co_filename != str(script):
        frames = frames.tb_next
    return frames
