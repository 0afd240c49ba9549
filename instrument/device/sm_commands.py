"""Rows of the SM model's commands: handles are given out in order, and commands that are over may be forgotten."""

from __future__ import annotations

from paellapy.instrument.device import sm_layout as lay
from paellapy.instrument.device.sm_state import more_commands
from paellapy.instrument.errors import LaunchError


class CommandRows:
    """The handles given out so far. A state that needs more room is replaced by a larger one."""

    def __init__(self, history: int | None) -> None:
        """`history`: number of commands already reported that are kept; None keeps all."""
        self._history = history
        self.base = 0  # handles below are forgotten
        self.next = 0

    def row(self, s: lay.State, handle: int) -> int:
        if not self.base <= handle < self.next:
            raise LaunchError(f"no command {handle}: the model knows {self.base} to {self.next - 1}")
        return handle & (len(s.command) - 1)

    def reserve(self, s: lay.State, n: int = 1) -> tuple[lay.State, int]:
        """The first of n new handles; the core sees their commands at its next call."""
        handle = self.next
        if handle + n - self.base > len(s.command):
            s = self._make_room(s, handle, n)
        self.next = handle + n
        s.gpu["next"][0] = self.next
        return s, handle

    def _make_room(self, s: lay.State, handle: int, n: int) -> lay.State:
        status = s.command["status"]
        mask = len(status) - 1
        if self._history is not None:
            while self.base < handle - self._history and status[self.base & mask] == lay.REPORTED:
                self.base += 1
        # half, so that the next enlargement is that far away
        while handle + n - self.base > len(s.command) // 2:
            s = more_commands(s, self.base, handle)
        return s
