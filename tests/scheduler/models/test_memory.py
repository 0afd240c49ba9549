"""Instances, the plan of the memory, and arenas in which instances of several models take turns."""

from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest
from failing import failing
from hypothesis import given
from hypothesis import strategies as some

from paellapy.scheduler.backends.virtual_memory import VirtualMemory
from paellapy.scheduler.core.errors import CaptureError, MemoryPlanError
from paellapy.scheduler.models.memory import ALIGN, Arenas, Bump, Instance, MemoryPlan, Need, aligned, plan_instance
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
    with failing(CaptureError, given=768, limit=512):
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


def test_no_two_tensors_of_an_instance_overlap():
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
    figures = caught.value.needed_bytes, caught.value.free_bytes, caught.value.limit_bytes
    assert figures == (7 << 20, 5 << 20, 10 << 20)
    for figure in ("3.0 MiB", "2 instances of 2.0 MiB", "7.0 MiB", "5.0 MiB", "10.0 MiB", "other: 5.0 MiB"):
        assert figure in str(caught.value)
    assert list(plan.reservations) == ["other"]


class Memory:
    """Device memory up to a limit: claimed bytes, and blocks that are not freed."""

    def __init__(self, limit):
        self.limit, self.claimed, self.blocks = limit, 0, 0
        self.arenas = Arenas(self.make, self.claim, self.give)

    def make(self, nbytes):
        self.blocks += 1
        return SimpleNamespace(free=self.free)

    def free(self):
        self.blocks -= 1

    def claim(self, nbytes):
        if self.claimed + nbytes > self.limit:
            raise MemoryPlanError("full")
        self.claimed += nbytes

    def give(self, nbytes):
        self.claimed -= nbytes

    def choose(self, name, nbytes, count=1, foreign=0, spare=False, priority=0, apart=True):
        need = Need(name, nbytes, foreign, count, priority)
        return self.arenas.choose(need, 4, lambda more, for_priority: apart if for_priority else spare)


def test_models_share_an_arena_that_is_large_enough():
    memory = Memory(1 << 20)
    (large,) = memory.choose("a", 10_000)
    (shared,) = memory.choose("b", 5_000)
    assert shared is large
    assert {*large.users} == {"a", "b"}
    assert memory.claimed == memory.arenas.held_bytes == 16384


def test_instances_of_one_model_have_arenas_of_their_own():
    memory = Memory(1 << 20)
    found = memory.choose("a", 4096, count=3)
    assert len({each.index for each in found}) == 3
    again = memory.choose("b", 4096, count=3)
    assert {each.index for each in again} == {each.index for each in found}


def test_further_arenas_are_made_while_memory_can_be_spared():
    memory = Memory(1 << 20)
    memory.choose("a", 4096)
    (own,) = memory.choose("b", 4096, spare=True)
    assert {*own.users} == {"b"}
    assert memory.blocks == 2


def test_models_of_different_priority_have_arenas_apart():
    memory = Memory(1 << 20)
    first, second = memory.choose("low", 4096, count=2)
    high = memory.choose("high", 4096, count=2, priority=1)
    assert not {first.index, second.index} & {each.index for each in high}
    also = memory.choose("also high", 4096, count=2, priority=1)
    assert {each.index for each in also} == {each.index for each in high}
    memory.choose("also low", 4096, count=2)
    assert all({*each.users.values()} == {1} for each in high)


def test_models_of_different_priority_share_an_arena_if_memory_is_short():
    memory = Memory(1 << 20)
    (low,) = memory.choose("low", 4096)
    (high,) = memory.choose("high", 4096, priority=1, apart=False)
    assert high is low
    memory.arenas.leave("low")
    assert memory.choose("again", 4096, priority=1) == [high]


def test_an_arena_is_shared_if_there_is_no_memory_for_another_after_all():
    memory = Memory(4096)
    (low,) = memory.choose("low", 4096)
    (high,) = memory.choose("high", 4096, priority=1)
    assert high is low
    assert memory.claimed == 4096


def test_an_arena_grows_by_the_memory_that_a_library_needs():
    memory = Memory(1 << 20)
    memory.choose("a", 4096, foreign=100)
    memory.choose("b", 4096, foreign=300)
    assert memory.claimed == memory.arenas.held_bytes == 4096 + 300


def test_arenas_go_with_their_last_model_and_their_numbers_are_used_again():
    memory = Memory(1 << 20)
    first = memory.choose("a", 4096, count=2)
    memory.choose("b", 4096)
    memory.arenas.leave("a")
    assert memory.blocks == 1
    (again,) = memory.choose("c", 8192)
    assert again.index in {each.index for each in first}
    for name in "bc":
        memory.arenas.leave(name)
    assert (memory.blocks, memory.claimed, memory.arenas.held_bytes) == (0, 0, 0)


def test_a_model_that_does_not_fit_leaves_nothing_behind():
    memory = Memory(8192)
    with pytest.raises(MemoryPlanError):
        memory.choose("a", 4096, count=3)
    assert (memory.blocks, memory.claimed) == (0, 0)
