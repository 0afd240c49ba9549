"""What times the commands of docs/start.md in CI finds them, and fails where one of them does."""

from __future__ import annotations

import runpy
import subprocess
from pathlib import Path
from typing import Any

import pytest
from places import ROOT


@pytest.fixture(scope="module")
def start() -> dict[str, Any]:
    return runpy.run_path(str(ROOT / ".ci" / "start.py"), run_name="start")


def test_every_section_of_the_page_with_commands_is_found(start: dict[str, Any]) -> None:
    page = (ROOT / "docs" / "start.md").read_text()
    found = start["sections"](page)
    start["check_page"](found)
    assert sum(len(blocks) for blocks in found.values()) == page.count("\n```sh")
    assert [server for blocks in found.values() for server, _ in blocks].count(True) == 1


def test_a_page_without_commands_is_a_failure(start: dict[str, Any]) -> None:
    with pytest.raises(RuntimeError, match="0 sections"):
        start["check_page"](start["sections"]("# Start here\n\n## Install\n\n```console\npip install\n```\n"))


@pytest.mark.parametrize("lines", ["true\nfalse\ntrue\n", "no-such-command-here | cat\n"])
def test_a_command_that_fails_is_a_failure(start: dict[str, Any], lines: str, tmp_path: Path) -> None:
    with pytest.raises(subprocess.CalledProcessError):
        start["run_section"]([(False, lines)], tmp_path, {"PATH": "/usr/bin:/bin"}, 10.0)


def test_a_command_that_takes_too_long_is_a_failure(start: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(subprocess.TimeoutExpired):
        start["run_section"]([(False, "exec sleep 60\n")], tmp_path, {"PATH": "/usr/bin:/bin"}, 0.2)


def test_a_server_that_ends_is_a_failure(start: dict[str, Any], tmp_path: Path) -> None:
    start["run_section"].__globals__["check_port"] = lambda: None
    with pytest.raises(RuntimeError, match="exit code 3"):
        start["run_section"]([(True, "exit 3\n")], tmp_path, {"PATH": "/usr/bin:/bin"}, 20.0)
