"""The first message of a guest to an engine: its name, priority, share and process, checked by both of them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Self

from paellapy.instrument.device.gate import LEAST_SHARE
from paellapy.instrument.errors import PaellaError
from paellapy.scheduler.core.priorities import checked_priority, shortened

LONGEST = 4096  # bytes of a message
_LONGEST_NAME = 255  # characters, as in a file's name
_LAST_PID = (1 << 31) - 1
_FIELDS = ("name", "priority", "share", "pid")


class GreetingError(PaellaError):
    """A guest has a name, priority or share that an engine cannot use."""


@dataclass(frozen=True, slots=True)
class Greeting:
    """A guest as it describes itself.

    >>> Greeting.read(Greeting("train", -1, 0.5, 17).message()).share
    0.5
    """

    name: str
    priority: int
    share: float
    pid: int

    def __post_init__(self) -> None:
        name, share, pid = self.name, self.share, self.pid
        if not isinstance(name, str) or not 0 < len(name) <= _LONGEST_NAME or not name.isprintable():
            raise GreetingError(
                f"name={shortened(name)}; the name must be 1 to {_LONGEST_NAME} printable characters: give another "
                "with --name"
            )
        try:
            object.__setattr__(self, "priority", checked_priority(self.priority))
        except ValueError as e:
            raise GreetingError(str(e)) from None
        if isinstance(share, bool) or not isinstance(share, int | float) or not LEAST_SHARE <= share <= 1:
            raise GreetingError(f"share={shortened(share)}; the share must be a number from {LEAST_SHARE} to 1")
        if isinstance(pid, bool) or not isinstance(pid, int) or not 0 < pid <= _LAST_PID:
            raise GreetingError(f"pid={shortened(pid)}; the process id must be an integer from 1 to {_LAST_PID}")

    def message(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @classmethod
    def read(cls, said: bytes) -> Self:
        """The greeting in a message; GreetingError for any other message."""
        try:
            found: Any = json.loads(said)
        except (ValueError, RecursionError):
            found = None
        if not isinstance(found, Mapping) or not set(_FIELDS) <= found.keys():
            raise GreetingError(f"a greeting must be a JSON object of {', '.join(_FIELDS)}, in at most {LONGEST} bytes")
        return cls(*(found[name] for name in _FIELDS))
