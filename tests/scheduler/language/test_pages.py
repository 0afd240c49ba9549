"""Pages of keys and values: nothing is lost, nothing is given twice, and equal beginnings are shared."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paellapy.scheduler.language.pages import PAGE, PagePool


def filled(pool: PagePool, tokens: list[int]) -> list[int]:
    """The pages of a sequence of these tokens, all full ones kept."""
    shared = pool.shared(tokens)
    pages = shared + pool.take(-(-len(tokens) // PAGE) - len(shared))
    chain = -1
    for k in range(len(tokens) // PAGE):
        chain = pool.keep(pages[k], tokens[k * PAGE : (k + 1) * PAGE], chain)
    return pages


@given(
    count=st.integers(4, 12),
    steps=st.lists(st.tuples(st.booleans(), st.integers(0, 3), st.integers(1, 3), st.integers(0, 3)), max_size=40),
)
def test_sequences_share_what_they_begin_with_and_nothing_else(
    count: int, steps: list[tuple[bool, int, int, int]]
) -> None:
    pool = PagePool(count)
    held: list[tuple[list[int], list[int]]] = []
    for comes, kind, pages, own in steps:
        if comes and pool.free >= pages + 1:
            tokens = [kind] * (pages * PAGE) + [own] * 3
            taken = filled(pool, tokens)
            for other, theirs in held:
                same = 0
                while same < len(tokens) // PAGE and tokens[: (same + 1) * PAGE] == other[: (same + 1) * PAGE]:
                    same += 1
                assert set(taken[same:]).isdisjoint(theirs)
            held.append((tokens, taken))
        elif held:
            pool.leave(held.pop(kind % len(held))[1])
        pool.check()
    for _, taken in held:
        pool.leave(taken)
    assert pool.free == count


def test_kept_pages_serve_again_until_their_place_is_needed():
    pool = PagePool(3)
    first = filled(pool, [1] * (2 * PAGE))
    pool.leave(first)
    assert pool.kept == 2
    assert pool.shared([1] * (2 * PAGE) + [5]) == first
    pool.leave(first)
    pool.leave(filled(pool, [2] * (2 * PAGE)))  # takes the empty page, and the last of the first sequence's
    assert pool.shared([1] * (2 * PAGE)) == first[:1]


def test_contents_that_were_dropped_are_not_found():
    pool = PagePool(2)
    pool.leave(filled(pool, [1] * (2 * PAGE)))
    pool.forget()
    assert pool.shared([1] * (2 * PAGE)) == []
    assert (pool.free, pool.kept) == (2, 0)


def test_more_pages_than_are_free_are_refused():
    pool = PagePool(2)
    pool.take(1)
    with pytest.raises(IndexError):
        pool.take(2)
