"""Arenas: instances of models take turns in the same memory, and unused memory is given back."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from paellapy.scheduler.core.errors import MemoryPlanError
from paellapy.scheduler.models.memory import Arenas, Need


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


def test_models_share_a_arena_that_is_large_enough():
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


def test_models_of_different_priority_share_a_arena_if_memory_is_short():
    memory = Memory(1 << 20)
    (low,) = memory.choose("low", 4096)
    (high,) = memory.choose("high", 4096, priority=1, apart=False)
    assert high is low
    memory.arenas.leave("low")
    assert memory.choose("again", 4096, priority=1) == [high]


def test_a_arena_is_shared_if_there_is_no_memory_for_another_after_all():
    memory = Memory(4096)
    (low,) = memory.choose("low", 4096)
    (high,) = memory.choose("high", 4096, priority=1)
    assert high is low
    assert memory.claimed == 4096


def test_a_arena_grows_by_the_memory_that_a_library_needs():
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
