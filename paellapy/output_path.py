"""The file that a command is to write: checked before the work begins, not after it."""

from __future__ import annotations

import os
from pathlib import Path

from paellapy.instrument.errors import PaellaError
from paellapy.viz.needs import need


class OutputError(PaellaError):
    """A file cannot be written where it was asked for."""


def check_output(path: Path) -> None:
    """Raises OutputError unless a file can be written there."""
    folder = path.parent
    if path.is_dir():
        raise OutputError(f"{path} is a folder: name a file in it")
    if not folder.is_dir():
        raise OutputError(f"{path} cannot be written: there is no folder {folder}; make it, or choose another")
    if not os.access(path if path.exists() else folder, os.W_OK):
        raise OutputError(f"{path} cannot be written: permission is denied; choose another place")


def check_picture(path: Path, what: str) -> None:
    """The same for a picture, which also needs matplotlib and an ending that it knows."""
    check_output(path)
    endings = need("matplotlib.backend_bases", what).FigureCanvasBase.get_supported_filetypes()
    if path.suffix[1:].lower() not in endings:
        raise OutputError(f"{path} is no picture's name: let it end in .{', .'.join(sorted(endings))}")
