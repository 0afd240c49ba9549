"""Measures a segment's use of GPU bandwidth and tensor units by its slowdown beside a kernel that wants them all.

Such a kernel is called a hog. No hardware counters are needed. This module has the hog of bandwidth; cuda_tensor_hog.py
has the hog of tensor units.

The hog leaves most of the room on each SM to others. Where the total demand exceeds the capacity, all are slowed down
equally: beside a hog that takes the fraction h, a segment of fraction m takes max(1, h + m) times as long. h is
measured too: the hog's pace relative to that of several hogs on each SM.

Some kernels leave no room for a hog, nor for any other kernel, on their SMs: a matrix product of cuBLAS on Hopper takes
all registers of an SM. Such a segment takes the whole arithmetic and bandwidth of these SMs, and is not measured.

Segments are measured one at a time: CUDA assigns graphs to the GPU's queues in turn, and a graph in the hog's queue
waits for the hog's end. The hog reads its stop word rarely, because the word is in host memory.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from paellapy.instrument.device.cuda import CudaDevice
from paellapy.instrument.device.cuda_memory import CudaArray, CudaStream
from paellapy.instrument.device.driver import check, driver
from paellapy.instrument.device.occupancy import Footprint, fits, footprint
from paellapy.instrument.device.parts import SmLimits
from paellapy.scheduler.backends.cuda_tensor_hog import TensorHog, prefer_shared
from paellapy.scheduler.models.program import Node

_SPAN_BYTES = 1 << 28  # read again and again: several times the size of the L2 cache
_MANY = 4  # hogs per SM, to measure the pace at full load
THREADS = 256
_BLOCKS = 2  # hogs per SM beside a segment: few, so that most of the room is left
_TRIAL_NS = 2_000_000
_REPEATS = 5
_SLOWED = 1.03  # below this slowdown, the segment's share fits beside the hog and counts as zero
_WAITED = 6.0  # multiple of its time alone above which a segment has waited for the hog's end

_LOADS = 6
_ENTRY = """
.version 7.0
.target sm_80
.address_size 64
.visible .entry memory_hog(
  .param .u64 data, .param .u64 mask, .param .u64 stop, .param .u64 longest, .param .u64 counts
)
.maxntid 256
{{
  .reg .pred %p<4>;
  .reg .b32 %r<64>;
  .reg .b64 %d<32>;
  ld.param.u64 %d1, [data];
  ld.param.u64 %d2, [mask];
  ld.param.u64 %d3, [stop];
  ld.param.u64 %d4, [longest];
  ld.param.u64 %d5, [counts];
  mov.u64 %d6, %globaltimer;
  add.u64 %d4, %d4, %d6;
  mov.u32 %r1, %tid.x;
  mov.u32 %r2, %ctaid.x;
  mov.u32 %r3, %nctaid.x;
  mad.lo.u32 %r4, %r2, 256, %r1;
  mul.wide.u32 %d7, %r4, 16;
  mul.wide.u32 %d8, %r3, 4096;
  mov.u64 %d9, 0;
  mov.u32 %r5, 0;
AGAIN:
{work}
  add.u64 %d9, %d9, 1;
  and.b64 %d10, %d9, 255;
  setp.ne.u64 %p1, %d10, 0;
  @%p1 bra AGAIN;
  ld.volatile.global.u64 %d11, [%d3];
  mov.u64 %d6, %globaltimer;
  setp.lt.u64 %p2, %d6, %d4;
  setp.eq.and.u64 %p2, %d11, 0, %p2;
  @%p2 bra AGAIN;
{after}
  setp.ne.u32 %p3, %r1, 0;
  @%p3 bra OVER;
  mul.wide.u32 %d12, %r2, 8;
  add.u64 %d12, %d12, %d5;
  st.global.u64 [%d12], %d9;
OVER:
  ret;
}}
"""


def memory_hog() -> str:
    loads = []
    for k in range(_LOADS):  # all in flight at once
        loads += [
            f"  and.b64 %d{20 + k}, %d7, %d2;",
            f"  add.u64 %d{20 + k}, %d{20 + k}, %d1;",
            "  add.u64 %d7, %d7, %d8;",
            f"  ld.global.cs.v4.u32 {{%r{10 + 4 * k}, %r{11 + 4 * k}, %r{12 + 4 * k}, %r{13 + 4 * k}}}, [%d{20 + k}];",
        ]
    sums = [f"  xor.b32 %r5, %r5, %r{k};" for k in range(10, 10 + 4 * _LOADS)]
    # The loaded values must be used, or the compiler would drop the loads.
    after = "  setp.ne.u32 %p3, %r5, 305419896;\n  @%p3 bra KEEP;\n  st.global.u32 [%d1], %r5;\nKEEP:"
    return _ENTRY.format(work="\n".join([*loads, *sums]), after=after)


class Hogs:
    """Both hogs on one GPU, and the fraction of the bandwidth that the first one gets alone."""

    def __init__(self, device: CudaDevice) -> None:
        cu = driver()
        self._device = device
        device.activate()
        self._module = check(cu.cuModuleLoadData(memory_hog().encode() + b"\0"), "loading the hogs")
        self._function = check(cu.cuModuleGetFunction(self._module, b"memory_hog"), "loading a hog")
        prefer_shared(self._function)
        self._data = CudaArray(device, (_SPAN_BYTES,), np.dtype(np.uint8))
        device.zero(self._data)
        self._counts = CudaArray(device, (device.sm_count * _MANY,), np.dtype(np.uint64))
        self._stop = device._allocate_pinned(64)
        self._stream = CudaStream(device, 0)
        self.part = min(self._pace(_BLOCKS) / max(self._pace(_MANY), 1.0), 1.0)
        attribute = cu.CUfunction_attribute.CU_FUNC_ATTRIBUTE_NUM_REGS
        registers = int(check(cu.cuFuncGetAttribute(attribute, self._function), "reading a hog"))
        self.tensor = TensorHog(device)
        # Resources on each SM, beside a segment.
        self.takes = [footprint(device.limits, THREADS, registers, 0) * _BLOCKS, self.tensor.takes]

    def _launch(self, each: int, longest_ns: int) -> None:
        self._stop[0] = 0
        values = (self._data.ptr, _SPAN_BYTES - 1, self._stop.ctypes.data, longest_ns, self._counts.ptr)
        params = (values, (ctypes.c_uint64,) * len(values))
        check(
            driver().cuLaunchKernel(
                self._function, each * self._device.sm_count, 1, 1, THREADS, 1, 1, 0, self._stream.handle, params, 0
            ),
            "launching a hog",
        )

    def _pace(self, each: int) -> float:
        """Rounds of all hogs together, with this number of hogs on each SM."""
        found = []
        for _ in range(3):
            self._launch(each, _TRIAL_NS)
            self._stream.synchronize()
            found.append(float(self._counts.numpy()[: each * self._device.sm_count].sum()))
        return max(found)

    def beside(self, measure: Callable[[], float], longest_ns: int) -> float:
        """The result of `measure` while the hog runs; the hog ends after `longest_ns` at the latest."""
        found = []
        for _ in range(_REPEATS):
            self._launch(_BLOCKS, longest_ns)
            time.sleep(100e-6)  # lets the hog reach the SMs before the measured work
            try:
                found.append(measure())
            finally:
                self._stop[0] = 1
                self._stream.synchronize()
        return float(np.median(found))

    def close(self) -> None:
        self._device.activate()
        self.tensor.close()
        driver().cuModuleUnload(self._module)


def part_taken(alone_ns: Sequence[float], beside_ns: Sequence[float], hog: float) -> list[float]:
    """The share of each segment in the hog's resource; 0 if it was not slowed down, or waited for the hog's end.

    >>> part_taken([100.0, 100.0, 100.0], [195.0, 101.0, 900.0], 0.95)
    [1.0, 0.0, 0.0]
    """
    stretch = np.asarray(beside_ns) / np.maximum(alone_ns, 1.0)
    part = np.clip(stretch - hog, 0.0, 1.0)
    return [round(float(x), 3) for x in np.where((stretch > _WAITED) | (stretch < _SLOWED), 0.0, part)]


def part_without_place(nodes: Sequence[Node], hogs: Sequence[Footprint], limits: SmLimits, sms: int) -> float:
    """The fraction of the SMs on which a kernel leaves no room for one of the hogs; 0 if there is no such kernel."""
    found = 0.0
    for node in nodes:
        if node.kind == "kernel":
            own = footprint(limits, node.threads, node.registers, node.shared_bytes)
            if not all(fits(limits, own, hog) for hog in hogs):
                found = max(found, min(node.blocks / sms, 1.0))
    return found


def segment_shares(
    hogs: Hogs, time_segment: Callable[[int], float], tensor_share: Callable[[int], float],
    alone_ns: Sequence[float], without_place: Sequence[float],
) -> list[tuple[float, float]]:  # fmt: skip
    """Shares of compute and memory of each segment. `time_segment(k)` runs a segment and returns its time."""
    measured = [k for k, part in enumerate(without_place) if not part]
    beside = [hogs.beside(partial(time_segment, k), int(8 * alone_ns[k]) + 2_000_000) for k in measured]
    memory = part_taken([alone_ns[k] for k in measured], beside, hogs.part)
    found = {k: (tensor_share(k), part) for k, part in zip(measured, memory, strict=True)}
    return [found.get(k, (part, part)) for k, part in enumerate(without_place)]
