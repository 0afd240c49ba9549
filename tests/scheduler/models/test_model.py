"""Models: what a user may say about one, and how a mistake is answered."""

from __future__ import annotations

import numpy as np
import pytest

from paellapy.instrument.errors import PaellaError
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


@pytest.mark.parametrize("shape", [(0,), (-1, 2), (1.5,), ("a",)])
def test_a_spec_refuses_what_is_no_shape(shape):
    with pytest.raises(ModelError, match="shape"):
        TensorSpec(shape)


def test_a_spec_refuses_what_is_no_element_type():
    with pytest.raises(ModelError, match="dtype='foo'"):
        TensorSpec((3,), "foo")


def test_specs_compare_by_value():
    assert TensorSpec((2,), np.float32) == TensorSpec([2], "float32") != TensorSpec((2,), "float16")


def test_weights_are_kept_contiguous():
    weights = np.arange(12.0).reshape(3, 4).T
    kept = model(weights={"w": weights}).weights["w"]
    assert kept.flags.c_contiguous
    np.testing.assert_array_equal(kept, weights)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"name": ""}, "name"),
        ({"fn": 3}, "callable"),
        ({"inputs": {}}, "no inputs"),
        ({"outputs": {}}, "no outputs"),
        ({"inputs": {"x": (4,)}}, "TensorSpec"),
        ({"batch": ()}, "batch"),
        ({"batch": 4}, "batch"),
        ({"batch": (2, 1)}, "batch"),
        ({"batch": (0, 1)}, "batch"),
        ({"batch": (1, 1)}, "batch"),
        ({"batch": (1.0,)}, "batch"),
        ({"target_ms": 0}, "target"),
        ({"target_ms": float("nan")}, "target"),
        ({"share": 0}, "share"),
        ({"instances": 0}, "instances"),
    ],
)
def test_each_mistake_is_named(changes, said):
    with pytest.raises(ModelError, match=said) as caught:
        model(**changes)
    assert isinstance(caught.value, PaellaError)


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
    with pytest.raises(ModelError, match="instances=0"):
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


@pytest.mark.parametrize(
    ("dtype", "bounds"),
    [("int64", {"low": 3, "high": 2}), ("int64", {"low": "a"}), ("bool", {"high": 1}), ("float32", {"low": np.nan})],
)
def test_a_range_that_cannot_be_is_refused(dtype, bounds):
    with pytest.raises(ModelError, match=r"low|high|range"):
        TensorSpec((2,), dtype, **bounds)
