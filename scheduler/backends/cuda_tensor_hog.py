"""Measures the tensor units that a segment uses, by the share that it leaves to a kernel that wants all of them.

The segment's slowdown says little if its products (`wgmma`) take precedence over the hog's (`mma.sync`), so the hog's
pace is measured too. If the hog runs at the fraction r of its own pace, beside a segment that takes s times as long as
alone, then the segment alone uses s · (1 - r) of the units.

The hog counts its rounds while a word of device memory is 1, and ends when the word is 2. The segment's stream writes
both: 1 before its first run, and 2 after its last.
"""

from __future__ import annotations

import ctypes
import time
from typing import Any

import numpy as np

from paellapy.instrument.device.cuda import CudaDevice
from paellapy.instrument.device.cuda_memory import CudaArray, CudaEvent, CudaStream
from paellapy.instrument.device.driver import check, driver
from paellapy.instrument.device.occupancy import Footprint, footprint

THREADS = 128  # one warp for each of an SM's tensor units
_CHAINS = 8  # concurrent products per warp, as each takes about 8 times as long as it keeps the unit busy
_ROUNDS = 256  # between two reads of the word: about 10 µs, longer than a read takes when memory is busy
_MANY = 4  # hogs per SM, to measure the pace at full load
_TRIAL_NS = 1_000_000
_REPEATS = 5
_WINDOW_NS = 1_000_000  # shortest time over which the hog is measured beside a segment
_MOST_RUNS = 32
_LONGEST = 6  # multiple of the segment's time alone after which the hog ends by itself
_WAITED = 4.0  # multiple of its time alone above which a segment waited in the hog's hardware queue
_COUNTS = 2  # numbers per block: counted rounds, and the time for them in ns

_PRODUCT = "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32"


_ENTRY = """
.version 7.0
.target sm_80
.address_size 64
.visible .entry tensor_hog(.param .u64 window, .param .u64 longest, .param .u64 counts)
.maxntid {threads}
{{
  .reg .pred %p<5>;
  .reg .b32 %r<32>;
  .reg .f32 %f<{floats}>;
  .reg .b64 %d<16>;
  ld.param.u64 %d1, [window];
  ld.param.u64 %d2, [longest];
  ld.param.u64 %d3, [counts];
  mov.u64 %d4, %globaltimer;
  add.u64 %d2, %d2, %d4;
  mov.u64 %d5, 0;
  mov.u64 %d6, 0;
  mov.u64 %d7, 0;
{zeros}
{operands}
AGAIN:
  ld.relaxed.gpu.global.u32 %r1, [%d1];
  mov.u32 %r2, 0;
ROUND:
{work}
  add.u32 %r2, %r2, 1;
  setp.lt.u32 %p1, %r2, {rounds};
  @%p1 bra ROUND;
  mov.u64 %d4, %globaltimer;
  setp.ge.u64 %p2, %d4, %d2;
  @%p2 bra DONE;
  setp.eq.u32 %p3, %r1, 0;
  @%p3 bra AGAIN;
  setp.eq.u32 %p3, %r1, 2;
  @%p3 bra DONE;
  setp.ne.u64 %p4, %d6, 0;
  @%p4 bra COUNT;
  mov.u64 %d6, %d4;
  mov.u64 %d7, %d4;
  bra AGAIN;
COUNT:
  add.u64 %d5, %d5, {rounds};
  mov.u64 %d7, %d4;
  bra AGAIN;
DONE:
{sums}
  setp.eq.f32 %p1, %f0, 0f00000000;
  @%p1 bra KEEP;
  st.global.f32 [%d1], %f0;
KEEP:
  mov.u32 %r3, %tid.x;
  setp.ne.u32 %p1, %r3, 0;
  @%p1 bra OVER;
  mov.u32 %r4, %ctaid.x;
  mul.wide.u32 %d8, %r4, {count_bytes};
  add.u64 %d8, %d8, %d3;
  sub.u64 %d7, %d7, %d6;
  st.global.u64 [%d8], %d5;
  st.global.u64 [%d8+8], %d7;
OVER:
  ret;
}}
"""


def tensor_hog() -> str:
    own = [f"{{%f{4 * k}, %f{4 * k + 1}, %f{4 * k + 2}, %f{4 * k + 3}}}" for k in range(_CHAINS)]
    zeros = "\n".join(f"  mov.f32 %f{k}, 0f00000000;" for k in range(4 * _CHAINS))
    operands = "\n".join(f"  mov.b32 %r{k}, 0;" for k in range(10, 16))
    work = "\n".join(f"  {_PRODUCT} {x}, {{%r10, %r11, %r12, %r13}}, {{%r14, %r15}}, {x};" for x in own)
    # The results must be used, or the compiler would drop the products.
    sums = "\n".join(f"  add.f32 %f0, %f0, %f{k};" for k in range(1, 4 * _CHAINS))
    return _ENTRY.format(
        threads=THREADS, floats=4 * _CHAINS, rounds=_ROUNDS, count_bytes=8 * _COUNTS, zeros=zeros, operands=operands,
        work=work, sums=sums,
    )  # fmt: skip


def prefer_shared(function: Any) -> None:
    """Makes a kernel run with the largest share of shared memory on its SMs. An SM changes this setting only when it is
    empty: beside a hog with another setting, kernels with much shared memory would wait for the hog's end.
    """
    cu = driver()
    attribute = cu.CUfunction_attribute.CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT
    check(cu.cuFuncSetAttribute(cu.CUfunction(int(function)), attribute, 100), "setting up a kernel")


class TensorHog:
    """The hog on one GPU, and the fraction of the tensor units that it gets alone."""

    def __init__(self, device: CudaDevice) -> None:
        cu = driver()
        self._device = device
        self._module = check(cu.cuModuleLoadData(tensor_hog().encode() + b"\0"), "loading the hogs")
        self._function = check(cu.cuModuleGetFunction(self._module, b"tensor_hog"), "loading a hog")
        self._window = CudaArray(device, (64,), np.dtype(np.uint32))
        self._counts = CudaArray(device, (device.sm_count * _MANY, _COUNTS), np.dtype(np.uint64))
        self._stream = CudaStream(device, 0)
        attribute = cu.CUfunction_attribute.CU_FUNC_ATTRIBUTE_NUM_REGS
        registers = int(check(cu.cuFuncGetAttribute(attribute, self._function), "reading a hog"))
        self.takes: Footprint = footprint(device.limits, THREADS, registers, 0)
        prefer_shared(self._function)
        self.pace = self._alone(1)  # rounds per ns
        self.part = min(self.pace / max(self._alone(_MANY), 1e-9), 1.0)

    def _write(self, stream: int, word: int) -> None:
        check(driver().cuStreamWriteValue32(stream, self._window.ptr, word, 0), "telling a hog")

    def _launch(self, each: int, longest_ns: int) -> None:
        values = (self._window.ptr, longest_ns, self._counts.ptr)
        params = (values, (ctypes.c_uint64,) * len(values))
        check(
            driver().cuLaunchKernel(
                self._function, each * self._device.sm_count, 1, 1, THREADS, 1, 1, 0, self._stream.handle, params, 0
            ),
            "launching a hog",
        )

    def _seen(self, each: int) -> tuple[float, float]:
        """Its pace in the latest counting period, and the length of that period in ns."""
        self._stream.synchronize()
        rounds, ns = self._counts.numpy()[: each * self._device.sm_count].astype(np.float64).T
        return float((rounds / np.maximum(ns, 1.0)).sum()), float(np.median(ns))

    def _alone(self, each: int) -> float:
        found = []
        for _ in range(3):
            self._write(self._stream.handle, 1)
            self._launch(each, _TRIAL_NS)
            found.append(self._seen(each)[0])
        return max(found)

    def _runs(self, executable: int, n: int, stream: int) -> float:
        """The time of one of several runs of a graph, ns. The hog counts during the runs, and ends after them."""
        self._write(stream, 1)
        began = CudaEvent(stream)
        for _ in range(n):
            check(driver().cuGraphLaunch(executable, stream), "timing a graph")
        end = CudaEvent(stream)
        self._write(stream, 2)
        end.synchronize()
        return end.elapsed_ns(began) / n

    def look(self, executable: int, alone_ns: float, stream: int) -> tuple[float, float]:
        """The slowdown of a graph beside the hog, and the hog's pace ÷ its pace alone; nan if not measured."""
        n = int(min(max(np.ceil(_WINDOW_NS / max(alone_ns, 1.0)), 3), _MOST_RUNS))
        own_ns = float(np.median([self._runs(executable, n, stream) for _ in range(3)]))
        found = []
        for _ in range(_REPEATS):
            self._write(self._stream.handle, 0)
            self._launch(1, int(_LONGEST * n * own_ns) + _TRIAL_NS)
            time.sleep(100e-6)  # lets the hog reach the SMs before the measured work
            stretch = self._runs(executable, n, stream) / own_ns
            pace, ns = self._seen(1)
            if stretch < _WAITED and ns > 0.5 * n * own_ns:
                found.append((stretch, pace / self.pace))
        if not found:
            return float("nan"), float("nan")
        stretch, pace = np.median(found, axis=0).tolist()
        return stretch, pace

    def share(self, executable: int, alone_ns: float, stream: int) -> float:
        """The fraction of the tensor units that a graph uses; 0: not known."""
        return part_of_units(*self.look(executable, alone_ns, stream))

    def close(self) -> None:
        driver().cuModuleUnload(self._module)


def part_of_units(stretch: float, pace: float) -> float:
    """The fraction of the tensor units that a segment uses, from its slowdown and the hog's pace beside it.

    >>> part_of_units(1.0, 0.4), part_of_units(1.6, 1 / 1.6), part_of_units(float("nan"), 1.0)
    (0.6, 0.6, 0.0)
    """
    found = stretch * (1.0 - min(pace, 1.0))
    return round(float(np.clip(np.nan_to_num(found), 0.0, 1.0)), 3)
