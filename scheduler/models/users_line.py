"""The line of the user's code that runs, or from which an error came: neither ours nor a library's."""

from __future__ import annotations

import os
import traceback
from pathlib import Path

_ROOT = Path(__file__).parents[2]
_OURS = (
    f"{_ROOT / 'instrument'}{os.sep}",
    f"{_ROOT / 'scheduler'}{os.sep}",
    str(_ROOT / "arrays.py"),  # the other modules of that package are models like any user's
)
_LIBRARIES = tuple(
    f"site-packages{os.sep}{name}{os.sep}" for name in ("numpy", "triton", "cupy", "numba", "cuda", "torch")
)


def users_line() -> str:
    """The current line of the user's code: the innermost frame that is neither ours nor a library's."""
    return _users_frame(traceback.extract_stack()) or "an unknown line"


def users_line_of(error: BaseException) -> str:
    """The line of the user's code from which an error came."""
    return _users_frame(traceback.extract_tb(error.__traceback__)) or "an unknown line"


def _users_frame(stack: traceback.StackSummary) -> str:
    for frame in reversed(stack):
        if not frame.filename.startswith(_OURS) and not any(name in frame.filename for name in _LIBRARIES):
            return f"{frame.filename}:{frame.lineno}"
    return ""
