"""The weights that each node needs: stale pointers, above and below the need of the kernel."""

from __future__ import annotations

from itertools import combinations, product

from hypothesis import given
from hypothesis import strategies as some

from paellapy.scheduler.models.weights import in_order

ends = some.integers(0, 6)


def longest(pairs):
    """By trying: the largest number of nodes in order."""
    for n in range(len(pairs), 0, -1):
        for chosen in combinations(pairs, n):
            if any(0 not in each and list(each) == sorted(each) for each in product(*chosen)):
                return n
    return 0


@given(some.lists(some.tuples(ends, ends).map(sorted), max_size=7))
def test_as_many_nodes_as_possible_keep_a_need_that_does_not_fall(pairs):
    found = in_order([low for low, _ in pairs], [high for _, high in pairs])
    kept = [each for each in found if each]
    assert kept == sorted(kept)
    assert all(each in (0, *pair) for each, pair in zip(found, pairs, strict=True))
    assert len(kept) == longest(pairs)


def test_single_stale_pointers_change_the_need_of_no_other_node():
    least, most = list(range(1, 61)), list(range(1, 61))
    least[50] = most[50] = 1  # early weights in a late kernel, whose own pointer is hidden
    least[5] = most[5] = 60
    most[20] = 44
    found = in_order(least, most)
    assert [found[k] for k in (5, 50)] == [0, 0]
    assert [each for k, each in enumerate(found) if k not in (5, 50)] == [k + 1 for k in range(60) if k not in (5, 50)]
