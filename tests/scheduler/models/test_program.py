"""Programs: where they are cut, and the order of their nodes."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as some

from paellapy.scheduler.core.errors import CaptureError
from paellapy.scheduler.models.program import Node, cut, plan_slices, slices, topological

pytestmark = pytest.mark.quick

times = some.lists(some.floats(1, 1e6), min_size=1, max_size=60)


@given(times, some.floats(1, 1e6))
def test_segments_are_consecutive_and_complete(node_times, quantum):
    bounds = cut(node_times, quantum)
    assert bounds[0][0] == 0
    assert bounds[-1][1] == len(node_times)
    assert all(end == start for (_, end), (start, _) in itertools.pairwise(bounds))
    assert all(first < end for first, end in bounds)


@given(times, some.floats(1, 1e6))
def test_no_segment_can_be_much_longer_than_its_longest_node_demands(node_times, quantum):
    for first, end in cut(node_times, quantum):
        part = node_times[first:end]
        # Nearest to the quantum is at most half a node over it; a crumb of a quarter on either side may join.
        assert sum(part) <= max(quantum, max(part)) + 0.5 * max(part) + 0.5 * quantum + 1e-6


def test_equal_nodes_make_segments_of_one_quantum():
    assert cut([10.0] * 12, 40) == [(0, 4), (4, 8), (8, 12)]


def test_a_short_program_is_one_segment():
    assert cut([10.0, 5.0], 50) == [(0, 2)]


def test_a_crumb_joins_its_shorter_neighbour():
    assert cut([50.0, 50.0, 2.0], 50) == [(0, 1), (1, 3)]
    assert cut([2.0, 80.0, 80.0], 50)[0] == (0, 2)


def test_nothing_is_cut_of_nothing():
    assert cut([], 50) == []


@given(some.integers(1, 5000), some.integers(1, 600), some.floats(1, 1e7), some.floats(1e3, 1e6))
def test_slices_cover_the_grid_in_whole_waves(blocks, wave, time_ns, quantum):
    parts = slices(blocks, wave, time_ns, quantum, 2.0)
    assert [first for first, _ in parts] == [sum(n for _, n in parts[:k]) for k in range(len(parts))]
    assert sum(count for _, count in parts) == blocks
    if len(parts) > 1:
        assert all(count % wave == 0 for _, count in parts[:-1])
        assert time_ns > 2.0 * quantum


def test_a_kernel_of_one_wave_is_never_sliced():
    assert slices(blocks=264, wave=264, time_ns=1e6, quantum_ns=5e4, slice_quanta=2.0) == ((0, 264),)


def test_only_our_divisible_kernels_are_sliced():
    nodes = [
        Node("kernel", "ours", blocks=1024, launch=0, divisible=True),
        Node("kernel", "theirs", blocks=1024),
        Node("h2d", nbytes=1 << 20),
        Node("kernel", "already", blocks=512, launch=1, part=(0, 512), divisible=True),
    ]
    cuts = plan_slices(nodes, [2e5] * 4, [264] * 4, 5e4, 2.0)
    assert list(cuts) == [0]
    assert len(cuts[0]) == 4


def test_a_chain_is_known_as_one():
    assert topological(4, [(0, 1), (1, 2), (2, 3)]) == ([0, 1, 2, 3], True)
    assert topological(3, [(0, 2), (1, 2)])[1] is False
    assert topological(1, []) == ([0], True)


@given(some.integers(1, 12).flatmap(lambda n: some.tuples(some.permutations(range(n)), some.sets(some.tuples(
    some.integers(0, n - 1), some.integers(0, n - 1))))))  # fmt: skip
def test_the_order_respects_every_edge(case):
    permutation, pairs = case
    edges = [(permutation[min(a, b)], permutation[max(a, b)]) for a, b in pairs if a != b]
    edges = sorted(set(edges))
    order, _ = topological(len(permutation), edges)
    place = {node: k for k, node in enumerate(order)}
    assert sorted(order) == list(range(len(permutation)))
    assert all(place[a] < place[b] for a, b in edges)


def test_a_cycle_is_refused():
    with pytest.raises(CaptureError):
        topological(2, [(0, 1), (1, 0)])
