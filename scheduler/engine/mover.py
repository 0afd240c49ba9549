"""The mover: a thread that carries out the core's orders about weights, one after the other."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable

from paellapy.instrument.errors import PaellaError
from paellapy.scheduler.core import codes
from paellapy.scheduler.core.errors import MemoryPlanError
from paellapy.scheduler.core.state import State


class Mover:
    """Calls `bring` and `evict` with a model's row, and reports errors of both to the core."""

    def __init__(
        self, state: State, bring: Callable[[int], None], evict: Callable[[int], None], ring: Callable[[], None]
    ) -> None:
        """`ring` wakes the core's loop."""
        self._state, self._bring, self._evict, self._ring = state, bring, evict, ring
        self.errors: dict[int, PaellaError] = {}  # by row: why the latest order to bring weights failed
        self.stuck: dict[int, PaellaError] = {}  # by row: why the latest eviction failed; the weights are still there
        self.last_stuck: PaellaError | None = None
        self.ordered: dict[int, bool] = {}  # by row: whether the latest order by hand was to come
        self._unfreed: set[int] = set()  # rows of failed evictions whose memory later orders may count on
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
                self._carry_out(int(cell["kind"]), int(cell["model"]), head)
                head += 1
                ring[codes.MOVE_HEAD, 0] = head
            if self._stopping:
                return
            os.eventfd_read(self._fd)

    def _carry_out(self, kind: int, row: int, number: int) -> None:
        try:
            if kind == codes.EVICT:
                self._evict(row)
                self._state.moved[row, 0] = codes.GONE
            else:
                self.errors.pop(row, None)
                self._check_memory(number)
                self._bring(row)
        except Exception as e:  # an order without an answer would leave requests waiting for ever
            error = e if isinstance(e, PaellaError) else PaellaError(f"{type(e).__name__}: {e}")
            if kind == codes.EVICT:
                self.stuck[row] = self.last_stuck = error
                self._unfreed.add(row)
            else:
                self.errors[row] = error
            self._state.moved[row, 0] = codes.BROKEN
        self._ring()

    def _check_memory(self, number: int) -> None:
        """Refuses an order that the core gave before it knew of a failed eviction: its memory may not be free."""
        for row in list(self._unfreed):
            known = self._state.moved[row, 0] != codes.BROKEN
            if not known or number < int(self._state.residency["stuck_before"][0]):
                raise MemoryPlanError(f"their memory is not free: {self.stuck[row]}") from self.stuck[row]
            self._unfreed.discard(row)

    def close(self) -> None:
        """Ends the thread. Call it after the core's loop has ended, when no more orders come."""
        self._state.residency["mover_fd"][0] = codes.NONE
        self._stopping = True
        os.eventfd_write(self._fd, 1)
        self._thread.join()
        os.close(self._fd)
