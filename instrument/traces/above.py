"""Methods that a package above adds to a class of ours: `t.plot()` is drawn by paellapy, which we must not import.

The package above says where such a method lives (`add_methods`), and it is imported when it is first used.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from types import MethodType
from typing import Any

_homes: dict[tuple[str, str], str] = {}


def add_methods(owner: str, homes: dict[str, str]) -> None:
    """The class of this name has these methods, each with the place of its function: "package.module:function"."""
    _homes.update({(owner, name): module for name, module in homes.items()})


class Above:
    """Stands in a class for a method that is added from above."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._owner, self._name = owner.__name__, name

    def __get__(self, found: Any, owner: type | None = None) -> Callable[..., Any]:
        home = _homes.get((self._owner, self._name))
        if home is None:
            raise AttributeError(f"{self._owner}.{self._name} comes with the package paellapy: import it first")
        module, _, name = home.partition(":")
        function: Callable[..., Any] = getattr(import_module(module), name)
        return function if found is None else MethodType(function, found)
