"""The GPU's current occupancy by the core's account, readable from any thread while the core runs."""

from __future__ import annotations

from dataclasses import dataclass

from paellapy.scheduler.core.state import State

RESOURCES = ("blocks", "warps", "registers", "shared_bytes", "issue")


@dataclass(frozen=True, slots=True)
class Use:
    """Use of one resource. `issue` is in kernels per second."""

    capacity: float
    resident: float  # of the running segments
    pending: float  # of the segments launched behind them

    @property
    def share(self) -> float:
        return self.resident / self.capacity if self.capacity else 0.0


@dataclass(frozen=True, slots=True)
class GpuUse:
    """Use of all resources, and where the jobs are. `fullest` names the limiting resource."""

    blocks: Use
    warps: Use
    registers: Use
    shared_bytes: Use
    issue: Use
    jobs_on_gpu: int
    jobs_active: int
    jobs_waiting: int
    requests: int
    requests_queued: int

    @property
    def share(self) -> float:
        """Use of the fullest resource; above 1 when more is launched than fits."""
        return max(float(getattr(self, name).share) for name in RESOURCES)

    @property
    def fullest(self) -> str:
        return max(RESOURCES, key=lambda name: float(getattr(self, name).share))


def occupancy(state: State) -> GpuUse:
    """The current account."""
    gpu = state.gpu[0]
    uses = {
        what: Use(*(float(gpu[f"{kind}_{what}"]) for kind in ("capacity", "resident", "pending"))) for what in RESOURCES
    }
    return GpuUse(
        **uses,
        jobs_on_gpu=int(state.core["flight"][0]),
        jobs_active=int(state.core["active"][0]),
        jobs_waiting=int(state.core["ready"][0] + state.core["barred"][0]),
        requests=int(state.core["live"][0]),
        requests_queued=int(state.core["queued"][0] + state.core["kept_out"][0] + state.client["aside"].sum()),
    )
