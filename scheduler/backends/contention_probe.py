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
from paellapy.instrument.device.driver import CudaArray, CudaEvent, CudaStream, check, driver
from paellapy.instrument.gpu_model.parts import Footprint, SmLimits, fits, footprint
from paellapy.scheduler.models.program import Node

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


# Measures the bandwidth that a segment uses, by the share that it leaves to a kernel that wants all of it.
#
# If all bandwidth is in use, the hog gets r · h of it: h is its fraction alone, and r its pace beside the segment
# relative to its pace alone. The segment gets the rest. It takes s times as long as alone, so alone it uses
# s · (1 - r · h).
#
# If the hog is not slowed down, some bandwidth is left over, and the segment's own slowdown has another cause: the two
# also share the SMs. The segment's use is then unknown but small, and counts as zero.


_SPAN_BYTES = 1 << 28  # read again and again: several times the size of the L2 cache
_THREADS = 256
_LOADS = 6  # per thread and round
ROUND_BYTES = 16 * _LOADS * _THREADS  # per block
_FREE = 0.92  # above this pace bandwidth is left over: other work on the SMs alone costs a hog up to 0.04


def memory_hog() -> Work:
    loads = []
    for k in range(_LOADS):
        loads += [
            f"  and.b64 %d{10 + k}, %d2, {_SPAN_BYTES - 1};",
            f"  add.u64 %d{10 + k}, %d{10 + k}, %d1;",
            "  add.u64 %d2, %d2, %d3;",
            f"  ld.global.cs.v4.u32 {{%r{10 + 4 * k}, %r{11 + 4 * k}, %r{12 + 4 * k}, %r{13 + 4 * k}}}, [%d{10 + k}];",
        ]
    sums = [f"  xor.b32 %r0, %r0, %r{k};" for k in range(10, 10 + 4 * _LOADS)]
    before = f"""
  ld.param.u64 %d1, [data];
  mov.u32 %r1, %tid.x;
  mov.u32 %r2, %ctaid.x;
  mov.u32 %r3, %nctaid.x;
  mad.lo.u32 %r4, %r2, {_THREADS}, %r1;
  mul.wide.u32 %d2, %r4, 16;
  mul.wide.u32 %d3, %r3, {16 * _THREADS};
  mov.u32 %r0, 0;"""
    # Without the directive, the assembler would save registers for more blocks, and a load would wait for another.
    return Work(
        "memory_hog", _THREADS, blocks=2, rounds=4, registers="  .reg .b32 %r<40>;\n  .reg .b64 %d<20>;", before=before,
        work="\n".join(['  .pragma "nounroll";', *loads, *sums]), after="  mov.b32 %result, %r0;",
        data_bytes=_SPAN_BYTES, directives=f".minnctapersm {MANY}",
    )  # fmt: skip


def part_of_bandwidth(stretch: float, pace: float, hog: float) -> float:
    """The fraction of the bandwidth that a segment uses, from its slowdown and the hog's pace beside it.

    `hog` is the fraction that the hog gets alone.

    >>> part_of_bandwidth(1.5, 1 / 1.5, 0.6), part_of_bandwidth(1.25, 1.0, 0.6)
    (0.9, 0.0)
    """
    if not pace < _FREE:
        return 0.0
    return round(float(np.clip(stretch * (1.0 - pace * hog), 0.0, 1.0)), 3)


# Measures the tensor units that a segment uses, by the share that it leaves to a kernel that wants all of them.
#
# The segment's slowdown says little if its products (`wgmma`) take precedence over the hog's (`mma.sync`), so the hog's
# pace is measured too. If the hog runs at the fraction r of its own pace, beside a segment that takes s times as long
# as alone, then the segment alone uses s · (1 - r) of the units.


_CUDA_TENSOR_HOG_THREADS = 128  # one warp for each of an SM's tensor units
_CHAINS = 8  # concurrent products per warp, as each takes about 8 times as long as it keeps the unit busy

_PRODUCT = "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32"


def tensor_hog() -> Work:
    own = [f"{{%f{4 * k}, %f{4 * k + 1}, %f{4 * k + 2}, %f{4 * k + 3}}}" for k in range(_CHAINS)]
    zeros = [f"  mov.f32 %f{k}, 0f00000000;" for k in range(4 * _CHAINS)]
    operands = [f"  mov.b32 %r{k}, 0;" for k in range(6)]
    work = [f"  {_PRODUCT} {x}, {{%r0, %r1, %r2, %r3}}, {{%r4, %r5}}, {x};" for x in own]
    sums = [f"  add.f32 %f0, %f0, %f{k};" for k in range(1, 4 * _CHAINS)]
    return Work(
        "tensor_hog", _CUDA_TENSOR_HOG_THREADS, blocks=1, rounds=256,
        registers=f"  .reg .b32 %r<6>;\n  .reg .f32 %f<{4 * _CHAINS}>;", before="\n".join([*zeros, *operands]),
        work="\n".join(work), after="\n".join([*sums, "  mov.b32 %result, %f0;"]),
    )  # fmt: skip


def part_of_units(stretch: float, pace: float) -> float:
    """The fraction of the tensor units that a segment uses, from its slowdown and the hog's pace beside it.

    >>> part_of_units(1.0, 0.4), part_of_units(1.6, 1 / 1.6), part_of_units(7.0, float("nan"))
    (0.6, 0.6, 0.0)
    """
    found = stretch * (1.0 - np.minimum(pace, 1.0))
    return round(float(np.clip(np.nan_to_num(found), 0.0, 1.0)), 3)


# Measures a segment's use of GPU bandwidth and tensor units beside kernels that want them all, the hogs.
#
# No hardware counters are needed. cuda_hog.py says how a segment runs beside a hog; cuda_memory_hog.py and
# cuda_tensor_hog.py have the two hogs, and derive the segment's use from its slowdown and the hog's.
#
# Some kernels leave no room for a hog, nor for any other kernel, on their SMs: a matrix product of cuBLAS on Hopper
# takes all registers of an SM. Such a segment takes the whole arithmetic and bandwidth of these SMs, and is not
# measured.


class Hogs:
    """Both hogs on one GPU."""

    def __init__(self, device: CudaDevice) -> None:
        self._device = device
        device.activate()
        self.memory, self.tensor = Hog(device, memory_hog()), Hog(device, tensor_hog())
        self.takes = [self.memory.takes, self.tensor.takes]

    def shares(self, executable: int, alone_ns: float, stream: int) -> tuple[float, float]:
        """The fractions of the tensor units and of the bandwidth that a graph uses; 0: not known."""
        units = part_of_units(*self.tensor.look(executable, alone_ns, stream))
        return units, part_of_bandwidth(*self.memory.look(executable, alone_ns, stream), self.memory.part)

    def close(self) -> None:
        self._device.activate()
        self.memory.close()
        self.tensor.close()


def part_without_place(nodes: Sequence[Node], hogs: Sequence[Footprint], limits: SmLimits, sms: int) -> float:
    """The fraction of the SMs on which a kernel leaves no room for one of the hogs; 0 if there is no such kernel."""
    found = 0.0
    for node in nodes:
        if node.kind == "kernel":
            own = footprint(limits, node.threads, node.registers, node.shared_bytes)
            if not all(fits(limits, own, hog) for hog in hogs):
                found = max(found, min(node.blocks / sms, 1.0))
    return found
