"""The capacity of a GPU, and the part of it that a segment takes: the only place where both are computed."""

from __future__ import annotations

from dataclasses import dataclass

from paellapy.instrument.device.parts import SmLimits
from paellapy.instrument.device.timing import Timing
from paellapy.scheduler.core.profiles import SegmentProfile
from paellapy.scheduler.core.state import State


@dataclass(frozen=True, slots=True)
class Capacity:
    """The capacity of a whole GPU."""

    blocks: float
    warps: float
    registers: float
    shared_bytes: float
    issue_ns: float  # between the starts of two kernels
    memory: float = 0.0  # bytes per ns; 0: not known

    @classmethod
    def of(cls, sms: int, sm: SmLimits, timing: Timing | None = None, memory: float = 0.0) -> Capacity:
        """The capacity of a GPU with this number of SMs and these limits."""
        issue_ns = (timing or Timing()).grid_issue_ns
        return cls(sms * sm.blocks, sms * sm.warps, sms * sm.registers, sms * sm.shared_bytes, issue_ns, memory)

    def slots(self, segment: SegmentProfile) -> float:
        """The part of the room for blocks that a segment takes, by warps, registers or shared memory: the largest."""
        return max(
            segment.blocks / self.blocks,
            segment.warps / self.warps,
            segment.registers / self.registers,
            segment.shared_bytes / self.shared_bytes,
        )

    def issuing(self, segment: SegmentProfile) -> float:
        """The part of the rate of kernel starts that a segment takes."""
        return segment.kernels * self.issue_ns / segment.time_ns


def set_capacity(state: State, capacity: Capacity) -> None:
    """Sets the capacity for the core's account of resident work."""
    gpu = state.gpu[0]
    for name in ("blocks", "warps", "registers", "shared_bytes", "memory"):
        gpu[f"capacity_{name}"] = getattr(capacity, name)
    gpu["capacity_issue"] = 1e9 / max(capacity.issue_ns, 1.0)  # kernels per second
