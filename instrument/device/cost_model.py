"""Converts the evaluator's counts to input for the SM model: traffic, arithmetic and waiting time of every block.

A block first waits; then its traffic and arithmetic flow at rates shared with all running blocks. The waiting time
follows from its machine code, walked through as a lone block would run it (lone_block.py); on parts without a profile
for that, from its longest chain of dependent loads, reductions and products. A kernel that was measured on the real
part has a correction factor, which scales the waiting time; other kernels use the uncorrected estimate.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paellapy.instrument.device.lone_block import LoneBlock
from paellapy.instrument.device.occupancy import occupancy
from paellapy.instrument.device.parts import Part
from paellapy.instrument.device.sm_costs import BlockCost
from paellapy.instrument.device.timing import PROFILES, Timing
from paellapy.instrument.ptx.compiled import Compiled
from paellapy.instrument.ptx.pass_config import PassConfig
from paellapy.instrument.records import Records
from paellapy.instrument.ttir.latency import SHARES
from paellapy.instrument.ttir.lower import Facts

# Cost of a product's element type in units of fp16 tensor flops (datasheets: fp8 is twice as fast, tf32 half as fast).
_TENSOR_WEIGHT = {"f8": 0.5, "f16": 1.0, "bf16": 1.0, "f32": 2.0, "i8": 0.5}
_L2_SHARE = 0.8  # fraction of L2 that a kernel's arrays can fill and still be found there by its next launch


@dataclass(frozen=True, slots=True)
class CostModel:
    """The part's timing and the factors of the kernels measured on it."""

    part: Part
    timing: Timing
    factors: dict[str, float] = field(default_factory=dict)

    @classmethod
    def for_part(cls, part: Part) -> CostModel:
        path = PROFILES / f"{part.name}.json"
        factors = json.loads(path.read_text()).get("kernels", {}) if path.exists() else {}
        return cls(part, Timing.for_part(part), factors)

    def wait_ns(self, cost: Records, threads: int) -> NDArray[np.float64]:
        """The waiting time of each block beyond its fixed overhead and its products, before any correction."""
        t = self.timing
        wait: NDArray[np.float64] = (
            t.load_ns * cost["loads"]
            + t.atomic_ns * cost["atomics"]
            + t.reduction_ns * cost["reductions"]
            + t.element_ns * cost["elements"] / threads
            + t.instruction_ns * cost["instructions"]
        )
        return wait

    def block_cost(
        self, compiled: Compiled, cost: Records, values: Sequence[Any], threads: int, facts: Facts
    ) -> BlockCost:
        """The cost of one launch's blocks."""
        return self.of_kernel(compiled, threads, facts).block_cost(cost, values)

    def of_kernel(self, compiled: Compiled, threads: int, facts: Facts) -> KernelCost:
        """The cost model of one kernel, with all facts looked up that its launches need."""
        dot_dtype = facts.dot_dtype
        kind = dot_dtype or "f16"
        weight = next((w for name, w in _TENSOR_WEIGHT.items() if kind.startswith(name)), 1.0)
        text = compiled.source.ttir
        ieee = kind == "f32" and ("inputPrecision = ieee" in text or "inputPrecision" not in text)
        label = compiled.source.metadata.get("label", "")
        # From the plain kernel: the cost must not depend on what the kernel reports.
        lone = LoneBlock.of(compiled.source.build(PassConfig()), facts.loops) if self.timing.cycle_ns else None
        cluster = compiled.source.cluster
        per_sm = occupancy(self.part, threads, compiled.registers, compiled.shared_bytes, cluster).blocks_per_sm
        return KernelCost(self, threads, weight, ieee, self.factor(label), cluster, per_sm * self.part.sms, lone)

    def factor(self, label: str) -> float:
        """The kernel's own factor; if it was measured with other constants, their geometric mean; otherwise 1."""
        if label in self.factors:
            return self.factors[label]
        stem = label.partition("][")[0]
        alike = [f for known, f in self.factors.items() if known.partition("][")[0] == stem]
        return float(np.exp(np.mean(np.log(alike)))) if alike and stem else 1.0


@dataclass(frozen=True, slots=True)
class KernelCost:
    """The cost model of one kernel."""

    model: CostModel
    threads: int
    tensor_weight: float
    ordinary_products: bool  # tensor cores do not multiply full fp32: products run on the ordinary units
    factor: float
    cluster: int
    resident: int  # blocks that the GPU holds at once
    lone: LoneBlock | None = None

    def block_cost(self, cost: Records, values: Sequence[Any]) -> BlockCost:
        """The cost of one launch's blocks; `values` are its arguments."""
        # Blocks mostly cost the same: then one row is enough, and a launch takes the host much less time.
        alike = len(cost) > 1 and bool((cost[1:] == cost[0]).all())
        count = len(cost)
        if alike:
            cost = cost[:1]
        part, timing = self.model.part, self.model.timing
        flops = np.maximum(cost["flops"], 2.0 * cost["elements"])  # peak rates count two flops per instruction
        tensor = cost["dot_flops"] * self.tensor_weight
        if self.ordinary_products:
            flops, tensor = flops + timing.fma_product_cost * cost["dot_flops"], np.zeros_like(tensor)
        traffic = self._traffic(cost, count if alike else 1, values)
        if self.lone is not None:
            wait = self.factor * self._beside_flow(self.lone, cost, traffic, flops, tensor)
        else:
            # A product's latency is hidden behind its arithmetic once that takes longer.
            busy = tensor / (part.fp16_tensor_tflops * 1e3 * timing.tensor_efficiency / part.sms)
            latency = np.maximum(timing.dot_ns * cost["dots"] - busy, 0.0)
            wait = self.factor * (self.model.wait_ns(cost, self.threads) + latency)
        # Atomic updates of one line wait for each other: those of all blocks that are on the GPU at once.
        turns = float(cost["pressure"].sum()) / SHARES * (count if alike else 1)
        wait += timing.sector_update_ns * turns * min(1.0, self.resident / (count * self.cluster))
        columns = [traffic, flops, tensor, wait]
        if self.cluster > 1:  # the blocks of a cluster share one program's work, but each of them waits
            columns = [np.repeat(c if i == 3 else c / self.cluster, self.cluster) for i, c in enumerate(columns)]
        return BlockCost(*(_one_or_all(c) for c in columns))

    def _beside_flow(
        self,
        lone: LoneBlock,
        cost: Records,
        traffic: NDArray[np.float64],
        flops: NDArray[np.float64],
        tensor: NDArray[np.float64],
    ) -> NDArray[np.float64]:
        """The time that a lone block takes beyond its traffic and arithmetic, which flow at an SM's full rates."""
        part, timing = self.model.part, self.model.timing
        total_ns = lone.cycles_of(cost) * timing.cycle_ns + lone.fetched * timing.fetch_ns
        per_ns = (
            timing.sm_bytes_per_clock * part.clock_mhz / 1e3,
            part.fp32_tflops * 1e3 * timing.flops_efficiency / part.sms,
            part.fp16_tensor_tflops * 1e3 * timing.tensor_efficiency / part.sms,
        )
        flow_ns = np.max([work / rate for work, rate in zip((traffic, flops, tensor), per_ns, strict=True)], axis=0)
        wait: NDArray[np.float64] = np.maximum(total_ns - flow_ns, 0.0)
        return wait

    def alone_ns(self, cost: Records) -> NDArray[np.float64]:
        """The time of these costs for a block alone on its SM; it never decreases as costs grow."""
        part, timing = self.model.part, self.model.timing
        per_ns = (part.bandwidth_gbps, part.fp32_tflops * 1e3, part.fp16_tensor_tflops * 1e3 * timing.tensor_efficiency)
        moved = (cost["bytes_loaded"] + cost["bytes_stored"]) / timing.l2_speedup
        work = (moved, np.maximum(cost["flops"], 2.0 * cost["elements"]), cost["dot_flops"] * self.tensor_weight)
        busy = [w * part.sms / rate for w, rate in zip(work, per_ns, strict=True)]
        wait = self.model.wait_ns(cost, self.threads) + timing.dot_ns * cost["dots"]
        found: NDArray[np.float64] = self.factor * wait + busy[0] + busy[1] + busy[2]
        return found

    def _traffic(self, cost: Records, times: int, values: Sequence[Any]) -> NDArray[np.float64]:
        """Bytes in units of memory traffic: bytes from L2 count for less."""
        part, timing = self.model.part, self.model.timing
        touched: NDArray[np.float64] = (cost["bytes_loaded"] + cost["bytes_stored"] + cost["wasted"]).astype(float)
        total = float(touched.sum()) * times
        distinct = min(total, float(sum(v.nbytes for v in values if isinstance(v, np.ndarray))))
        if total == 0.0:
            return np.zeros(len(cost))
        from_memory = distinct if distinct > _L2_SHARE * part.l2_bytes else 0.0
        share = (from_memory + (total - from_memory) / timing.l2_speedup) / total
        return np.multiply(touched, share)


def _one_or_all(column: NDArray[np.float64]) -> Any:
    """One number if all blocks cost the same, which the SM model then stores once."""
    return float(column[0]) if (column == column[0]).all() else column
