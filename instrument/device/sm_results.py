"""Results of the SM model: its time, the times of its commands, its traced blocks, and the use of its SMs."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from paellapy.instrument.device import sm_core as core
from paellapy.instrument.device import sm_layout as lay
from paellapy.instrument.device.parts import Part
from paellapy.instrument.device.sm_commands import CommandRows
from paellapy.instrument.device.sm_state import check_idle
from paellapy.instrument.device.sm_traced import TracedRows


class SmResults:
    """A model as its readers see it."""

    def __init__(self, part: Part, state: lay.State, commands: CommandRows) -> None:
        self.part = part
        self._s = state
        self._commands = commands
        self._traced = TracedRows()

    @property
    def state(self) -> lay.State:
        """The state, for a compiled loop that runs the model. It is replaced whenever more room is needed."""
        return self._s

    @property
    def now_ns(self) -> float:
        return float(self._s.gpu["now_ns"][0])

    @property
    def next_event_ns(self) -> float:
        """When the next event happens, if nothing else is submitted; infinite if there is none."""
        return core.next_event(self._s)

    @property
    def last_handle(self) -> int:
        """The handle of the latest command; records and waits have handles too."""
        return self._commands.next - 1

    def done(self, handle: int) -> bool:
        return bool(self._s.command["status"][self._row(handle)] >= lay.DONE)

    def start_ns(self, handle: int) -> float:
        """When the first block, or the copy, started. NaN before."""
        return float(self._s.command["start_ns"][self._row(handle)])

    def notify_ns(self, handle: int) -> float:
        """When the last block started: from then on the whole launch is on the SMs. NaN before."""
        return float(self._s.command["notify_ns"][self._row(handle)])

    def finish_ns(self, handle: int) -> float:
        """When the last block, or the copy, ended. NaN before."""
        return float(self._s.command["finish_ns"][self._row(handle)])

    @property
    def lines(self) -> NDArray[Any]:
        """Each SM's live counters (SM_LINE)."""
        return self._s.lines

    def use_until(self, now_ns: float) -> tuple[float, NDArray[np.float64], NDArray[np.float64]]:
        """A time, and per SM up to that time: warp-ns of resident warps, and ns with any resident warp.

        The time is `now_ns`, or the next event if it comes first, because later events are not known yet.
        """
        until = max(self.now_ns, min(now_ns, self.next_event_ns))
        use = self._s.use
        resident = use[:, lay.U_WARPS]
        more = np.where(resident > 0, until - use[:, lay.U_SINCE], 0.0)
        return until, use[:, lay.U_WARP_NS] + resident * more, use[:, lay.U_BUSY_NS] + more

    @property
    def block_events(self) -> int:
        """Blocks that have ended so far."""
        return int(self._s.gpu["block_events"][0])

    def blocks(self) -> NDArray[Any]:
        """The ended blocks of traced launches (BLOCK), launch after launch, in order of block."""
        return self._traced.ended(self._s)

    def clear_blocks(self) -> None:
        """Forget the blocks of finished launches, for long traced runs."""
        self._traced.forget(self._s, self._commands.base)

    def check_integrity(self) -> None:
        """Checks that with nothing in flight all resources are free and all counters agree; AssertionError otherwise.
        """
        check_idle(self._s, self.part)

    def _row(self, handle: int) -> int:
        return self._commands.row(self._s, handle)
