"""What a segment takes of the GPU's bandwidth and tensor units: how much longer it runs beside a kernel that wants all.

No hardware counters are needed.

The hog leaves most of each SM's places to others. Where all ask for more than there is, everybody is slowed down alike:
beside a hog that takes the part h, a segment of part m takes max(1, h + m) times as long. h is measured too: the hog's
pace against that of several on each SM. A segment that the hog leaves no place for waits until the hog is over; nothing
is said of it.

Segments are measured one at a time: CUDA deals graphs out to the GPU's queues in turn, and one that comes to the hog's
queue waits for its end. The hog looks at its stop word rarely, since that is in the host's memory.
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

THREADS = 256
_SPAN_BYTES = 1 << 28  # read again and again: several times what the L2 cache holds
_MANY = 4  # blocks of a hog on an SM, to see what all of them get
_BLOCKS = {"tensor_hog": 1, "memory_hog": 2}  # on an SM beside a segment: so few that most of its places are left
_TRIAL_NS = 2_000_000
_REPEATS = 5
_MOST_STRETCH = 2.3  # beyond, the segment has waited for the hog's end

_LOADS = 6
_HEAD = """
.version 7.0
.target sm_80
.address_size 64
"""
_ENTRY = """
.visible .entry {name}(.param .u64 data, .param .u64 mask, .param .u64 stop, .param .u64 longest, .param .u64 counts)
.maxntid 256
{{
  .reg .pred %p<4>;
  .reg .b32 %r<64>;
  .reg .f32 %f<32>;
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
{before}
AGAIN:
{work}
  add.u64 %d9, %d9, 1;
  and.b64 %d10, %d9, {pause};
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


def _memory_hog() -> str:
    loads = []
    for k in range(_LOADS):  # all in flight at once
        loads += [
            f"  and.b64 %d{20 + k}, %d7, %d2;",
            f"  add.u64 %d{20 + k}, %d{20 + k}, %d1;",
            "  add.u64 %d7, %d7, %d8;",
            f"  ld.global.cs.v4.u32 {{%r{10 + 4 * k}, %r{11 + 4 * k}, %r{12 + 4 * k}, %r{13 + 4 * k}}}, [%d{20 + k}];",
        ]
    sums = [f"  xor.b32 %r5, %r5, %r{k};" for k in range(10, 10 + 4 * _LOADS)]
    # What is loaded must be of use, or the loads would be left out.
    after = "  setp.ne.u32 %p3, %r5, 305419896;\n  @%p3 bra KEEP;\n  st.global.u32 [%d1], %r5;\nKEEP:"
    return _ENTRY.format(name="memory_hog", pause=255, before="", work="\n".join([*loads, *sums]), after=after)


def _tensor_hog() -> str:
    before = [f"  mov.f32 %f{k}, 0f00000000;" for k in range(16)]
    before += [f"  mov.b32 %r{k}, 0;" for k in range(10, 16)]
    product = "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32"
    work = []
    for k in range(8):  # four chains, two steps of each
        f = 4 * (k % 4)
        own = f"{{%f{f}, %f{f + 1}, %f{f + 2}, %f{f + 3}}}"
        work.append(f"  {product} {own}, {{%r10, %r11, %r12, %r13}}, {{%r14, %r15}}, {own};")
    sums = [f"  add.f32 %f0, %f0, %f{k};" for k in range(1, 16)]
    after = "  setp.eq.f32 %p3, %f0, 0f00000000;\n  @%p3 bra KEEP;\n  st.global.f32 [%d1], %f0;\nKEEP:"
    after = "\n".join([*sums, after])
    return _ENTRY.format(name="tensor_hog", pause=4095, before="\n".join(before), work="\n".join(work), after=after)


HOGS = _HEAD + _memory_hog() + _tensor_hog()
NAMES = ("tensor_hog", "memory_hog")


class Hogs:
    """Both hogs on one GPU, and how much of what they want each gets alone."""

    def __init__(self, device: CudaDevice) -> None:
        cu = driver()
        self._device = device
        device.activate()
        self._module = check(cu.cuModuleLoadData(HOGS.encode() + b"\0"), "loading the hogs")
        self._functions = {n: check(cu.cuModuleGetFunction(self._module, n.encode()), "loading a hog") for n in NAMES}
        self._data = CudaArray(device, (_SPAN_BYTES,), np.dtype(np.uint8))
        device.zero(self._data)
        self._counts = CudaArray(device, (device.sm_count * _MANY,), np.dtype(np.uint64))
        self._stop = device._allocate_pinned(64)
        self._stream = CudaStream(device, 0)
        self.parts = {name: self._part(name) for name in NAMES}

    def _launch(self, name: str, each: int, longest_ns: int) -> None:
        self._stop[0] = 0
        values = (self._data.ptr, _SPAN_BYTES - 1, self._stop.ctypes.data, longest_ns, self._counts.ptr)
        params = (values, (ctypes.c_uint64,) * len(values))
        check(
            driver().cuLaunchKernel(
                self._functions[name], each * self._device.sm_count, 1, 1, THREADS, 1, 1, 0, self._stream.handle,
                params, 0,
            ),
            "launching a hog",
        )  # fmt: skip

    def _pace(self, name: str, each: int) -> float:
        """Rounds of all hogs together, where each SM has so many."""
        found = []
        for _ in range(3):
            self._launch(name, each, _TRIAL_NS)
            self._stream.synchronize()
            found.append(float(self._counts.numpy()[: each * self._device.sm_count].sum()))
        return max(found)

    def _part(self, name: str) -> float:
        return min(self._pace(name, _BLOCKS[name]) / max(self._pace(name, _MANY), 1.0), 1.0)

    def beside(self, name: str, measure: Callable[[], float], longest_ns: int) -> float:
        """What `measure` says while the hog runs; `longest_ns` is when the hog is over at the latest."""
        found = []
        for _ in range(_REPEATS):
            self._launch(name, _BLOCKS[name], longest_ns)
            time.sleep(100e-6)  # it is on the SMs before what is measured comes
            try:
                found.append(measure())
            finally:
                self._stop[0] = 1
                self._stream.synchronize()
        return float(np.median(found))

    def close(self) -> None:
        self._device.activate()
        driver().cuModuleUnload(self._module)


def part_taken(alone_ns: Sequence[float], beside_ns: Sequence[float], hog: float) -> list[float]:
    """What each segment takes of what the hog wants; 0 where the hog left it no place.

    >>> part_taken([100.0, 100.0, 100.0], [195.0, 101.0, 900.0], 0.95)
    [1.0, 0.06, 0.0]
    """
    stretch = np.asarray(beside_ns) / np.maximum(alone_ns, 1.0)
    part = np.clip(stretch - hog, 0.0, 1.0)
    return [round(float(x), 3) for x in np.where(stretch > _MOST_STRETCH, 0.0, part)]


def segment_shares(
    hogs: Hogs, time_segment: Callable[[int], float], alone_ns: Sequence[float]
) -> list[tuple[float, float]]:
    """Compute and memory of each segment. `time_segment(k)` runs one and says what it took."""
    taken = []
    for name in NAMES:
        beside = [
            hogs.beside(name, partial(time_segment, k), int(8 * ns) + 2_000_000) for k, ns in enumerate(alone_ns)
        ]
        taken.append(part_taken(alone_ns, beside, hogs.parts[name]))
    return list(zip(*taken, strict=True))
