"""Turns on the GPU: tests of several processes share it, and a test that measures it has it alone."""

from __future__ import annotations

import fcntl
import os
import tempfile
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import IO, TYPE_CHECKING

if TYPE_CHECKING:
    import pytest

# Files of one user: in a folder that all may write to, Linux may refuse to open those of others.
ROOM, TURNSTILE = (Path(tempfile.gettempdir(), f"paellapy-gpu-{os.getuid()}.{name}") for name in ("room", "turnstile"))


def turn_of(item: pytest.Item) -> AbstractContextManager[None]:
    """The turn that a test takes: alone if it is marked `alone`, with others if only `gpu`, none if it does not run."""
    if item.get_closest_marker("gpu") is None or item.get_closest_marker("skip") is not None:
        return nullcontext()
    return turn(alone=item.get_closest_marker("alone") is not None)


@contextmanager
def turn(*, alone: bool, room: Path = ROOM, turnstile: Path = TURNSTILE) -> Iterator[None]:
    """Holds the room alone or with others. Everyone passes the turnstile before.

    Whoever waits to be alone stands in the turnstile meanwhile: nobody else enters, so the room gets empty.
    """
    with room.open("a") as inside, ExitStack() as stay:
        with turnstile.open("a") as entrance, _locked(entrance, fcntl.LOCK_EX):
            stay.enter_context(_locked(inside, fcntl.LOCK_EX if alone else fcntl.LOCK_SH))
        yield


@contextmanager
def _locked(file: IO[str], kind: int) -> Iterator[None]:
    """Unlocks explicitly: processes that a test forked may keep the file open."""
    fcntl.flock(file, kind)
    try:
        yield
    finally:
        fcntl.flock(file, fcntl.LOCK_UN)
