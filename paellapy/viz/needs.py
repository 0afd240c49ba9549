"""Imports the libraries of the extra `viz` when a picture is drawn."""

from __future__ import annotations

import importlib
from typing import Any

from paellapy.instrument.errors import PaellaError


class MissingExtraError(PaellaError, ImportError):
    """A library of an optional extra is not installed."""


def need(module: str, what: str) -> Any:
    """The module, or an error that says how to install it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        library = module.partition(".")[0]
        raise MissingExtraError(f"{what} needs {library}: pip install 'paellapy[viz]'") from error
