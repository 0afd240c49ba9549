"""A hog: a kernel that wants all of one resource of the GPU. It shows how much of the resource a segment uses.

The segment runs beside the hog. Two numbers are measured: s, the segment's time relative to its time alone, and r, the
hog's pace relative to its pace alone. The hog leaves most of the room on each SM to others.

The hog counts its rounds while a word of device memory is 1, and ends when the word is 2. The segment's stream writes
both: 1 before its first run, and 2 after its last.

Segments are measured one at a time: CUDA assigns graphs to the GPU's queues in turn, and a graph in the hog's queue
waits for the hog's end.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from paellapy.instrument.device.cuda import CudaDevice
from paellapy.instrument.device.cuda_memory import CudaArray, CudaEvent, CudaStream
from paellapy.instrument.device.driver import check, driver
from paellapy.instrument.device.occupancy import Footprint, footprint

MANY = 4  # hogs per SM, to measure the pace at full load
_TRIAL_NS = 1_000_000
_TRIALS = 3
_REPEATS = 5
_WINDOW_NS = 1_000_000  # shortest time over which the hog is measured beside a segment
_MOST_RUNS = 32
_LONGEST = 6  # multiple of the segment's time alone after which the hog ends by itself
_WAITED = 4.0  # multiple of its time alone above which a segment waited in the hog's hardware queue
_COUNTED = 0.5  # part of the segment's time alone for which the hog must have counted
_COUNTS = 2  # numbers per block: counted rounds, and the time for them in ns

_ENTRY = """
.version 7.0
.target sm_80
.address_size 64
.visible .entry {name}(.param .u64 window, .param .u64 longest, .param .u64 counts, .param .u64 data)
.maxntid {threads}
{directives}
{{
  .reg .pred %q<3>;
  .reg .b32 %word, %round, %block, %thread, %result;
  .reg .b64 %window, %end, %counts, %now, %rounds, %began, %last, %at;
{registers}
  ld.param.u64 %window, [window];
  ld.param.u64 %end, [longest];
  ld.param.u64 %counts, [counts];
  mov.u64 %now, %globaltimer;
  add.u64 %end, %end, %now;
  mov.u64 %rounds, 0;
  mov.u64 %began, 0;
  mov.u64 %last, 0;
{before}
AGAIN:
  ld.relaxed.gpu.global.u32 %word, [%window];
  mov.u32 %round, 0;
ROUND:
{work}
  add.u32 %round, %round, 1;
  setp.lt.u32 %q0, %round, {rounds};
  @%q0 bra ROUND;
  mov.u64 %now, %globaltimer;
  setp.ge.u64 %q0, %now, %end;
  @%q0 bra DONE;
  setp.eq.u32 %q1, %word, 0;
  @%q1 bra AGAIN;
  setp.eq.u32 %q1, %word, 2;
  @%q1 bra DONE;
  setp.ne.u64 %q2, %began, 0;
  @%q2 bra COUNT;
  mov.u64 %began, %now;
  mov.u64 %last, %now;
  bra AGAIN;
COUNT:
  add.u64 %rounds, %rounds, {rounds};
  mov.u64 %last, %now;
  bra AGAIN;
DONE:
{after}
  setp.ne.u32 %q0, %result, 305419896;
  @%q0 bra KEEP;
  st.global.u32 [%window], %result;
KEEP:
  mov.u32 %thread, %tid.x;
  setp.ne.u32 %q0, %thread, 0;
  @%q0 bra OVER;
  mov.u32 %block, %ctaid.x;
  mul.wide.u32 %at, %block, {count_bytes};
  add.u64 %at, %at, %counts;
  sub.u64 %last, %last, %began;
  st.global.u64 [%at], %rounds;
  st.global.u64 [%at+8], %last;
OVER:
  ret;
}}
"""


@dataclass(frozen=True, slots=True)
class Work:
    """The work of a hog, as PTX. Registers are %p, %r, %f and %d with a number; `data` is a parameter."""

    name: str
    threads: int  # per block
    blocks: int  # per SM, beside a segment
    rounds: int  # between two reads of the word: about 10 µs, longer than a read takes when memory is busy
    registers: str
    before: str
    work: str  # one round
    after: str  # leaves in %result a value of all the work, or the compiler would drop the work; never 305419896
    data_bytes: int = 0  # zeros behind the parameter `data`
    directives: str = ""  # for the assembler

    @property
    def ptx(self) -> str:
        return _ENTRY.format(
            name=self.name, threads=self.threads, rounds=self.rounds, count_bytes=8 * _COUNTS, before=self.before,
            directives=self.directives, registers=self.registers, work=self.work, after=self.after,
        )  # fmt: skip


def prefer_shared(function: Any) -> None:
    """Makes a kernel run with the largest share of shared memory on its SMs. An SM changes this setting only when it is
    empty: beside a hog with another setting, kernels with much shared memory would wait for the hog's end.
    """
    cu = driver()
    attribute = cu.CUfunction_attribute.CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT
    check(cu.cuFuncSetAttribute(cu.CUfunction(int(function)), attribute, 100), "setting up a kernel")


class Hog:
    """A hog on one GPU, and the fraction of its resource that it gets alone."""

    def __init__(self, device: CudaDevice, work: Work) -> None:
        cu = driver()
        self._device, self._work = device, work
        self._module = check(cu.cuModuleLoadData(work.ptx.encode() + b"\0"), "loading a hog")
        self._function = check(cu.cuModuleGetFunction(self._module, work.name.encode()), "loading a hog")
        self._window = CudaArray(device, (64,), np.dtype(np.uint32))
        self._counts = CudaArray(device, (device.sm_count * max(MANY, work.blocks), _COUNTS), np.dtype(np.uint64))
        self._data = CudaArray(device, (max(work.data_bytes, 1),), np.dtype(np.uint8))
        device.zero(self._data)
        self._stream = CudaStream(device, 0)
        attribute = cu.CUfunction_attribute.CU_FUNC_ATTRIBUTE_NUM_REGS
        registers = int(check(cu.cuFuncGetAttribute(attribute, self._function), "reading a hog"))
        # Resources on each SM, beside a segment.
        self.takes: Footprint = footprint(device.limits, work.threads, registers, 0) * work.blocks
        prefer_shared(self._function)
        self.pace = self._alone(work.blocks)  # rounds per ns, of all blocks together
        self.part = min(self.pace / max(self._alone(MANY), 1e-9), 1.0)

    def _write(self, stream: int, word: int) -> None:
        check(driver().cuStreamWriteValue32(stream, self._window.ptr, word, 0), "telling a hog")

    def _launch(self, each: int, longest_ns: int) -> None:
        values = (self._window.ptr, longest_ns, self._counts.ptr, self._data.ptr)
        params = (values, (ctypes.c_uint64,) * len(values))
        blocks, threads, stream = each * self._device.sm_count, self._work.threads, self._stream.handle
        launched = driver().cuLaunchKernel(self._function, blocks, 1, 1, threads, 1, 1, 0, stream, params, 0)
        check(launched, "launching a hog")

    def _seen(self, each: int) -> tuple[float, float]:
        """Its pace in the latest counting period, and the length of that period in ns."""
        self._stream.synchronize()
        rounds, ns = self._counts.numpy()[: each * self._device.sm_count].astype(np.float64).T
        return float((rounds / np.maximum(ns, 1.0)).sum()), float(np.median(ns))

    def _alone(self, each: int) -> float:
        """Its pace with this number of hogs on each SM: that of the fastest trial, as other work can only slow it."""
        found = []
        for _ in range(_TRIALS):
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
        check(driver().cuStreamSynchronize(stream), "timing a graph")
        return end.elapsed_ns(began) / n

    def look(self, executable: int, alone_ns: float, stream: int) -> tuple[float, float]:
        """The slowdown of a graph beside the hog, and the hog's pace ÷ its pace alone; see `of_trials`."""
        n = int(min(max(np.ceil(_WINDOW_NS / max(alone_ns, 1.0)), 3), _MOST_RUNS))
        own_ns = float(np.median([self._runs(executable, n, stream) for _ in range(_TRIALS)]))
        own_pace = self._alone(self._work.blocks)  # again, because the GPU's clocks may have changed
        found = []
        for _ in range(_REPEATS):
            self._write(self._stream.handle, 0)
            self._launch(self._work.blocks, int(_LONGEST * n * own_ns) + _TRIAL_NS)
            time.sleep(100e-6)  # lets the hog reach the SMs before the measured work
            stretch = self._runs(executable, n, stream) / own_ns
            pace, ns = self._seen(self._work.blocks)
            found.append((stretch, pace / own_pace, ns / (n * own_ns)))
        return of_trials(found)

    def close(self) -> None:
        driver().cuModuleUnload(self._module)


def of_trials(trials: Sequence[tuple[float, float, float]]) -> tuple[float, float]:
    """The median slowdown of a graph and pace of the hog, of trials in which the two ran at the same time.

    A trial also says how long the hog counted, relative to the graph's time alone. If the graph waited for the hog's
    end in all trials, the pace is nan.

    >>> of_trials([(1.5, 0.7, 1.5), (1.7, 0.6, 1.7), (7.0, 1.0, 7.0), (1.6, 0.65, 1.6)])
    (1.6, 0.65)
    >>> of_trials([(7.0, 1.0, 7.0), (7.2, 0.0, 0.0)])
    (7.1, nan)
    """
    rows = np.array(trials)
    beside = rows[(rows[:, 0] < _WAITED) & (rows[:, 2] > _COUNTED)]
    if not len(beside):
        return float(np.median(rows[:, 0])), float("nan")
    stretch, pace, _ = np.median(beside, axis=0).tolist()
    return stretch, pace
