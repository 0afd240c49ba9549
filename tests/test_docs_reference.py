"""The generated reference is complete: every public name, metric, address and variable has its place."""

from __future__ import annotations

import asyncio
import inspect
import json
import re
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import typer
from pages import pages
from places import ROOT
from rich.text import Text

import paellapy as pp
from paellapy.cli import app

sys.path.insert(0, str(ROOT / "docs"))

import record_http
import reference_api
import reference_tables

PACKAGES = ("paellapy", "serving", "scheduler", "instrument")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


@pytest.fixture(scope="module")
def api(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("api")
    reference_api.write(folder)
    return folder


def test_every_public_name_has_a_page_with_its_signature(api: Path) -> None:
    index = (api / "index.md").read_text()
    for name in pp.__all__:
        text, found = (api / f"{name}.md").read_text(), getattr(pp, name)
        assert f"]({name}.md)" in index, name
        if inspect.ismodule(found):
            continue
        head = re.search(rf"\{{py:(\w+)\}} {name}(.*)", text)
        assert head, name
        if callable(found) and head[1] == "function":
            assert set(inspect.signature(found).parameters) <= set(re.findall(r"\w+", head[2])), name


def test_every_public_name_and_method_says_what_it_is_for(api: Path) -> None:
    for name in pp.__all__:
        assert inspect.getdoc(getattr(pp, name)), name


def test_members_that_are_left_out_exist() -> None:
    for owner, names in reference_api.INNER.items():
        for name in names:
            assert hasattr(getattr(pp, owner), name), f"{owner}.{name}"


def test_a_method_that_is_lent_from_above_has_no_parameter_for_its_object(api: Path) -> None:
    head = re.search(r"\{py:method\} plot_gantt\((.*)\)", (api / "Trace.md").read_text())
    assert head
    assert head[1].startswith("**options")


def test_every_group_of_names_is_there() -> None:
    listed = [name for names in reference_api.groups().values() for name in names]
    assert sorted(listed) == sorted(pp.__all__)
    assert reference_api.REST not in reference_api.groups(), "sort new names into GROUPS in docs/reference_api.py"


def test_every_variable_that_is_read_is_on_the_page() -> None:
    page = (ROOT / "docs" / "reference" / "environment.md").read_text()
    for package in PACKAGES:
        for path in (ROOT / package).rglob("*.py"):
            for name in re.findall(r"(?:environ(?:\.get\(|\[)|envvar=)\"([A-Z_]+)\"", path.read_text()):
                assert f"`{name}`" in page, f"{path}: {name}"


def test_every_extra_that_is_named_exists() -> None:
    known = set(PROJECT["optional-dependencies"])
    texts = [*pages(), *(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))]
    for path in texts:
        for names in re.findall(r"(?:paellapy|\.)\[([a-z0-9,]+)\]'", path.read_text()):
            assert set(names.split(",")) <= known, f"{path}: {names}"


def keys(value: Any, at: str = "") -> set[str]:
    """The names in a JSON value, each with its parents' names."""
    if isinstance(value, dict):
        return {f"{at}.{name}" for name in value}.union(*(keys(v, f"{at}.{name}") for name, v in value.items()))
    return set().union(*(keys(each, f"{at}[]") for each in value)) if isinstance(value, list) else set()


def test_answers_and_metrics_of_a_server_are_those_of_the_reference() -> None:
    kept = json.loads(record_http.KEPT.read_text())
    now = asyncio.run(record_http.answers())
    assert set(kept) == set(now), "run python docs/record_http.py"
    for what, text in now.items():
        if kept[what]["language"] == "json":
            assert keys(json.loads(kept[what]["answer"])) == keys(json.loads(text)), what
    families = set(re.findall(r"^# TYPE ((?:paellapy|nv)_\w+)", now["GET /metrics"], re.M))
    known = set(reference_tables.metric_names())
    assert {name.removesuffix("_created") for name in families} <= known


def test_every_address_of_the_server_is_on_the_page() -> None:
    page = reference_tables.addresses()
    for path in reference_tables.openapi.document()["paths"]:
        assert "/versions/" in path or f" {path}`" in page


def helps(group: Any) -> list[str]:
    """All help texts of a command, its arguments, options and sub-commands."""
    found = [group.help or "", *(getattr(each, "help", None) or "" for each in group.params)]
    return found + [text for each in getattr(group, "commands", {}).values() for text in helps(each)]


def test_no_text_of_help_is_taken_for_markup() -> None:
    """An unescaped [cluster] would vanish."""
    texts = helps(typer.main.get_command(app))
    assert len(texts) > 50
    for text in texts:
        assert Text.from_markup(text).plain == re.sub(r"\[/?dim\]", "", text).replace("\\[", "[")


def test_the_version_stands_in_one_place() -> None:
    version = PROJECT["version"]
    assert f"## {version}" in (ROOT / "CHANGELOG.md").read_text()
    for path in (ROOT / "CITATION.cff", ROOT / "docs" / "conf.py", ROOT / "README.md"):
        assert version not in path.read_text(), path
