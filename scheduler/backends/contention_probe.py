"""Measures how much bandwidth and tensor-unit time a segment uses, by running probe kernels beside it.

A probe kernel wants all of one resource and leaves most of the room on each SM to others. No hardware counters are
needed: the segment's use follows from its own slowdown and from the probe's rate beside it, relative to its rate alone.

The probe counts its rounds while a word of device memory is 1, and ends when the word is 2. The segment's stream writes
both: 1 before its first run, and 2 after its last. Segments are measured one at a time: CUDA assigns graphs to the
GPU's queues in turn, and a graph in the probe's queue waits for the probe's end.

Some kernels leave no room for a probe, nor for any other kernel, on their SMs: a matrix product of cuBLAS on Hopper
takes all registers of an SM. Such a segment takes the whole arithmetic and bandwidth of these SMs, and is not measured.
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

SATURATING_BLOCKS = 4  # blocks per SM that get all of the resource
_ALONE_NS = 1_000_000  # length of a run of the probe alone
_ALONE_RUNS = 3
_RUNS_BESIDE = 5
_BESIDE_NS = 1_000_000  # shortest time over which the probe is measured beside a segment
_MOST_REPEATS = 32  # of the segment in one such run
_LONGEST = 6  # multiple of the segment's time alone after which the probe ends by itself
_WAITED = 4.0  # slowdown above which a segment waited in the probe's hardware queue
_COUNTED = 0.5  # part of the segment's time alone for which the probe must have counted
_COUNTS = 2  # numbers per block: counted rounds, and the time for them in ns
_FREE = 0.92  # above this relative rate bandwidth is left over: other work on the SMs alone costs a probe up to 0.04

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
class ProbeCode:
    """The work of a probe, as PTX. Registers are %p, %r, %f and %d with a number; `data` is a parameter."""

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


# -- bandwidth

_SPAN_BYTES = 1 << 28  # read again and again: several times the size of the L2 cache
_READING_THREADS = 256
_LOADS = 6  # per thread and round
ROUND_BYTES = 16 * _LOADS * _READING_THREADS  # per block


def bandwidth_probe() -> ProbeCode:
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
  mad.lo.u32 %r4, %r2, {_READING_THREADS}, %r1;
  mul.wide.u32 %d2, %r4, 16;
  mul.wide.u32 %d3, %r3, {16 * _READING_THREADS};
  mov.u32 %r0, 0;"""
    # Without the directive, the assembler would save registers for more blocks, and a load would wait for another.
    return ProbeCode(
        "bandwidth_probe", _READING_THREADS, blocks=2, rounds=4, before=before,
        registers="  .reg .b32 %r<40>;\n  .reg .b64 %d<20>;",
        work="\n".join(['  .pragma "nounroll";', *loads, *sums]), after="  mov.b32 %result, %r0;",
        data_bytes=_SPAN_BYTES, directives=f".minnctapersm {SATURATING_BLOCKS}",
    )  # fmt: skip


def bandwidth_share(slowdown: float, rate: float, alone_share: float) -> float:
    """The fraction of the bandwidth that a segment uses, from its slowdown and the probe's relative rate beside it.

    Alone, the probe gets `alone_share` of the bandwidth. If all is in use, it gets rate · alone_share, and the segment
    the rest. The segment takes `slowdown` times as long as alone, so alone it uses slowdown · (1 - rate · alone_share).

    If the probe is not slowed, some bandwidth is left over, and the segment's slowdown has another cause: the two also
    share the SMs. The segment's use is then unknown but small, and counts as zero.

    >>> bandwidth_share(1.5, 1 / 1.5, 0.6), bandwidth_share(1.25, 1.0, 0.6)
    (0.9, 0.0)
    """
    if not rate < _FREE:
        return 0.0
    return round(float(np.clip(slowdown * (1.0 - rate * alone_share), 0.0, 1.0)), 3)


# -- tensor units

_MULTIPLYING_THREADS = 128  # one warp for each of an SM's tensor units
_CHAINS = 8  # concurrent products per warp, as each takes about 8 times as long as it keeps the unit busy
_PRODUCT = "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32"


def tensor_probe() -> ProbeCode:
    own = [f"{{%f{4 * k}, %f{4 * k + 1}, %f{4 * k + 2}, %f{4 * k + 3}}}" for k in range(_CHAINS)]
    zeros = [f"  mov.f32 %f{k}, 0f00000000;" for k in range(4 * _CHAINS)]
    operands = [f"  mov.b32 %r{k}, 0;" for k in range(6)]
    work = [f"  {_PRODUCT} {x}, {{%r0, %r1, %r2, %r3}}, {{%r4, %r5}}, {x};" for x in own]
    sums = [f"  add.f32 %f0, %f0, %f{k};" for k in range(1, 4 * _CHAINS)]
    return ProbeCode(
        "tensor_probe", _MULTIPLYING_THREADS, blocks=1, rounds=256,
        registers=f"  .reg .b32 %r<6>;\n  .reg .f32 %f<{4 * _CHAINS}>;", before="\n".join([*zeros, *operands]),
        work="\n".join(work), after="\n".join([*sums, "  mov.b32 %result, %f0;"]),
    )  # fmt: skip


def tensor_share(slowdown: float, rate: float) -> float:
    """The fraction of the tensor units that a segment uses, from its slowdown and the probe's relative rate beside it.

    The slowdown alone says little if the segment's products (`wgmma`) take precedence over the probe's (`mma.sync`).

    >>> tensor_share(1.0, 0.4), tensor_share(1.6, 1 / 1.6), tensor_share(7.0, float("nan"))
    (0.6, 0.6, 0.0)
    """
    found = slowdown * (1.0 - np.minimum(rate, 1.0))
    return round(float(np.clip(np.nan_to_num(found), 0.0, 1.0)), 3)


# -- measurement


class ProbeKernel:
    """A probe on one GPU, and the fraction of its resource that it gets alone."""

    def __init__(self, device: CudaDevice, code: ProbeCode) -> None:
        cu = driver()
        self._device, self._code = device, code
        self._module = check(cu.cuModuleLoadData(code.ptx.encode() + b"\0"), "loading a probe")
        self._function = check(cu.cuModuleGetFunction(self._module, code.name.encode()), "loading a probe")
        self._window = CudaArray(device, (64,), np.dtype(np.uint32))
        most = device.sm_count * max(SATURATING_BLOCKS, code.blocks)
        self._counts = CudaArray(device, (most, _COUNTS), np.dtype(np.uint64))
        self._data = CudaArray(device, (max(code.data_bytes, 1),), np.dtype(np.uint8))
        device.zero(self._data)
        self._stream = CudaStream(device, 0)
        attribute = cu.CUfunction_attribute.CU_FUNC_ATTRIBUTE_NUM_REGS
        registers = int(check(cu.cuFuncGetAttribute(attribute, self._function), "reading a probe"))
        # Resources on each SM, beside a segment.
        self.footprint: Footprint = footprint(device.limits, code.threads, registers, 0) * code.blocks
        prefer_shared(self._function)
        self.alone_share = min(self._alone(code.blocks) / max(self._alone(SATURATING_BLOCKS), 1e-9), 1.0)

    def measure(self, executable: int, alone_ns: float, stream: int) -> tuple[float, float]:
        """The slowdown of a graph beside the probe, and the probe's rate ÷ its rate alone; see `median_of_runs`."""
        n = int(min(max(np.ceil(_BESIDE_NS / max(alone_ns, 1.0)), 3), _MOST_REPEATS))
        own_ns = float(np.median([self._graph_ns(executable, n, stream) for _ in range(_ALONE_RUNS)]))
        rate_alone = self._alone(self._code.blocks)  # again, because the GPU's clocks may have changed
        runs = []
        for _ in range(_RUNS_BESIDE):
            self._write(self._stream.handle, 0)
            self._launch(self._code.blocks, int(_LONGEST * n * own_ns) + _ALONE_NS)
            time.sleep(100e-6)  # lets the probe reach the SMs before the measured work
            slowdown = self._graph_ns(executable, n, stream) / own_ns
            rate, ns = self._counted(self._code.blocks)
            runs.append((slowdown, rate / rate_alone, ns / (n * own_ns)))
        return median_of_runs(runs)

    def _alone(self, blocks: int) -> float:
        """Rounds per ns with this number of blocks on each SM, in the fastest run: other work can only slow it."""
        found = []
        for _ in range(_ALONE_RUNS):
            self._write(self._stream.handle, 1)
            self._launch(blocks, _ALONE_NS)
            found.append(self._counted(blocks)[0])
        return max(found)

    def _graph_ns(self, executable: int, n: int, stream: int) -> float:
        """The time of one of several runs of a graph. The probe counts during the runs, and ends after them."""
        self._write(stream, 1)
        began = CudaEvent(stream)
        for _ in range(n):
            check(driver().cuGraphLaunch(executable, stream), "timing a graph")
        end = CudaEvent(stream)
        self._write(stream, 2)
        check(driver().cuStreamSynchronize(stream), "timing a graph")
        return end.elapsed_ns(began) / n

    def _counted(self, blocks: int) -> tuple[float, float]:
        """Rounds per ns in the latest counting period, and the length of that period in ns."""
        self._stream.synchronize()
        rounds, ns = self._counts.numpy()[: blocks * self._device.sm_count].astype(np.float64).T
        return float((rounds / np.maximum(ns, 1.0)).sum()), float(np.median(ns))

    def _write(self, stream: int, word: int) -> None:
        check(driver().cuStreamWriteValue32(stream, self._window.ptr, word, 0), "writing a probe's word")

    def _launch(self, blocks: int, longest_ns: int) -> None:
        values = (self._window.ptr, longest_ns, self._counts.ptr, self._data.ptr)
        params = (values, (ctypes.c_uint64,) * len(values))
        grid, threads, stream = blocks * self._device.sm_count, self._code.threads, self._stream.handle
        launched = driver().cuLaunchKernel(self._function, grid, 1, 1, threads, 1, 1, 0, stream, params, 0)
        check(launched, "launching a probe")

    def close(self) -> None:
        driver().cuModuleUnload(self._module)


def median_of_runs(runs: Sequence[tuple[float, float, float]]) -> tuple[float, float]:
    """The median slowdown of a graph and relative rate of the probe, of runs in which the two ran at the same time.

    A run also says how long the probe counted, relative to the graph's time alone. If the graph waited for the probe's
    end in all runs, the rate is nan.

    >>> median_of_runs([(1.5, 0.7, 1.5), (1.7, 0.6, 1.7), (7.0, 1.0, 7.0), (1.6, 0.65, 1.6)])
    (1.6, 0.65)
    >>> median_of_runs([(7.0, 1.0, 7.0), (7.2, 0.0, 0.0)])
    (7.1, nan)
    """
    rows = np.array(runs)
    beside = rows[(rows[:, 0] < _WAITED) & (rows[:, 2] > _COUNTED)]
    if not len(beside):
        return float(np.median(rows[:, 0])), float("nan")
    slowdown, rate, _ = np.median(beside, axis=0).tolist()
    return slowdown, rate


class ContentionProbe:
    """Both probe kernels on one GPU."""

    def __init__(self, device: CudaDevice) -> None:
        self._device = device
        device.activate()
        self.memory, self.tensor = ProbeKernel(device, bandwidth_probe()), ProbeKernel(device, tensor_probe())

    def shares(self, executable: int, nodes: Sequence[Node], alone_ns: float, stream: int) -> tuple[float, float]:
        """The fractions of the tensor units and of the bandwidth that a graph of these nodes uses; 0: not known."""
        probes = [self.memory.footprint, self.tensor.footprint]
        blocked = blocked_share(nodes, probes, self._device.limits, self._device.sm_count)
        if blocked:
            return blocked, blocked
        units = tensor_share(*self.tensor.measure(executable, alone_ns, stream))
        return units, bandwidth_share(*self.memory.measure(executable, alone_ns, stream), self.memory.alone_share)

    def close(self) -> None:
        self._device.activate()
        self.memory.close()
        self.tensor.close()


def blocked_share(nodes: Sequence[Node], probes: Sequence[Footprint], limits: SmLimits, sms: int) -> float:
    """The fraction of the SMs on which a kernel leaves no room for one of the probes; 0 if there is no such kernel."""
    found = 0.0
    for node in nodes:
        if node.kind == "kernel":
            own = footprint(limits, node.threads, node.registers, node.shared_bytes)
            if not all(fits(limits, own, probe) for probe in probes):
                found = max(found, min(node.blocks / sms, 1.0))
    return found


def prefer_shared(function: Any) -> None:
    """Makes a kernel run with the largest share of shared memory on its SMs. An SM changes this setting only when it is
    empty: beside a probe with another setting, kernels with much shared memory would wait for the probe's end.
    """
    cu = driver()
    attribute = cu.CUfunction_attribute.CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT
    check(cu.cuFuncSetAttribute(cu.CUfunction(int(function)), attribute, 100), "setting up a kernel")
