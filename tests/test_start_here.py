"""What runs the commands of docs/start.md and docs/service.md in CI finds them, and fails where one of them does."""

from __future__ import annotations

import runpy
import subprocess
from pathlib import Path

import pytest
from places import ROOT

START = runpy.run_path(str(ROOT / ".ci" / "start.py"), run_name="start")


@pytest.mark.parametrize(("name", "servers"), [("start.md", 1), ("service.md", 2)])
def test_every_section_of_the_page_with_commands_is_found(name: str, servers: int) -> None:
    page = (ROOT / "docs" / name).read_text()
    found = START["sections"](page)
    START["check_page"](name, found)
    assert sum(len(blocks) for blocks in found.values()) == page.count("\n```sh")
    assert [server for blocks in found.values() for server, _ in blocks].count(True) == servers
    with pytest.raises(RuntimeError):
        START["check_page"](name, START["sections"](page.replace("```sh", "```console")))


def test_a_folder_and_a_variable_hold_for_the_next_block(tmp_path: Path) -> None:
    terminal = START["Terminal"](tmp_path, {"PATH": "/usr/bin:/bin"}, 10.0)
    terminal.run(False, "mkdir inner && cd inner\nexport WHO='a b'\n")
    terminal.run(False, 'printf %s "$WHO" > said\n')
    terminal.close()
    assert (tmp_path / "inner" / "said").read_text() == "a b"


def test_uv_installs_what_pip_would() -> None:
    found = START["by_uv"]("venv v\n.venv/bin/pip install --editable '.[viz]'\npip install a\nmy-pip install b\n")
    own = "uv pip install --quiet"
    assert found == f"venv v\n{own} --editable '.[viz]'\n{own} a\nmy-pip install b\n"


def test_lines_that_install_are_found_once_each() -> None:
    lines = START["install_lines"](ROOT)
    assert ("--editable", ".[viz]") in lines
    assert len(set(lines)) == len(lines)


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
    known = START["Terminal"].run.__globals__
    monkeypatch.setitem(known, "check_port", lambda: None)
    monkeypatch.setitem(known, "READY", "://127.0.0.1:1/")  # where no server of another program answers
    terminal = START["Terminal"](tmp_path, {"PATH": "/usr/bin:/bin"}, limit_s)
    with pytest.raises(failure):
        terminal.run(server, lines)
    terminal.close()
