"""Graphs that somebody else captured, as models: PyTorch's, CuPy's, or a handle of the driver's.

A graph reads and writes where it did when it was captured. So a model of it has one lane, takes whole tensors, and
copies a request's inputs to where the graph reads, its outputs from where the graph writes.
"""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from paellapy.instrument.device.base import Device
from paellapy.scheduler.core.errors import CaptureError, ModelError
from paellapy.scheduler.models.tensors import Arrays, TensorSpec
from paellapy.scheduler.models.torch_module import numpy_dtype


@dataclass(frozen=True, slots=True)
class Place:
    """A tensor in GPU memory that a graph uses."""

    address: int
    spec: TensorSpec
    keep: Any


class ForeignGraph:
    """A graph, where its inputs and outputs are, and what keeps them alive."""

    uses_torch = False
    stateful = False
    nbytes = 0

    def __init__(self, name: str, graph: Any, inputs: Mapping[str, Any], outputs: Mapping[str, Any]) -> None:
        self.handle = graph_handle(name, graph)
        self.inputs = {key: _place(name, key, each) for key, each in inputs.items()}
        self.outputs = {key: _place(name, key, each) for key, each in outputs.items()}
        self._keep = graph

    def place(self, model: str, device: Device) -> Arrays:
        if not device.name.startswith("cuda"):
            raise ModelError(f"model {model!r} is a CUDA graph: it needs a GPU, and this engine has {device.title}")
        return {}

    def preserved(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def run(self, weights: Arrays, inputs: Arrays, outputs: Arrays) -> None:
        raise CaptureError("is a graph already: it is not captured again")


def graph_handle(name: str, graph: Any) -> int:
    """The driver's handle of a captured graph that was not instantiated away."""
    if hasattr(graph, "raw_cuda_graph"):  # PyTorch
        try:
            return int(graph.raw_cuda_graph())
        except RuntimeError as e:
            raise ModelError(
                f"model {name!r}: PyTorch has kept no more than the executable of this graph ({e}); make it with "
                "torch.cuda.CUDAGraph(keep_graph=True)"
            ) from e
    found = getattr(graph, "graph", graph)  # CuPy's graphs have their handle there
    try:
        handle = int(found)
    except (TypeError, ValueError):
        handle = 0
    if handle <= 0:
        raise ModelError(
            f"model {name!r}: a {type(graph).__name__} is no captured graph: give a torch.cuda.CUDAGraph made with "
            "keep_graph=True, a graph of CuPy's, or the handle of a CUgraph"
        )
    return handle


def _place(name: str, key: str, tensor: Any) -> Place:
    torch: Any = sys.modules.get("torch")
    if torch is not None and isinstance(tensor, torch.Tensor):
        if not (tensor.is_cuda and tensor.is_contiguous()):
            raise ModelError(f"model {name!r}: {key!r} is not a contiguous tensor on the GPU, as a graph's tensors are")
        shape, dtype, address = tuple(tensor.shape), numpy_dtype(torch, tensor.dtype), tensor.data_ptr()
    else:
        facts = getattr(tensor, "__cuda_array_interface__", None)
        if facts is None or facts.get("strides") is not None:
            raise ModelError(
                f"model {name!r}: {key!r} is a {type(tensor).__name__}; give the contiguous array on the GPU that the "
                "graph was captured with"
            )
        shape, dtype, address = tuple(facts["shape"]), np.dtype(facts["typestr"]), facts["data"][0]
    if not math.prod(shape):
        raise ModelError(f"model {name!r}: {key!r} is empty")
    return Place(int(address), TensorSpec(shape or (1,), dtype), tensor)
