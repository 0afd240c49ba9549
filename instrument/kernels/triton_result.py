"""The result of a launch or of `warmup`, as Triton's: a compiled kernel that can be launched, `result[grid](…)`."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from paellapy.instrument.errors import ArgumentError

Launch = Callable[[Any, list[Any], dict[str, Any]], Any]  # of a grid, all arguments in order, and options


class Result:
    """A compiled kernel with the constants and options of one launch. All else is of the compiled kernel."""

    def __init__(
        self, made: Any, launch: Launch, names: Sequence[str], constants: dict[int, Any], options: dict[str, Any]
    ) -> None:
        self._made, self._launch, self._names = made, launch, names
        self._constants, self._options = constants, options

    def __getitem__(self, grid: Any) -> Callable[..., Any]:
        return functools.partial(self._run, grid)

    def _run(self, grid: Any, /, *args: Any, stream: Any = None) -> Any:
        """Takes every argument in order. Constants must be given and are ignored, as in Triton: they are compiled in.

        `stream` is ignored too: the launch is on the device's current stream.
        """
        if len(args) != len(self._names):
            raise ArgumentError(
                f"compiled kernel {self._made.name!r} takes all of {', '.join(self._names)}, constants too, in this "
                f"order: {len(self._names)} arguments, not {len(args)}"
            )
        given = [self._constants.get(i, value) for i, value in enumerate(args)]
        return self._launch(grid, given, self._options)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "_made":
            raise AttributeError(name)
        return getattr(self._made, name)

    def __repr__(self) -> str:
        return repr(self._made)
