"""A simulated GPU: kernels evaluated with NumPy, their blocks placed and timed by the SM model.

A launch computes its data at once, in the order of the host's calls. That order respects every event and stream, since
a wait can only name an event that was recorded before. Its blocks then enter the SM model with their costs, and time
passes there: a separate host clock advances with every call, so that the same program gives the same trace on every
machine. Preemptible launches are an exception: their data are computed when they are over, and a launch that follows on
the same stream waits for that.
"""

from __future__ import annotations

import math
import sys
import warnings
from collections.abc import Callable, Iterable
from typing import Any, ClassVar, Self
from weakref import WeakSet

import ml_dtypes
import numpy as np
from numpy.typing import DTypeLike, NDArray

from paellapy.instrument.arguments import (
    DTYPES,
    SCALARS,
    Handler,
    Handlers,
    PointerKey,
    pointer_keys,
    triton_dtype,
    without_memory,
)
from paellapy.instrument.device.base import Device, Event, Events, Pick, Stream
from paellapy.instrument.device.virtual_launch import NotedLaunch, VirtualFlag, VirtualLauncher, VirtualRun
from paellapy.instrument.env import ImportHook
from paellapy.instrument.errors import ArgumentError, LaunchWarning, PaellaError
from paellapy.instrument.gpu_model.costs import CostModel
from paellapy.instrument.gpu_model.model import SmModel
from paellapy.instrument.gpu_model.parts import part
from paellapy.instrument.ptx.compiled import Draft
from paellapy.instrument.ptx.descriptor import PassConfig
from paellapy.instrument.records import RING_RECORD, SM_LINE, Records
from paellapy.instrument.triton_ir.memory_ops import know, memory_at, note_addresses, storage_bytes

# --- kernel arguments on the virtual GPU: NumPy arrays and PyTorch's CPU tensors, read and written in place -----------

_TORCH_TYPES = {
    name: np.dtype(getattr(ml_dtypes, name, None) or name)
    for name in (
        "bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float16", "float32",
        "float64", "bfloat16", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz",
    )
}  # fmt: skip


def virtual_handlers() -> Handlers:
    """The handlers of arguments for kernels that run on a virtual GPU."""
    return Handlers({**SCALARS}, _find)


def _find(kind: type) -> Handler | None:
    if issubclass(kind, np.ndarray):
        return _array_handler()
    torch = sys.modules.get("torch")
    if torch is not None and issubclass(kind, torch.Tensor):
        handle = _array_handler()
        return lambda t: handle(as_array(t))  # the kernel works on the tensor's own memory
    if hasattr(kind, "data_ptr"):
        return _by_address
    if hasattr(kind, "__cuda_array_interface__"):

        def refuse(_: Any) -> tuple[Any, Any]:
            raise ArgumentError(
                f"a {kind.__module__}.{kind.__name__} cannot be passed to a kernel on the virtual GPU: "
                "pass NumPy arrays or PyTorch's CPU tensors, which the kernel then reads and writes in place",
                field="argument", given=kind.__name__,
            )

        return refuse
    return None


def _array_handler() -> Handler:
    aligned, lookup = pointer_keys()

    def handle(a: NDArray[Any]) -> tuple[Any, Any]:
        a = np.asarray(a)  # the memory itself: NumPy would pass a subclass on to every intermediate result
        if a.ctypes.data & 15:
            return a, lookup(a.dtype, False)
        return a, aligned.get(a.dtype) or lookup(a.dtype, True)

    return handle


def _by_address(thing: Any) -> tuple[Any, Any]:
    """An object with `data_ptr()` and `dtype`, as Triton takes it. Its memory belongs to an array or a tensor."""
    name, address = triton_dtype(thing.dtype), int(thing.data_ptr())
    memory = memory_at(address)
    if memory is None:
        raise ArgumentError(
            f"the address {address:#x} of a {type(thing).__name__} is in no array or tensor that paellapy knows: pass "
            "one over the memory of pp.array, pp.empty or a PyTorch CPU tensor", field="argument", given=address,
        )
    dtype = np.dtype(next(known for known, short in DTYPES.items() if short == name))
    return memory[: len(memory) // dtype.itemsize * dtype.itemsize].view(dtype), PointerKey.of(name, not address & 15)


def numpy_dtype(dtype: Any) -> np.dtype[Any]:
    """NumPy's dtype for one of PyTorch.

    >>> numpy_dtype("torch.bfloat16").name
    'bfloat16'
    """
    found = _TORCH_TYPES.get(str(dtype).removeprefix("torch."))
    if found is None:
        raise ArgumentError(
            f"a kernel cannot take tensors of {dtype}: convert them to another type", field="dtype", given=str(dtype)
        )
    return found


def as_array(tensor: Any) -> NDArray[Any]:
    """A CPU tensor's own memory as a NumPy array, for any strides and type; its base is the whole storage."""
    import torch

    if type(tensor).__name__ == "FakeTensor":
        raise without_memory(tensor)
    if tensor.device.type != "cpu":
        raise ArgumentError(
            f"a tensor on {tensor.device} cannot be passed to the virtual GPU: move it with .cpu()",
            field="device", given=str(tensor.device),
        )
    if tensor.layout != torch.strided:
        raise ArgumentError(
            f"a kernel cannot take tensors of layout {tensor.layout}: pass a dense one, or its parts",
            field="layout", given=str(tensor.layout),
        )
    dtype = numpy_dtype(tensor.dtype)
    storage = tensor.untyped_storage()
    if not storage.nbytes():
        return np.empty(tuple(tensor.shape), dtype)
    memory = storage_bytes(storage)
    size = dtype.itemsize
    strides = tuple(size * s for s in tensor.stride())
    return np.ndarray(tuple(tensor.shape), dtype, memory.data, size * tensor.storage_offset(), strides)


_MOST_LATER = 1024  # most launches kept with their costs and arguments until their place on the SMs is needed
_HISTORY = 1 << 16  # finished commands that the model keeps


class VirtualArray(np.ndarray[Any, Any]):
    """Memory of a virtual GPU: a NumPy array with the methods of a real GPU's arrays."""

    def numpy(self) -> NDArray[Any]:
        """A copy on the host, after all work submitted to the current stream is done."""
        for device in list(VirtualDevice.deferring):
            device.finish(device.current_stream())
        return np.array(self, subok=False)

    def set(self, data: NDArray[Any]) -> None:
        """Overwrites the array with host data of the same shape."""
        if np.shape(data) != self.shape:
            raise ValueError(
                f"the array has shape {self.shape}, but the data have {np.shape(data)}: both must be equal"
            )
        self[...] = data

    # -- with the names of PyTorch's tensors, which Triton's `TensorDescriptor` asks for

    def data_ptr(self) -> int:
        """The address of the first element."""
        return int(self.ctypes.data)

    def stride(self, dim: int | None = None) -> tuple[int, ...] | int:
        """The strides in elements; with `dim`, the stride of this dimension."""
        every = tuple(step // self.itemsize for step in self.strides)
        return every if dim is None else every[dim]


class VirtualDevice(Device):
    """`Device("virtual:h200")`; the parts are in parts.py."""

    first = "h200"
    deferring: ClassVar[WeakSet[VirtualDevice]] = WeakSet()  # devices with runs whose data are not computed yet

    def _setup(self, which: str) -> None:
        self.part = part(which or "h200")
        self.name, self.title = f"virtual:{self.part.name}", f"{self.part.title} (virtual)"
        self.limits, self.capability = self.part.sm, self.part.sm.capability
        self.sm_count = self.sm_ids = self.part.sms
        self.costs = CostModel.for_part(self.part)
        self._model = SmModel(self.part, timing=self.costs.timing, history=_HISTORY)
        self._counting: list[NDArray[Any]] = []  # counters (SM_LINE) of the SM models of engines
        self._counted = np.zeros(self.sm_ids, np.uint64)  # before this device's counts began
        self._later: list[Callable[[], object]] = []
        self._failed: list[PaellaError] = []  # of preemptible launches, whose data are computed late
        self.handlers = virtual_handlers()
        if "torch" in sys.modules:
            note_addresses(sys.modules["torch"])
        else:
            ImportHook("torch", note_addresses).add()
        self._default_stream = self._model.stream()
        self.stream_stack: list[int] = []  # the streams that were entered
        self._host_ns = 0.0
        self._ring_size = 0
        self.noted: list[NotedLaunch] | None = None  # launches with their costs, while a caller collects them
        self.events: list[Events] = []  # events of ranges, in the current or latest trace
        self.runs: list[VirtualRun] = []  # preemptible launches whose data are not computed yet

    evaluates = True

    @property
    def model(self) -> SmModel:
        """The SM model, with all launches so far submitted.

        A launch that the GPU refuses leaves a warning here, since its caller is not the one who asks for the model. Its
        next launch raises the error.
        """
        for error in self._submit_later():
            _warn_of(error)
        return self._model

    def _submit_later(self) -> list[PaellaError]:
        """Submits the launches that wait for it; returns the errors of those that the GPU refuses."""
        later, self._later = self._later, []
        refused = []
        for submit in later:
            try:
                submit()
            except PaellaError as error:
                refused.append(error)
        return refused

    def place(self, submit: Callable[[], object]) -> None:
        """Submits a launch to the SM model once its result is needed.

        Its place depends on registers and shared memory, which are known only at the end of compilation: where no times
        are read, kernels are never compiled that far.
        """
        self._later.append(submit)
        if len(self._later) >= _MOST_LATER:
            _ = self.model

    # -- memory and order

    def empty(self, shape: int | tuple[int, ...], dtype: DTypeLike = np.float32) -> VirtualArray:
        if self.capture is not None and self.capture.active:
            return self.capture.empty((shape,) if isinstance(shape, int) else tuple(shape), np.dtype(dtype))  # type: ignore[no-any-return]
        # Poisoned, so that a kernel that reads unwritten memory does not work here by accident.
        out = np.empty(shape, dtype)
        out.view(np.uint8).fill(0xFF) if out.dtype.kind in "fV" and out.size else out.fill(0)
        return know(out.view(VirtualArray))

    def array(self, data: NDArray[Any]) -> VirtualArray:
        self.not_in_capture("copies an array to the GPU and waits for it")
        return know(np.array(data, order="C").view(VirtualArray))

    def stream(self, priority: int = 0) -> VirtualStream:
        return VirtualStream(self, self._model.stream(priority))

    def current_stream(self) -> int:
        return self.stream_stack[-1] if self.stream_stack else self._default_stream

    def record(self) -> VirtualEvent:
        return VirtualStream(self, self.current_stream()).record()

    def synchronize(self) -> None:
        self.not_in_capture("waits for the GPU")
        refused = self._submit_later()
        self.wait_until(self._model.run())
        refused += self._failed
        self._failed = []
        for error in refused[1:]:
            _warn_of(error)
        if refused:
            raise refused[0]

    def _drain(self) -> None:
        """Waits for all launches; errors belong to others."""
        self.not_in_capture("waits for the GPU")
        self.wait_until(self.model.run())

    # -- the host's clock

    def host_ns(self) -> int:
        return int(self._host_ns)

    def submit(self) -> float:
        """The time of a submission: a call takes the host as long as a launch does beside the real part."""
        self._host_ns = max(self._host_ns, self._model.now_ns) + self.part.launch_ns
        return self._host_ns

    def wait_until(self, ns: float) -> None:
        self._host_ns = max(self._host_ns, ns)
        self.settle()

    # -- launches that may be preempted

    def flag(self) -> VirtualFlag:
        return VirtualFlag(self)

    def settle(self) -> None:
        """Computes the data of runs that are over, in the order of their launches."""
        while done := next((run for run in self.runs if self.model.done(run.handle)), None):
            self.runs.remove(done)
            done.settle()
            self._failed += [done.error] if done.error is not None else []
        (self.deferring.add if self.runs else self.deferring.discard)(self)

    def finish(self, stream: int) -> None:
        """Waits for the runs on a stream, since later work may read their results."""
        for run in [run for run in self.runs if run.stream == stream]:
            run.wait()

    def clock_ns(self) -> int:
        return int(self.model.now_ns)

    # -- kernels and their reports

    def prepare(self, draft: Draft, config: PassConfig, pick: Pick) -> VirtualLauncher:
        return VirtualLauncher(self, draft, config, pick)

    def counts(self) -> Records:
        self.model.run(max(self._host_ns, self.model.now_ns))
        self.settle()
        lines = self._lines()
        for name in ("started", "ended"):
            lines[name] -= self._counted
        return lines

    def _lines(self) -> Records:
        lines = self.model.lines.copy()
        for each in (*self._counting,):
            for name in ("started", "ended"):
                lines[name] += each[name]
        return lines

    def count_anew(self) -> None:
        """Lets the counters begin at 0."""
        self._counted = self._lines()["ended"]

    def count_too(self, lines: NDArray[Any]) -> None:
        """Adds to the device's counters what an engine's SM model counts from now on (SM_LINE)."""
        self._counting.append(lines)
        self._counted += lines["ended"]

    def count_no_more(self, lines: NDArray[Any]) -> None:
        """Keeps what the SM model has counted so far."""
        self._counting[:] = [each for each in self._counting if each is not lines]
        self._counted -= lines["ended"]

    def begin_trace(self, records_per_sm: int) -> None:
        self._drain()
        self.model.clear_blocks()
        self.count_anew()
        self._ring_size = records_per_sm
        self.events = []

    def range_events(self, launches: NDArray[np.uint32]) -> Iterable[Events]:
        return [events for events in self.events if events.launch in launches]

    def read_trace(self) -> tuple[Records, Records]:
        self._drain()
        return _rings(self.model.blocks(), self.sm_ids, self._ring_size)

    def end_trace(self) -> tuple[Records, Records]:
        found = self.read_trace()
        self.model.clear_blocks()
        return found


def _warn_of(error: PaellaError) -> None:
    kernel = getattr(error, "kernel", None)
    text = f"an earlier launch of kernel {kernel!r} does not run on this GPU and takes no time here: {error}"
    warnings.warn(LaunchWarning(text, kernel=kernel, error=error), stacklevel=4)


def _rings(blocks: Records, sm_ids: int, size: int) -> tuple[Records, Records]:
    """The blocks in the layout of a real GPU's rings."""
    lines, rings = np.zeros(sm_ids, SM_LINE), np.zeros((sm_ids, size), RING_RECORD)
    ordered = blocks[np.lexsort((blocks["start_ns"], blocks["sm"]))]
    tails = np.bincount(ordered["sm"], minlength=sm_ids)
    lines["tail"] = tails
    first = np.cumsum(tails) - tails
    slot = np.arange(len(ordered)) - first[ordered["sm"]]
    kept = slot >= tails[ordered["sm"]] - size
    ordered, slot = ordered[kept], slot[kept] & (size - 1)
    where = (ordered["sm"], slot)
    rings["start_lo"][where] = ordered["start_ns"].astype(np.uint64).astype(np.uint32)
    rings["end_lo"][where] = ordered["end_ns"].astype(np.uint64).astype(np.uint32)
    rings["block"][where] = ordered["block"]
    rings["launch"][where] = ordered["launch"]
    return lines, rings


class VirtualStream(Stream):
    def __init__(self, device: VirtualDevice, handle: int) -> None:
        self.device, self.handle = device, handle

    def synchronize(self) -> None:
        self.device.not_in_capture("waits for a stream")
        self.record().synchronize()

    def record(self) -> VirtualEvent:
        model = self.device.model
        event = model.record(self.handle, submit_ns=max(self.device.host_ns(), model.now_ns))
        return VirtualEvent(self.device, event, model.last_handle, self.handle)

    def wait(self, event: VirtualEvent) -> None:
        model = self.device.model
        self.device.finish(event.stream)
        model.wait(self.handle, event.number, submit_ns=max(self.device.host_ns(), model.now_ns))

    def __enter__(self) -> Self:
        self.device.stream_stack.append(self.handle)
        return self

    def __exit__(self, *_: object) -> None:
        self.device.stream_stack.pop()


class VirtualEvent(Event):
    def __init__(self, device: VirtualDevice, number: int, handle: int, stream: int) -> None:
        self.device, self.number, self.handle, self.stream = device, number, handle, stream
        self._at_ns = math.nan

    def done(self) -> bool:
        model = self.device.model
        model.run(max(self.device.host_ns(), model.now_ns))
        self.device.settle()
        return not math.isnan(self._at_ns) or model.done(self.handle)

    def synchronize(self) -> None:
        if math.isnan(self._at_ns):
            self._at_ns = self.device.model.run_until_done(self.handle)
        self.device.wait_until(self._at_ns)

    def elapsed_ns(self, earlier: VirtualEvent) -> float:
        for event in (earlier, self):
            event.synchronize()
        return self._at_ns - earlier._at_ns


Device.kinds["virtual"] = VirtualDevice
