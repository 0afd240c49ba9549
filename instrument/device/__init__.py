"""Devices: the real GPU and the virtual one, behind one interface."""

from instrument.device.base import Array, Device, Event, Launcher, Stream
from instrument.device.cuda import CudaDevice

__all__ = ["Array", "CudaDevice", "Device", "Event", "Launcher", "Stream"]
