"""The launch path on a real GPU: packs values into a buffer and calls cuLaunchKernel."""

from __future__ import annotations

import ctypes
import functools
import struct
import sys
from collections.abc import Sequence
from typing import Any, NoReturn, Protocol

import numpy as np
from numpy.typing import NDArray

from paellapy.instrument.arguments import (
    SCALARS,
    Descriptor,
    Handler,
    Handlers,
    param_offsets,
    pointer_keys,
    without_memory,
)
from paellapy.instrument.device.base import Blocks, Call, Capture, EventLayout, Launcher, Pick, Work, check_grid
from paellapy.instrument.device.cuda_preempt import CudaFlag, CudaRun
from paellapy.instrument.device.driver import CudaArray, Gpu, check, driver, fail_launch, library, unfinished
from paellapy.instrument.errors import ArgumentError, out_of_resources
from paellapy.instrument.gpu_model.parts import SmLimits
from paellapy.instrument.ptx.compiled import TRITON_PARAMS, Compiled, Draft
from paellapy.instrument.ptx.descriptor import PassConfig
from paellapy.instrument.ptx.ranges import Ranges, Sites
from paellapy.instrument.records import DESCRIPTOR, MAGIC, field_offset

_INVALID_CONTEXT = 201
_DEFAULT_SHARED_LIMIT = 48 * 1024
# CU_LAUNCH_PARAM_BUFFER_POINTER, CU_LAUNCH_PARAM_BUFFER_SIZE, CU_LAUNCH_PARAM_END
_BUFFER_POINTER, _BUFFER_SIZE, _END = 1, 2, 0
_launched = unfinished.append
_WORD, _QWORD = struct.Struct("<I"), struct.Struct("<Q")
_SLICE = struct.Struct("<4I")  # first, grid_x, grid_y, grid_z: adjacent in the descriptor
_FLAG_AND_EPOCH, _LISTS = struct.Struct("<QI"), struct.Struct("<2Q")  # flag, epoch; todo, left: adjacent too
_FIRST, _LAUNCH, _NOTIFY = (field_offset(DESCRIPTOR, n) for n in ("first", "launch", "notify"))
_FLAG, _TODO = (field_offset(DESCRIPTOR, n) for n in ("flag", "todo"))
_RANGE_MASK, _RANGES = (field_offset(DESCRIPTOR, n) for n in ("range_mask", "ranges"))


class LaunchGpu(Gpu, Protocol):
    """The parts of the GPU that a launch uses."""

    title: str
    limits: SmLimits
    capture: Capture | None
    session: Any
    lines: CudaArray
    rings: CudaArray | None

    def current_stream(self) -> int: ...
    def prepare(self, draft: Draft, config: PassConfig, pick: Pick) -> Launcher: ...
    def next_notify_word(self) -> tuple[NDArray[np.uint64], int, int]: ...
    def place_for_events(self, layout: EventLayout, launch: int, stream: int) -> int: ...


class _ParamBuffer:
    """One launch's parameters: the kernel's own, then the descriptor, and the array through which CUDA finds them.

    The array is `extra`, for the buffer as a whole, or, with `offsets`, `each`: the address of each parameter.
    """

    __slots__ = ("array", "bytes", "each", "extra", "size")

    def __init__(self, size: int, offsets: Sequence[int]) -> None:
        self.bytes = ctypes.create_string_buffer(size)
        self.size = ctypes.c_size_t(size)
        self.each: int | None = None
        self.extra: int | None = None
        start = ctypes.addressof(self.bytes)
        if offsets:
            self.array = (ctypes.c_void_p * len(offsets))(*(start + offset for offset in offsets))
            self.each = ctypes.addressof(self.array)
        elif size:
            self.array = (ctypes.c_void_p * 5)(_BUFFER_POINTER, start, _BUFFER_SIZE, ctypes.addressof(self.size), _END)
            self.extra = ctypes.addressof(self.array)


class Notification:
    """The result of a launch at level `notify`: set once its last block is on an SM."""

    __slots__ = ("_index", "_words")

    def __init__(self, words: NDArray[np.uint64], index: int) -> None:
        self._words, self._index = words, index

    @property
    def time_ns(self) -> int:
        """When the last block started, on the device's clock; 0 before that."""
        return int(self._words[self._index])

    def __bool__(self) -> bool:
        return bool(self._words[self._index])


class CudaLauncher(Launcher):
    def __init__(self, device: LaunchGpu, compiled: Compiled, pick: Pick) -> None:
        cu = driver()
        source = compiled.source
        self.device, self.compiled, self.pick, self._name = device, compiled, pick, compiled.name
        self._module = check(cu.cuModuleLoadData(compiled.cubin), f"loading kernel {compiled.name!r}")
        function = check(cu.cuModuleGetFunction(self._module, compiled.name.encode()), "finding the kernel")
        self._function = int(function)
        self._block = (source.threads, 1, 1) if source.threads else None
        self._allow_shared(source.dynamic_shared_bytes)
        self._launch = library().cuLaunchKernel
        own_format = compiled.param_format
        self._pack = struct.Struct(own_format).pack_into
        own = struct.calcsize(own_format)
        self._descriptor_at = own + -own % 8
        changed = compiled.config.changes_anything
        self._size = self._descriptor_at + DESCRIPTOR.itemsize if changed else own
        # A structure may need more alignment than the place where the GPU keeps parameters has. Then a gap is ahead of
        # the first parameter, as large as only the driver knows, so the driver gets the address of each.
        offsets = param_offsets(own_format) if "s" in own_format else []
        self._offsets = [*offsets, self._descriptor_at] if offsets and changed else offsets
        self._free: list[_ParamBuffer] = []  # popped and put back: list operations are atomic, so threads may share it
        self._special = source.cluster > 1 or source.cooperative or source.dependent
        self._hidden = (0,) * (TRITON_PARAMS - compiled.unread_params if source.ttir else 0)
        self._scratch_per_block = source.scratch_bytes
        self._trace = compiled.config.report == "trace"
        self._ranges = Ranges.in_text(source.ptx) if self._trace else Ranges()
        self._sites = Sites.in_text(compiled.ptx) if self._ranges.names else Sites()
        self._rings: Any = None  # the rings to which the buffers in _free point
        self._notify = compiled.config.notifies
        self._sliced = compiled.config.sliced

    def _allow_shared(self, nbytes: int) -> None:
        total = nbytes + self.compiled.code.static_shared_bytes
        if total > self.device.limits.shared_bytes_per_block:
            most = self.device.limits.shared_bytes_per_block
            raise out_of_resources(
                f"kernel {self.compiled.name!r} needs {total} bytes of shared memory per block; "
                f"{self.device.title} has {most}. Use smaller tiles or fewer stages.",
                "shared memory", total, most,
            )  # fmt: skip
        if nbytes > _DEFAULT_SHARED_LIMIT:
            cu = driver()
            attribute = cu.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            check(cu.cuFuncSetAttribute(cu.CUfunction(self._function), attribute, nbytes), "reserving shared memory")
        self._allowed_shared = max(nbytes, _DEFAULT_SHARED_LIMIT)

    def _new_buffer(self) -> _ParamBuffer:
        buffer = _ParamBuffer(self._size, self._offsets)
        if self.compiled.config.changes_anything:
            rings = self.device.rings
            descriptor = np.zeros((), DESCRIPTOR)
            descriptor["lines"], descriptor["magic"] = self.device.lines.ptr, MAGIC
            if self._trace and rings is not None:
                descriptor["rings"], descriptor["ring_mask"] = rings.ptr, rings.shape[1] - 1
            at = ctypes.addressof(buffer.bytes) + self._descriptor_at
            ctypes.memmove(at, descriptor.tobytes(), DESCRIPTOR.itemsize)
        return buffer

    def __call__(  # noqa: PLR0915  every launch takes this path, and every call costs time
        self,
        grid: tuple[int, ...],
        values: Sequence[Any],
        block: tuple[int, ...] = (),
        shared_bytes: int = 0,
        part: tuple[int, int] | None = None,
        words: tuple[int, int, int, int] | None = None,
    ) -> Notification | None:
        # One long function, because every call adds to the few microseconds of a launch.
        device = self.device
        if device.capture is not None and device.capture.active:
            return device.capture.launch(self, Call(grid, values, block, shared_bytes, part))  # type: ignore[no-any-return]
        source = self.compiled.source
        gx, gy, gz = grid if len(grid) == 3 else (*grid, 1, 1)[:3]
        if gx <= 0 or gy <= 0 or gz <= 0:
            check_grid(self.compiled.name, grid)
            return None  # an empty grid launches nothing, as in Triton
        bx, by, bz = self._block or (*block, 1, 1)[:3]
        if shared_bytes:
            if shared_bytes > self._allowed_shared:
                self._allow_shared(shared_bytes)
        else:
            shared_bytes = source.dynamic_shared_bytes
        gx *= source.cluster
        stream = device.current_stream()
        scratch = 0
        hidden = self._hidden
        if self._scratch_per_block:
            scratch = self._allocate_scratch(gx * gy * gz, stream)
            hidden = (scratch, *self._hidden[1:])
        if self._trace and self._rings is not device.rings:
            self._free, self._rings = [], device.rings
        buffer = self._free.pop() if self._free else self._new_buffer()
        try:
            self._pack(buffer.bytes, 0, *self.pick(values), *hidden)
        except (struct.error, OverflowError) as e:
            raise ArgumentError(
                f"kernel {self.compiled.name!r}: an argument does not fit its parameter: {e}",
                kernel=self.compiled.name, field="argument",
            ) from None
        first, count = 0, gx * gy * gz
        if self._sliced:
            first, count = part or (0, count)
            _SLICE.pack_into(buffer.bytes, self._descriptor_at + _FIRST, first, gx, gy, gz)
        if self._trace:
            facts = ((gx, gy, gz), bx * by * bz, shared_bytes, first, count, stream, values)
            launch = device.session.add(self.compiled, *facts)
            _WORD.pack_into(buffer.bytes, self._descriptor_at + _LAUNCH, launch)
            if self._ranges.names:
                layout = EventLayout.of(self._ranges, self._sites, gx * gy * gz, bx * by * bz)
                place = device.place_for_events(layout, launch, stream)
                _WORD.pack_into(buffer.bytes, self._descriptor_at + _RANGE_MASK, layout.mask)
                _QWORD.pack_into(buffer.bytes, self._descriptor_at + _RANGES, place)
        if words is not None:
            _LISTS.pack_into(buffer.bytes, self._descriptor_at + _TODO, *words[:2])
            _FLAG_AND_EPOCH.pack_into(buffer.bytes, self._descriptor_at + _FLAG, *words[2:])
        notification = self._to_be_notified(buffer) if self._notify else None
        if self._sliced:
            gx, gy, gz = count, 1, 1
        if self._special:
            status = self._launch_special((gx, gy, gz), (bx, by, bz), shared_bytes, stream, buffer)
        else:
            call = (self._function, gx, gy, gz, bx, by, bz, shared_bytes, stream, buffer.each, buffer.extra)
            status = self._launch(*call)
            if status == _INVALID_CONTEXT:
                device.activate()
                status = self._launch(*call)
        self._free.append(buffer)
        if scratch and (device.capture is None or not device.capture.mine):
            check(driver().cuMemFreeAsync(scratch, stream), "freeing scratch memory")
        if status:
            doing = f"launching kernel {self._name!r} on grid {grid} with blocks of {(bx, by, bz)}"
            fail_launch(status, stream, self._name, grid, doing)
        _launched((stream, self._name, grid))
        return notification

    def under(self, flag: CudaFlag, work: Work, blocks: Blocks) -> CudaRun:
        """Launches some blocks under a flag, on the work's own stream."""
        streams = self.device.stream_stack
        streams.append(work.stream)
        try:
            run = CudaRun(flag, work, blocks)
            part = run.part if self._sliced else None
            self(work.grid, work.values, work.block, work.shared_bytes, part, run.words)
            run.launched()
        finally:
            streams.pop()
        return run

    def _to_be_notified(self, buffer: _ParamBuffer) -> Notification | None:
        """Gives the launch a word to write to; None if a capture provides one."""
        capture, notification = self.device.capture, None
        if capture is not None and capture.mine and capture.notify_word:
            address = capture.notify_word
        else:
            words, index, address = self.device.next_notify_word()
            notification = Notification(words, index)
        _QWORD.pack_into(buffer.bytes, self._descriptor_at + _NOTIFY, address)
        return notification

    def _allocate_scratch(self, blocks: int, stream: int) -> int:
        nbytes = blocks * self._scratch_per_block
        capture = self.device.capture
        if capture is not None and capture.mine:
            return int(capture.empty((nbytes,), np.dtype(np.uint8)).ptr)
        return int(check(driver().cuMemAllocAsync(nbytes, stream), f"allocating {nbytes} bytes of scratch memory"))

    def _launch_special(
        self, grid: tuple[int, ...], block: tuple[int, ...], shared_bytes: int, stream: int, buffer: _ParamBuffer
    ) -> int:
        """Launches clusters and cooperative grids, which need the launch attributes of cuLaunchKernelEx."""
        cu = driver()
        config = cu.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = grid
        config.blockDimX, config.blockDimY, config.blockDimZ = block
        config.sharedMemBytes, config.hStream = shared_bytes, stream
        attributes: list[Any] = []

        def attribute(name: str) -> Any:
            attributes.append(cu.CUlaunchAttribute())
            attributes[-1].id = getattr(cu.CUlaunchAttributeID, f"CU_LAUNCH_ATTRIBUTE_{name}")
            return attributes[-1].value

        source = self.compiled.source
        if source.cluster > 1:
            size = attribute("CLUSTER_DIMENSION").clusterDim
            size.x, size.y, size.z = source.cluster, 1, 1
        if source.cooperative:
            attribute("COOPERATIVE").cooperative = 1
        if source.dependent:
            attribute("PROGRAMMATIC_STREAM_SERIALIZATION").programmaticStreamSerializationAllowed = 1
        config.attrs, config.numAttrs = attributes, len(attributes)
        return int(cu.cuLaunchKernelEx(config, cu.CUfunction(self._function), buffer.each or 0, buffer.extra or 0)[0])


# Kernel arguments on a real GPU: arrays of ours, of PyTorch and of CuPy become addresses and facts about alignment.


def cuda_handlers(device: Gpu) -> Handlers:
    """The handlers of arguments for kernels that run on this GPU."""
    known = {**SCALARS, CudaArray: _cuda_array_handler(device), np.ndarray: _refuse_numpy}
    return Handlers(known, functools.partial(_find, device))


def _find(device: Gpu, kind: type) -> Handler | None:
    torch = sys.modules.get("torch")
    if kind.__name__ == "FakeTensor":
        return _refuse_fake
    if torch is not None and issubclass(kind, torch.Tensor):
        return _torch_handler(device)
    if kind.__module__.partition(".")[0] == "cupy" and kind.__name__ == "ndarray":
        return _cupy_handler(device)
    if hasattr(kind, "__cuda_array_interface__"):
        return _interface_handler
    if issubclass(kind, np.ndarray):
        return _refuse_numpy
    return _address_handler if hasattr(kind, "data_ptr") else None


def _cuda_array_handler(device: Gpu) -> Handler:
    aligned, lookup = pointer_keys()

    def handle(a: CudaArray) -> tuple[int, Any]:
        if a.device is not device:
            raise ArgumentError(
                f"the array is on {a.device.name}, but the kernel runs on {device.name}: copy the array there",
                field="device", given=a.device.name, limit=device.name,
            )
        return a.ptr, aligned.get(a.dtype) or lookup(a.dtype, True)  # the driver aligns to 256

    return handle


def _torch_handler(device: Gpu) -> Handler:
    aligned, lookup = pointer_keys()
    index = device.index

    def handle(t: Any) -> tuple[int, Any]:
        if t.get_device() != index:
            raise ArgumentError(
                f"the tensor is on {t.device}, but the kernel runs on {device.name}: move it with .to()",
                field="device", given=str(t.device), limit=device.name,
            )
        try:
            ptr = t.data_ptr()
        except RuntimeError as error:  # a tensor on the device "meta", or of a class that holds others
            raise without_memory(t) from error
        if ptr & 15:
            return ptr, lookup(t.dtype, False)
        return ptr, aligned.get(t.dtype) or lookup(t.dtype, True)

    return handle


def _refuse_fake(tensor: Any) -> NoReturn:
    raise without_memory(tensor)  # its address is read with a warning only


def _cupy_handler(device: Gpu) -> Handler:
    aligned, lookup = pointer_keys()
    index = device.index

    def handle(a: Any) -> tuple[int, Any]:
        data = a.data
        if data.device_id != index:
            raise ArgumentError(
                f"the array is on cuda:{data.device_id}, but the kernel runs on {device.name}: copy the array there",
                field="device", given=data.device_id, limit=device.name,
            )
        ptr = data.ptr
        if ptr & 15:
            return ptr, lookup(a.dtype, False)
        return ptr, aligned.get(a.dtype) or lookup(a.dtype, True)

    return handle


def _interface_handler(a: Any) -> tuple[int, Any]:
    _, lookup = pointer_keys()
    interface = a.__cuda_array_interface__
    ptr = interface["data"][0]
    return ptr, lookup(np.dtype(interface["typestr"]), not ptr & 15)


def _address_handler(a: Any) -> tuple[int, Any]:
    """For an object with `data_ptr()` and `dtype`, as Triton takes it."""
    _, lookup = pointer_keys()
    ptr = int(a.data_ptr())
    return ptr, lookup(a.dtype, not ptr & 15)


def _refuse_numpy(a: Any) -> tuple[int, Any]:
    raise ArgumentError(
        "a NumPy array is in host memory, but the kernel runs on the GPU: copy it with pp.array(x) or cupy.asarray(x), "
        'or run the kernel on the virtual GPU: with pp.Device("virtual:h200"): …', field="array"
    )


# --- tensor descriptors on a real GPU: the CUtensorMap that a kernel's bulk copies use --------------------------------

# Triton numbers element types as the device does; three of the driver's numbers differ.
_HOST_TYPES = {8: 10, 9: 8, 10: 9}
_TF32 = 11


def encode_tile(descriptor: Descriptor, facts: dict[str, Any]) -> bytes:
    """The 128 bytes of the map. `facts` is one entry of Triton's `tensordesc_meta`."""
    cu = driver()
    shape = list(descriptor.shape)
    if facts["fp4_padded"]:
        shape[-1] *= 2
    kind = _TF32 if descriptor.tf32 else _HOST_TYPES.get(facts["elem_type"], facts["elem_type"])
    size, rank = facts["elem_size"], len(shape)
    # The driver counts dimensions from the innermost one, and omits its stride. It refuses an empty list.
    strides = [size * stride for stride in descriptor.strides[-2::-1]] or [size * shape[0]]
    fill = cu.CUtensorMapFloatOOBfill
    encoded = cu.cuTensorMapEncodeTiled(
        cu.CUtensorMapDataType(kind),
        rank,
        descriptor.base,
        [cu.cuuint64_t(extent) for extent in reversed(shape)],
        [cu.cuuint64_t(stride) for stride in strides],
        [cu.cuuint32_t(extent) for extent in reversed(facts["block_size"])],
        [cu.cuuint32_t(1)] * rank,
        cu.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
        cu.CUtensorMapSwizzle(facts["swizzle"]),
        cu.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
        fill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NAN_REQUEST_ZERO_FMA
        if descriptor.nan_padding
        else fill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
    )
    words = check(encoded, "describing a tensor").opaque
    return b"".join(int(word).to_bytes(8, "little") for word in words)
