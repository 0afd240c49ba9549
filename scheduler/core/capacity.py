"""What a GPU can hold, and the part of it that a segment takes: the one account of both."""

from __future__ import annotations

from dataclasses import dataclass

from paellapy.instrument.device.parts import SmLimits
from paellapy.instrument.device.timing import Timing
from paellapy.scheduler.core.profiles import SegmentProfile
from paellapy.scheduler.core.state import State


@dataclass(frozen=True, slots=True)
class Capacity:
    """Of a whole GPU."""

    blocks: float
    warps: float
    registers: float
    shared_bytes: float
    issue_ns: float  # between the beginnings of two kernels
    memory: float = 0.0  # bytes per ns; 0: not known

    @classmethod
    def of(cls, sms: int, sm: SmLimits, timing: Timing | None = None, memory: float = 0.0) -> Capacity:
        """Of so many SMs with these limits."""
        issue_ns = (timing or Timing()).grid_issue_ns
        return cls(sms * sm.blocks, sms * sm.warps, sms * sm.registers, sms * sm.shared_bytes, issue_ns, memory)

    def slots(self, segment: SegmentProfile) -> float:
        """Part of the places for blocks that a segment takes: of warps, registers, shared memory, whichever is most."""
        return max(
            segment.blocks / self.blocks,
            segment.warps / self.warps,
            segment.registers / self.registers,
            segment.shared_bytes / self.shared_bytes,
        )

    def issuing(self, segment: SegmentProfile) -> float:
        """Part of the rate at which kernels begin."""
        return segment.kernels * self.issue_ns / segment.time_ns


def set_capacity(state: State, capacity: Capacity) -> None:
    """For the core's account of what is resident."""
    gpu = state.gpu[0]
    for name in ("blocks", "warps", "registers", "shared_bytes", "memory"):
        gpu[f"capacity_{name}"] = getattr(capacity, name)
    gpu["capacity_issue"] = 1e9 / max(capacity.issue_ns, 1.0)  # kernels per second
