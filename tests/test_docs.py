"""Pages agree with the code and with the stored results."""

from __future__ import annotations

import asyncio
import inspect
import json
import re
import sys
import tomllib
from pathlib import Path
from typing import Any

import msgspec
import pytest
import typer
from aiohttp.test_utils import TestClient, TestServer
from pages import pages
from places import ROOT
from rich.text import Text

import paellapy as pp
from paellapy.cli import app
from paellapy.serving.config import Config, ModelConfig, PipelineConfig, ServerConfig, TlsConfig

sys.path.insert(0, str(ROOT / "docs"))

import figures
import make_drawings
import record_http
import reference_api
import reference_tables

PACKAGES = ("paellapy", "serving", "scheduler", "instrument")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
SOURCES = [path for package in PACKAGES for path in (ROOT / package).rglob("*.py")]


def test_figures_and_tables_are_those_of_the_result_files() -> None:
    text = figures.FILE.read_text()
    assert text == figures.collected(), "run python docs/figures.py"
    for page in figures.pages():
        assert page.read_text() == figures.filled(page.read_text(), tomllib.loads(text)), page


def test_drawings_show_the_stored_figures() -> None:
    for name, draw in make_drawings.DRAWINGS.items():
        assert (make_drawings.FOLDER / f"{name}.svg").read_text() == draw(), "run python docs/make_drawings.py"


@pytest.mark.parametrize("page", pages(), ids=lambda page: page.name)
def test_links_lead_to_files(page: Path) -> None:
    text = re.sub(r"^```.*?^```$|`[^`]*`", "", page.read_text(), flags=re.M | re.S)
    for target in re.findall(r"\]\(\s*([^)#\s]+)[^)]*\)", text):
        if not target.startswith("http") and not re.search(r"(api/.*|cli|http|metrics)\.md$", target):  # generated
            assert (page.parent / target).exists(), target


@pytest.mark.parametrize("page", ["architecture", "glossary"])
def test_the_map_names_files_and_names_of_the_code(page: str) -> None:
    text = re.sub(r"```.*?```", "", (ROOT / "docs" / f"{page}.md").read_text(), flags=re.S)
    words = {word for path in SOURCES for word in re.findall(r"\w+", path.read_text())}
    folders = (*PACKAGES, "docs", "benchmarks", "tests")
    files = [str(path) for folder in folders for path in (ROOT / folder).rglob("*.py*")]
    for named in set(re.findall(r"`([\w./]+)`", text)) - {"test_MODULE.py", "ptxas"}:
        if named.endswith((".py", ".pyi")):
            assert any(path.endswith(f"/{named}") for path in files), named
        elif "/" not in named and not named.endswith((".md", ".toml")):
            assert named.rpartition(".")[2] in words, named


TITLES = {Config: "top level", ServerConfig: "`[server]`", TlsConfig: "`[tls]`", ModelConfig: "`[[models]]`",
          PipelineConfig: "`[[pipelines]]`"}  # fmt: skip


@pytest.mark.parametrize(("kind", "title"), TITLES.items())
def test_the_page_of_settings_lists_every_setting_with_its_default(kind: type[msgspec.Struct], title: str) -> None:
    page = (ROOT / "docs" / "settings.md").read_text()
    table = page.partition(f"\n| {title} | default | |\n|---|---|---|\n")[2].partition("\n\n")[0]
    rows = [line.strip("| ").split(" | ") for line in table.splitlines()]
    listed = {name.strip("`"): row[1] for row in rows for name in row[0].split(", ")}
    fields = msgspec.structs.fields(kind)
    assert list(listed) == [each.name for each in fields]
    for each in fields:
        if each.default not in (None, msgspec.NODEFAULT):
            assert tomllib.loads(f"value = {listed[each.name].strip('`')}")["value"] == each.default, each.name


def test_the_serving_page_s_application_runs() -> None:
    page = (ROOT / "docs" / "serving.md").read_text()
    space: dict[str, Any] = {"__name__": "example"}
    exec(next(each for each in re.findall(r"```python\n(.*?)```", page, re.S) if "create_app" in each), space)

    async def ask() -> tuple[int, int]:
        async with TestClient(TestServer(space["app"])) as client:
            found = await client.get("/inference/v2/models/mlp", headers={"X-API-Key": "a long text"})
            return found.status, (await client.get("/inference/v2/models/mlp")).status

    with space["engine"]:
        assert asyncio.run(ask()) == (200, 401)


def test_every_public_name_is_in_the_reference_and_says_what_it_is_for(tmp_path: Path) -> None:
    reference_api.write(tmp_path)
    listed = [name for names in reference_api.groups().values() for name in names]
    assert sorted(listed) == sorted(pp.__all__)
    for name in pp.__all__:
        found = getattr(pp, name)
        assert inspect.getdoc(found), name
        page = (tmp_path / f"{name}.md").read_text()
        assert inspect.ismodule(found) or re.search(rf"\{{py:\w+\}} {name}", page), name


def test_every_variable_and_extra_that_is_named_exists() -> None:
    page, known = (ROOT / "docs/reference/environment.md").read_text(), set(PROJECT["optional-dependencies"])
    for path in SOURCES:
        for name in re.findall(r"(?:environ(?:\.get\(|\[)|envvar=)\"([A-Z_]+)\"", path.read_text()):
            assert f"`{name}`" in page, f"{path}: {name}"
    for path in (*pages(), *SOURCES):
        for names in re.findall(r"(?:paellapy|\.)\[([a-z0-9,]+)\]'", path.read_text()):
            assert set(names.split(",")) <= known, f"{path}: {names}"


def test_answers_and_metrics_of_a_server_are_those_of_the_reference() -> None:
    kept, now = json.loads(record_http.KEPT.read_text()), asyncio.run(record_http.answers())
    assert set(kept) == set(now), "run python docs/record_http.py"
    for what, text in now.items():
        if kept[what]["language"] == "json":
            assert keys(json.loads(kept[what]["answer"])) == keys(json.loads(text)), what
    families = set(re.findall(r"^# TYPE ((?:paellapy|nv)_\w+)", now["GET /metrics"], re.M))
    assert {name.removesuffix("_created") for name in families} <= set(reference_tables.metric_names())


def keys(value: Any, at: str = "") -> set[str]:
    """The names in a JSON value, each with its parents' names."""
    if isinstance(value, dict):
        return {f"{at}.{name}" for name in value}.union(*(keys(v, f"{at}.{name}") for name, v in value.items()))
    return set().union(*(keys(each, f"{at}[]") for each in value)) if isinstance(value, list) else set()


def helps(group: Any) -> list[str]:
    """All help texts of a command, its arguments, options and sub-commands."""
    found = [group.help or "", *(getattr(each, "help", None) or "" for each in group.params)]
    return found + [text for each in getattr(group, "commands", {}).values() for text in helps(each)]


def test_no_text_of_help_is_taken_for_markup() -> None:
    """An unescaped [cluster] would vanish."""
    for text in helps(typer.main.get_command(app)):
        assert Text.from_markup(text).plain == re.sub(r"\[/?dim\]", "", text).replace("\\[", "[")
