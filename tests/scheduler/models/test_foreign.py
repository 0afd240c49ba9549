"""Graphs captured elsewhere: what cannot be a model is refused with the remedy, without a GPU too."""

from __future__ import annotations

import numpy as np
import pytest

import paellapy as pp
from paellapy.scheduler.core.errors import ModelError


class OnGpu:
    """An array of another library."""

    def __init__(self, strides=None):
        facts = {"shape": (4,), "typestr": "<f4", "data": (4096, False), "version": 3, "strides": strides}
        self.__cuda_array_interface__ = facts


ARRAYS = {"inputs": {"x": OnGpu()}, "outputs": {"y": OnGpu()}}


@pytest.mark.parametrize("change", [
    {"inputs": [OnGpu()]}, {"outputs": OnGpu()}, {"inputs": {}}, {"inputs": {"x": np.zeros(4)}},
    {"inputs": {"x": OnGpu(strides=(8,))}}, {"instances": 4}, {"batch": (1, 2)},
])  # fmt: skip
def test_what_cannot_be_the_model_of_a_graph_is_refused(change):
    ((key, _),) = change.items()
    with pytest.raises(ModelError, match=f"'net'.*({key}|'x')"):
        pp.Model.from_graph(1234, name="net", **{**ARRAYS, **change})


@pytest.mark.parametrize("graph", [None, 0, -3, "graph", object()])
def test_what_is_no_graph_is_refused(graph):
    with pytest.raises(ModelError, match="keep_graph=True"):
        pp.Model.from_graph(graph, **ARRAYS)


def test_a_graph_of_cupy_s_has_no_handle_and_the_remedy_has_one():
    found = type("Graph", (), {"__module__": "cupy.cuda.graph"})()
    with pytest.raises(ModelError, match="streamEndCapture"):
        pp.Model.from_graph(found, **ARRAYS)


def test_a_virtual_gpu_runs_no_graph():
    with pp.Engine("virtual:h200") as engine, pytest.raises(ModelError, match="CUDA graph"):
        engine.load(pp.Model.from_graph(1234, **ARRAYS))
