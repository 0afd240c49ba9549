"""Models made from graphs that were captured elsewhere: by PyTorch, by CuPy, or through the driver.

A graph reads and writes the addresses with which it was captured. So such a model has one lane and takes whole tensors;
it copies a request's inputs to the graph's input addresses, and the outputs from its output addresses.
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
from paellapy.scheduler.models.torch_tensors import numpy_dtype


@dataclass(frozen=True, slots=True)
class Place:
    """A tensor in GPU memory that a graph uses."""

    address: int
    spec: TensorSpec
    keep: Any


class ForeignGraph:
    """A graph, the places of its inputs and outputs, and references that keep them alive."""

    uses_torch = False
    stateful = keeps_state = False
    nbytes = 0

    def __init__(self, name: str, graph: Any, inputs: Mapping[str, Any], outputs: Mapping[str, Any]) -> None:
        for what, given in (("inputs", inputs), ("outputs", outputs)):
            if not isinstance(given, Mapping):
                raise ModelError(f"model {name!r}: {what} is a {type(given).__name__}; give a dict of arrays by name")
        self.handle = graph_handle(name, graph)
        self.inputs = {key: _place(name, key, each) for key, each in inputs.items()}
        self.outputs = {key: _place(name, key, each) for key, each in outputs.items()}
        self._keep = graph

    def place(self, model: str, device: Device) -> Arrays:
        if not device.name.startswith("cuda"):
            raise ModelError(
                f"model {model!r} is a CUDA graph: it needs an engine on a CUDA GPU, and this one runs on "
                f"{device.title}"
            )
        return {}

    def preserved(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def run(self, weights: Arrays, inputs: Arrays, outputs: Arrays) -> None:
        raise CaptureError("is already a captured graph and cannot be captured again")


def graph_handle(name: str, graph: Any) -> int:
    """The driver's handle of a captured graph that still exists beside its executable form."""
    if hasattr(graph, "raw_cuda_graph"):  # PyTorch
        try:
            return int(graph.raw_cuda_graph())
        except RuntimeError as e:
            raise ModelError(
                f"model {name!r}: PyTorch has kept only the executable form of this graph ({e}); create it with "
                "torch.cuda.CUDAGraph(keep_graph=True)"
            ) from e
    if type(graph).__module__.partition(".")[0] == "cupy":
        raise ModelError(
            f"model {name!r}: CuPy keeps only the executable form of this graph; end the capture with handle = "
            "cupy.cuda.runtime.streamEndCapture(stream.ptr), and give the handle"
        )
    found = getattr(graph, "graph", graph)  # other libraries' graphs have their handle in this attribute
    try:
        handle = int(found)
    except (TypeError, ValueError):
        handle = 0
    if handle <= 0:
        raise ModelError(
            f"model {name!r}: a {type(graph).__name__} is not a captured graph: give a torch.cuda.CUDAGraph made with "
            "keep_graph=True, or the handle of a CUgraph"
        )
    return handle


def _place(name: str, key: str, tensor: Any) -> Place:
    torch: Any = sys.modules.get("torch")
    if torch is not None and isinstance(tensor, torch.Tensor):
        if not (tensor.is_cuda and tensor.is_contiguous()):
            raise ModelError(
                f"model {name!r}: {key!r} is not a contiguous tensor on the GPU; give the graph's own tensor"
            )
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
        raise ModelError(
            f"model {name!r}: {key!r} has shape {shape} and no elements; give the tensor that the graph uses"
        )
    return Place(int(address), TensorSpec(shape or (1,), dtype), tensor)
