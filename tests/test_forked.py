"""Forked processes: each begins anew after the head, and one that fails is noticed."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from forked import Forked


@pytest.fixture(scope="module")
def forked() -> Iterator[Forked]:
    with Forked("import os, signal, sys; seen = []") as processes:
        yield processes


def test_a_case_sees_the_head_and_no_other_case(forked: Forked, tmp_path: Path) -> None:
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        forked.run(
            f"assert seen == []\nseen.append(1)\nassert os.environ['PAELLAPY_CACHE_DIR'] == {str(tmp_path / name)!r}",
            tmp_path / name,
        )
    assert "PAELLAPY_CACHE_DIR" not in os.environ or os.environ["PAELLAPY_CACHE_DIR"] != str(tmp_path / "first")


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("assert seen, 'nothing was seen'", "nothing was seen"),
        ("sys.exit('gone')", "gone"),
        ("sys.exit(0)", ""),
        ("os.kill(os.getpid(), signal.SIGKILL)", "-9"),
        ("os._exit(0)", ""),
    ],
)
def test_a_case_that_does_not_reach_its_end_fails(forked: Forked, tmp_path: Path, code: str, said: str) -> None:
    with pytest.raises(AssertionError, match=said or None):
        forked.run(code, tmp_path)


def test_a_command_says_how_it_ended(forked: Forked, tmp_path: Path) -> None:
    found = forked.outcome("print('well')\nprint('but', file=sys.stderr)\nsys.exit(3)", tmp_path, {})
    assert found == ("3", "well\n", "but\n")
