"""Measures a segment's use of GPU bandwidth and tensor units beside kernels that want them all, the hogs.

No hardware counters are needed. cuda_hog.py says how a segment runs beside a hog; cuda_memory_hog.py and
cuda_tensor_hog.py have the two hogs, and derive the segment's use from its slowdown and the hog's.

Some kernels leave no room for a hog, nor for any other kernel, on their SMs: a matrix product of cuBLAS on Hopper takes
all registers of an SM. Such a segment takes the whole arithmetic and bandwidth of these SMs, and is not measured.
"""

from __future__ import annotations

from collections.abc import Sequence

from paellapy.instrument.device.cuda import CudaDevice
from paellapy.instrument.device.occupancy import Footprint, fits, footprint
from paellapy.instrument.device.parts import SmLimits
from paellapy.scheduler.backends.cuda_hog import Hog
from paellapy.scheduler.backends.cuda_memory_hog import memory_hog, part_of_bandwidth
from paellapy.scheduler.backends.cuda_tensor_hog import part_of_units, tensor_hog
from paellapy.scheduler.models.program import Node


class Hogs:
    """Both hogs on one GPU."""

    def __init__(self, device: CudaDevice) -> None:
        self._device = device
        device.activate()
        self.memory, self.tensor = Hog(device, memory_hog()), Hog(device, tensor_hog())
        self.takes = [self.memory.takes, self.tensor.takes]

    def shares(self, executable: int, alone_ns: float, stream: int) -> tuple[float, float]:
        """The fractions of the tensor units and of the bandwidth that a graph uses; 0: not known."""
        units = part_of_units(*self.tensor.look(executable, alone_ns, stream))
        return units, part_of_bandwidth(*self.memory.look(executable, alone_ns, stream), self.memory.part)

    def close(self) -> None:
        self._device.activate()
        self.memory.close()
        self.tensor.close()


def part_without_place(nodes: Sequence[Node], hogs: Sequence[Footprint], limits: SmLimits, sms: int) -> float:
    """The fraction of the SMs on which a kernel leaves no room for one of the hogs; 0 if there is no such kernel."""
    found = 0.0
    for node in nodes:
        if node.kind == "kernel":
            own = footprint(limits, node.threads, node.registers, node.shared_bytes)
            if not all(fits(limits, own, hog) for hog in hogs):
                found = max(found, min(node.blocks / sms, 1.0))
    return found
