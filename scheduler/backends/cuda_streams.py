"""Streams of an engine on a real GPU: by priority, to capture on and for the core to launch on."""

from __future__ import annotations

import numpy as np

from paellapy.instrument.device.cuda import CudaDevice
from paellapy.instrument.device.cuda_memory import CudaArray, CudaStream
from paellapy.instrument.device.driver import check, driver
from paellapy.scheduler.backends.cuda_windows import CudaWindows
from paellapy.scheduler.core import codes


class CudaStreams:
    def __init__(self, device: CudaDevice) -> None:
        self._device = device
        self._captures: dict[int, CudaStream] = {}
        self._scratch_array = CudaArray(device, (1,), np.dtype(np.uint8))
        self.pools: dict[int, list[CudaStream]] = {}  # by CUDA's number for the priority

    def to_capture_on(self, priority: int) -> CudaStream:
        """A stream to capture on: kernels in a graph keep the priority of the stream on which they were captured."""
        if priority not in self._captures:
            self._captures[priority] = CudaStream(self._device, priority)
        return self._captures[priority]

    def pool(self, priority: int, windows: CudaWindows | None) -> list[CudaStream]:
        """The streams for launches of a priority: on all SMs, then in each window.

        Each is used once when it is created, because a stream's first work takes longer.
        """
        level = CudaStream.level(priority)
        if level not in self.pools:
            streams: list[CudaStream] = []
            try:
                for _ in range(codes.OF_WINDOWS):
                    streams.append(CudaStream(self._device, priority))
                if windows is not None:
                    for window in range(len(windows.sms)):
                        for _ in range(codes.QUEUES):
                            streams.append(windows.stream(window, priority))
                for k in (*range(codes.QUEUES), *range(codes.OF_WINDOWS, len(streams))):
                    opened = driver().cuMemsetD8Async(self._scratch_array.ptr, 0, 1, streams[k].handle)
                    check(opened, "opening a stream")
                    streams[k].synchronize()
            except BaseException:
                # streams of a window must go before the window does, even if the error keeps references
                streams.clear()
                raise
            self.pools[level] = streams
        return self.pools[level]

    def row(self, priority: int) -> int:
        """The place of a priority's pool among all pools, in the order of their creation."""
        return list(self.pools).index(CudaStream.level(priority))

    def clear(self) -> None:
        self.pools.clear()
        self._captures.clear()
