"""Quick measurements of the GPU itself: real SM clocks, copies, a matrix product, gaps between kernels.

They are stored beside figures, to spot unusual states of the GPU. Everything is launched on the default stream, which
the computation of expected outputs also uses: single kernels on a second stream would slow down the measurements
(benchmarks/kernel_gaps.py).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

KERNELS = r"""
extern "C" __global__ void count(long long* out, long long ticks) {
  extern __shared__ char all_of_it[];  // one block to an SM
  if (threadIdx.x != 0) return;
  unsigned sm; asm volatile("mov.u32 %0, %%smid;" : "=r"(sm));
  unsigned long long begin, end; long long first = clock64();
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(begin));
  while (clock64() - first < ticks) { }
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(end));
  out[blockIdx.x * 3] = sm; out[blockIdx.x * 3 + 1] = clock64() - first; out[blockIdx.x * 3 + 2] = end - begin;
}
extern "C" __global__ void nothing(int* x) { if (threadIdx.x == 0 && x[0] == 77) x[1] = 1; }
"""
TICKS = 400_000  # 0.2 ms: globaltimer's steps of 32 ns do not show
SHARED = 200 * 1024
CHAIN = 200  # kernels of a graph
LARGE, SMALL = 1 << 28, 8 << 20  # bytes to copy: through memory, within the cache
SIDE = 2048  # of the matrices


class Probe:
    """Everything is made once: what it measures with stays the same."""

    def __init__(self) -> None:
        import cupy as cp

        self._cp, module = cp, cp.RawModule(code=KERNELS)
        self._count, nothing = module.get_function("count"), module.get_function("nothing")
        self._count.max_dynamic_shared_size_bytes = SHARED
        self._sms = int(cp.cuda.Device().attributes["MultiProcessorCount"])
        self._stream = cp.cuda.Stream.null
        self._counts = cp.zeros((self._sms, 3), np.int64)
        self._from, self._to = cp.zeros(LARGE, np.uint8), cp.zeros(LARGE, np.uint8)
        self._a = torch.zeros(SIDE, SIDE, dtype=torch.float16, device="cuda")
        self._b, self._c = torch.zeros_like(self._a), torch.zeros_like(self._a)
        unused = cp.zeros(4, np.int32)
        with cp.cuda.Stream(non_blocking=True) as stream:
            stream.begin_capture()
            for _ in range(CHAIN):
                nothing((1,), (32,), (unused,))
            self._chain = stream.end_capture()

    def look(self) -> dict[str, Any]:
        cp, stream = self._cp, self._stream
        with stream, torch.cuda.stream(torch.cuda.default_stream()):
            self._count((self._sms,), (32,), (self._counts, np.int64(TICKS)), shared_mem=SHARED)
            stream.synchronize()
            sm, ticks, ns = self._counts.get().T
            return {
                "counted_mhz": [float(each) for each in np.quantile(ticks / ns * 1e3, (0, 0.5, 1))],
                "sms": len(np.unique(sm)),
                "copy_256_mib_us": self._us(lambda: cp.copyto(self._to, self._from)),
                "copy_8_mib_us": self._us(lambda: cp.copyto(self._to[:SMALL], self._from[:SMALL])),
                "kernel_gap_ns": 1e3 / CHAIN * self._us(lambda: self._chain.launch(stream=stream)),
                "matmul_us": self._us(lambda: torch.mm(self._a, self._b, out=self._c)),
            }

    def _us(self, launch: Callable[[], Any], repeats: int = 9) -> float:
        cp, times = self._cp, []
        for _ in range(repeats):
            begin, end = cp.cuda.Event(), cp.cuda.Event()
            begin.record(self._stream)
            launch()
            end.record(self._stream)
            end.synchronize()
            times.append(cp.cuda.get_elapsed_time(begin, end) * 1e3)
        return float(np.median(times))


@functools.cache
def probe() -> Probe:
    return Probe()
