"""The CUDA driver, and its memory, streams and events.

It is called through cuda-bindings where speed does not matter, and through ctypes on the launch path.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import math
import operator
import os
import weakref
from collections import deque
from collections.abc import Iterator
from typing import Any, Protocol, Self

import numpy as np
from numpy.typing import NDArray

from paellapy.instrument.device.base import Event, Stream
from paellapy.instrument.env import cuda_line
from paellapy.instrument.errors import LaunchError, NoDeviceError

NOT_READY = 600  # CUDA_ERROR_NOT_READY



def _no_gpu(field: str, why: str) -> NoDeviceError:
    return NoDeviceError(
        f"{why} Install NVIDIA's driver, then run {cuda_line()}, or use the virtual GPU: "
        'pp.Device("virtual:h200").', field=field
    )


@functools.cache
def driver() -> Any:
    """cuda-bindings' driver module, with the driver initialised."""
    try:
        from cuda.bindings import driver as cu
    except ImportError:
        raise _no_gpu("cuda-bindings", "The Python package cuda-bindings is not installed.") from None
    try:
        library()
    except OSError:
        raise _no_gpu("libcuda", "This machine has no CUDA driver (libcuda.so.1).") from None
    try:
        (status,) = cu.cuInit(0)
    except RuntimeError as e:  # the binding's own loader
        raise _no_gpu("libcuda", f"The CUDA driver cannot be used: {e}.") from None
    if int(status):
        raise _no_gpu("gpu", f"The CUDA driver found no usable GPU ({status.name}).")
    return cu


@functools.cache
def library() -> Any:
    """libcuda with the prototypes of functions that are called per launch, or per node of a graph that is cut. A ctypes
    call costs a third of a binding's.
    """
    lib = ctypes.CDLL("libcuda.so.1")
    u32, ptr = ctypes.c_uint, ctypes.c_void_p
    lib.cuLaunchKernel.argtypes = [ptr, u32, u32, u32, u32, u32, u32, u32, ptr, ptr, ptr]
    lib.cuLaunchKernel.restype = ctypes.c_int
    lib.cuStreamIsCapturing.argtypes = [ptr, ptr]
    lib.cuStreamIsCapturing.restype = ctypes.c_int
    lib.cuGraphGetNodes.argtypes = [ptr, ptr, ptr]
    lib.cuGraphGetNodes.restype = ctypes.c_int
    lib.cuGraphDestroyNode.argtypes = [ptr]
    lib.cuGraphDestroyNode.restype = ctypes.c_int
    return lib


@contextlib.contextmanager
def relaxed_capture() -> Iterator[None]:
    """Temporarily allows this thread calls that a stream capture in progress would forbid."""
    cu = driver()
    before = check(
        cu.cuThreadExchangeStreamCaptureMode(cu.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED), "pausing a capture"
    )
    try:
        yield
    finally:
        check(cu.cuThreadExchangeStreamCaptureMode(before), "resuming a capture")


def check(result: tuple[Any, ...], doing: str) -> Any:
    """Unpacks the result of a binding; LaunchError if the call failed while `doing` that."""
    status = result[0]
    if int(status):
        fail(int(status), doing)
    if len(result) == 1:
        return None
    return result[1] if len(result) == 2 else result[1:]


def fail(status: int, doing: str) -> None:
    """Raises the error for a driver status."""
    cu = driver()
    code = cu.CUresult(status)
    text = cu.cuGetErrorString(code)[1]
    said = f"{text.decode() if text else code.name} ({code.name})"
    if code.name in _DEFERRED:
        launches = tuple(dict.fromkeys((kernel, grid) for _, kernel, grid in unfinished))
        names = ", ".join(f"{kernel!r} on grid {grid}" for kernel, grid in launches[-_NAMED:]) or "none of paellapy's"
        raise LaunchError(
            f"{doing} reports the error of an earlier launch: {said}. It belongs to one that was not waited for "
            f"({names}), or to a launch that paellapy did not make. {_LOST}",
            doing=doing, status=status, launches=launches,
        )
    message, remedy = f"{doing} failed: {said}", _REMEDIES.get(code.name)
    raise LaunchError(f"{message}. {remedy}" if remedy else message, doing=doing, status=status)


_REMEDIES = {
    "CUDA_ERROR_OUT_OF_MEMORY": "Free arrays, or trace with fewer records_per_sm.",
    "CUDA_ERROR_INVALID_VALUE": "Check the grid, the block and the shared memory against the device's limits.",
    "CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES": "The block needs more registers or shared memory than an SM has.",
    "CUDA_ERROR_UNSUPPORTED_PTX_VERSION": "The driver is older than the compiler: update the driver.",
    "CUDA_ERROR_NO_BINARY_FOR_GPU": "The kernel was compiled for another architecture.",
}

# Errors of blocks that run: the driver reports them in whichever call comes next, and in every call from then on.
_DEFERRED = frozenset(
    f"CUDA_ERROR_{name}"
    for name in ("ILLEGAL_ADDRESS", "LAUNCH_TIMEOUT", "ASSERT", "HARDWARE_STACK_ERROR", "ILLEGAL_INSTRUCTION",
                 "MISALIGNED_ADDRESS", "INVALID_ADDRESS_SPACE", "INVALID_PC", "LAUNCH_FAILED", "TENSOR_MEMORY_LEAK")
)  # fmt: skip
_LOST = (
    "The CUDA context is lost: restart the process. CUDA_LAUNCH_BLOCKING=1 lets each launch report its own error; the "
    "virtual GPU names line, block and index."
)
_NAMED = 8  # launches in a message; all are in the error's `launches`

# The latest launches that are not known to be over: stream, kernel, grid.
unfinished: deque[tuple[int, str, tuple[int, ...]]] = deque(maxlen=256)


def finished(stream: int | None = None) -> None:
    """Notes that all launches are over, or all on one stream."""
    for _ in range(len(unfinished)):  # other threads may launch meanwhile
        each = unfinished.popleft()
        if stream is not None and each[0] != stream:
            unfinished.append(each)


def fail_launch(status: int, stream: int, kernel: str, grid: tuple[int, ...], doing: str) -> None:
    """Raises the error of a launch that the driver refused."""
    if os.environ.get("CUDA_LAUNCH_BLOCKING") == "1":  # the driver has waited for all launches before it
        finished()
        unfinished.append((stream, kernel, grid))
    fail(status, doing)


# --- memory, streams and events ---------------------------------------------------------------------------------------

# Element types that NumPy does not have are passed as unsigned integers of the same width.
_INTERFACE_TYPES = {"bfloat16": "<u2", "float8_e4m3fn": "|u1", "float8_e5m2": "|u1"}

MOST_URGENT = 100  # above the range of any GPU: the stream gets the highest priority there is


class Gpu(Protocol):
    """The parts of the GPU that memory, streams and arguments use."""

    name: str
    index: int

    @property
    def stream_stack(self) -> list[int]: ...
    def activate(self) -> None: ...
    def allocate(self, nbytes: int) -> int: ...
    def free(self, ptr: int) -> None: ...
    def cleared(self, nbytes: int) -> CudaArray: ...
    def copy_in(self, ptr: int, source: NDArray[Any]) -> None: ...
    def copy_out(self, target: NDArray[Any], ptr: int) -> None: ...
    def not_in_capture(self, doing: str) -> None: ...


class CudaArray:
    """Device memory with shape and element type (including bfloat16 and float8, by ml_dtypes)."""

    __slots__ = ("__weakref__", "device", "dtype", "owner", "ptr", "shape")

    def __init__(self, device: Gpu, shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
        self.device, self.shape, self.dtype = device, shape, dtype
        self.ptr = device.allocate(max(1, self.nbytes))
        self.owner: object = None  # of the memory, if this is a view
        weakref.finalize(self, device.free, self.ptr)

    @classmethod
    def over(
        cls, device: Gpu, ptr: int, shape: tuple[int, ...], dtype: np.dtype[Any], owner: object = None
    ) -> CudaArray:
        """An array over memory that `owner` keeps alive; without an owner the caller does."""
        array = cls.__new__(cls)
        array.device, array.ptr, array.shape, array.dtype, array.owner = device, ptr, shape, dtype, owner
        return array

    def __getitem__(self, key: int | slice) -> CudaArray:
        """A view of one entry of the first axis, or of several that lie side by side."""
        n = self.shape[0] if self.shape else 0
        if isinstance(key, slice):
            first, end, step = key.indices(n)
            if step != 1:
                raise IndexError(f"a view of GPU memory cannot skip entries: the step is {step}; it must be 1")
            shape: tuple[int, ...] = (max(0, end - first), *self.shape[1:])
        else:
            first = operator.index(key)
            if not -n <= first < n:
                raise IndexError(f"index {first} is outside the first axis of shape {self.shape}")
            first, shape = first % n, self.shape[1:]
        entry = math.prod(self.shape[1:]) * self.dtype.itemsize
        return CudaArray.over(self.device, self.ptr + first * entry, shape, self.dtype, self)

    def reshape(self, *shape: int) -> CudaArray:
        """A view of the same memory in another shape; one extent may be -1."""
        known = math.prod(n for n in shape if n != -1)
        made = tuple(self.size // known if n == -1 and known else n for n in shape)
        if math.prod(made) != self.size or shape.count(-1) > 1:
            raise ValueError(f"an array of shape {self.shape} cannot have the shape {shape}")
        return CudaArray.over(self.device, self.ptr, made, self.dtype, self)

    @property
    def size(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64))

    @property
    def nbytes(self) -> int:
        return self.size * self.dtype.itemsize

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        kind = _INTERFACE_TYPES.get(self.dtype.name, self.dtype.str)
        return {"shape": self.shape, "typestr": kind, "data": (self.ptr, False), "version": 3, "stream": None}

    def numpy(self) -> NDArray[Any]:
        """A copy on the host, after all work submitted to the current stream is done."""
        out = np.empty(self.shape, self.dtype)
        self.device.copy_out(out, self.ptr)
        return out

    def set(self, data: NDArray[Any]) -> None:
        """Overwrites the array with host data of the same shape and type."""
        source = np.ascontiguousarray(data, self.dtype)
        if source.shape != self.shape:
            raise ValueError(f"the array has shape {self.shape}, but the data have {source.shape}: both must be equal")
        self.device.copy_in(self.ptr, source)

    # -- with the names of PyTorch's tensors, which Triton's `TensorDescriptor` asks for

    def data_ptr(self) -> int:
        """The address of the first element."""
        return self.ptr

    def stride(self, dim: int | None = None) -> tuple[int, ...] | int:
        """The strides in elements; with `dim`, the stride of this dimension."""
        every = tuple(int(np.prod(self.shape[axis + 1 :], dtype=np.int64)) for axis in range(len(self.shape)))
        return every if dim is None else every[dim]

    def __repr__(self) -> str:
        return f"<{self.dtype.name}{list(self.shape)} on {self.device.name}>"


class CudaStream(Stream):
    def __init__(self, device: Gpu, priority: int, green: Any = None) -> None:
        """`green`: a green context whose SMs the stream uses; without it, all SMs."""
        cu = driver()
        device.activate()
        level = self.level(priority)
        non_blocking = int(cu.CUstream_flags.CU_STREAM_NON_BLOCKING)
        if green is None:
            made = cu.cuStreamCreateWithPriority(non_blocking, level)
        else:
            made = cu.cuGreenCtxStreamCreate(green, non_blocking, level)
        self.handle = int(check(made, "creating a stream"))
        self.device = device
        weakref.finalize(self, cu.cuStreamDestroy, self.handle)

    @staticmethod
    def level(priority: int) -> int:
        """CUDA's number for one of our priorities: smaller numbers go first in CUDA, and there are few."""
        lowest, highest = check(driver().cuCtxGetStreamPriorityRange(), "reading stream priorities")
        return max(int(highest), min(int(lowest), -priority))

    def synchronize(self) -> None:
        self.device.not_in_capture("waits for a stream")
        check(driver().cuStreamSynchronize(self.handle), "waiting for a stream")
        finished(self.handle)

    def record(self) -> CudaEvent:
        return CudaEvent(self.handle)

    def wait(self, event: CudaEvent) -> None:
        check(driver().cuStreamWaitEvent(self.handle, event.handle, 0), "waiting for an event")

    def __enter__(self) -> Self:
        self.device.stream_stack.append(self.handle)
        return self

    def __exit__(self, *_: object) -> None:
        self.device.stream_stack.pop()


class CudaEvent(Event):
    def __init__(self, stream: int) -> None:
        cu = driver()
        self.handle = check(cu.cuEventCreate(0), "creating an event")
        weakref.finalize(self, cu.cuEventDestroy, self.handle)
        check(cu.cuEventRecord(self.handle, stream), "recording an event")

    def done(self) -> bool:
        status = int(driver().cuEventQuery(self.handle)[0])
        if status not in (0, NOT_READY):
            fail(status, "asking for an event")
        return not status

    def synchronize(self) -> None:
        check(driver().cuEventSynchronize(self.handle), "waiting for an event")

    def elapsed_ns(self, earlier: CudaEvent) -> float:
        milliseconds = check(driver().cuEventElapsedTime(earlier.handle, self.handle), "reading events")
        return float(milliseconds) * 1e6


def free_in(context: Any, ptr: int) -> None:
    """Frees memory of a context in any thread: arrays are also freed by the garbage collector, and in a thread without
    the context the driver would keep the memory.
    """
    cu = driver()
    (status,) = cu.cuCtxPushCurrent(context)
    if not int(status):  # at interpreter exit the context may be gone, and then there is nothing to free
        cu.cuMemFree(ptr)
        cu.cuCtxPopCurrent()
