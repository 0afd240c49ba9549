"""What times the commands of docs/start.md in CI finds them, and fails where one of them does."""

from __future__ import annotations

import runpy
import subprocess
from pathlib import Path

import pytest
from places import ROOT

START = runpy.run_path(str(ROOT / ".ci" / "start.py"), run_name="start")


def test_every_section_of_the_page_with_commands_is_found() -> None:
    page = (ROOT / "docs" / "start.md").read_text()
    found = START["sections"](page)
    START["check_page"](found)
    assert sum(len(blocks) for blocks in found.values()) == page.count("\n```sh")
    assert [server for blocks in found.values() for server, _ in blocks].count(True) == 1
    with pytest.raises(RuntimeError):
        START["check_page"](START["sections"](page.replace("```sh", "```console")))


@pytest.mark.parametrize(
    ("server", "lines", "limit_s", "failure"),
    [
        (False, "true\nfalse\ntrue\n", 10.0, subprocess.CalledProcessError),
        (False, "no-such-command-here | cat\n", 10.0, subprocess.CalledProcessError),
        (False, "exec sleep 60\n", 0.2, subprocess.TimeoutExpired),
        (True, "exit 3\n", 20.0, RuntimeError),
    ],
)
def test_a_command_that_fails_is_a_failure(
    server: bool, lines: str, limit_s: float, failure: type[Exception], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(START["run_section"].__globals__, "check_port", lambda: None)
    with pytest.raises(failure):
        START["run_section"]([(server, lines)], tmp_path, {"PATH": "/usr/bin:/bin"}, limit_s)
