"""The GPU resources of programs in a simulation: from profiles to the fluid model's tables."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from paellapy.instrument.device.parts import Part
from paellapy.instrument.device.timing import Timing
from paellapy.scheduler.core.capacity import Capacity
from paellapy.scheduler.core.demand import TOGETHER, busy_alone
from paellapy.scheduler.core.profiles import ModelProfile
from paellapy.scheduler.core.state import State
from paellapy.scheduler.sim.fluid_state import ISSUE, MEMORY, Programs


def resources(state: State, models: Sequence[ModelProfile], gpu: Part, timing: Timing) -> Programs:
    """For each segment, the share of each resource it takes alone, and its time; the last row is for the whole program.
    """
    n, sizes, segments = state.segment.shape
    use = np.zeros((n, sizes, segments + 1, 4))
    work = np.zeros((n, sizes, segments + 1))
    busy, kernels = np.zeros((n, sizes)), np.zeros((n, sizes))
    capacity = Capacity.of(gpu.sms, gpu.sm, timing)
    bandwidth = gpu.bandwidth_gbps * timing.bandwidth_efficiency  # GB/s is bytes/ns
    for m, model in enumerate(models):
        for k, (batch, program) in enumerate(model.sizes.items()):
            for i, each in enumerate(program):
                memory = each.memory or each.bytes / each.time_ns / bandwidth
                found = (capacity.slots(each), memory, capacity.issuing(each), each.compute)
                use[m, k, i] = np.minimum(found, 1.0)
                work[m, k, i] = each.time_ns
            total = math.fsum(work[m, k, : len(program)])
            if batch in model.demand:  # measured, not estimated: the whole program keeps this part of the GPU busy
                guess = (use[m, k, : len(program), :ISSUE + 1].max(axis=1) * work[m, k, : len(program)]).sum() / total
                busy[m, k] = busy_alone(model.demand[batch], model.together.get(batch, TOGETHER))
                use[m, k, : len(program), : ISSUE + 1] *= busy[m, k] / max(guess, 1e-9)
                # Bandwidth and arithmetic were measured separately, where they are known.
                for i, each in enumerate(program):
                    use[m, k, i, MEMORY] = each.memory or use[m, k, i, MEMORY]
            use[m, k, -1] = (use[m, k, : len(program)] * work[m, k, : len(program), None]).sum(axis=0) / total
            work[m, k, -1], kernels[m, k] = total, sum(each.kernels for each in program)
    copy = np.zeros(n)
    copy[: len(models)] = [model.input_bytes / state.tuning["copy_gbps"][0] for model in models]
    return Programs(use, work, busy, copy, kernels)
