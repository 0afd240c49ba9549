"""The clock of a real GPU: read by a kernel, and compared with the host's clock."""

from __future__ import annotations

import ctypes
import time

import numpy as np
from numpy.typing import NDArray

from paellapy.instrument.device.driver import check, driver

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
