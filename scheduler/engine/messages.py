"""Messages of requests to the core: one for each thread, filled in for every request, and copied when it is posted."""

from __future__ import annotations

import struct
import threading

import numpy as np

from paellapy.scheduler.core.codes import SUBMIT
from paellapy.scheduler.core.tables import SUBMISSION

_KINDS = [SUBMISSION[name].kind for name in SUBMISSION.names or ()]
# One call fills in a whole message, in a third of the time that as many assignments take.
_fill = struct.Struct("=" + "".join("Q" if kind == "u" else "q" for kind in _KINDS)).pack_into


class Messages(threading.local):
    """The message of each thread."""

    def __init__(self) -> None:
        self._memory = np.zeros(1, SUBMISSION)
        self._one = self._memory.view(np.uint8).data, int(self._memory.ctypes.data)

    def fill(
        self, request: int, serial: int, model: int, generation: int, lane: int, slot: int, source: int, client: int,
        priority: int, arrival_ns: int, deadline_ns: int,
    ) -> int:  # fmt: skip
        """Fills in this thread's message, and returns its address."""
        memory, address = self._one
        _fill(memory, 0, 0, SUBMIT, request, serial, 0, model, lane, slot, client, priority, arrival_ns, deadline_ns,
              source, generation)  # fmt: skip
        return address
