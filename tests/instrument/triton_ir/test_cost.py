"""Sectors that are touched and queues of atomic updates, for addresses given as NumPy arrays."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from paellapy.instrument.triton_ir import COST_DTYPE
from paellapy.instrument.triton_ir.cost import SHARES, count_updates, count_waste
from paellapy.instrument.triton_ir.memory import Site
from paellapy.instrument.triton_ir.types import ELEMENTS

F32 = ELEMENTS["f32"]


def counted(count: Any, offset: Any, mask: Any = None, **more: Any) -> Any:
    offset = np.asarray(offset)
    blocks, shape = len(offset), offset.shape[1:]
    cost = np.zeros((blocks, len(COST_DTYPE)), np.int64)
    site = Site("k", "line", "op", "x", (blocks, 1, 1), np.arange(blocks), np.arange(blocks), shape)
    count(cost, offset, mask, F32, *more.values(), site)
    return cost.view(COST_DTYPE).reshape(-1)


def tile(blocks: int, elements: int, step: int = 1) -> Any:
    return step * np.arange(blocks * elements, dtype=np.int64).reshape(blocks, elements)


@pytest.mark.parametrize(("step", "wasted"), [(1, 0), (2, 128 * 4), (8, 128 * 28), (100, 128 * 28)])
def test_bytes_beyond_the_used_ones(step: int, wasted: int) -> None:
    assert counted(count_waste, tile(4, 128, step))["wasted"].tolist() == [wasted] * 4


def test_masked_elements_and_repeated_addresses_move_nothing() -> None:
    strided = tile(4, 128, 8)
    half = np.broadcast_to(np.arange(128) < 64, strided.shape)
    assert counted(count_waste, strided, half)["wasted"].tolist() == [64 * 28] * 4
    assert not counted(count_waste, np.zeros((4, 128), np.int64))["wasted"].any()


def turns(offset: Any, mask: Any = None, threads: int = 128) -> tuple[float, float, int]:
    cost = counted(count_updates, offset, mask, threads=threads)
    queue, hottest = (round(float(cost[name].sum()) / SHARES, 3) for name in ("pressure", "hottest"))
    return queue, hottest, int(cost["updates"].sum())


def test_lanes_at_one_address_take_turns() -> None:
    assert turns(np.zeros((4, 128), np.int64)) == (512, 512, 512)


def test_lanes_at_different_addresses_of_a_sector_do_not() -> None:
    # 4 lanes an address, 4 warps, 4 blocks
    assert turns(np.tile(np.arange(128) % 8, (4, 1))) == (4 * 4 * 4, 4 * 16, 512)


def test_a_thread_has_several_elements_in_a_row() -> None:
    # 256 elements, 128 threads: in one request the lanes have every second address, so 8 lanes have the same one
    assert turns(np.tile(np.arange(256) % 8, (1, 1)))[0] == 8 * 8


def test_updates_of_different_lines_do_not_wait_for_each_other() -> None:
    queue, hottest, updates = turns(tile(64, 128))
    assert (hottest, updates) == (1, 64 * 128)
    assert queue == 4, "the sectors of one line, each once"


def test_many_blocks_are_judged_by_some_of_them() -> None:
    blocks = 4096
    queue, _, updates = turns(np.zeros((blocks, 1024), np.int64))
    assert updates == blocks * 1024
    assert queue == pytest.approx(blocks * 1024, rel=0.01)
