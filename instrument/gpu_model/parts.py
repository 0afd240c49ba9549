"""GPU parts as data: the capacity of one SM, and the rates of the whole chip; and how many blocks an SM holds.

Sources, named at each table: the CUDA C++ Programming Guide ("Technical Specifications per Compute Capability"), the
allocation rules published in the CUDA toolkit's cuda_occupancy.h, and NVIDIA's whitepapers and datasheets.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

from paellapy.instrument.errors import LaunchError, NoDeviceError, PaellaError, also, out_of_resources

WARP = 32
KIB = 1024
MIB = 1024 * KIB


@dataclass(frozen=True, slots=True)
class SmLimits:
    """The capacity of one SM, and its allocation units."""

    capability: tuple[int, int]
    threads: int
    warps: int
    blocks: int
    registers: int
    shared_bytes: int
    shared_bytes_per_block: int  # static and dynamic together, with the opt-in attribute set
    reserved_shared_bytes: int  # taken by the system from every block
    shared_granularity: int
    register_granularity: int = 256  # per warp
    registers_per_thread: int = 255
    registers_per_block: int = 65536
    partitions: int = 4  # a warp's registers are in one of these; each owns an equal share
    threads_per_block: int = 1024
    cluster: int = 1  # largest cluster without the non-portable attribute; 1: no clusters


def _limits(
    capability: tuple[int, int],
    threads: int,
    blocks: int,
    shared_kib: int,
    reserved: int,
    granularity: int,
    cluster: int,
) -> SmLimits:
    return SmLimits(
        capability=capability,
        threads=threads,
        warps=threads // WARP,
        blocks=blocks,
        registers=65536,
        shared_bytes=shared_kib * KIB,
        # The guide's per-block maximum is the SM's shared memory minus the system's reserve for one block.
        shared_bytes_per_block=shared_kib * KIB - reserved,
        reserved_shared_bytes=reserved,
        shared_granularity=granularity,
        cluster=cluster,
    )


# CUDA C++ Programming Guide, "Technical Specifications per Compute Capability"; granularities, partitions and the 24
# blocks of 12.0 (an earlier edition of the guide printed 32) from cuda_occupancy.h of CUDA 13.
_LIMITS = MappingProxyType(
    {
        (7, 5): _limits((7, 5), 1024, 16, 64, 0, 256, 1),
        (8, 0): _limits((8, 0), 2048, 32, 164, KIB, 128, 1),
        (8, 6): _limits((8, 6), 1536, 16, 100, KIB, 128, 1),
        (8, 9): _limits((8, 9), 1536, 24, 100, KIB, 128, 1),
        (9, 0): _limits((9, 0), 2048, 32, 228, KIB, 128, 8),
        (10, 0): _limits((10, 0), 2048, 32, 228, KIB, 128, 8),
        (12, 0): _limits((12, 0), 1536, 24, 100, KIB, 128, 8),
    }
)


def limits_for_capability(capability: tuple[int, int] | int) -> SmLimits:
    """The SM of a compute capability, written (9, 0) or 90.

    >>> limits_for_capability(90).shared_bytes // 1024
    228
    """
    key = divmod(capability, 10) if isinstance(capability, int) else capability
    if key not in _LIMITS:
        known = ", ".join(f"{major}.{minor}" for major, minor in _LIMITS)
        raise NoDeviceError(
            f"no SM limits are known for compute capability {key[0]}.{key[1]}; supported are {known}",
            field="capability", given=key,
        )
    return _LIMITS[key]


@dataclass(frozen=True, slots=True)
class Part:
    """One GPU as sold. Rates are peaks: dense, without sparsity; 0 if the part has no such unit."""

    name: str
    title: str
    sm: SmLimits
    gpc_sms: tuple[int, ...]  # SMs of each GPC, in SM order: a cluster is inside one GPC
    clock_mhz: int
    memory_bytes: int
    bandwidth_gbps: float  # gigabytes per second
    fp32_tflops: float
    fp16_tensor_tflops: float  # with fp32 accumulation
    l2_bytes: int
    pcie_gbps: float  # per direction, of the connector
    hardware_queues: int = 32  # Hyper-Q work queues
    connections: int = 8  # queues in use unless CUDA_DEVICE_MAX_CONNECTIONS is set (1 to 32)
    concurrent_grids: int = 128  # Programming Guide: resident grids per device, 7.5 and later
    int8_ratio: float = 2.0  # rate of int8 products ÷ that of fp16
    launch_ns: float = 3700.0  # one cuLaunchKernel call on the host; 3.4–4.0 µs measured beside an H200

    @property
    def capability(self) -> tuple[int, int]:
        return self.sm.capability

    @property
    def sms(self) -> int:
        return sum(self.gpc_sms)

    def tensor_tflops(self, kind: str) -> float:
        """The peak rate of products of such operands (records.PRODUCTS); 0 if it is not known.

        >>> part("h200").tensor_tflops("e4m3") / part("h200").tensor_tflops("f16")
        2.0
        """
        kind, _, pieces = kind.partition("x")
        if kind == "fma":
            return self.fp32_tflops
        if kind == "f64":  # as fast as fp32 on the parts that have such instructions
            return self.fp32_tflops if self.capability in ((8, 0), (9, 0)) else 0.0
        ratio = self.int8_ratio if kind in ("s8", "u8") else _TENSOR_RATIO.get(kind, 0.0)
        return self.fp16_tensor_tflops * ratio / int(pieces or 1)


_TENSOR_RATIO = {"f16": 1.0, "bf16": 1.0, "tf32": 0.5, "e4m3": 2.0, "e5m2": 2.0}  # of fp16, by the datasheets

_PARTS = (
    # H200 datasheet (bandwidth, flops); flops as in the H100 whitepaper, whose SM it shares: 132 SMs at 1980 MHz. L2 as
    # the driver reports it (60 MiB; the H100 reports 50). GPCs: six of 16 SMs and two of 18 make 132; dies differ.
    Part(
        name="h200",
        title="NVIDIA H200 SXM 141GB",
        sm=limits_for_capability(90),
        gpc_sms=(16, 16, 16, 16, 16, 16, 18, 18),
        clock_mhz=1980,
        memory_bytes=141 * 10**9,
        bandwidth_gbps=4800.0,
        fp32_tflops=66.9,
        fp16_tensor_tflops=989.4,
        l2_bytes=60 * MIB,
        pcie_gbps=64.0,
    ),
    # NVIDIA H100 Tensor Core GPU Architecture whitepaper, table "H100 SXM5"; datasheet for the bandwidth.
    Part(
        name="h100",
        title="NVIDIA H100 SXM 80GB",
        sm=limits_for_capability(90),
        gpc_sms=(16, 16, 16, 16, 16, 16, 18, 18),
        clock_mhz=1980,
        memory_bytes=80 * 10**9,
        bandwidth_gbps=3350.0,
        fp32_tflops=66.9,
        fp16_tensor_tflops=989.4,
        l2_bytes=50 * MIB,
        pcie_gbps=64.0,
    ),
    # NVIDIA A100 Tensor Core GPU Architecture whitepaper; A100 80GB datasheet (SXM) for memory and bandwidth.
    Part(
        name="a100",
        title="NVIDIA A100 SXM 80GB",
        sm=limits_for_capability(80),
        gpc_sms=(16, 16, 16, 16, 16, 14, 14),
        clock_mhz=1410,
        memory_bytes=80 * 10**9,
        bandwidth_gbps=2039.0,
        fp32_tflops=19.5,
        fp16_tensor_tflops=312.0,
        l2_bytes=40 * MIB,
        pcie_gbps=32.0,
    ),
    # NVIDIA L4 datasheet (its tensor figures are with sparsity: halved here); Ada whitepaper for the SM and L2.
    Part(
        name="l4",
        title="NVIDIA L4 24GB",
        sm=limits_for_capability(89),
        gpc_sms=(12, 12, 12, 12, 10),
        clock_mhz=2040,
        memory_bytes=24 * 10**9,
        bandwidth_gbps=300.0,
        fp32_tflops=30.3,
        fp16_tensor_tflops=121.0,
        l2_bytes=48 * MIB,
        pcie_gbps=32.0,
    ),
    # NVIDIA Turing GPU Architecture whitepaper, appendix "Tesla T4".
    Part(
        name="t4",
        title="NVIDIA T4 16GB",
        sm=limits_for_capability(75),
        gpc_sms=(8, 8, 8, 8, 8),
        clock_mhz=1590,
        memory_bytes=16 * 10**9,
        bandwidth_gbps=320.0,
        fp32_tflops=8.1,
        fp16_tensor_tflops=65.0,
        l2_bytes=4 * MIB,
        pcie_gbps=16.0,
    ),
    # NVIDIA Ada GPU Architecture whitepaper, table "GeForce RTX 4090"; tensor rates with fp32 accumulation.
    Part(
        name="rtx4090",
        title="NVIDIA GeForce RTX 4090 24GB",
        sm=limits_for_capability(89),
        gpc_sms=(12, 12, 12, 12, 12, 12, 12, 12, 12, 10, 10),
        clock_mhz=2520,
        memory_bytes=24 * 10**9,
        bandwidth_gbps=1008.0,
        fp32_tflops=82.6,
        fp16_tensor_tflops=165.2,
        int8_ratio=4.0,  # fp16 is halved by its fp32 accumulation
        l2_bytes=72 * MIB,
        pcie_gbps=32.0,
    ),
)
PARTS = MappingProxyType({each.name: each for each in _PARTS})


def part(name: str) -> Part:
    """A part by name; case, spaces, dashes and underscores do not matter.

    >>> part("RTX 4090").sms
    128
    """
    key = "".join(c for c in name.lower() if c not in " -_")
    if key not in PARTS:
        raise NoDeviceError(
            f"no GPU part named {name!r}: choose one of {', '.join(PARTS)}",
            field="part", given=name, limit=tuple(PARTS),
        )
    return PARTS[key]


# --- calibration of a GPU's timing: every time and efficiency of the SM model, in one place ---------------------------

PROFILES = Path(__file__).parent / "profiles"


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """Timing of one part. Defaults were measured on one H200; `Timing.for_part` prefers a part's recorded profile."""

    # From the host's call to the first block on an idle GPU: 3.4–4.0 µs of cuLaunchKernel, then the doorbell across
    # PCIe and the fetch. With a 2.4 µs kernel and the completion word's return, this gives the measured loop of 9–10
    # µs.
    launch_ns: float = 5700.0
    kernel_gap_ns: float = 4000.0  # kernel to kernel in one stream, launched one by one
    graph_gap_ns: float = 1000.0  # kernel to kernel inside one graph
    # The front end starts one grid after the other, over all streams: 1.35 M kernels/s at saturation.
    grid_issue_ns: float = 740.0
    block_issue_ns: float = 0.35  # the block scheduler places one block after the other
    block_overhead_ns: float = 600.0  # a block's fixed latency before its work flows: setup and the first load
    # A block's waiting time, per step of its longest dependent chain, per element that each of its threads computes,
    # and per instruction on numbers that all threads share.
    load_ns: float = 350.0
    atomic_ns: float = 500.0
    reduction_ns: float = 60.0
    dot_ns: float = 150.0
    element_ns: float = 0.5
    instruction_ns: float = 2.0
    # For parts whose machine code is read (costs.py), these two replace the six above: the time of a cycle, and
    # the time to fetch each different instruction. 0: it is not read.
    cycle_ns: float = 0.0
    fetch_ns: float = 0.0
    sector_update_ns: float = 0.675  # from one turn of atomic updates to the next at a line of L2 (triton_ir/cost.py)
    fma_product_cost: float = 4.0  # products on the ordinary units, in units of their flops, including operand movement
    l2_speedup: float = 2.5  # how much faster than memory L2 delivers data that fit into it
    # 16384 blocks of 3 x 4 KiB in 48 µs; an fp16 GEMM of 2048³ in 27 µs.
    bandwidth_efficiency: float = 0.92
    flops_efficiency: float = 0.9
    tensor_efficiency: float = 0.7
    sm_bytes_per_clock: float = 64.0  # one SM's port to L2 (A100 whitepaper): the most that a lone SM can draw
    copy_latency_ns: float = 1500.0
    pcie_efficiency: float = 0.85
    jitter: float = 0.0  # blocks vary by up to this fraction either way, drawn from the model's seed

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not isinstance(value, int | float) or not value >= 0:
                raise _impossible(field.name, value, "a number of at least 0")
        for name in ("bandwidth_efficiency", "flops_efficiency", "tensor_efficiency", "pcie_efficiency"):
            if not 0 < getattr(self, name) <= 1:
                raise _impossible(name, getattr(self, name), "above 0 and at most 1")
        if self.jitter >= 1:
            raise _impossible("jitter", self.jitter, "below 1")
        if self.sm_bytes_per_clock == 0:
            raise _impossible("sm_bytes_per_clock", 0, "above 0")

    def sm_rates(self, part: Part) -> tuple[float, float, float]:
        """The most that one SM reaches: bytes, fp32 and tensor flops per nanosecond."""
        return (
            self.sm_bytes_per_clock * part.clock_mhz / 1000,
            part.fp32_tflops * 1000 * self.flops_efficiency / part.sms,
            part.fp16_tensor_tflops * 1000 * self.tensor_efficiency / part.sms,
        )

    @classmethod
    def load(cls, path: Path) -> Timing:
        """Reads a recorded profile: JSON, with any of these names under "timing"; the others keep their defaults."""
        recorded: dict[str, Any] = json.loads(path.read_text())["timing"]
        unknown = set(recorded) - {field.name for field in fields(cls)}
        if unknown:
            raise NoDeviceError(
                f"{path.name} sets timing that this version of paellapy does not know: {', '.join(sorted(unknown))}; "
                "upgrade paellapy", field="timing", given=sorted(unknown)
            )
        return cls(**recorded)

    @classmethod
    def for_part(cls, part: Part) -> Timing:
        """The part's recorded profile if there is one, otherwise the defaults."""
        path = PROFILES / f"{part.name}.json"
        return cls.load(path) if path.exists() else cls()

    def save(self, path: Path, **about: object) -> None:
        """Writes a profile; `about` says how it was recorded (device, driver, date, error against the part)."""
        path.write_text(json.dumps({**about, "timing": asdict(self)}, indent=2) + "\n")


def _impossible(name: str, value: Any, wanted: str) -> PaellaError:
    return also(
        PaellaError(f"timing {name}={value!r}: it must be {wanted}", field=name, given=value, limit=wanted), ValueError
    )


# --- occupancy --------------------------------------------------------------------------------------------------------
# The blocks of a kernel that an SM holds at once, by the rules of the CUDA occupancy calculator.

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

    >>> active_clusters(part("h200"), blocks_per_sm=1, cluster=8)
    16
    """
    return sum(sms * blocks_per_sm // cluster for sms in part.gpc_sms)


def _with_clusters(gpu: SmLimits | Part, limits: SmLimits, blocks: int, cluster: int) -> int:
    if not 1 <= cluster <= limits.cluster:
        raise LaunchError(
            f"a cluster of {cluster} blocks: compute capability {limits.capability[0]}.{limits.capability[1]} allows "
            f"1 to {limits.cluster}", field="cluster", given=cluster, limit=limits.cluster
        )
    if isinstance(gpu, SmLimits):
        return blocks
    clusters = active_clusters(gpu, blocks, cluster)
    if clusters == 0:
        raise LaunchError(
            f"a cluster of {cluster} blocks does not fit in a GPC of the {gpu.title}, which holds {blocks} such blocks "
            "per SM", field="cluster", given=cluster, limit=blocks
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
