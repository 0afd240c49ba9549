"""Captures: what a program holds, that it replays, and what a captured function must not do."""

from __future__ import annotations

import numpy as np
import pytest
import triton
from engine_models import instances_of, mlp_model, mlp_reference, random_inputs, scale, scale_model
from failing import failing

import paellapy as pp
from paellapy.scheduler.backends.virtual import VirtualBackend
from paellapy.scheduler.core.errors import CaptureError
from paellapy.scheduler.models.model import Model, TensorSpec

pytestmark = pytest.mark.quick

SPECS = {"inputs": {"x": TensorSpec((64,))}, "outputs": {"y": TensorSpec((64,))}}


@pytest.fixture
def backend():
    return VirtualBackend(pp.Device("virtual:h200"))


def test_a_program_is_copies_in_kernels_copies_out(backend):
    model = mlp_model(layers=1)
    weights, (instance,) = instances_of(backend, model)
    program = backend.capture(instance, weights, 2, {})
    assert [node.kind for node in program.nodes] == ["h2d", "kernel", "kernel", "kernel", "d2h"]
    assert [node.name for node in program.nodes[1:4]] == ["gemm", "gemm", "softmax"]
    assert [node.launch for node in program.nodes] == [-1, 0, 1, 2, -1]
    assert program.nodes[0].nbytes == 2 * 64 * 4
    assert program.nodes[1].blocks == 4
    assert program.chain


def test_replaying_computes_what_the_model_computes(backend):
    model = mlp_model()
    weights, (instance,) = instances_of(backend, model)
    program = backend.capture(instance, weights, 4, {})
    rng, reference = np.random.default_rng(1), mlp_reference()
    for _ in range(3):
        given = [random_inputs(model, rng) for _ in range(4)]
        for slot, inputs in enumerate(given):
            instance.inputs["x"][slot] = inputs["x"]
        for item in program.body:
            item.run()
        for slot, inputs in enumerate(given):
            np.testing.assert_allclose(instance.outputs["p"][slot], reference(inputs)["p"], rtol=1e-4, atol=1e-6)


def test_instances_hold_the_same_program_over_other_memory(backend):
    model = scale_model(steps=3)
    weights, (one, other) = instances_of(backend, model, 2)
    first, second = backend.capture(one, weights, 1, {}), backend.capture(other, weights, 1, {})
    assert first.content() == second.content()
    assert first.content() != backend.capture(one, weights, 2, {}).content()
    one.inputs["x"][0] = 1
    other.inputs["x"][0] = 10
    for item in (*first.body, *second.body):
        item.run()
    assert (one.outputs["y"][0] == 8).all()
    assert (other.outputs["y"][0] == 80).all()


def test_scratch_memory_is_the_instances(backend):
    model = scale_model(steps=4)
    _, (instance,) = instances_of(backend, model)
    assert instance.plan.scratch_bytes == 3 * 8 * 64 * 4


def test_a_launch_is_cut_where_the_plan_says(backend):
    model = scale_model(steps=2, n=1024, batch=(1,))
    weights, (instance,) = instances_of(backend, model)
    program = backend.capture(instance, weights, 1, {1: ((0, 3), (3, 5))})
    assert [node.part for node in program.nodes] == [None, None, (0, 3), (3, 5), None]
    assert [node.blocks for node in program.nodes] == [0, 8, 3, 5, 0]
    instance.inputs["x"][0] = np.arange(1024)
    for item in program.body:
        item.run()
    np.testing.assert_array_equal(instance.outputs["y"][0], 4 * np.arange(1024, dtype=np.float32))


def capture(backend, fn, **specs):
    model = Model("culprit", fn, batch=(1,), **{**SPECS, **specs})
    weights, (instance,) = instances_of(backend, model)
    return backend.capture(instance, weights, 1, {})


def launch(inputs, outputs):
    scale[(1,)](inputs["x"], outputs["y"], 2.0, 64, B=64)


def waits(weights, inputs, outputs):
    launch(inputs, outputs)
    pp.Device.current().synchronize()


def waits_for_a_stream(weights, inputs, outputs):
    launch(inputs, outputs)
    pp.stream().synchronize()


def uploads(weights, inputs, outputs):
    launch(inputs, outputs)
    pp.array(np.zeros(4))


@pytest.mark.parametrize("fn", [waits, waits_for_a_stream, uploads])
def test_what_cannot_be_captured_names_model_and_line(backend, fn):
    with pytest.raises(CaptureError) as caught:
        capture(backend, fn)
    assert caught.value.model == "culprit"
    assert caught.value.location.endswith(f"test_capture.py:{fn.__code__.co_firstlineno + 2}")


@pytest.mark.parametrize(("touch", "doing"), [
    (lambda x: x + 1, "computes numpy.add on the host"),
    (lambda x: np.concatenate([x, x]), "calls numpy.concatenate on the host"),
    (lambda x: x.numpy(), "copies an array to the host"),
    (lambda x: x.set(np.zeros((1, 64))), "copies an array to the GPU"),
    (lambda x: x.__setitem__(0, 1), "writes to an array from the host"),
    (lambda x: float(x[0, 0:1].reshape(())), "reads a number from the GPU"),
    (lambda x: x.tolist(), "copies an array to the host"),
    (lambda x: x[0, 0:1].item(), "reads a number from the GPU"),
    (lambda x: bool(x[0, 0:1]), "branches on data"),
    (lambda x: x[0, 0] > 0, "reads a number from the GPU"),
    (lambda x: list(x[0]), "reads a number from the GPU"),
    (lambda x: x[0, [1, 2]], "picks elements on the host"),
    (lambda x: x.astype(np.float16), "computes astype() on the host"),
    (lambda x: x.copy(), "computes copy() on the host"),
    (lambda x: x.fill(1.0), "computes fill() on the host"),
    (lambda x: x.sort(), "computes sort() on the host"),
    (lambda x: x.flatten(), "computes flatten() on the host"),
    (lambda x: x.reshape(8, 8).T.reshape(64), "copies an array on the host"),
])  # fmt: skip
def test_the_host_does_not_compute_while_a_function_is_captured(backend, touch, doing):
    def fn(weights, inputs, outputs):
        launch(inputs, outputs)
        touch(inputs["x"])

    with pytest.raises(CaptureError) as caught:
        capture(backend, fn)
    assert (caught.value.model, caught.value.doing) == ("culprit", doing)
    assert "test_capture.py" in caught.value.location
    assert all(part in str(caught.value) for part in ("'culprit'", doing, caught.value.location))


def test_views_of_arrays_can_be_captured(backend):
    def fn(weights, inputs, outputs):
        scale[(1,)](inputs["x"].reshape(-1)[:32], outputs["y"], 3.0, 32, B=32)
        scale[(1,)](inputs["x"][0, 32:], outputs["y"][0, 32:], 5.0, 32, B=32)

    program = capture(backend, fn)
    program.body[0].source[:] = 1
    for item in program.body:
        item.run()
    assert program.body[-1].target[0].tolist() == [3.0] * 32 + [5.0] * 32


def test_memory_that_grows_from_run_to_run_is_refused(backend):
    grows = []

    def fn(weights, inputs, outputs):
        grows.append(pp.empty(64 * (1 + len(grows))))
        launch(inputs, outputs)

    with pytest.raises(CaptureError) as caught:
        capture(backend, fn)
    assert (caught.value.model, caught.value.limit) == ("culprit", 512)
    assert "test_capture.py" in caught.value.location


def test_an_error_of_the_function_is_the_cause(backend):
    def fn(weights, inputs, outputs):
        raise KeyError("nope")

    with pytest.raises(CaptureError) as caught:
        capture(backend, fn)
    assert (caught.value.model, caught.value.batch) == ("culprit", 1)
    assert "test_capture.py" in caught.value.location
    assert isinstance(caught.value.__cause__, KeyError)


def test_a_function_that_launches_nothing_is_refused(backend):
    with failing(CaptureError, launches=0):
        capture(backend, lambda weights, inputs, outputs: None)


def test_a_function_that_returns_its_result_is_told_where_to_write_it(backend):
    def fn(weights, inputs, outputs):
        launch(inputs, outputs)
        return outputs["y"]

    with failing(CaptureError, field="fn"):
        capture(backend, fn)


def test_the_device_runs_launches_again_after_a_capture_failed(backend):
    with pytest.raises(CaptureError):
        capture(backend, waits)
    with backend.device:
        x, y = pp.array(np.ones(64, np.float32)), pp.empty(64)
        scale[(triton.cdiv(64, 64),)](x, y, 2.0, 64, B=64)
        assert (y.numpy() == 2).all()
