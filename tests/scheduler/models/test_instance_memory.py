"""Instances: where tensors lie, and who gets how much of the memory."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as some

from paellapy.scheduler.backends.virtual_memory import VirtualMemory
from paellapy.scheduler.core.errors import CaptureError, MemoryPlanError
from paellapy.scheduler.models.memory import ALIGN, Bump, Instance, MemoryPlan, aligned, plan_instance
from paellapy.scheduler.models.model import Model, TensorSpec


def model(**options):
    return Model(
        "m",
        lambda weights, inputs, outputs: None,
        inputs={"x": TensorSpec((3, 5)), "ids": TensorSpec((7,), np.int32)},
        outputs={"x": TensorSpec((2,), np.float16)},
        **options,
    )


def instance(scratch_bytes=1000, **options):
    plan = plan_instance(model(**options), scratch_bytes, segments=4)
    return Instance(0, model(**options), plan, VirtualMemory(plan.device_bytes, plan.host_bytes))


@given(some.lists(some.integers(0, 5000)))
def test_a_bump_gives_aligned_pieces_that_do_not_overlap(sizes):
    bump = Bump()
    end = 0
    for size in sizes:
        offset = bump.take(size)
        assert offset % ALIGN == 0
        assert offset >= end
        end = offset + size
    assert bump.used == sum(aligned(size) for size in sizes)


def test_a_bump_with_a_capacity_says_what_was_planned():
    bump = Bump(512)
    bump.take(512)
    with pytest.raises(CaptureError, match=r"768 bytes.*512"):
        bump.take(1)


def test_inputs_and_outputs_of_one_name_are_different_memory():
    found = instance(batch=(1, 3))
    found.inputs["x"][:] = 1
    found.outputs["x"][:] = 2
    assert (found.inputs["x"] == 1).all()
    assert found.inputs["x"].shape == (3, 3, 5)
    assert found.outputs["x"].dtype == np.float16


def test_all_batch_sizes_share_the_same_device_memory():
    found = instance(batch=(1, 3))
    small, large = found.device_inputs(1)["ids"], found.device_inputs(3)["ids"]
    assert small.shape == (1, 7)
    assert small.ctypes.data == large.ctypes.data
    assert small.ctypes.data % ALIGN == 0


def test_no_two_tensors_of_a_instance_overlap():
    found = instance()
    arrays = [*found.device_inputs(8).values(), *found.device_outputs(8).values()]
    arrays.append(found.scratch(Bump(1024), (250,), np.dtype(np.float32)))
    spans = sorted((a.ctypes.data, a.ctypes.data + a.nbytes) for a in arrays)
    assert all(end <= start for (_, end), (start, _) in pairwise(spans))


def test_completion_words_lie_beside_the_slots():
    found = instance()
    assert len(found.words) == 5
    assert found.words.ctypes.data % 8 == 0
    found.words[:] = 7
    assert not found.inputs["x"].any()


@given(
    budget=some.integers(0, 10**6),
    models=some.lists(some.tuples(some.integers(0, 10**5), some.integers(0, 10**5), some.integers(1, 8))),
)
def test_what_is_held_never_exceeds_the_budget(budget, models):
    plan = MemoryPlan(budget)
    for k, (weights, instance_bytes, wanted) in enumerate(models):
        try:
            got = plan.reserve(f"m{k}", weights, instance_bytes, wanted)
        except MemoryPlanError:
            continue
        assert 1 <= got.instances <= wanted
    assert plan.held_bytes <= budget
    for k in range(len(models)):
        plan.release(f"m{k}")
    assert plan.held_bytes == 0


def test_fewer_instances_are_given_where_not_all_fit():
    assert MemoryPlan(1000).reserve("m", 400, 200, wanted=8).instances == 3


def test_a_refusal_has_the_figures():
    plan = MemoryPlan(10 << 20)
    plan.reserve("other", 4 << 20, 1 << 20, 1)
    with pytest.raises(MemoryPlanError) as caught:
        plan.reserve("large", 3 << 20, 2 << 20, wanted=4, least=2)
    for figure in ("3.0 MiB", "2 instances of 2.0 MiB", "7.0 MiB", "5.0 MiB", "10.0 MiB", "other: 5.0 MiB"):
        assert figure in str(caught.value)
    assert list(plan.reservations) == ["other"]
