"""Runs a policy's plain function again on a sample, to find the line at which it failed or returned."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Mapping, Sequence
from types import FrameType
from typing import Any

import numpy as np

from paellapy.scheduler.core.tables import Table

MOST_LINES = 100_000  # plain Python is slow: a function with long loops is not followed to its end


class _TooLongError(Exception):
    pass


def last_line(function: Any, calls: Sequence[Mapping[str, Table]]) -> int | None:
    """The last line of the function that runs in the last of these calls; None if it cannot be followed.

    Each call has one row for each argument. The calls are made in turn, since earlier ones may change `own`.
    """
    code, seen, count = function.__code__, 0, 0

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal seen, count
        if frame.f_code is not code:
            return None
        if event == "line":
            seen, count = frame.f_lineno, count + 1
            if count > MOST_LINES:
                raise _TooLongError
        return trace

    previous = sys.gettrace()
    try:
        with warnings.catch_warnings(), np.errstate(all="ignore"):
            warnings.simplefilter("ignore")
            for rows in calls:
                seen = 0
                arguments = [row.view(np.recarray)[0] for row in rows.values()]
                sys.settrace(trace)
                try:
                    function(*arguments)
                except _TooLongError:
                    return None
                except Exception:  # the failure that is looked for; its line has been seen
                    continue
                finally:
                    sys.settrace(previous)
    except Exception:  # the samples cannot be made into arguments of plain Python
        return None
    return seen or None
