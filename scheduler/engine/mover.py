"""The mover: a thread that carries out the core's orders about weights, one after the other."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable

from paellapy.instrument.errors import PaellaError
from paellapy.scheduler.core import codes
from paellapy.scheduler.core.state import State


class Mover:
    """Calls `bring` and `evict` with a model's row. An error from `bring` is reported to the waiting requests."""

    def __init__(
        self, state: State, bring: Callable[[int], None], evict: Callable[[int], None], ring: Callable[[], None]
    ) -> None:
        """`ring` wakes the core's loop."""
        self._state, self._bring, self._evict, self._ring = state, bring, evict, ring
        self.errors: dict[int, PaellaError] = {}  # by row: why the latest order to bring weights failed
        self._stopping = False
        self._fd = os.eventfd(0, os.EFD_CLOEXEC)
        self._thread = threading.Thread(target=self._run, name="paellapy-mover", daemon=True)
        self._thread.start()
        state.residency["mover_fd"][0] = self._fd

    def _run(self) -> None:
        ring, head = self._state.move_ring, 0
        while True:
            while head < int(ring[codes.MOVE_TAIL, 0]):
                cell = self._state.move[head % len(self._state.move)]
                head += 1
                self._carry_out(int(cell["kind"]), int(cell["model"]))
                ring[codes.MOVE_HEAD, 0] = head
            if self._stopping:
                return
            os.eventfd_read(self._fd)

    def _carry_out(self, kind: int, row: int) -> None:
        try:
            if kind == codes.EVICT:
                self._evict(row)
                self._state.moved[row, 0] = codes.GONE
            else:
                self.errors.pop(row, None)
                self._bring(row)
        except (PaellaError, OSError, MemoryError) as e:
            self.errors[row] = e if isinstance(e, PaellaError) else PaellaError(f"{type(e).__name__}: {e}")
            self._state.moved[row, 0] = codes.BROKEN
        self._ring()

    def close(self) -> None:
        """Ends the thread. Call it after the core's loop has ended, when no more orders come."""
        self._state.residency["mover_fd"][0] = codes.NONE
        self._stopping = True
        os.eventfd_write(self._fd, 1)
        self._thread.join()
        os.close(self._fd)
