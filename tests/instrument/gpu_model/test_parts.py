"""Parts and their limits: what is known of each GPU, and how many blocks an SM holds."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from importlib.util import find_spec
from pathlib import Path

import pytest
from failing import failing
from hypothesis import given
from hypothesis import strategies as st

from paellapy.instrument.errors import LaunchError, NoDeviceError
from paellapy.instrument.gpu_model.parts import (
    KIB,
    PARTS,
    Part,
    SmLimits,
    active_clusters,
    footprint,
    limits_for_capability,
    occupancy,
    part,
)

pytestmark = pytest.mark.quick

CAPABILITIES = [(7, 5), (8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0)]


def test_h200_is_the_measured_part():
    h200 = part("h200")
    assert (h200.sms, h200.capability) == (132, (9, 0))
    assert (h200.sm.threads, h200.sm.registers, h200.sm.shared_bytes, h200.sm.blocks) == (2048, 65536, 228 * 1024, 32)


@pytest.mark.parametrize(
    ("name", "sms"), [("h200", 132), ("h100", 132), ("a100", 108), ("l4", 58), ("t4", 40), ("rtx4090", 128)]
)
def test_sm_counts_add_up_over_the_gpcs(name: str, sms: int):
    assert part(name).sms == sms


@pytest.mark.parametrize("name", PARTS)
def test_peak_fp32_follows_from_sms_clock_and_lanes(name: str):
    gpu = part(name)
    lanes = 128 if gpu.capability in ((8, 9), (9, 0)) else 64
    assert gpu.sms * lanes * 2 * gpu.clock_mhz * 1e6 / 1e12 == pytest.approx(gpu.fp32_tflops, rel=0.02)


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_limits_are_consistent(capability: tuple[int, int]):
    sm = limits_for_capability(capability)
    assert sm == limits_for_capability(capability[0] * 10 + capability[1])
    assert sm.warps * 32 == sm.threads
    assert sm.shared_bytes_per_block + sm.reserved_shared_bytes == sm.shared_bytes
    assert sm.reserved_shared_bytes == (1024 if capability >= (8, 0) else 0)


def test_names_are_forgiving():
    assert part("RTX 4090") is part("rtx-4090") is part("rtx4090")


def test_unknown_parts_and_capabilities_are_refused():
    with failing(NoDeviceError, field="part", given="b300"):
        part("b300")
    with failing(NoDeviceError, field="capability", given=(6, 1)):
        limits_for_capability(61)


NUMBERS = (75, 80, 86, 89, 90, 100, 120)
HOPPER = limits_for_capability(90)

capabilities = st.sampled_from(NUMBERS).map(limits_for_capability)
thread_counts = st.integers(1, 1024)
register_counts = st.integers(0, 255)
shared_sizes = st.integers(0, 64 * KIB)


def blocks_or_none(limits: SmLimits, threads: int, registers: int, shared: int) -> int:
    """Blocks per SM, 0 where the kernel cannot be launched at all."""
    try:
        return occupancy(limits, threads, registers, shared).blocks_per_sm
    except LaunchError:
        return 0


@pytest.mark.parametrize(
    ("capability", "threads", "registers", "shared", "blocks", "limiter"),
    [
        (90, 256, 32, 0, 8, "threads"),  # 2048 / 256: a full SM
        (90, 32, 32, 0, 32, "blocks"),
        (90, 256, 33, 0, 6, "registers"),  # 33 x 32 -> 1280 a warp; 12 of those in a partition's 16384; 48 warps
        (90, 256, 64, 0, 4, "registers"),
        (90, 256, 96, 0, 2, "registers"),  # 3072 a warp, 5 in a partition: 20 warps; 65536 / 3072 would give 21
        (90, 128, 96, 0, 5, "registers"),
        (90, 128, 168, 0, 3, "registers"),
        (90, 128, 255, 0, 2, "registers"),
        (90, 128, 32, 48 * KIB, 4, "shared memory"),  # 49 KiB each with the reserved one
        (90, 128, 32, 227 * KIB, 1, "shared memory"),
        (80, 128, 32, 0, 16, "threads"),
        (80, 128, 32, 40 * KIB, 4, "shared memory"),  # 164 / 41
        (86, 64, 32, 0, 16, "blocks"),
        (89, 64, 32, 0, 24, "threads"),
        (75, 256, 64, 0, 4, "threads"),  # registers tie; the SM is full anyway
        (75, 256, 32, 32 * KIB, 2, "shared memory"),  # nothing reserved before 8.0
    ],
)
def test_known_values(capability: int, threads: int, registers: int, shared: int, blocks: int, limiter: str):
    found = occupancy(limits_for_capability(capability), threads, registers, shared)
    assert (found.blocks_per_sm, found.limiter) == (blocks, limiter)


@pytest.mark.parametrize(
    ("threads", "registers", "shared", "field", "given", "limit"),
    [
        (1025, 32, 0, "threads", 1025, 1024),
        (0, 32, 0, "threads", 0, 1024),
        (128, 256, 0, "registers", 256, 255),
        (1024, 65, 0, "registers", 73728, 65536),
        (128, 32, 228 * KIB, "shared memory", 233472, 232448),
        (128, 32, -1, "shared memory", -1, 232448),
    ],
)
def test_what_fits_no_sm_is_refused_with_the_figures(
    threads: int, registers: int, shared: int, field: str, given: int, limit: int
) -> None:
    with failing(LaunchError, field=field, given=given, limit=limit):
        occupancy(HOPPER, threads, registers, shared)


@given(capabilities, thread_counts, register_counts, shared_sizes)
def test_more_of_any_resource_never_raises_occupancy(limits: SmLimits, threads: int, registers: int, shared: int):
    here = blocks_or_none(limits, threads, registers, shared)
    assert blocks_or_none(limits, min(1024, threads + 32), registers, shared) <= here
    assert blocks_or_none(limits, threads, min(255, registers + 1), shared) <= here
    assert blocks_or_none(limits, threads, registers, shared + 128) <= here


@given(capabilities, thread_counts, register_counts, shared_sizes)
def test_the_limiter_is_what_the_next_block_would_overflow(limits: SmLimits, threads: int, registers: int, shared: int):
    if blocks_or_none(limits, threads, registers, shared) == 0:
        return
    found = occupancy(limits, threads, registers, shared)
    block = footprint(limits, threads, registers, shared)
    free = {
        "threads": limits.threads - found.blocks_per_sm * block.threads - block.threads,
        "registers": limits.registers - found.blocks_per_sm * block.registers - block.registers,
        "shared memory": limits.shared_bytes - found.blocks_per_sm * block.shared_bytes - block.shared_bytes,
        "blocks": limits.blocks - found.blocks_per_sm - 1,
    }
    assert free[found.limiter] < 0
    assert found.warps_per_sm == found.blocks_per_sm * block.warps <= limits.warps


def test_clusters_are_counted_whole():
    h200: Part = part("h200")
    assert active_clusters(h200, 1, 8) == 16  # two in each GPC; the 18-SM ones leave two SMs over
    assert occupancy(h200, 1024, 32, 200 * KIB, cluster=2).blocks_per_sm == 1
    with failing(LaunchError, field="cluster", given=16):
        occupancy(h200, 128, 32, cluster=16)
    with failing(LaunchError, field="cluster", given=2):
        occupancy(part("a100"), 128, 32, cluster=2)


# --- against NVIDIA's own calculator, the header that comes with the CUDA toolkit ---------------------------------

CALCULATOR = """
#include <cuda_occupancy.h>
int blocks(int major, int minor, int threads_sm, int shared_sm, int reserved, int threads, int regs, int shared) {
    cudaOccDeviceProp p = {0};
    cudaOccFuncAttributes a = {0};
    cudaOccDeviceState s = {0};
    cudaOccResult r;
    p.computeMajor = major; p.computeMinor = minor; p.maxThreadsPerBlock = 1024; p.warpSize = 32;
    p.maxThreadsPerMultiprocessor = threads_sm; p.regsPerBlock = p.regsPerMultiprocessor = 65536;
    p.sharedMemPerBlock = 49152 + reserved; p.sharedMemPerMultiprocessor = shared_sm; p.numSms = 1;
    p.sharedMemPerBlockOptin = shared_sm - reserved; p.reservedSharedMemPerBlock = reserved;
    a.maxThreadsPerBlock = 1024; a.numRegs = regs; a.shmemLimitConfig = FUNC_SHMEM_LIMIT_OPTIN;
    a.maxDynamicSharedSizeBytes = shared_sm - reserved;
    s.carveoutConfig = SHAREDMEM_CARVEOUT_MAX_SHARED;
    if (cudaOccMaxActiveBlocksPerMultiprocessor(&r, &p, &a, &s, threads, shared) != CUDA_OCC_SUCCESS) return -1;
    return r.activeBlocksPerMultiprocessor;
}
"""


@pytest.fixture(scope="module")
def calculator(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    spec = find_spec("triton")
    headers = Path(spec.origin).parent / "backends/nvidia/include" if spec and spec.origin else Path()
    if shutil.which("cc") is None or not (headers / "cuda_occupancy.h").exists():
        pytest.skip("needs a C compiler and cuda_occupancy.h")
    folder = tmp_path_factory.mktemp("occupancy")
    (folder / "c.c").write_text(CALCULATOR)
    subprocess.run(["cc", "-w", "-shared", "-fPIC", f"-I{headers}", "-o", folder / "c.so", folder / "c.c"], check=True)
    return ctypes.CDLL(str(folder / "c.so"))


@pytest.mark.parametrize("capability", NUMBERS)
def test_nvidias_calculator_agrees(calculator: ctypes.CDLL, capability: int):
    sm = limits_for_capability(capability)
    sizes = [0, 1, 1000, 8 * KIB, 16 * KIB + 1, 24 * KIB, 48 * KIB, sm.shared_bytes_per_block]
    for threads in (1, 32, 33, 96, 128, 160, 256, 288, 384, 512, 640, 768, 1000, 1024):
        for registers in (*range(16, 256, 7), 32, 40, 64, 96, 128, 168, 255):
            for shared in sizes:
                theirs = calculator.blocks(
                    *sm.capability, sm.threads, sm.shared_bytes, sm.reserved_shared_bytes, threads, registers, shared
                )
                assert blocks_or_none(sm, threads, registers, shared) == theirs, (threads, registers, shared)
