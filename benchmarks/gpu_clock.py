"""The GPU's clock, power and temperature as reported by its driver, stored beside figures to spot unusual states."""

from __future__ import annotations

import functools
from typing import Any

from paellapy.instrument.device.driver import check, driver

SM_CLOCK, MEMORY_CLOCK, GPU_SENSOR = 1, 2, 0  # NVML's numbers; what cuda-bindings calls them differs by version
SLOWED_BY = {
    0x4: "power cap", 0x8: "hardware", 0x20: "temperature", 0x40: "temperature (hardware)", 0x80: "power brake",
    0x200: "board limit", 0x400: "reliability",
}  # fmt: skip


@functools.cache
def _nvml() -> Any:
    """The driver's library for it; None with an older cuda-bindings, or where it is not installed."""
    try:
        from cuda.bindings import nvml

        nvml.init_v2()
    except (ImportError, RuntimeError):
        return None
    return nvml


def gpu_state() -> dict[str, Any]:
    """Of the first GPU. Empty where it cannot be known."""
    if (nvml := _nvml()) is None:
        return {}
    address = check(driver().cuDeviceGetPCIBusId(32, 0), "reading the GPU's address")
    try:
        gpu = nvml.device_get_handle_by_pci_bus_id_v2(address.split(b"\0")[0].decode())
        reasons = int(nvml.device_get_current_clocks_event_reasons(gpu))
        return {
            "sm_mhz": int(nvml.device_get_clock_info(gpu, SM_CLOCK)),
            "memory_mhz": int(nvml.device_get_clock_info(gpu, MEMORY_CLOCK)),
            "watts": int(nvml.device_get_power_usage(gpu)) / 1e3,
            "celsius": int(nvml.device_get_temperature_v(gpu, GPU_SENSOR)),
            "slowed_by": [name for bit, name in SLOWED_BY.items() if reasons & bit],
        }
    except nvml.NvmlError:  # in a container that is not told
        return {}
