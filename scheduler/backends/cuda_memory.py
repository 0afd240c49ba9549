"""Memory on a real GPU: instances with pinned host memory, arenas that they share, and weights that come and go.

An address range for weights is reserved once, and graphs contain addresses in it. Physical memory is created, mapped
and opened in blocks as weights arrive, each block just before its copies: creating 64 MiB takes a tenth of the time of
copying them. A block has several chunks. Behind each chunk's copy the stream writes a word, so the core learns of it
without the interpreter. The first chunk does not wait for its block: it is copied to a landing place, and from there,
within the GPU, to its addresses.
"""

from __future__ import annotations

import contextlib
import ctypes
import sys
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from paellapy.instrument.device.cuda import CudaDevice
from paellapy.instrument.device.driver import CudaArray, CudaStream, check, driver
from paellapy.instrument.errors import LaunchError, PaellaError
from paellapy.scheduler.backends.cuda_graphs import words_of
from paellapy.scheduler.core.errors import MemoryPlanError
from paellapy.scheduler.core.processes import SharedBlock
from paellapy.scheduler.models.memory import InstancePlan, Memory, readable_bytes
from paellapy.scheduler.models.torch_capture import InstanceDraws, TorchPool
from paellapy.scheduler.models.weights import COPY_BYTES, Bytes, Layout, WeightRange

_PORTABLE_MAPPED = 3  # portable and mapped, for both cuMemHostAlloc and cuMemHostRegister


class PinnedBlock:
    """Host memory from which the GPU copies at full speed. `shared`: other processes can map it."""

    def __init__(self, device: CudaDevice, nbytes: int, shared: bool = False) -> None:
        self._device = device
        device.activate()
        nbytes = max(1, nbytes)
        self.block = _pinned_shared(device, nbytes) if shared else None
        if self.block is not None:
            self._at = self.block.address
        else:
            self._at = int(check(driver().cuMemHostAlloc(nbytes, _PORTABLE_MAPPED), "allocating pinned memory"))
        self.host = _host_array(self._at, nbytes)

    def free(self) -> None:
        if self._at:
            self._device.activate()
            (driver().cuMemFreeHost if self.block is None else driver().cuMemHostUnregister)(self._at)
            self._at, self.block, self.host = 0, None, np.empty(0, np.uint8)


def _pinned_shared(device: CudaDevice, nbytes: int) -> SharedBlock:
    """Shared memory that is pinned once it exists: the driver cannot share memory that it allocates itself."""
    cu = driver()
    # Graphs, kernels and copies use host addresses directly, so the GPU must see memory at the same addresses.
    same = cu.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM
    if not int(check(cu.cuDeviceGetAttribute(same, device.index), "reading the GPU's attributes")):
        raise LaunchError(
            "this GPU maps registered host memory at other addresses than the host, so its instances cannot be "
            "shared with other processes: serve without workers"
        )
    made = SharedBlock(nbytes)
    check(cu.cuMemHostRegister(made.address, made.nbytes, _PORTABLE_MAPPED), "pinning shared memory")
    return made


def _host_array(address: int, nbytes: int) -> Bytes:
    return np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(address))


class CudaArena:
    """Device memory in which one instance runs at a time: our own block, and PyTorch's pool if it is used."""

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
    """An instance's block on the GPU and its pinned block on the host. `shared`: other processes map the host block."""

    def __init__(
        self, device: CudaDevice, plan: InstancePlan, shared: bool = False, arena: CudaArena | None = None
    ) -> None:
        self._device = device
        device.activate()  # instances are also made in threads that have not used the GPU
        self._arena = CudaArena(device, plan.device_bytes) if arena is None else arena
        self._ptr, self._own = self._arena.ptr, arena is None
        self._draws: InstanceDraws | None = None
        try:
            self._pinned = PinnedBlock(device, plan.host_bytes, shared)
        except PaellaError:
            if self._own:
                self._arena.free()
            raise
        self.host = self._pinned.host
        self.block = self._pinned.block
        self.host[:] = 0

    def array(self, offset: int, shape: tuple[int, ...], dtype: np.dtype[Any]) -> CudaArray:
        return CudaArray.over(self._device, self._ptr + offset, shape, dtype)

    def free(self) -> None:
        if self.host.size:
            self._device.activate()
            if self._own:
                self._arena.free()
            self._pinned.free()
            self.host, self.block = self._pinned.host, None

    def draws(self, number: int) -> InstanceDraws:
        """Random numbers of this instance, which has this number in its model."""
        if self._draws is None:
            torch: Any = sys.modules["torch"]
            self._draws = InstanceDraws(torch, self._device.index, number, words_of)
        return self._draws

    @property
    def torch_pool(self) -> TorchPool | None:
        return self._arena.torch_pool

    @torch_pool.setter
    def torch_pool(self, pool: TorchPool) -> None:
        self._arena.torch_pool = pool


def free_and_whole_bytes(device: Any) -> tuple[int, int]:
    """Free and total bytes of the GPU's memory."""
    device.activate()
    free, whole = check(driver().cuMemGetInfo(), "reading the GPU's memory")
    return int(free), int(whole)


class CudaPages:
    """Physical memory of one GPU. Freed memory is kept for the next request of the same size. Kept memory and memory in
    use never exceed the limit together. Two threads use it: models are loaded while the mover moves others.
    """

    def __init__(self, device: CudaDevice, limit_bytes: int) -> None:
        cu = driver()
        device.activate()
        self._device, self._cu = device, cu
        self._about = cu.CUmemAllocationProp()
        self._about.type = cu.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        self._about.location.type = cu.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        self._about.location.id = device.index
        least = cu.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
        self.granularity = int(check(cu.cuMemGetAllocationGranularity(self._about, least), "reading page sizes"))
        self._access = cu.CUmemAccessDesc()
        self._access.location.type = self._about.location.type
        self._access.location.id = device.index
        self._access.flags = cu.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        self._lock = threading.RLock()
        self._free: dict[int, list[Any]] = {}
        self._limit_bytes = limit_bytes
        self.kept_bytes = 0  # freed but not released to the GPU
        self.used_bytes = 0
        self._landing = (0, 0)  # address, bytes

    def landing(self, nbytes: int) -> int:
        """The address of memory to which the first chunk of any weights is copied, while their own is taken."""
        with self._lock:
            if self._landing[1] < nbytes:
                made = self._device.allocate(nbytes)
                self._free_landing()
                self._landing = made, nbytes
            return self._landing[0]

    def _free_landing(self) -> None:
        at, _ = self._landing
        self._landing = (0, 0)
        if at:
            self._device.free(at)

    def close(self) -> None:
        """Releases all memory that no weights use."""
        self.trim()
        with self._lock:
            self._free_landing()

    def open(self, address: int, nbytes: int, handle: Any) -> None:
        """Maps the memory of this handle behind these addresses, with the bytes it has."""
        check(self._cu.cuMemMap(address, nbytes, 0, handle, 0), "mapping weights")
        try:
            check(self._cu.cuMemSetAccess(address, nbytes, [self._access], 1), "opening mapped weights")
        except PaellaError:
            self._cu.cuMemUnmap(address, nbytes)
            raise

    def take_all(self, sizes: Sequence[int]) -> list[tuple[Any, int]]:
        """Memory of these sizes: handles, each with its size. All of it, or none."""
        taken: list[tuple[Any, int]] = []
        try:
            for nbytes in sizes:
                taken.append((self._take(nbytes), nbytes))
        except BaseException:
            for handle, nbytes in taken:
                self.give(handle, nbytes)
            raise
        return taken

    def _take(self, nbytes: int) -> Any:
        with self._lock:
            handle = self._kept(nbytes) if self._free.get(nbytes) else self._create(nbytes)
            self.used_bytes += nbytes
            return handle

    def _kept(self, nbytes: int) -> Any:
        self.kept_bytes -= nbytes
        handles = self._free[nbytes]
        found = handles.pop()
        if not handles:
            del self._free[nbytes]
        return found

    def _create(self, nbytes: int) -> Any:
        while self._free and self.used_bytes + self.kept_bytes + nbytes > self._limit_bytes:
            check(self._cu.cuMemRelease(self._kept(min(self._free))), "releasing memory of weights")
        status, handle = self._cu.cuMemCreate(nbytes, self._about, 0)
        if int(status) and self.kept_bytes:
            self.trim()  # release memory that is kept in other sizes
            status, handle = self._cu.cuMemCreate(nbytes, self._about, 0)
        if int(status) == int(self._cu.CUresult.CUDA_ERROR_OUT_OF_MEMORY):
            free, total = check(self._cu.cuMemGetInfo(), "reading the GPU's memory")
            raise MemoryPlanError(
                f"weights need {readable_bytes(nbytes)} more, within the engine's memory_bytes, but the GPU has only "
                f"{readable_bytes(int(free))} of {readable_bytes(int(total))} free: another process, or other code in "
                "this one, uses the rest; free it, or give the engine a smaller memory_bytes",
                needed_bytes=nbytes, free_bytes=int(free), limit_bytes=int(total),
            )  # fmt: skip
        return check((status, handle), "creating memory for weights")

    def give(self, handle: Any, nbytes: int) -> None:
        with self._lock:
            self._free.setdefault(nbytes, []).append(handle)
            self.kept_bytes += nbytes
            self.used_bytes -= nbytes

    def trim(self) -> None:
        """Releases all kept memory to the GPU."""
        with self._lock:
            for handles in self._free.values():
                for handle in handles:
                    check(self._cu.cuMemRelease(handle), "releasing memory of weights")
            self._free.clear()
            self.kept_bytes = 0


class CudaWeights(WeightRange):
    def __init__(
        self, device: CudaDevice, layout: Layout, sizes: tuple[int, int], pages: CudaPages, stream: CudaStream
    ) -> None:
        """`sizes`: bytes of a chunk, and the least bytes of a block."""
        super().__init__(layout)
        cu = driver()
        device.activate()
        grain = pages.granularity
        self._device, self._pages, self._stream = device, pages, stream
        chunk_bytes, map_bytes = sizes
        self.chunk_bytes = -(-chunk_bytes // grain) * grain
        self._block_bytes = -(-max(map_bytes, 1) // self.chunk_bytes) * self.chunk_bytes
        pages.landing(self.chunk_bytes)  # taken now, so that no weights have to wait for it later
        self.held_bytes = max(grain, -(-layout.nbytes // grain) * grain)
        self._mapped: list[tuple[Any, int]] = []  # handles and sizes of blocks
        self._pinned = PinnedBlock(device, 8 * self.chunks)
        self.words = self._pinned.host[: 8 * self.chunks].view(np.uint64)
        self.words[:] = 0
        self.address = 0
        try:
            self.address = int(check(cu.cuMemAddressReserve(self.held_bytes, 0, 0, 0), "reserving addresses"))
            with self._taken() as blocks:
                while blocks:
                    self._map_next(blocks)
        except BaseException:
            self.free()
            raise

    @contextlib.contextmanager
    def _taken(self) -> Iterator[list[tuple[Any, int]]]:
        """Memory for all blocks, which the caller maps one after the other; memory that is left is given back."""
        firsts = range(0, self.held_bytes, self._block_bytes)
        blocks = self._pages.take_all([min(self._block_bytes, self.held_bytes - first) for first in firsts])
        try:
            yield blocks
        finally:
            for handle, nbytes in blocks:
                self._pages.give(handle, nbytes)

    def _map_next(self, blocks: list[tuple[Any, int]]) -> None:
        """Maps the next block, with the first of this memory."""
        handle, nbytes = blocks[0]
        self._pages.open(self.address + len(self._mapped) * self._block_bytes, nbytes, handle)
        self._mapped.append(blocks.pop(0))

    def array(self, offset: int, shape: tuple[int, ...], dtype: np.dtype[Any]) -> CudaArray:
        return CudaArray.over(self._device, self.address + offset, shape, dtype)

    def bring(self, source: Bytes) -> None:
        cu, stream = driver(), self._stream.handle
        self._device.activate()
        words, host = int(self.words.ctypes.data), int(source.ctypes.data)
        try:
            # To take memory and to map a block takes as long as to copy 12 MiB.
            landing, landed = self._pages.landing(self.chunk_bytes), min(self.chunk_bytes, self.layout.nbytes)
            self._copy(landing, host, landed)
            # All memory before the first report: then segments may use a chunk, and it can no longer be unmapped.
            with self._taken() as blocks:
                for k, first in enumerate(range(0, self.held_bytes, self.chunk_bytes)):
                    if first % self._block_bytes == 0:
                        self._map_next(blocks)
                    if first == 0:
                        moved = cu.cuMemcpyDtoDAsync(self.address, landing, landed, stream)
                        check(moved, "moving weights to their addresses")
                    else:
                        nbytes = min(self.chunk_bytes, self.layout.nbytes - first)
                        self._copy(self.address + first, host + first, nbytes)
                    check(cu.cuStreamWriteValue64(stream, words + 8 * k, 1, 0), "reporting a copy of weights")
        except PaellaError:
            if self._mapped:  # segments may use chunks that were reported
                self._device.synchronize()
            else:
                self._stream.synchronize()  # the copy to the landing place reads the source
            self.evict()
            raise
        self.there = True

    def _copy(self, address: int, host: int, nbytes: int) -> None:
        for at in range(0, nbytes, COPY_BYTES):
            n = min(COPY_BYTES, nbytes - at)
            copied = driver().cuMemcpyHtoDAsync(address + at, host + at, n, self._stream.handle)
            check(copied, "copying weights to the GPU")

    def evict(self) -> None:
        self._device.activate()
        done = 0
        try:
            for k, (_, nbytes) in enumerate(self._mapped):
                check(driver().cuMemUnmap(self.address + k * self._block_bytes, nbytes), "unmapping weights")
                done += 1
        except PaellaError:  # all weights are there, or none: memory keeps its bytes while it is not mapped
            for k, (handle, nbytes) in enumerate(self._mapped[:done]):
                self._pages.open(self.address + k * self._block_bytes, nbytes, handle)
            raise
        for handle, nbytes in self._mapped:
            self._pages.give(handle, nbytes)
        self._mapped.clear()
        self.there = False

    def wait(self) -> None:
        self._device.activate()
        self._stream.synchronize()

    def write(self, source: Bytes, first: int, end: int) -> None:
        self._device.activate()
        self._copy(self.address + first, int(source.ctypes.data) + first, end - first)
        self._stream.synchronize()

    def fill(self, byte: int) -> None:
        self._device.activate()
        nbytes = self.layout.nbytes
        check(driver().cuMemsetD8Async(self.address, byte, nbytes, self._stream.handle), "overwriting weights")
        self._stream.synchronize()

    def holds(self, source: Bytes) -> bool:
        self._device.activate()
        block = PinnedBlock(self._device, min(self.chunk_bytes, self.layout.nbytes))
        try:
            for first in range(0, self.layout.nbytes, self.chunk_bytes):
                n = min(self.chunk_bytes, self.layout.nbytes - first)
                into = int(block.host.ctypes.data)
                read = driver().cuMemcpyDtoHAsync(into, self.address + first, n, self._stream.handle)
                check(read, "reading weights back")
                self._stream.synchronize()
                if not np.array_equal(block.host[:n], source[first : first + n]):
                    return False
            return True
        finally:
            block.free()

    def free(self) -> None:
        if self.address:
            # A load that failed may have left kernels on the GPU, and unmapping memory does not wait for them.
            self._device.synchronize()
            self.evict()
            check(driver().cuMemAddressFree(self.address, self.held_bytes), "giving addresses back")
            self.address = 0
        self.words = np.zeros(0, np.uint64)
        self._pinned.free()
