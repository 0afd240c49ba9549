"""Every snippet on every page runs: Python, settings, and our command lines."""

from __future__ import annotations

import runpy
import shlex
import textwrap
import tomllib
from pathlib import Path

import pytest
from pages import blocks, pages
from places import ROOT
from typer.testing import CliRunner

import paellapy as pp
from paellapy.cli import app
from paellapy.serving.config import load_config

NEEDED = ("torch", "plotly", "matplotlib", "anywidget")
RUN = ("simulate", "doctor", "version")  # other commands serve, or need a server: their options are looked up
GROUPS = ("cluster",)  # commands with commands of their own
OTHERS = {"cluster", "profiles"}  # settings that are not a server's
QUICK = {"simulate": ["--seconds", "0.05"]}


def named(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def with_snippets(language: str) -> list[Path]:
    return [page for page in pages() if blocks(page, language)]


@pytest.mark.parametrize("page", with_snippets("python"), ids=named)
def test_python_runs(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A page's snippets are one script, from the top of the page down."""
    monkeypatch.chdir(tmp_path)
    on_gpu = any(name.startswith("cuda") for name in pp.devices())
    script = tmp_path / "page.py"
    parts = ["import paellapy as pp"]
    for kind, code in blocks(page, "python"):
        if kind == "gpu" and not on_gpu:  # compiled here, and then refused
            code = f"try:\n{textwrap.indent(code, '    ')}\nexcept pp.LaunchError:\n    pass"
        parts.append(code)
    script.write_text("\n\n".join(parts))
    for module in NEEDED:
        if f"import {module}" in script.read_text():
            pytest.importorskip(module)
    found = runpy.run_path(str(script), run_name="page")
    for value in found.values():
        if isinstance(value, pp.Engine):
            value.close()


@pytest.mark.parametrize("page", with_snippets("toml"), ids=named)
def test_settings_are_right(page: Path, tmp_path: Path) -> None:
    for number, (_, text) in enumerate(blocks(page, "toml")):
        if OTHERS & set(tomllib.loads(text)):
            continue  # of a cluster, or of a plan
        path = tmp_path / f"{number}.toml"
        path.write_text(text)
        load_config(path)


def command_lines() -> list[str]:
    lines = []
    for page in pages():
        for _, text in blocks(page, "(?:sh|console|)"):
            joined = text.replace("\\\n", " ")
            lines += [line.partition("  #")[0].rpartition("&& ")[2] for line in joined.splitlines()]
    ours = (line.removeprefix("../").removeprefix(".venv/bin/").removesuffix("&") for line in lines)
    return sorted({line.strip() for line in ours if line.startswith("paellapy ")})


@pytest.mark.parametrize("line", command_lines())
def test_command_lines_are_right(line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, command, *given = shlex.split(line)
    runner = CliRunner()
    which = [command, given[0]] if command in GROUPS else [command]
    shown = runner.invoke(app, [*which, "--help"], terminal_width=200).output
    for option in (each.partition("=")[0] for each in given if each.startswith("-")):
        assert option in shown, option
    files = [each for each in given if each.endswith(".json")]
    modules = {each.partition(":")[0] for each in given if ":" in each and not each.startswith("http")}
    if command in RUN and "--help" not in given and not files and not modules - {"own_policy"}:
        monkeypatch.chdir(tmp_path if "own_policy" not in line else ROOT / "examples")
        done = runner.invoke(app, [command, *given, *QUICK.get(command, ())])
        assert done.exit_code == 0, done.output
