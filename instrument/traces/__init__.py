"""Traces: recorded, summed up, explained, and kept in files."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from types import MethodType
from typing import Any


class Elsewhere:
    """A method whose function is in a folder above, and is imported on first use: `t.plot()` needs `paellapy.viz`."""

    def __init__(self, place: str) -> None:
        """`place`: "package.module:function"."""
        self._module, _, self._function = place.partition(":")

    def __get__(self, found: Any, owner: type | None = None) -> Callable[..., Any]:
        function: Callable[..., Any] = getattr(import_module(self._module), self._function)
        return function if found is None else MethodType(function, found)
