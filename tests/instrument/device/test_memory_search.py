"""The search of memory finds every word, in any piece, and passes over memory that is gone."""

from __future__ import annotations

import mmap

import numpy as np
import pytest

from paellapy.instrument.device.launch_hook import Finder, in_pieces


@pytest.mark.parametrize("plain", [False, True])
def test_a_search_finds_all_words_however_many_there_are(plain: bool) -> None:
    words = np.full(300_000, 5, np.uint64)  # more than a piece
    words[[100, 299_999]] = 9
    start = int(words.ctypes.data)
    pieces = in_pieces([(start, start + 8 * 1000 + 3), (start + 8 * 1000, start + words.nbytes)])
    assert len(pieces) == 4
    finder = Finder(plain)
    assert finder.plain == plain
    for _ in range(2):  # the room that was made is kept
        assert finder.find(pieces, 4, 6) == [start + 8 * k for k in range(len(words)) if k not in (100, 299_999)]
    assert finder.find(pieces, 9, 10) == [start + 800, start + 8 * 299_999]
    assert finder.find(pieces[:0], 4, 6) == []


def test_memory_that_is_gone_is_passed_over() -> None:
    """As when a library is unloaded during a search."""
    block = mmap.mmap(-1, 4 * mmap.PAGESIZE)
    seen = np.frombuffer(block, np.uint64)
    start, nbytes = int(seen.ctypes.data), seen.nbytes
    del seen
    block.close()
    here = np.array([7, 1 << 41], np.uint64)
    at = int(here.ctypes.data)
    found = Finder().find(in_pieces([(start, start + nbytes), (at, at + here.nbytes)]), 1 << 41, (1 << 41) + 1)
    assert at + 8 in found


def test_a_search_works_where_memory_is_no_file(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError

    monkeypatch.setattr("os.open", refuse)
    words = np.array([1, 77], np.uint64)
    start = int(words.ctypes.data)
    finder = Finder()
    assert finder.plain
    assert finder.find(in_pieces([(start, start + words.nbytes)]), 77, 78) == [start + 8]
