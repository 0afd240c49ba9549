"""Recorders: they capture a stream's work into a CUDA graph, through the driver or through PyTorch."""

from __future__ import annotations

import contextlib
import sys
from typing import Any

from paellapy.instrument.device.driver import check, driver
from paellapy.scheduler.models.tensors import Capturable
from paellapy.scheduler.models.torch_pool import TorchPool
from paellapy.scheduler.models.torch_random import Draws


class Recorder:
    """Captures a stream's work into a graph."""

    owner: Any = None

    def __init__(self, stream: int) -> None:
        self.stream = stream

    def memory(self, pool: TorchPool | None) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext() if pool is None else pool.on(self.stream)

    def begin(self) -> None:
        mode = driver().CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
        check(driver().cuStreamBeginCapture(self.stream, mode), "starting a capture")

    def end(self) -> Any:
        return check(driver().cuStreamEndCapture(self.stream), "ending a capture")

    def abandon(self) -> None:
        status, graph = driver().cuStreamEndCapture(self.stream)
        if not int(status) and int(graph):
            driver().cuGraphDestroy(graph)


class TorchRecorder(Recorder):
    """Captures through PyTorch, for training: the backward pass runs in PyTorch's own threads, whose memory must also
    come from the pool, and random numbers need a graph that is registered with their generator.
    """

    def __init__(self, stream: int, pool: TorchPool, draws: Draws | None) -> None:
        super().__init__(stream)
        self._pool = pool
        torch: Any = sys.modules["torch"]
        self.owner = torch.cuda.CUDAGraph(keep_graph=True)
        if draws is not None:
            draws.register(self.owner)

    def memory(self, pool: TorchPool | None) -> contextlib.AbstractContextManager[None]:
        return self._pool.stream_only(self.stream)

    def begin(self) -> None:
        self._pool.begin(self.owner)

    def end(self) -> Any:
        try:
            self.owner.capture_end()
        except RuntimeError:
            self._let_go()
            raise
        return driver().CUgraph(self.owner.raw_cuda_graph())

    def abandon(self) -> None:
        try:
            self.owner.capture_end()
        except RuntimeError:  # it cannot end properly; the original error is already being raised
            self._let_go()
        self.owner = None  # it holds the pool, and the traceback of the error holds this object

    def _let_go(self) -> None:
        self._pool.stop_recording()
        self.owner = None


def recorder_for(stream: int, pool: TorchPool | None, model: Capturable, drawn: int) -> Recorder:
    if pool is None or not (model.stateful or drawn):
        return Recorder(stream)
    return TorchRecorder(stream, pool, model.source.draws if model.stateful else None)
