"""Programs of the virtual GPU: what one instance recorded serves the others, and what blocks cost."""

from __future__ import annotations

from collections import namedtuple
from typing import Any

import numpy as np
import pytest
from engine_models import instances_of, mlp_model
from hypothesis import given
from hypothesis import strategies as some

import paellapy as pp
from paellapy import demo
from paellapy.scheduler.backends.virtual import VirtualBackend
from paellapy.scheduler.backends.virtual_memory import VirtualMemory

Pair = namedtuple("Pair", "a b")


def described(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return value.ctypes.data, value.shape, value.strides, value.dtype
    return tuple(map(described, value)) if isinstance(value, tuple) else value


@pytest.mark.parametrize("model", [mlp_model(batch=(1, 4)), demo.load("cnn", batch=(2,))], ids=lambda m: m.name)
def test_a_program_moved_to_another_instance_is_what_a_capture_there_records(model):
    backend = VirtualBackend(pp.Device("virtual:h200"))
    weights, (first, other) = instances_of(backend, model, 2)
    for batch in model.batch:
        recorded = backend.capture(first, weights, batch, {})
        moved, captured = backend.copied(recorded, first, other, {}), backend.capture(other, weights, batch, {})
        assert moved is not None
        assert moved.nodes == captured.nodes
        assert moved.content() == captured.content()
        for a, b in zip(moved.body, captured.body, strict=True):
            assert (a.launcher, a.grid, a.first) == (b.launcher, b.grid, b.first)
            assert described((a.values, a.target, a.source)) == described((b.values, b.target, b.source))
        again = backend.copied(recorded, first, first, {(0, None): 3})
        assert again is not None
        assert (again.body, again.marks) == (recorded.body, {(0, None): 3})


@given(some.integers(0, 15), some.integers(1, 16), some.sampled_from([-1, 1, 2]), some.booleans())
def test_an_array_is_moved_with_its_shape_and_strides(offset, n, step, on_host):
    here, there = VirtualMemory(256, 256), VirtualMemory(256, 256)
    memories = [(m.host if on_host else m.array(0, (256,), np.dtype(np.uint8))).view(np.ndarray) for m in (here, there)]
    views = [memory[4 * offset :].view(np.float32)[:n][::step] for memory in memories]
    elsewhere = np.zeros(3)
    moved = here.moved((views[0], Pair(elsewhere, 7), "x", None), there)
    assert described(moved[0]) == described(views[1])
    assert moved[1] == Pair(elsewhere, 7)
    assert type(moved[1]) is Pair
    assert moved[1].a is elsewhere
    assert moved[2:] == ("x", None)


def test_what_may_hold_arrays_out_of_sight_is_not_moved():
    memory = VirtualMemory(64, 64)
    with pytest.raises(TypeError):
        memory.moved((1, object()), VirtualMemory(64, 64))


def test_costs_seen_in_the_warm_up_run_are_those_of_the_program():
    model = demo.load("cnn", batch=(2,))
    costs = []
    for warmed_up in (True, False):
        backend = VirtualBackend(pp.Device("virtual:h200"))
        weights, (instance,) = instances_of(backend, model)
        if not warmed_up:
            backend.costs.warm_ups.clear()
        program = backend.capture(instance, weights, 2, {})
        assert (backend.costs.seen(program) is not None) == warmed_up
        costs.append(backend.costs.of(program))
    for a, b in zip(*costs, strict=True):
        assert (a is None) == (b is None)
        if a is not None and b is not None:
            for name in ("bytes", "flops", "tensor_flops", "wait_ns"):
                np.testing.assert_array_equal(getattr(a, name), getattr(b, name))
