"""Devices: the real GPU and the virtual one, behind one interface."""

from paellapy.instrument.device.base import Array, Device, Event, Launcher, Stream
from paellapy.instrument.device.cuda import CudaDevice
from paellapy.instrument.device.virtual import VirtualDevice
from paellapy.instrument.errors import NoDeviceError
from paellapy.instrument.gpu_model.parts import PARTS

__all__ = ["Array", "CudaDevice", "Device", "Event", "Launcher", "Stream", "VirtualDevice", "devices"]


def devices() -> list[str]:
    """Names of the devices that can be opened on this machine: GPUs first, then the virtual parts."""
    from paellapy.instrument.device.driver import check, driver

    try:
        found = [f"cuda:{i}" for i in range(check(driver().cuDeviceGetCount(), "counting GPUs"))]
    except NoDeviceError:
        found = []
    return found + [f"virtual:{name}" for name in PARTS]
