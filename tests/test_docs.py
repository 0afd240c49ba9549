"""The documents stay true: every module in the map, every quoted number from a result file."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "docs"))

import make_pictures  # noqa: E402
import update_architecture  # noqa: E402


def test_architecture_lists_every_module() -> None:
    page = update_architecture.PAGE.read_text()
    assert page == update_architecture.updated(page), "run python docs/update_architecture.py"


def test_readme_quotes_the_measured_costs() -> None:
    results = json.loads((ROOT / "benchmarks" / "results" / "report_cost.json").read_text())["results"]
    readme = (ROOT / "README.md").read_text()
    for name, row in results.items():
        quoted = re.search(rf"^\| {re.escape(name)} \|(.*)\|$", readme, re.M)
        assert quoted, f"README has no row for {name}"
        cells = [cell.strip() for cell in quoted[1].split("|")]
        expected = [f"{row['plain_us']:.1f}", *(f"{row[v]['ratio']:.3f}" for v in _QUOTED)]
        assert cells == expected


_QUOTED = ("count", "trace", "notify", "one counter")


def test_pictures_and_their_captions_come_from_the_shipped_traces(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    captions = make_pictures.make(tmp_path)
    for page in make_pictures.PAGES:
        text = page.read_text()
        assert text == make_pictures.captioned(text, captions), "run python docs/make_pictures.py"
        for name in re.findall(r"\(.*?pictures/([\w-]+)\.png\)", text):
            assert name in captions
    made = {path.name for path in tmp_path.iterdir()}
    assert made == {path.name for path in make_pictures.PICTURES.iterdir()}, "run python docs/make_pictures.py"
