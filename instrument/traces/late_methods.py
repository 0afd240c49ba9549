"""Methods that a package above adds to our classes: `t.plot()` is part of paellapy, which we must not import.

The package above registers the place of such a method (`add_methods`); it is imported on first use.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from types import MethodType
from typing import Any

_homes: dict[tuple[str, str], str] = {}


def add_methods(owner: str, homes: dict[str, str]) -> None:
    """Adds methods to the class of this name, each with the place of its function: "package.module:function"."""
    _homes.update({(owner, name): module for name, module in homes.items()})


class Above:
    """A placeholder in a class for a method that a package above adds."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._owner, self._name = owner.__name__, name

    def __get__(self, found: Any, owner: type | None = None) -> Callable[..., Any]:
        home = _homes.get((self._owner, self._name))
        if home is None:
            raise AttributeError(
                f"{self._owner}.{self._name} is provided by the package paellapy: import paellapy first"
            )
        module, _, name = home.partition(":")
        function: Callable[..., Any] = getattr(import_module(module), name)
        return function if found is None else MethodType(function, found)
