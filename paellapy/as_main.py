"""Runs a script in this process as `python script.py` would: for `paellapy run` and `paellapy trace`."""

from __future__ import annotations

import runpy
import sys
import traceback
from pathlib import Path
from types import TracebackType

_INTERRUPTED = 130  # exit code that shells expect after Ctrl-C


def run_as_main(script: Path) -> int:
    """Runs a script as `python script.py` would, and returns the exit code."""
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
