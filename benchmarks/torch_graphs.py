"""A module's inference as a CUDA graph, without the engine, for benchmarks of the GPU by itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from paper_models import Kind

from paellapy.instrument.device.driver import driver
from paellapy.scheduler.backends.cuda_graphs import CapturedGraph, read_graph


def half_net(kind: Kind) -> torch.nn.Module:
    net: torch.nn.Module = kind.build("cuda").half().to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return net


def capture(net: torch.nn.Module, kind: Kind, batch: int, priority: int = 0) -> tuple[CapturedGraph, Any]:
    """The graph of one run, and what must stay alive with it."""
    x = torch.randn(batch, *kind.image, device="cuda", dtype=torch.float16)
    x = x.contiguous(memory_format=torch.channels_last)
    stream = torch.cuda.Stream(priority=-priority)
    with torch.no_grad():
        for _ in range(3):  # not on that stream: benchmarks/kernel_gaps.py
            net(x)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph(keep_graph=True)
        with torch.cuda.graph(graph, stream=stream):
            y = net(x)
    return read_graph(driver().CUgraph(int(graph.raw_cuda_graph()))), (net, x, y, graph, stream)


def median_us(launch: Callable[[], Any], runs: int, before: Callable[[], Any] = lambda: None) -> float:
    """Of what is launched on the default stream, each time after something else has ended there."""
    times = []
    for _ in range(runs):
        before()
        torch.cuda.synchronize()
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        launch()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3)
    return float(np.median(times))
