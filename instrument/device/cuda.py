"""A real GPU behind the common interface. Shares the primary context with CuPy and PyTorch."""

from __future__ import annotations

import ctypes
import functools
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from paellapy.instrument.arguments import Descriptor
from paellapy.instrument.cache import protect_triton
from paellapy.instrument.device.base import MOST_BYTES, Device, EventLayout, Events, Pick
from paellapy.instrument.device.cuda_launch import CudaLauncher, cuda_handlers, encode_tile
from paellapy.instrument.device.cuda_preempt import CudaFlag, Preemption
from paellapy.instrument.device.driver import (
    MOST_URGENT,
    CudaArray,
    CudaEvent,
    CudaStream,
    check,
    driver,
    fail,
    finished,
    free_in,
    library,
    relaxed_capture,
)
from paellapy.instrument.errors import NoDeviceError
from paellapy.instrument.gpu_model.parts import limits_for_capability
from paellapy.instrument.ptx.compiled import Draft
from paellapy.instrument.ptx.descriptor import PassConfig
from paellapy.instrument.records import RING_RECORD, SM_LINE, Records

# --- the clock of a real GPU: read by a kernel, and compared with the host's clock ------------------------------------

_LOOKS = 5  # readings of the clock: with only one, blocks seemed to begin up to 8 µs before their launch
# Reads the clock of the reports and the number of SM ids, which may exceed the number of SMs.
_PROBE = """
.version 7.0
.target sm_70
.address_size 64
.visible .entry probe(.param .u64 out)
{
	.reg .b64 %rd<3>;
	.reg .b32 %r<2>;
	ld.param.u64 %rd1, [out];
	mov.u64 %rd2, %globaltimer;
	st.global.u64 [%rd1], %rd2;
	mov.u32 %r1, %nsmid;
	st.global.u32 [%rd1+8], %r1;
	ret;
}
"""


class CudaClock:
    """The clock of the current context's GPU. `words` are two words of pinned memory."""

    def __init__(self, words: NDArray[np.uint64]) -> None:
        self._words, self._address = words, words.ctypes.data
        self.offset_ns = 0  # the GPU's time minus the host's
        cu = driver()
        self._module = check(cu.cuModuleLoadData(_PROBE.encode() + b"\0"), "loading a kernel")
        self._probe = check(cu.cuModuleGetFunction(self._module, b"probe"), "loading a kernel")

    def read_ns(self) -> int:
        """The current time. The host's clock is set by the quickest of a few readings, to half of its duration."""
        cu = driver()
        params = ((self._address,), (ctypes.c_void_p,))
        quickest = None
        for _ in range(_LOOKS):
            before = time.perf_counter_ns()
            check(cu.cuLaunchKernel(self._probe, 1, 1, 1, 1, 1, 1, 0, 0, params, 0), "reading the clock")
            check(cu.cuStreamSynchronize(0), "reading the clock")
            after = time.perf_counter_ns()
            now = int(self._words[0])
            if quickest is None or after - before < quickest:
                quickest = after - before
                self.offset_ns = now - (before + after) // 2
        return now

    @property
    def sm_ids(self) -> int:
        """The number of SM ids at the last reading."""
        return int(self._words.view(np.uint32)[2])


# --- memory for events of ranges on a real GPU: assigned launch by launch while a trace runs, read when it ends -------

_CHUNK_BYTES = 64 << 20


class EventMemory:
    """Memory for the events of a trace's launches. A launch need not clear it: every block records how much it used.

    A launch inside a CUDA graph keeps its memory until it is forgotten, since a later trace may replay the graph.
    """

    def __init__(self, device: Any) -> None:
        self._device = device
        self._chunks: list[Any] = []
        self._taken: list[tuple[int, EventLayout, int, Any]] = []  # launch, layout, address of its rings, and memory
        self._captured: dict[int, tuple[int, EventLayout, int, Any]] = {}
        self._chunk = self._used = 0
        self.unplaced = 0  # launches for which there was no room

    def begin(self) -> None:
        self._taken, self._chunk, self._used, self.unplaced = [], 0, 0, 0

    def place(self, layout: EventLayout, launch: int, captured: bool) -> int:
        """The address of a launch's rings, behind their heads; 0 if the trace has no room for more."""
        room = layout.nbytes + layout.ring_bytes  # with room to align them
        # Memory is cleared once: rings are read whole, and a sanitizer reports parts that no block wrote.
        if captured:
            if sum(kept.nbytes for *_, kept in self._captured.values()) + room > MOST_BYTES:
                self.unplaced += 1
                return 0
            memory = self._device.cleared(room)
            rings = _rings(layout, int(memory.ptr))
            self._captured[launch] = (launch, layout, rings, memory)
            return rings
        while self._chunk < len(self._chunks) and self._used + room > self._chunks[self._chunk].nbytes:
            self._chunk, self._used = self._chunk + 1, 0
        if self._chunk == len(self._chunks):
            if sum(chunk.nbytes for chunk in self._chunks) + room > MOST_BYTES:
                self.unplaced += 1
                return 0
            self._chunks.append(self._device.cleared(max(room, _CHUNK_BYTES)))
        memory = self._chunks[self._chunk]
        rings = _rings(layout, int(memory.ptr) + self._used)
        self._used += room
        self._taken.append((launch, layout, rings, memory))
        return rings

    def forget(self, launches: Iterable[int]) -> None:
        """Frees the memory of launches in graphs that will not be replayed again."""
        for launch in launches:
            self._captured.pop(launch, None)

    def read(self, launches: NDArray[np.uint32]) -> Iterator[Events]:
        """The events of these launches, including those of replayed graphs."""
        wanted = set(launches.tolist())
        for launch, layout, rings, _ in [*self._taken, *self._captured.values()]:
            if launch in wanted:
                out = np.empty(layout.nbytes, np.uint8)
                self._device.copy_out(out, rings - layout.heads_bytes)
                yield layout.read(launch, out)


def _rings(layout: EventLayout, address: int) -> int:
    """The first address for rings with their heads behind `address`."""
    rings = address + layout.heads_bytes
    return rings + -rings % layout.ring_bytes


_NOTIFY_WORDS = 4096


class _StreamStack(threading.local):
    """Streams per thread, as in CuPy and PyTorch: a capture in one thread must not catch another thread's launches."""

    def __init__(self) -> None:
        self.handles: list[int] = []


class CudaDevice(Device):
    """`Device("cuda:0")`."""

    first = "0"

    def _setup(self, which: str) -> None:
        protect_triton()
        cu = driver()
        count = check(cu.cuDeviceGetCount(), "counting GPUs")
        index = int(which or 0) if (which or "0").isdigit() else -1
        if not 0 <= index < count:
            raise NoDeviceError(
                f"there is no GPU 'cuda:{which}'; this machine has {count}", field="device", given=which, limit=count
            )
        self.index, self.name = index, f"cuda:{index}"
        self._device = check(cu.cuDeviceGet(index), "opening the GPU")
        self.title = check(cu.cuDeviceGetName(128, self._device), "naming the GPU").split(b"\0")[0].decode()
        attribute = cu.CUdevice_attribute
        major = self.attribute(attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)
        minor = self.attribute(attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)
        self.capability = (major, minor)
        self.limits = limits_for_capability(self.capability)
        self.sm_count = self.attribute(attribute.CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)
        self._context = check(cu.cuDevicePrimaryCtxRetain(self._device), "opening the GPU's context")
        self._streams = _StreamStack()
        self.activate()
        self.handlers = cuda_handlers(self)
        self._pinned = self.allocate_pinned(16 + 8 * _NOTIFY_WORDS)
        self._pinned_address = self._pinned.ctypes.data
        self._notified = 0
        self._clock = CudaClock(self._pinned[:2])
        self.clock_ns()
        # Disabled SMs may leave gaps in the numbering, so rings are laid out by SM number.
        self.sm_ids = max(self.sm_count, self._clock.sm_ids)
        self.lines = CudaArray(self, (self.sm_ids,), SM_LINE)
        self.zero(self.lines)
        # Rings stay allocated: a CUDA graph captured inside a trace writes to them in every replay.
        self._rings: dict[int, CudaArray] = {}
        self.rings: CudaArray | None = None
        self._counting = threading.Lock()
        self._counter_stream: CudaStream | None = None
        self._counter_words: NDArray[np.uint64] = np.zeros(0, np.uint64)

    def attribute(self, which: Any) -> int:
        return int(check(driver().cuDeviceGetAttribute(which, self._device), "reading the GPU's properties"))

    def activate(self) -> None:
        """Makes the context current in this thread."""
        check(driver().cuCtxSetCurrent(self._context), "activating the GPU's context")

    # -- memory and order

    def allocate(self, nbytes: int) -> int:
        self.activate()
        return int(check(driver().cuMemAlloc(nbytes), f"allocating {nbytes} bytes"))

    def free(self, ptr: int) -> None:
        free_in(self._context, ptr)

    def allocate_pinned(self, nbytes: int) -> NDArray[np.uint64]:
        cu = driver()
        ptr = int(check(cu.cuMemHostAlloc(nbytes, 3), "allocating pinned memory"))  # portable | mapped
        words = (ctypes.c_uint64 * (nbytes // 8)).from_address(ptr)
        return np.ctypeslib.as_array(words)

    def empty(self, shape: int | tuple[int, ...], dtype: DTypeLike = np.float32) -> CudaArray:
        extents = (shape,) if isinstance(shape, int) else tuple(shape)
        if self.capture is not None and self.capture.active:
            return self.capture.empty(extents, np.dtype(dtype))  # type: ignore[no-any-return]
        return CudaArray(self, extents, np.dtype(dtype))

    def array(self, data: NDArray[Any]) -> CudaArray:
        data = np.asarray(data)
        out = self.empty(data.shape, data.dtype)
        out.set(data)
        return out

    def array_beside(self, data: NDArray[Any]) -> CudaArray:
        """Memory with a copy of `data`, made without disturbing a capture that PyTorch may have in progress."""
        self.activate()
        cu = driver()
        with relaxed_capture():
            out, stream = CudaArray(self, data.shape, data.dtype), CudaStream(self, 0)
            check(cu.cuMemcpyHtoDAsync(out.ptr, data.ctypes.data, data.nbytes, stream.handle), "copying to the GPU")
            check(cu.cuStreamSynchronize(stream.handle), "copying to the GPU")
        return out

    def cleared(self, nbytes: int) -> CudaArray:
        """Memory that is zero, made without disturbing a capture that PyTorch may have in progress."""
        self.activate()
        cu = driver()
        with relaxed_capture():
            out, stream = CudaArray(self, (nbytes,), np.dtype(np.uint8)), self._urgent
            check(cu.cuMemsetD8Async(out.ptr, 0, nbytes, stream.handle), "clearing memory")
            check(cu.cuStreamSynchronize(stream.handle), "clearing memory")
        return out

    @functools.cached_property
    def _urgent(self) -> CudaStream:
        """A stream whose blocks go first: memory must not stay uncleared until the kernels on the GPU end."""
        return CudaStream(self, MOST_URGENT)

    def zero(self, array: CudaArray) -> None:
        check(driver().cuMemsetD8(array.ptr, 0, array.nbytes), "clearing memory")

    def copy_in(self, ptr: int, source: NDArray[Any]) -> None:
        self._copy("to the GPU", driver().cuMemcpyHtoDAsync, ptr, source.ctypes.data, source.nbytes)

    def copy_out(self, target: NDArray[Any], ptr: int) -> None:
        self._copy("to the host", driver().cuMemcpyDtoHAsync, target.ctypes.data, ptr, target.nbytes)

    def _copy(self, where: str, copy: Callable[..., Any], to: int, source: int, nbytes: int) -> None:
        self.not_in_capture(f"copies an array {where} and waits for it")
        self.activate()
        if nbytes:
            stream = self.current_stream()
            check(copy(to, source, nbytes, stream), f"copying {where}")
            check(driver().cuStreamSynchronize(stream), f"copying {where}")
            finished(stream)

    def stream(self, priority: int = 0) -> CudaStream:
        return CudaStream(self, priority)

    def current_stream(self) -> int:
        """Our stream (`with stream:`) if one is set, otherwise PyTorch's or CuPy's, if that is not the default."""
        stack = self._streams.handles
        if stack:
            return stack[-1]
        stream = 0
        torch = sys.modules.get("torch")
        if torch is not None and torch.cuda.is_initialized():
            stream = torch._C._cuda_getCurrentRawStream(self.index)  # noqa: SLF001  PyTorch's own; Triton calls it too
        if not stream:
            cupy = sys.modules.get("cupy")
            if cupy is not None:
                stream = cupy.cuda.get_current_stream().ptr
        return stream

    def record(self) -> CudaEvent:
        self.activate()
        return CudaEvent(self.current_stream())

    @property
    def stream_stack(self) -> list[int]:
        """The streams this thread has entered."""
        return self._streams.handles

    def synchronize(self) -> None:
        self.not_in_capture("waits for the GPU")
        self.activate()
        check(driver().cuCtxSynchronize(), "running kernels")
        finished()

    # -- kernels and their reports

    def flag(self) -> CudaFlag:
        return self._preemption.flag()

    @functools.cached_property
    def _preemption(self) -> Preemption:
        return Preemption(self)

    def prepare(self, draft: Draft, config: PassConfig, pick: Pick) -> CudaLauncher:
        self.activate()
        with relaxed_capture():  # loading code allocates memory, which must not disturb a capture in this thread
            return CudaLauncher(self, draft.source.build(config), pick)

    def function_resources(self, function: int) -> tuple[int, int]:
        """Registers per thread and static shared bytes of a loaded function."""
        cu = driver()
        names = cu.CUfunction_attribute
        wanted = (names.CU_FUNC_ATTRIBUTE_NUM_REGS, names.CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES)
        handle = cu.CUfunction(function)
        registers, shared = (int(check(cu.cuFuncGetAttribute(n, handle), "reading a kernel")) for n in wanted)
        return registers, shared

    def tile(self, descriptor: Descriptor, facts: Any) -> bytes:
        return encode_tile(descriptor, facts)

    @classmethod
    def of_thread(cls) -> CudaDevice:
        """The GPU on which the calling thread launches: PyTorch's current one, in code of PyTorch's."""
        index = ctypes.c_int()
        none = library().cuCtxGetDevice(ctypes.byref(index))  # an error if the thread has no context yet
        found: CudaDevice = cls.open("cuda" if none else f"cuda:{index.value}")
        return found

    def is_capturing(self, stream: int) -> bool:
        """Whether launches on `stream` go into a CUDA graph instead of onto the GPU."""
        status = ctypes.c_int()
        if code := library().cuStreamIsCapturing(stream, ctypes.byref(status)):
            fail(code, "asking for a capture")
        return status.value != 0  # CU_STREAM_CAPTURE_STATUS_NONE

    def next_notify_word(self) -> tuple[NDArray[np.uint64], int, int]:
        """A cleared word of pinned memory: array, index and address. Words are reused after 4096 launches."""
        self._notified = (self._notified + 1) % _NOTIFY_WORDS
        index = 2 + self._notified
        self._pinned[index] = 0
        return self._pinned, index, self._pinned_address + 8 * index

    def counts(self) -> Records:
        self.not_in_capture("reads counters")
        cu = driver()
        self.activate()
        with self._counting:
            if self._counter_stream is None:
                # A separate stream: reading live counters must not wait for the kernels that write them.
                self._counter_stream = CudaStream(self, 0)
                self._counter_words = self.allocate_pinned(self.lines.nbytes)
            target, stream = self._counter_words, self._counter_stream
            check(
                cu.cuMemcpyDtoHAsync(target.ctypes.data, self.lines.ptr, target.nbytes, stream.handle),
                "reading counters",
            )
            check(cu.cuStreamSynchronize(stream.handle), "reading counters")
            return target.view(SM_LINE).copy()

    def begin_trace(self, records_per_sm: int) -> None:
        self.activate()
        if records_per_sm not in self._rings:
            self._rings[records_per_sm] = self.empty((self.sm_ids, records_per_sm), RING_RECORD)
        self.rings = self._rings[records_per_sm]
        self._events.begin()
        self.synchronize()
        self.zero(self.lines)
        self.zero(self.rings)
        self.clock_ns()

    def end_trace(self) -> tuple[Records, Records]:
        found = self.read_trace()
        self.rings = None
        return found

    def read_trace(self) -> tuple[Records, Records]:
        rings = self.rings
        assert rings is not None
        self.synchronize()
        lines = self.lines.numpy()
        capacity = rings.shape[1]
        used = int(min(capacity, lines["tail"].max()))
        out = np.zeros((self.sm_ids, capacity), RING_RECORD)
        cu = driver()
        copy = cu.CUDA_MEMCPY2D()
        copy.srcMemoryType = cu.CUmemorytype.CU_MEMORYTYPE_DEVICE
        copy.dstMemoryType = cu.CUmemorytype.CU_MEMORYTYPE_HOST
        copy.srcDevice, copy.dstHost = rings.ptr, out.ctypes.data
        copy.srcPitch = copy.dstPitch = capacity * RING_RECORD.itemsize
        copy.WidthInBytes, copy.Height = used * RING_RECORD.itemsize, self.sm_ids
        if used:
            check(cu.cuMemcpy2D(copy), "reading the trace")
        return lines, out

    @functools.cached_property
    def _events(self) -> EventMemory:
        return EventMemory(self)

    def place_for_events(self, layout: EventLayout, launch: int, stream: int) -> int:
        return self._events.place(layout, launch, self.is_capturing(stream))

    def forget_events(self, launches: Iterable[int]) -> None:
        self._events.forget(launches)

    def range_events(self, launches: NDArray[np.uint32]) -> Iterable[Events]:
        return self._events.read(launches)

    def clock_ns(self) -> int:
        self.activate()
        return self._clock.read_ns()

    def to_device_ns(self, host_ns: int) -> int:
        return host_ns + self._clock.offset_ns


Device.kinds["cuda"] = CudaDevice
