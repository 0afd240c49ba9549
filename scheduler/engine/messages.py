"""Messages of requests to the core: one for each thread, filled in for every request, and copied when it is posted."""

from __future__ import annotations

import struct
import threading
from typing import Any, Protocol

import numpy as np

from paellapy.scheduler.core.codes import SUBMIT
from paellapy.scheduler.core.tables import SUBMISSION

_KINDS = [SUBMISSION[name].kind for name in SUBMISSION.names or ()]
# One call fills in a whole message, in a third of the time that as many assignments take.
_fill = struct.Struct("=" + "".join("Q" if kind == "u" else "q" for kind in _KINDS)).pack_into


# What a message says of a request besides its place: client, priority, arrival_ns, deadline_ns. Making a named tuple
# takes as long as ten calls.
Terms = tuple[int, int, int, int]


class Request(Protocol):
    """The parts of a pending request that its message has."""

    row: int
    serial: int

    @property
    def loaded(self) -> Any: ...


class Messages(threading.local):
    """The message of each thread."""

    def __init__(self) -> None:
        self._memory = np.zeros(1, SUBMISSION)
        self._one = self._memory.view(np.uint8).data, int(self._memory.ctypes.data)

    def fill(self, request: Request, lane: int, slot: int, source: int, terms: Terms) -> int:
        """Fills in this thread's message, and returns its address."""
        memory, address = self._one
        loaded = request.loaded
        client, priority, arrival_ns, deadline_ns = terms
        _fill(memory, 0, 0, SUBMIT, request.row, request.serial, 0, loaded.row, lane, slot, client, priority,
              arrival_ns, deadline_ns, source, loaded.generation)  # fmt: skip
        return address
