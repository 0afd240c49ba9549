"""Checks that a command can write its output, before the work is done."""

from __future__ import annotations

import os
from pathlib import Path

from paellapy.instrument.errors import PaellaError
from paellapy.viz.needs import need


class OutputError(PaellaError):
    """A file cannot be written at the given path."""


def check_output(path: Path) -> None:
    """Raises OutputError unless a file can be written there."""
    folder = path.parent
    if path.is_dir():
        raise OutputError(f"{path} is a folder: give the name of a file in it")
    if not folder.is_dir():
        raise OutputError(f"{path} cannot be written: the folder {folder} does not exist; create it or choose another")
    if not os.access(path if path.exists() else folder, os.W_OK):
        raise OutputError(f"{path} cannot be written: permission denied; choose another folder")


def check_picture(path: Path, what: str) -> None:
    """The same for a picture, which also needs matplotlib and a supported file name extension."""
    check_output(path)
    endings = need("matplotlib.backend_bases", what).FigureCanvasBase.get_supported_filetypes()
    if path.suffix[1:].lower() not in endings:
        raise OutputError(f"{path} cannot hold a picture: give a name that ends in .{', .'.join(sorted(endings))}")
