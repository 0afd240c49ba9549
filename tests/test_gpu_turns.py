"""Turns on the GPU, without one: who shares it, who has it alone, and who waits for whom."""

from __future__ import annotations

import fcntl
import subprocess
import sys
import threading
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gpu_turns
import pytest
from places import TESTS
from waiting import wait_until


@pytest.fixture
def turn(tmp_path: Path) -> Any:
    return partial(gpu_turns.turn, room=tmp_path / "room", turnstile=tmp_path / "turnstile")


def is_held(path: Path) -> bool:
    with path.open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


class Visitor:
    """A thread that takes a turn, and stays until it is told to leave."""

    def __init__(self, turn: Any, *, alone: bool) -> None:
        self.entered, self.leave = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._visit, args=(turn, alone), daemon=True)
        self._thread.start()

    def _visit(self, turn: Any, alone: bool) -> None:
        with turn(alone=alone):
            self.entered.set()
            self.leave.wait()

    def end(self) -> None:
        self.leave.set()
        self._thread.join(60)
        assert not self._thread.is_alive()


def test_tests_share_the_gpu_and_one_that_measures_waits_for_all(turn: Any, tmp_path: Path) -> None:
    with ExitStack() as first:
        first.enter_context(turn(alone=False))
        second = Visitor(turn, alone=False)
        assert second.entered.wait(60)
        alone = Visitor(turn, alone=True)
        wait_until(lambda: is_held(tmp_path / "turnstile"))
        second.end()
        assert not alone.entered.wait(0.1)
    assert alone.entered.wait(60)
    alone.end()


def test_nobody_overtakes_a_test_that_waits_to_be_alone(turn: Any, tmp_path: Path) -> None:
    with ExitStack() as first:
        first.enter_context(turn(alone=False))
        alone = Visitor(turn, alone=True)
        wait_until(lambda: is_held(tmp_path / "turnstile"))
        others = [Visitor(turn, alone=False), Visitor(turn, alone=True)]
        assert not any(each.entered.wait(0.1) for each in (alone, *others))
    assert alone.entered.wait(60)
    assert not any(each.entered.wait(0.1) for each in others)
    for each in (alone, *others):
        each.leave.set()
    for each in (alone, *others):
        each.end()
        assert each.entered.is_set()


def test_a_process_that_is_killed_leaves_the_gpu_to_others(turn: Any, tmp_path: Path) -> None:
    code = (
        f"import sys; sys.path.insert(0, {str(TESTS)!r}); from pathlib import Path; from gpu_turns import turn\n"
        "with turn(alone=True, room=Path('room'), turnstile=Path('turnstile')): print('in', flush=True); input()"
    )
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", code], cwd=tmp_path, stdin=pipe, stdout=pipe, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "in\n"
        other = Visitor(turn, alone=False)
        assert not other.entered.wait(0.1)
        process.kill()
        assert other.entered.wait(60)
        other.end()


@pytest.mark.parametrize(
    ("marks", "room"),
    [("", "free"), ("gpu skip", "free"), ("gpu alone skip", "free"), ("gpu", "shared"), ("gpu alone", "alone")],
)
def test_marks_say_which_turn_a_test_takes(
    marks: str, room: str, turn: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_turns, "turn", turn)
    item: Any = SimpleNamespace(get_closest_marker=lambda name: name if name in marks.split() else None)
    with gpu_turns.turn_of(item):
        assert (tmp_path / "room").exists() == (room != "free")
        if room != "free":
            assert is_held(tmp_path / "room")
            other = Visitor(turn, alone=False)
            assert other.entered.wait(0.1 if room == "alone" else 60) == (room == "shared")
    if room != "free":
        assert other.entered.wait(60)
        other.end()
    assert not (tmp_path / "room").exists() or not is_held(tmp_path / "room")
