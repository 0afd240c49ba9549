"""GPU parts as data: the capacity of one SM, and the rates of the whole chip.

Sources, named at each table: the CUDA C++ Programming Guide ("Technical Specifications per Compute Capability"), the
allocation rules published in the CUDA toolkit's cuda_occupancy.h, and NVIDIA's whitepapers and datasheets.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType

from paellapy.instrument.errors import NoDeviceError

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
        raise NoDeviceError(f"no SM limits are known for compute capability {key[0]}.{key[1]}; supported are {known}")
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
    launch_ns: float = 3700.0  # one cuLaunchKernel call on the host; 3.4–4.0 µs measured beside an H200

    @property
    def capability(self) -> tuple[int, int]:
        return self.sm.capability

    @property
    def sms(self) -> int:
        return sum(self.gpc_sms)


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
        raise NoDeviceError(f"no GPU part named {name!r}: choose one of {', '.join(PARTS)}")
    return PARTS[key]
