"""An error in an engine's own loop. The loop reports it and goes on: only the core can end requests with the error."""

from __future__ import annotations

RETRY_S = 0.1  # the loop goes on after this time, since the error may come again at once


def broken_loop(cause: BaseException) -> RuntimeError:
    """The failure of an engine whose loop met this error."""
    error = RuntimeError(f"the engine's own loop met an error, {type(cause).__name__}: {cause}; start a new engine")
    error.__cause__ = cause
    return error
