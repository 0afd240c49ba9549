"""Costs of programs on the virtual GPU: of each node's blocks, and the shares of the GPU that segments use."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from paellapy.instrument.device.parts import Part
from paellapy.instrument.device.sm_costs import BlockCost
from paellapy.instrument.device.timing import Timing
from paellapy.instrument.device.virtual_launch import NotedLaunch
from paellapy.scheduler.backends.launches import Launches
from paellapy.scheduler.models.program import Program


class ProgramCosts:
    """The costs of programs, by content."""

    def __init__(self) -> None:
        self._known: dict[str, list[BlockCost | None]] = {}
        self.rehearsed: dict[int, list[NotedLaunch]] = {}  # launches of the model that is being loaded, by batch size

    def of(self, program: Program) -> list[BlockCost | None]:
        """The costs of each node's blocks, from the rehearsal or from one run of the program."""
        key = program.content()
        if key not in self._known:
            seen = self.seen(program)
            self._known[key] = [item.block_cost() for item in program.body] if seen is None else seen
        return self._known[key]

    def seen(self, program: Program) -> list[BlockCost | None] | None:
        """The costs from the rehearsal, if it had the same launches: no kernel was tuned in it, or is sliced now."""
        seen = self.rehearsed.get(program.batch, [])
        ours = [item for item in program.body if item.launcher is not None]
        if [(e.launcher, e.grid, e.first, e.count) for e in seen] != [
            (item.launcher, item.grid, item.first, item.node.blocks // item.node.cluster) for item in ours
        ]:
            return None
        costs = iter(seen)
        return [item.cost if item.launcher is None else next(costs).cost for item in program.body]


def segment_shares(
    part: Part, timing: Timing, launches: Launches, costs: Sequence[BlockCost | None], alone_ns: Sequence[float]
) -> list[tuple[float, float]]:
    """The fractions of the GPU's arithmetic and bandwidth that each segment uses, 0 to 1."""
    rates = np.array([
        part.fp32_tflops * 1e3 * timing.flops_efficiency,
        part.fp16_tensor_tflops * 1e3 * timing.tensor_efficiency,
        part.bandwidth_gbps * timing.bandwidth_efficiency,
    ])  # fmt: skip
    nodes, found = launches.program.nodes, []
    for (first, end), ns in zip(launches.bounds, alone_ns, strict=True):
        work = np.zeros(3)
        for node, cost in zip(nodes[first:end], costs[first:end], strict=True):
            if cost is not None:
                each = (cost.flops, cost.tensor_flops, cost.bytes)
                work += [float(np.broadcast_to(x, node.blocks).sum()) for x in each]
        plain, tensor, memory = np.minimum(work / (rates * ns), 1.0).round(4).tolist()
        found.append((max(plain, tensor), memory))
    return found
