"""Models: what a user may say about one, graphs captured elsewhere, and how a mistake is answered."""

from __future__ import annotations

import numpy as np
import pytest
from failing import failing

import paellapy as pp
from paellapy.scheduler.core.errors import ModelError
from paellapy.scheduler.models.model import Model, TensorSpec

pytestmark = pytest.mark.quick

SPECS = {"x": TensorSpec((4,))}


def nothing(weights, inputs, outputs):
    return None


def model(**changes):
    options = {"inputs": SPECS, "outputs": SPECS, **changes}
    return Model(options.pop("name", "m"), options.pop("fn", nothing), **options)


def test_a_spec_counts_its_bytes_without_the_batch():
    assert TensorSpec((3, 8), "float16").nbytes == 48
    assert TensorSpec(5).shape == (5,)
    assert TensorSpec((), np.int64).nbytes == 8


@pytest.mark.parametrize(("arguments", "options", "field"), [
    (((0,),), {}, "shape"), (((-1, 2),), {}, "shape"), (((1.5,),), {}, "shape"), ((("a",),), {}, "shape"),
    (((3,), "foo"), {}, "dtype"), (((2,), "int64"), {"low": 3, "high": 2}, "low"),
    (((2,), "int64"), {"low": "a"}, "low"), (((2,), "bool"), {"high": 1}, "dtype"),
    (((2,), "float32"), {"low": np.nan}, "low"),
])  # fmt: skip
def test_a_spec_refuses_what_no_tensor_can_have(arguments, options, field):
    with failing(ModelError, field=field):
        TensorSpec(*arguments, **options)


def test_specs_compare_by_value():
    assert TensorSpec((2,), np.float32) == TensorSpec([2], "float32") != TensorSpec((2,), "float16")


def test_weights_are_kept_contiguous():
    weights = np.arange(12.0).reshape(3, 4).T
    kept = model(weights={"w": weights}).weights["w"]
    assert kept.flags.c_contiguous
    np.testing.assert_array_equal(kept, weights)


@pytest.mark.parametrize(("field", "given"), [
    ("name", ""), ("fn", 3), ("inputs", {}), ("outputs", {}), ("inputs", {"x": (4,)}), ("batch", ()), ("batch", 4),
    ("batch", (2, 1)), ("batch", (0, 1)), ("batch", (1, 1)), ("batch", (1.0,)), ("target_ms", 0),
    ("target_ms", float("nan")), ("share", 0), ("instances", 0), ("priority", "high"), ("params", {"a b": 1}),
    ("resident", "always"), ("capture", "later"),
])  # fmt: skip
def test_each_mistake_is_named(field, given):
    with pytest.raises(ModelError) as caught:
        model(**{field: given})
    assert (caught.value.field, caught.value.model) == (field, "" if field == "name" else "m")
    assert repr(caught.value.model) in str(caught.value)
    assert field in str(caught.value)


def test_the_largest_batch_is_the_last():
    assert model(batch=(1, 4, 16)).max_batch == 16
    assert "batch (1, 4, 16)" in repr(model(batch=(1, 4, 16)))


def test_a_model_is_changed_in_part_and_stays_what_it_is():
    class Special(Model):
        def run(self, weights, inputs, outputs):
            return self.name

    first = Special("a", print, inputs={"x": TensorSpec(4)}, outputs={"y": TensorSpec(4)}, batch=(1, 2), share=2.0)
    first.fn = first.run
    second = first.changed(name="b", batch=(4,), instances=3)
    assert isinstance(second, Special)
    assert (second.name, second.batch, second.instances, second.share) == ("b", (4,), 3, 2.0)
    assert (first.name, first.batch, first.instances) == ("a", (1, 2), None)
    assert (first.fn({}, {}, {}), second.fn({}, {}, {})) == ("a", "b")
    with failing(ModelError, model="a", field="instances", given=0):
        first.changed(instances=0)


def test_a_range_is_checked_and_shown():
    spec = TensorSpec((2,), np.int64, low=0, high=9)
    assert spec.outside(np.array([0, 9])) is None
    assert spec.outside(np.array([[3, 4], [5, 10]])) == "has the value 10; it takes 0 to 9"
    assert spec.outside(np.array([-1, 3])) == "has the value -1; it takes 0 to 9"
    assert "low=0, high=9" in repr(spec)
    assert "1.5 and above" in str(TensorSpec((2,), low=1.5).outside(np.array([2.0, np.nan])))
    assert TensorSpec((2,), low=1.5).neutral == 1.5
    assert TensorSpec((2,), high=-2).neutral == -2
    assert not TensorSpec((2,)).has_range


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
    with pytest.raises(ModelError) as caught:
        pp.Model.from_graph(1234, name="net", **{**ARRAYS, **change})
    assert caught.value.model == "net"
    assert caught.value.field in (key, "x")


@pytest.mark.parametrize("graph", [None, 0, -3, "graph", object()])
def test_what_is_no_graph_is_refused(graph):
    with failing(ModelError, field="graph", given=graph):
        pp.Model.from_graph(graph, **ARRAYS)


def test_a_graph_of_cupy_s_has_no_handle_and_the_remedy_has_one():
    found = type("Graph", (), {"__module__": "cupy.cuda.graph"})()
    with failing(ModelError, field="graph", given=found):
        pp.Model.from_graph(found, **ARRAYS)


def test_a_virtual_gpu_runs_no_graph():
    with pp.Engine("virtual:h200") as engine, failing(ModelError, field="device"):
        engine.load(pp.Model.from_graph(1234, **ARRAYS))
