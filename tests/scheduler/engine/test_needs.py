"""Which weights a segment needs: test runs draw inputs like those of requests, so that no weight passes unread."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

import paellapy as pp
from paellapy.scheduler.engine.needs import Trials


class Table:
    """A program of one segment that looks rows up, and adds the last tensor where a mask says so."""

    def __init__(self):
        self.table, self.bias = np.arange(16, dtype=np.float32), np.ones(1, np.float32)
        specs = {"ids": pp.TensorSpec((8,), "int64", low=2, high=15), "mask": pp.TensorSpec((8,), "bool"),
                 "scale": pp.TensorSpec((8,), "float32", low=1.0), "kind": pp.TensorSpec((8,), "int32")}  # fmt: skip
        self.inputs = {name: np.full((1, 8), spec.neutral, spec.dtype) for name, spec in specs.items()}
        self.outputs = {"y": np.zeros((1, 8), np.float32)}
        self.model = SimpleNamespace(inputs=specs)
        self.layout = SimpleNamespace(nbytes=68)

    def write(self, source, first, end):
        both = np.concatenate([self.table, self.bias]).view(np.uint8)
        both[first:end] = source[first:end]
        self.table, self.bias = both.view(np.float32)[:16].copy(), both.view(np.float32)[16:].copy()

    def fill(self, byte):
        self.write(np.full(68, byte, np.uint8), 0, 68)

    def run_segment(self, launches, k):
        looked = self.table[self.inputs["ids"]]
        self.outputs["y"][...] = np.where(self.inputs["mask"], looked + self.bias, 0)


@pytest.mark.parametrize("least", [0, 12, 64])  # nothing, the first rows, all but the tensor behind the mask
def test_weights_behind_masks_and_indices_are_found_to_be_needed(least):
    made = Table()
    source = np.concatenate([made.table, made.bias]).view(np.uint8).copy()
    trials = Trials(made, made, source, made, SimpleNamespace(handles=[0]))
    assert trials.tried([(least,)], (68,)) == (68,)
    assert made.inputs["mask"].any()
    assert (made.inputs["ids"] >= 2).all()
    assert (made.inputs["scale"] == 1.0).all()
    assert not made.inputs["kind"].any()  # any other number might be an index beyond a table
