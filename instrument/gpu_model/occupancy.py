"""Theoretical occupancy: a kernel's resident blocks per SM, by the rules of the CUDA occupancy calculator."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from paellapy.instrument.errors import LaunchError, out_of_resources
from paellapy.instrument.gpu_model.parts import WARP, Part, SmLimits

Limiter = Literal["registers", "shared memory", "threads", "blocks"]


@dataclass(frozen=True, slots=True)
class Footprint:
    """The resources that one block takes from its SM, in the SM's allocation units."""

    warps: int
    threads: int  # whole warps
    registers: int
    shared_bytes: int

    def __mul__(self, blocks: int) -> Footprint:
        return Footprint(*(blocks * each for each in (self.warps, self.threads, self.registers, self.shared_bytes)))


@dataclass(frozen=True, slots=True)
class Occupancy:
    """How full one SM can get, and the limiting resource."""

    blocks_per_sm: int
    warps_per_sm: int
    max_warps: int
    fraction: float
    limiter: Limiter
    reporting: Occupancy | None = None  # occupancy of the reporting kernel, beside that of the plain one

    def __str__(self) -> str:
        return (
            f"{self.fraction:.0%} occupancy: {self.blocks_per_sm} blocks, {self.warps_per_sm} of {self.max_warps} "
            f"warps per SM, limited by {self.limiter}"
        )


def footprint(limits: SmLimits, threads: int, registers: int, shared_bytes: int) -> Footprint:
    """The resources that a block of this kernel takes from an SM; `LaunchError` if no SM could ever hold it.

    >>> from paellapy.instrument.gpu_model.parts import limits_for_capability
    >>> footprint(limits_for_capability(90), threads=100, registers=33, shared_bytes=1)
    Footprint(warps=4, threads=128, registers=5460, shared_bytes=1152)
    """
    if not 1 <= threads <= limits.threads_per_block:
        raise out_of_resources(
            f"a block of {threads} threads: this GPU allows 1 to {limits.threads_per_block} per block",
            "threads", threads, limits.threads_per_block,
        )  # fmt: skip
    if not 0 <= registers <= limits.registers_per_thread:
        raise out_of_resources(
            f"{registers} registers per thread: this GPU allows 0 to {limits.registers_per_thread}; set maxnreg",
            "registers", registers, limits.registers_per_thread,
        )  # fmt: skip
    if not 0 <= shared_bytes <= limits.shared_bytes_per_block:
        raise out_of_resources(
            f"{shared_bytes} bytes of shared memory per block: this GPU allows at most "
            f"{limits.shared_bytes_per_block}; use smaller tiles",
            "shared memory", shared_bytes, limits.shared_bytes_per_block,
        )  # fmt: skip
    warps = -(-threads // WARP)
    per_warp = _round_up(registers * WARP, limits.register_granularity)
    # The hardware's launch check assumes that every partition holds as many warps as the fullest one.
    assumed = per_warp * _round_up(warps, limits.partitions)
    if assumed > limits.registers_per_block:
        raise out_of_resources(
            f"a block of {warps} warps with {registers} registers per thread needs {assumed} registers: this GPU has "
            f"{limits.registers_per_block} per block; use fewer threads or compile with maxnreg",
            "registers", assumed, limits.registers_per_block,
        )  # fmt: skip
    return Footprint(
        warps=warps,
        threads=warps * WARP,
        registers=warps * _registers_per_warp(limits, per_warp),
        shared_bytes=_round_up(shared_bytes + limits.reserved_shared_bytes, limits.shared_granularity),
    )


def fits(limits: SmLimits, *blocks: Footprint) -> bool:
    """Whether one SM holds these blocks of different kernels at once.

    >>> from paellapy.instrument.gpu_model.parts import limits_for_capability
    >>> h200 = limits_for_capability(90)
    >>> large = footprint(h200, threads=384, registers=168, shared_bytes=200_000)
    >>> fits(h200, large), fits(h200, large, footprint(h200, threads=128, registers=32, shared_bytes=0))
    (True, False)
    """
    names = ("warps", "threads", "registers", "shared_bytes")
    return all(sum(getattr(block, name) for block in blocks) <= getattr(limits, name) for name in names)


def occupancy(
    gpu: SmLimits | Part, threads: int, registers: int, shared_bytes: int = 0, cluster: int = 1
) -> Occupancy:
    """Blocks of one kernel that fit an SM at once; `shared_bytes` is static and dynamic together, per block.

    Blocks of a cluster are placed together inside one GPC. Given a `Part`, blocks that cannot complete a cluster there
    are not counted, so `blocks_per_sm` is the floor of the average over the GPU.

    >>> from paellapy.instrument.gpu_model.parts import part
    >>> print(occupancy(part("h200"), threads=256, registers=64))
    50% occupancy: 4 blocks, 32 of 64 warps per SM, limited by registers
    """
    limits = gpu.sm if isinstance(gpu, Part) else gpu
    block = footprint(limits, threads, registers, shared_bytes)
    # Ties go to the first: if the SM is full anyway, saving registers or shared memory would gain nothing.
    by: dict[Limiter, int] = {
        "threads": limits.threads // block.threads,
        "blocks": limits.blocks,
        "registers": limits.registers // block.registers if block.registers else limits.blocks,
        "shared memory": limits.shared_bytes // block.shared_bytes if block.shared_bytes else limits.blocks,
    }
    limiter = min(by, key=lambda name: by[name])
    blocks = by[limiter]
    if cluster != 1:
        blocks = _with_clusters(gpu, limits, blocks, cluster)
    warps = blocks * block.warps
    return Occupancy(blocks, warps, limits.warps, warps / limits.warps, limiter)


def active_clusters(part: Part, blocks_per_sm: int, cluster: int) -> int:
    """Clusters resident at once on the whole GPU.

    >>> from paellapy.instrument.gpu_model.parts import part
    >>> active_clusters(part("h200"), blocks_per_sm=1, cluster=8)
    16
    """
    return sum(sms * blocks_per_sm // cluster for sms in part.gpc_sms)


def _with_clusters(gpu: SmLimits | Part, limits: SmLimits, blocks: int, cluster: int) -> int:
    if not 1 <= cluster <= limits.cluster:
        raise LaunchError(
            f"a cluster of {cluster} blocks: compute capability {limits.capability[0]}.{limits.capability[1]} allows "
            f"1 to {limits.cluster}"
        )
    if isinstance(gpu, SmLimits):
        return blocks
    clusters = active_clusters(gpu, blocks, cluster)
    if clusters == 0:
        raise LaunchError(
            f"a cluster of {cluster} blocks does not fit in a GPC of the {gpu.title}, which holds {blocks} such blocks "
            "per SM"
        )
    return max(1, clusters * cluster // gpu.sms)


def _registers_per_warp(limits: SmLimits, per_warp: int) -> int:
    """The registers that a warp costs the SM: its allocation, and its share of the unusable remainder.

    A warp's registers come from one partition, so a partition's remainder is lost. Charging it to the warps keeps
    `registers // footprint` equal to the calculator's answer: with w warps in a partition of 16384 registers the charge
    is c = 16384 // w, and since w <= 64 gives c >= 4 w, one warp more than 4 w never fits 65536.
    """
    if per_warp == 0:
        return 0
    partition = limits.registers // limits.partitions
    return partition // (partition // per_warp)


def _round_up(value: int, unit: int) -> int:
    return -(-value // unit) * unit
