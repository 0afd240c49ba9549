"""A segment beside a hog, on a GPU of which only the driver's calls exist."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from paellapy.instrument.gpu_model.parts import part
from paellapy.scheduler.backends import contention_probe
from paellapy.scheduler.backends.contention_probe import Hog, Work, memory_hog, tensor_hog

SMS, RUN_NS = 4, 200_000.0
HOG_STREAM, STREAM, GRAPH = 1, 2, 77


class Gpu:
    """Counts of a hog whose pace and whose effect on a graph are given. Its clock moves only while something runs."""

    def __init__(self, stretch: float, pace: float, waits: bool = False) -> None:
        self.stretch, self.pace, self.waits = stretch, pace, waits
        self.now_ns, self.word, self.since_ns = 0.0, 0, 0.0
        self.hog: tuple[int, float] | None = None  # its blocks per SM, and when it ends by itself
        self.counts = np.zeros((SMS * 4, 2), np.uint64)
        self.CUfunction_attribute = SimpleNamespace(
            CU_FUNC_ATTRIBUTE_NUM_REGS=0, CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT=1
        )

    def write(self, stream: int, word: int) -> None:
        self.word = word
        if word == 1:
            self.since_ns = self.now_ns
        if word == 2 and self.hog is not None:
            self._end(self.now_ns - self.since_ns, self.pace)

    def _end(self, ns: float, pace: float) -> None:
        assert self.hog is not None
        each, self.hog = self.hog[0], None
        self.counts[: SMS * each] = (pace * ns / max(each, 2), ns)  # two or more on an SM have all of the resource

    def launch(self, each: int, longest_ns: int) -> None:
        self.hog = each, self.now_ns + longest_ns
        if self.word == 1:  # nothing else runs
            self.now_ns += longest_ns
            self._end(float(longest_ns), 1.0)

    def run_graph(self) -> None:
        if self.hog is not None and self.waits:
            self.now_ns = max(self.now_ns, self.hog[1])
            self._end(self.now_ns - self.since_ns, 1.0)
        self.now_ns += RUN_NS * (self.stretch if self.hog is not None else 1.0)

    # -- calls of the driver

    def cuModuleLoadData(self, text: bytes) -> str:
        assert text.endswith(b"\0")
        return "module"

    def cuModuleGetFunction(self, module: str, name: bytes) -> int:
        return 5

    def cuModuleUnload(self, module: str) -> None: ...

    def cuFuncGetAttribute(self, attribute: int, function: int) -> int:
        return 40

    def cuFuncSetAttribute(self, function: int, attribute: int, value: int) -> None: ...

    def CUfunction(self, function: int) -> int:
        return function

    def cuStreamWriteValue32(self, stream: int, ptr: int, word: int, flags: int) -> None:
        self.write(stream, word)

    def cuStreamSynchronize(self, stream: int) -> None: ...

    def cuGraphLaunch(self, executable: int, stream: int) -> None:
        assert (executable, stream) == (GRAPH, STREAM)
        self.run_graph()

    def cuLaunchKernel(self, function: int, blocks: int, *rest: Any) -> None:
        (_, longest_ns, _, _), kinds = rest[-2]
        assert len(kinds) == 4
        self.launch(blocks // SMS, longest_ns)


def hog_on(gpu: Gpu, work: Work, patch: pytest.MonkeyPatch) -> Hog:
    def array(device: Any, shape: tuple[int, ...], dtype: Any) -> Any:
        return SimpleNamespace(ptr=4096, numpy=lambda: gpu.counts)

    def event(stream: int) -> Any:
        at = gpu.now_ns
        return SimpleNamespace(at=at, elapsed_ns=lambda earlier: at - earlier.at)

    patch.setattr(contention_probe, "driver", lambda: gpu)
    patch.setattr(contention_probe, "check", lambda found, doing: found)
    patch.setattr(contention_probe, "CudaArray", array)
    patch.setattr(contention_probe, "CudaEvent", event)
    stream = SimpleNamespace(handle=HOG_STREAM, synchronize=lambda: None)
    patch.setattr(contention_probe, "CudaStream", lambda *_: stream)
    device: Any = SimpleNamespace(sm_count=SMS, limits=part("h200").sm, zero=lambda _: None)
    return Hog(device, work)


@pytest.mark.parametrize("work", [memory_hog(), tensor_hog()], ids=lambda work: work.name)
def test_slowdown_and_pace_are_measured_in_one_window(work: Work, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = Gpu(1.5, 0.6)
    hog = hog_on(gpu, work, monkeypatch)
    assert hog.part == pytest.approx(work.blocks / 2, rel=1e-3)
    assert hog.takes.threads == work.blocks * work.threads
    assert hog.look(GRAPH, RUN_NS, STREAM) == pytest.approx((1.5, 0.6), rel=1e-3)
    hog.close()


def test_a_graph_that_waits_for_the_hog_s_end_has_no_pace(monkeypatch: pytest.MonkeyPatch) -> None:
    hog = hog_on(Gpu(1.0, 1.0, waits=True), tensor_hog(), monkeypatch)
    stretch, pace = hog.look(GRAPH, RUN_NS, STREAM)
    assert stretch > 4.0
    assert math.isnan(pace)
