import dataclasses

import pytest
from failing import failing

from paellapy.instrument.errors import NoDeviceError
from paellapy.instrument.gpu_model.parts import PARTS, limits_for_capability, part

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


def test_an_unknown_part_lists_what_exists():
    with failing(NoDeviceError, field="part", given="b300"):
        part("b300")


def test_an_unknown_capability_lists_what_exists():
    with failing(NoDeviceError, field="capability", given=(6, 1)):
        limits_for_capability(61)


def test_parts_are_facts():
    with pytest.raises(dataclasses.FrozenInstanceError):
        part("h200").clock_mhz = 1  # type: ignore[misc]
