"""Memory of lanes on a real GPU: a block on the GPU, a pinned block on the host, and berths that lanes share."""

from __future__ import annotations

import contextlib
import ctypes
import sys
from typing import Any

import numpy as np

from paellapy.instrument.device.cuda import CudaDevice
from paellapy.instrument.device.cuda_memory import CudaArray
from paellapy.instrument.device.driver import check, driver
from paellapy.instrument.errors import LaunchError, PaellaError
from paellapy.scheduler.backends.cuda_pointers import words_of
from paellapy.scheduler.core.shared_memory import SharedBlock
from paellapy.scheduler.models.lane_memory import LanePlan, Memory
from paellapy.scheduler.models.torch_pool import TorchPool
from paellapy.scheduler.models.torch_random import LaneDraws

_PORTABLE_MAPPED = 3  # portable and mapped, for both cuMemHostAlloc and cuMemHostRegister


class CudaBerth:
    """Device memory in which one lane runs at a time: our own block, and PyTorch's pool if it is used."""

    def __init__(self, device: CudaDevice, nbytes: int) -> None:
        self._device = device
        self.ptr = device.allocate(max(1, nbytes))
        self.torch_pool: TorchPool | None = None

    def free(self) -> None:
        if self.ptr:
            ptr, self.ptr = self.ptr, 0
            if self.torch_pool is not None:
                with contextlib.suppress(PaellaError):  # the GPU is lost: the pool sees it too
                    self._device.activate()
                self.torch_pool.free()
                self.torch_pool = None
            self._device.activate()
            self._device.free(ptr)


class CudaMemory(Memory):
    """A lane's block on the GPU and its pinned block on the host.

    `shared`: other processes map the host block too. The driver cannot share memory that it allocates itself, so shared
    memory is created first and then pinned.
    """

    def __init__(
        self, device: CudaDevice, plan: LanePlan, shared: bool = False, berth: CudaBerth | None = None
    ) -> None:
        self._device = device
        device.activate()  # lanes are also made in threads that have not used the GPU
        self._berth = CudaBerth(device, plan.device_bytes) if berth is None else berth
        self._ptr, self._own = self._berth.ptr, berth is None
        self._draws: LaneDraws | None = None
        try:
            self._pinned = self._share(plan.host_bytes) if shared else self._allocate(plan.host_bytes)
        except PaellaError:
            if self._own:
                self._berth.free()
            raise
        self.host = np.ctypeslib.as_array((ctypes.c_uint8 * plan.host_bytes).from_address(self._pinned))
        self.host[:] = 0

    def _allocate(self, nbytes: int) -> int:
        return int(check(driver().cuMemHostAlloc(nbytes, _PORTABLE_MAPPED), "allocating pinned memory"))

    def _share(self, nbytes: int) -> int:
        cu = driver()
        # Graphs, kernels and copies use host addresses directly, so the GPU must see memory at the same addresses.
        same = cu.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM
        if not int(check(cu.cuDeviceGetAttribute(same, self._device.index), "reading the GPU's attributes")):
            raise LaunchError(
                "this GPU maps registered host memory at other addresses than the host, so its lanes cannot be shared "
                "with other processes: serve without workers"
            )
        self.block = SharedBlock(nbytes)
        # Whole pages, because the block consists of them.
        check(
            cu.cuMemHostRegister(self.block.address, self.block.nbytes, _PORTABLE_MAPPED), "pinning shared memory"
        )
        return self.block.address

    def array(self, offset: int, shape: tuple[int, ...], dtype: np.dtype[Any]) -> CudaArray:
        return CudaArray.over(self._device, self._ptr + offset, shape, dtype)

    def free(self) -> None:
        if self._pinned:
            self._device.activate()
            if self._own:
                self._berth.free()
            if self.block is None:
                driver().cuMemFreeHost(self._pinned)
            else:
                driver().cuMemHostUnregister(self._pinned)
            self._pinned, self.host, self.block = 0, np.empty(0, np.uint8), None

    def draws(self, number: int) -> LaneDraws:
        """Random numbers of this lane, which has this number in its model."""
        if self._draws is None:
            torch: Any = sys.modules["torch"]
            self._draws = LaneDraws(torch, self._device.index, number, words_of)
        return self._draws

    @property
    def torch_pool(self) -> TorchPool | None:
        return self._berth.torch_pool

    @torch_pool.setter
    def torch_pool(self, pool: TorchPool) -> None:
        self._berth.torch_pool = pool


def free_and_whole_bytes(device: Any) -> tuple[int, int]:
    """Free and total bytes of the GPU's memory."""
    device.activate()
    free, whole = check(driver().cuMemGetInfo(), "reading the GPU's memory")
    return int(free), int(whole)
