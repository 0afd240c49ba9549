"""A module's inference as a CUDA graph, without the engine: for benchmarks of what the GPU does by itself."""

from __future__ import annotations

from typing import Any

import torch
from paper_models import Kind

from instrument.device.driver import driver
from scheduler.cuda_graphs import CapturedGraph, read_graph


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
