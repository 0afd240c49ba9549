"""The mover: a thread that carries out the core's orders about weights, one after the other.

Weights that have to wait until others have left begin to come before that, as far as there is memory for them.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable
from typing import Protocol

from paellapy.instrument.errors import PaellaError
from paellapy.scheduler.core import codes
from paellapy.scheduler.core.errors import MemoryPlanError
from paellapy.scheduler.core.state import State


class Moves(Protocol):
    """The ways to move the weights of a model, given by its row."""

    def begin(self, row: int) -> None:
        """Begins to bring weights, as far as there is memory for them at once."""

    def bring(self, row: int) -> None: ...

    def withdraw(self, row: int) -> None:
        """Takes back weights that began to come."""

    def evict(self, row: int) -> None: ...


class Mover:
    """Carries out orders with `moves`, and reports errors to the core."""

    def __init__(self, state: State, moves: Moves, ring: Callable[[], None]) -> None:
        """`ring` wakes the core's loop."""
        self._state, self._moves, self._ring = state, moves, ring
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
            while head < (tail := int(ring[codes.MOVE_TAIL, 0])):
                kind, row = self._order(head)
                if kind == codes.EVICT:
                    self._begin_next(head + 1, tail)
                self._carry_out(kind, row, head)
                head += 1
                ring[codes.MOVE_HEAD, 0] = head
            if self._stopping:
                return
            os.eventfd_read(self._fd)

    def _order(self, number: int) -> tuple[int, int]:
        """Its kind and its model's row."""
        cell = self._state.move[number % len(self._state.move)]
        return int(cell["kind"]), int(cell["model"])

    def _begin_next(self, first: int, end: int) -> None:
        """Begins to bring the weights that are to come next. Their own order reports what fails."""
        for kind, row in map(self._order, range(first, end)):
            if kind != codes.EVICT:
                with contextlib.suppress(Exception):
                    self._moves.begin(row)
                return

    def _carry_out(self, kind: int, row: int, number: int) -> None:
        try:
            if kind == codes.EVICT:
                self._moves.evict(row)
                self._state.moved[row, 0] = codes.GONE
            else:
                self.errors.pop(row, None)
                self._check_memory(number)
                self._moves.bring(row)
        except Exception as e:  # an order without an answer would leave requests waiting for ever
            error = e if isinstance(e, PaellaError) else PaellaError(f"{type(e).__name__}: {e}")
            if kind == codes.EVICT:
                self.stuck[row] = self.last_stuck = error
                self._unfreed.add(row)
            else:
                self.errors[row] = error
                with contextlib.suppress(PaellaError):
                    self._moves.withdraw(row)
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
