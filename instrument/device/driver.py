"""The CUDA driver: through cuda-bindings where speed does not matter, and through ctypes on the launch path."""

from __future__ import annotations

import contextlib
import ctypes
import functools
from collections.abc import Iterator
from typing import Any

from paellapy.instrument.errors import LaunchError, NoDeviceError

NOT_READY = 600  # CUDA_ERROR_NOT_READY

_NO_GPU = (
    "{why} Install NVIDIA's driver and paellapy[cuda12] or paellapy[cuda13], or use the virtual GPU: "
    'pp.Device("virtual:h200").'
)


@functools.cache
def driver() -> Any:
    """cuda-bindings' driver module, with the driver initialised."""
    try:
        from cuda.bindings import driver as cu
    except ImportError:
        raise NoDeviceError(_NO_GPU.format(why="The Python package cuda-bindings is not installed.")) from None
    try:
        library()
    except OSError:
        raise NoDeviceError(_NO_GPU.format(why="This machine has no CUDA driver (libcuda.so.1).")) from None
    try:
        (status,) = cu.cuInit(0)
    except RuntimeError as e:  # the binding's own loader
        raise NoDeviceError(_NO_GPU.format(why=f"The CUDA driver cannot be used: {e}.")) from None
    if int(status):
        raise NoDeviceError(_NO_GPU.format(why=f"The CUDA driver found no usable GPU ({status.name})."))
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
    message = f"{doing} failed: {text.decode() if text else code.name} ({code.name})"
    remedy = _REMEDIES.get(code.name)
    raise LaunchError(f"{message}. {remedy}" if remedy else message)


_STICKY = (
    "A kernel launched earlier accessed invalid memory, and the CUDA context is lost: restart the process. "
    "Run the kernel on the virtual GPU to find the line, block and index."
)
_REMEDIES = {
    "CUDA_ERROR_ILLEGAL_ADDRESS": _STICKY,
    "CUDA_ERROR_MISALIGNED_ADDRESS": _STICKY,
    "CUDA_ERROR_OUT_OF_MEMORY": "Free arrays, or trace with fewer records_per_sm.",
    "CUDA_ERROR_INVALID_VALUE": "Check the grid, the block and the shared memory against the device's limits.",
    "CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES": "The block needs more registers or shared memory than an SM has.",
    "CUDA_ERROR_UNSUPPORTED_PTX_VERSION": "The driver is older than the compiler: update the driver.",
    "CUDA_ERROR_NO_BINARY_FOR_GPU": "The kernel was compiled for another architecture.",
}
