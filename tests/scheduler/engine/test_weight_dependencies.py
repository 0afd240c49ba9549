"""Which weights a segment needs: test runs draw inputs like those of requests, so that no weight passes unread."""

from __future__ import annotations

from itertools import accumulate
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as some

import paellapy as pp
from paellapy.scheduler.engine.weight_dependencies import Trials, guesses, lowered


class Table:
    """A program of one segment that looks rows up, and adds the last tensor where a mask says so."""

    def __init__(self):
        self.table, self.bias = np.arange(16, dtype=np.float32), np.ones(1, np.float32)
        specs = {"ids": pp.TensorSpec((8,), "int64", low=2, high=15), "mask": pp.TensorSpec((8,), "bool"),
                 "scale": pp.TensorSpec((8,), "float32", low=1.0), "kind": pp.TensorSpec((8,), "int32")}  # fmt: skip
        self.inputs = {name: np.full((1, 8), spec.neutral, spec.dtype) for name, spec in specs.items()}
        self.outputs = {"y": np.zeros((1, 8), np.float32)}
        self.model = SimpleNamespace(inputs=specs)
        self.layout, self.chunk_bytes = SimpleNamespace(nbytes=68), 4

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


@pytest.mark.parametrize(("dtype", "low", "high", "least", "most"), [
    ("int64", 0, 2**63, 0, 2**63 - 1),
    ("int64", -(2.0**70), 5, -(2**63), 5),
    ("uint64", -1, 2**64, 0, 2**64 - 1),
    ("int8", 120.5, 1e30, 121, 127),
    (">i4", 7, 7, 7, 7),
    ("int64", 0, np.inf, 0, 0),  # not drawn, as without a bound
    ("int64", -np.inf, 0, 0, 0),
    ("int64", np.inf, np.inf, 0, 0),
    ("int8", 200, 300, 0, 0),
    ("int32", 0.25, 0.75, 0, 0),
])  # fmt: skip
def test_values_are_drawn_from_the_part_of_a_range_that_the_type_can_hold(dtype, low, high, least, most):
    made = Table()
    spec = pp.TensorSpec((64,), dtype, low=low, high=high)
    made.model.inputs["more"], made.inputs["more"] = spec, np.zeros((1, 64), spec.dtype)
    Trials(made, made, np.zeros(68, np.uint8), made, SimpleNamespace(handles=[0]))
    found = made.inputs["more"].ravel().tolist()
    assert least <= min(found) <= max(found) <= most
    assert (len(set(found)) > 1) == (least < most)


needs = some.lists(some.tuples(some.integers(0, 9), some.integers(0, 9), some.integers(0, 9)), min_size=1, max_size=24)


@given(needs, some.integers(0, 60))
def test_needs_are_lowered_as_far_as_the_pointers_and_the_tests_allow(drawn, most):
    """`needed` is the truth, `smallest` the guess of the pointers, and `found` a guess that suffices."""
    smallest, more, most_of_all = (tuple(accumulate(column, max)) for column in zip(*drawn, strict=True))
    needed = tuple(map(max, smallest, more))
    found = tuple(map(max, needed, most_of_all))
    tested = []

    def runs_with(guess):
        tested.append(guess)
        return all(map(int.__ge__, guess, needed))

    got = lowered(smallest, found, runs_with, 1, most)
    assert len(tested) <= most
    assert all(map(int.__ge__, got, needed))
    assert all(map(int.__le__, got, found))
    assert got == found or got in tested
    if smallest == needed and most:
        assert got == needed


class Layers:
    """A chain of layers, a segment and a number each. Some kernels show the pointer of another layer beside theirs."""

    def __init__(self, layers):
        self.numbers = np.arange(1, layers + 1, dtype=np.float32)
        self.inputs, self.outputs = {"x": np.zeros((1, 1), np.float32)}, {"y": np.zeros((1, 1), np.float32)}
        self.model = SimpleNamespace(inputs={"x": pp.TensorSpec((1,))})
        self.layout, self.chunk_bytes = SimpleNamespace(nbytes=4 * layers), 4
        self.runs = 0

    def write(self, source, first, end):
        self.numbers.view(np.uint8)[first:end] = source[first:end]

    def fill(self, byte):
        self.numbers.view(np.uint8)[:] = byte

    def run_segment(self, launches, k):
        source = self.inputs["x"] if k == 0 else self.outputs["y"]
        self.outputs["y"][...] = source * self.numbers[k]
        self.runs += 1


def test_one_kernel_with_a_misleading_pointer_does_not_delay_all_segments():
    layers = 24
    made = Layers(layers)
    source = made.numbers.view(np.uint8).copy()
    needed = [4 * (k + 1) for k in range(layers)]
    least = [*needed]
    least[7] = 4  # a stale pointer to the first layer, and the layer's own pointer in a structure that is not read
    least = tuple(accumulate(least, max))
    trials = Trials(made, made, source, made, SimpleNamespace(handles=list(range(layers))))
    found = trials.tried([least], (4 * layers,) * layers)
    assert found == tuple(needed)
    assert found not in guesses([least], (4 * layers,) * layers)
    assert np.array_equal(made.numbers.view(np.uint8), source)
