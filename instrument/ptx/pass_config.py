"""`PassConfig`: the changes that passes make to a kernel, and the key under which the result is cached."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, get_args

from paellapy.instrument import markers, records
from paellapy.instrument.errors import InstrumentError

Report = Literal["count", "trace", "notify"]
Exits = Literal["auto", "barrier", "spare-barrier", "count-out"]


@dataclass(frozen=True, slots=True)
class PassConfig:
    """The changes to make to a kernel. Part of every cache key.

    `also_notify` makes a kernel that counts or traces also report when its last block starts. `exits` says how the end
    of a block is detected: "auto" decides from the code (exits.py). `pointer_param` names the parameter that points to
    the descriptor; None adds a parameter passed by value. `preempt` makes blocks look at a flag when they start, and
    not run while it is set; with `sliced`, a launch may then run any list of blocks.
    """

    report: Report | None = None
    sliced: bool = False
    exits: Exits = "auto"
    pointer_param: int | None = None
    also_notify: bool = False
    preempt: bool = False

    def __post_init__(self) -> None:
        if self.report is not None and self.report not in get_args(Report):
            raise InstrumentError(f"unknown report level {self.report!r}; use one of {', '.join(get_args(Report))}")
        if self.exits not in get_args(Exits):
            raise InstrumentError(f"unknown kind of exits {self.exits!r}; use one of {', '.join(get_args(Exits))}")
        if self.sliced and self.pointer_param is not None:
            raise InstrumentError(
                "a kernel launched by other code (pointer_param) cannot be sliced: launch it as a pp.kernel"
            )
        if self.preempt and self.pointer_param is not None:
            raise InstrumentError(
                "a kernel launched by other code (pointer_param) cannot be preempted: launch it as a pp.kernel"
            )

    @property
    def changes_anything(self) -> bool:
        return self.report is not None or self.sliced or self.also_notify or self.preempt

    @property
    def notifies(self) -> bool:
        return self.report == "notify" or self.also_notify

    def notifying(self) -> PassConfig:
        """The same configuration, and the kernel reports when its last block starts."""
        return self if self.notifies else replace(self, also_notify=True)

    def key(self) -> str:
        return (
            f"{self.report}/{self.sliced}/{self.exits}/{self.pointer_param}/{self.also_notify}/{self.preempt}/"
            f"{pass_version()}"
        )


def pass_version() -> str:
    """A digest of the sources that determine the passes' output: changing them invalidates compiled results."""
    return _VERSION


_PATHS = (*sorted(Path(__file__).parent.glob("*.py")), Path(records.__file__), Path(markers.__file__))
_VERSION = hashlib.sha256(b"".join(path.read_bytes() for path in _PATHS)).hexdigest()[:16]
