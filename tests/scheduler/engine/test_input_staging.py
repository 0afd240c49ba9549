"""Memory for inputs without a slot: used again, never by two requests at once."""

from __future__ import annotations

import asyncio
import contextlib
from itertools import pairwise

import numpy as np
import pytest
from core_check import check_at_rest
from engine_models import scale_model
from hypothesis import given, settings
from hypothesis import strategies as some
from waiting import held_core

import paellapy as pp
from paellapy.scheduler.core.errors import QueueFullError
from paellapy.scheduler.core.processes import SharedBlock
from paellapy.scheduler.engine.input_staging import OwnStage, SharedStage, Stage

pytestmark = pytest.mark.quick


def shared(nbytes: int) -> SharedStage:
    block = SharedBlock(nbytes)
    return SharedStage(block, int(block.array.ctypes.data))


@pytest.mark.parametrize("make", [OwnStage, lambda: shared(1 << 20)])
@given(script=some.lists(some.tuples(some.sampled_from([1, 64, 256, 300]), some.booleans()), max_size=60))
@settings(max_examples=50, deadline=None)
def test_no_two_requests_have_the_same_memory(make, script):
    stage: Stage = make()
    held = []
    for number, (nbytes, takes) in enumerate(script):
        if takes or not held:
            memory, address, token = stage.take(nbytes)
            assert (len(memory), memory.ctypes.data) == (nbytes, address)
            memory[:] = number % 256
            held.append((memory, number % 256, token))
        else:
            memory, value, token = held.pop(0)
            assert (memory == value).all()
            stage.give(token)
    assert all((memory == value).all() for memory, value, _ in held)


def test_memory_is_used_again():
    stage = OwnStage()
    taken = [stage.take(256) for _ in range(3)]
    for _, _, token in taken:
        stage.give(token)
    assert {stage.take(256)[1] for _ in range(3)} == {address for _, address, _ in taken}


def test_free_memory_of_a_size_is_kept_up_to_a_limit():
    stage = OwnStage()
    taken = [stage.take(1 << 18) for _ in range(10)]
    for _, _, token in taken:
        stage.give(token)
    del taken, token
    assert [len(blocks) for blocks in stage._free.values()] == [4]


def test_a_full_stage_refuses():
    stage = shared(4096)
    for _ in range(len(stage._memory) // 256):
        stage.take(256)
    with pytest.raises(QueueFullError):
        stage.take(256)


@pytest.mark.parametrize(("before", "after"), [(256, 64), (64, 256), (64, 4096), (4096, 300)])
def test_a_flood_of_one_size_leaves_all_memory_to_other_sizes(before, after):
    stage = shared(1 << 16)
    fits = len(stage._memory) // before
    for token in [stage.take(before)[2] for _ in range(fits)]:
        stage.give(token)
    places = [stage.take(after)[1] for _ in range(len(stage._memory) // (1 << (after - 1).bit_length()))]
    assert len({*places}) == len(places)
    with pytest.raises(QueueFullError):
        stage.take(after)


@given(script=some.lists(some.tuples(some.integers(0, 5000), some.booleans()), max_size=80))
@settings(max_examples=50, deadline=None)
def test_blocks_of_all_sizes_never_overlap_and_all_memory_comes_back(script):
    stage = shared(12_288)
    whole, held = len(stage._memory), []
    for nbytes, takes in script:
        if not takes and held:
            stage.give(held.pop(0)[2])
            continue
        with contextlib.suppress(QueueFullError):
            held.append(stage.take(nbytes))
    ends = sorted((address, address + len(memory)) for memory, address, _ in held)
    assert all(end <= start for (_, end), (start, _) in pairwise(ends))
    for _, _, token in held:
        stage.give(token)
    stage.take(1 << (whole.bit_length() - 1))  # the largest block


@pytest.mark.parametrize("n", [64, 4096])
def test_inputs_that_find_no_open_instance_arrive_unchanged(n):
    """Short and long ones, whole arrays and every second element of others, in memory that is new and used again."""

    async def ask(engine) -> None:
        for _ in range(2):
            inputs = [np.arange(k, k + 2 * n, dtype=np.float32)[:: 1 + k % 2][:n] for k in range(40)]
            with held_core(engine):
                tasks = [asyncio.create_task(engine.infer("scale", {"x": x})) for x in inputs]
                await asyncio.sleep(0)
                assert engine.core.ring.waiting == len(inputs)
            found = await asyncio.wait_for(asyncio.gather(*tasks), 60)
            for x, each in zip(inputs, found, strict=True):
                np.testing.assert_array_equal(each["y"], 2 * x)

    with pp.Engine("virtual:h200") as engine:
        engine.load(scale_model(instances=2, batch=(1, 2), n=n))
        asyncio.run(ask(engine))
        check_at_rest(engine.state)
