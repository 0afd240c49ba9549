"""The documents stay true: every module in the map, every quoted number from a result file."""

from __future__ import annotations

import asyncio
import json
import re
import sys
import tomllib
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from aiohttp.test_utils import TestClient, TestServer
from pages import pages

from paellapy.serving.config import Config, ModelConfig, ServerConfig, TlsConfig

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "docs"))

import make_drawings  # noqa: E402
import make_pictures  # noqa: E402
import quoted  # noqa: E402
import quoted_trust  # noqa: E402
import update_architecture  # noqa: E402


def test_architecture_lists_every_module() -> None:
    page = update_architecture.PAGE.read_text()
    assert page == update_architecture.updated(page), "run python docs/update_architecture.py"


def test_the_virtual_gpu_s_errors_are_those_of_the_recordings() -> None:
    page = (ROOT / "docs" / "virtual-gpu.md").read_text()
    fresh, fitted = (_errors(f"calibration_{name}_h200") for name in ("check1", "error"))
    rows = re.findall(r"^\| .* \((\d+) (?:launches|pairs)\) \| ([\d.]+) % \| ([\d.]+) % \|$", page, re.M)
    assert rows == [*fresh, *fitted]


def _errors(name: str) -> list[tuple[str, str, str]]:
    """Number, median and 90th percentile of each line of the page's table."""
    results = json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text())["results"]
    times = {kernel: row["time_error"] for kernel, row in results["kernels"].items()}
    resident = [row["resident_error"] for row in results["kernels"].values()]
    plain = [row["time_error"] for row in results["kernels without their factor"].values()]
    pairs = [row["error"] for pair, row in results["concurrent kernels"].items() if "+" in pair]
    lines = [list(times.values()), resident, pairs, plain]
    if largest := [error for kernel, error in times.items() if kernel.endswith("×24")]:
        others = [error for kernel, error in times.items() if not kernel.endswith("×24")]
        lines = [lines[0], others, largest, resident, plain, pairs]
    return [(str(len(e)), *(f"{q:.1%}"[:-1] for q in np.quantile(np.abs(e), (0.5, 0.9)))) for e in lines]


@pytest.mark.parametrize("page", pages(), ids=lambda page: page.name)
def test_figures_and_tables_are_those_of_their_result_files(page: Path) -> None:
    text = page.read_text()
    assert text == quoted.updated(text), "run python docs/quoted.py"


VERSIONS = {"3.11", "Apache-2.0", "Triton 3.6", "TLS 1.2"}
SETTINGS = {  # numbers of the prose that no run has measured: settings, aims, examples and runs that were not kept
    "measure.md": {"0.3", "1.5"},  # an example, σ
    "policies.md": {"1.0", "0.0", "1.46", "0.84"},  # what `admit` returns; how a pair in the table is read
    "results.md": {"1.5", "2.0"},  # σ
    "results_notes.md": {"0.33", "1.6", "3.2", "2.1", "2.6", "2.5"},  # an aim, limits that were tried, a threshold
}
TESTED = {"pictures.md": {"0.35", "0.29", "0.26"}}  # below, by a test of its own


@pytest.mark.parametrize("page", pages(), ids=lambda page: page.name)
def test_every_figure_in_the_prose_has_its_result_file(page: Path) -> None:
    """Outside of tables and code a number with decimals is a figure."""
    made = r"^```.*?^```$|<!-- table.*?<!-- end -->|<!-- caption.*?<!-- end -->|<!-- \w+: begin.*?: end -->"
    text = re.sub(made, "", page.read_text(), flags=re.M | re.S)
    lines = (line for line in quoted.MARK.sub("", text).splitlines() if not line.lstrip().startswith("|"))
    prose = re.sub(r"\]\([^)]*\)|`[^`]*`|<[^>]*>|\d+(\.\d+){3}", "", "\n".join(lines))
    for version in VERSIONS:
        prose = prose.replace(version, "")
    found = set(re.findall(r"(?<![\w./])\d+\.\d+(?![\w/])", prose))
    assert found <= SETTINGS.get(page.name, set()) | TESTED.get(page.name, set())


def test_every_figure_is_quoted_somewhere() -> None:
    found = {name for page in pages() for _, name in quoted.MARK.findall(page.read_text())}
    assert set(quoted.FIGURES) == found


def test_drawings_are_as_drawn() -> None:
    for name, draw in make_drawings.DRAWINGS.items():
        assert (make_drawings.FOLDER / f"{name}.svg").read_text() == draw().svg(), "run python docs/make_drawings.py"


@pytest.mark.parametrize(
    ("kind", "title"),
    [(Config, "top level"), (ServerConfig, "`[server]`"), (TlsConfig, "`[tls]`"), (ModelConfig, "`[[models]]`")],
)
def test_the_serving_page_lists_every_setting_with_its_default(kind: type[msgspec.Struct], title: str) -> None:
    page = (ROOT / "docs" / "serving.md").read_text()
    table = page.partition(f"\n| {title} | default | |\n|---|---|---|\n")[2].partition("\n\n")[0]
    rows = [line.strip("| ").split(" | ") for line in table.splitlines()]
    listed = {name.strip("`"): row[1] for row in rows for name in row[0].split(", ")}
    fields = msgspec.structs.fields(kind)
    assert list(listed) == [each.name for each in fields]
    for each in fields:
        if each.default not in (None, msgspec.NODEFAULT):
            assert tomllib.loads(f"value = {listed[each.name].strip('`')}")["value"] == each.default, each.name
        elif each.required:
            assert listed[each.name] == "must be given"


def test_the_serving_page_s_application_runs() -> None:
    page = (ROOT / "docs" / "serving.md").read_text()
    code = next(each for each in re.findall(r"```python\n(.*?)```", page, re.S) if "create_app" in each)
    space: dict[str, Any] = {"__name__": "example"}
    exec(code, space)

    async def ask() -> tuple[int, int]:
        async with TestClient(TestServer(space["app"])) as client:
            found = await client.get("/inference/v2/models/mlp", headers={"X-API-Key": "a long text"})
            return found.status, (await client.get("/inference/v2/models/mlp")).status

    with space["engine"]:
        assert asyncio.run(ask()) == (200, 401)


def test_the_serving_page_quotes_what_was_measured_on_the_gpu() -> None:
    page = (ROOT / "docs" / "serving.md").read_text()
    results = json.loads((ROOT / "benchmarks" / "results" / "serving_demo.json").read_text())
    assert results["on"]["device"] == "NVIDIA H200"
    found = results["results"]["found"]
    titles = {"engine": "engine, no HTTP", "one": "one process", "1": "1 worker"}
    for kind, row in found.items():
        alone = [f"{row[m]['p50'] * 1e3:.0f} / {row[m]['p99'] * 1e3:.0f}" for m in ("mlp", "cnn", "transformer")]
        many = row["many"]
        cells = [*alone, f"{many['per_s']:,.0f}", f"{many['p50']:.2f} / {many['p99']:.2f}"]
        assert f"| {titles.get(kind, f'{kind} workers')} | {' | '.join(cells)} |" in page


def test_the_serving_page_quotes_the_floor() -> None:
    page = (ROOT / "docs" / "serving.md").read_text()
    results = json.loads((ROOT / "benchmarks" / "results" / "serving_floor.json").read_text())["results"]
    for label, by_kind in results["cases"].items():
        cells = [f"{row['per_s']:,.0f} / {row['p50_ms']:.2f}" for row in by_kind.values()]
        for ratio in ("ratio_per_s", "ratio_p50"):
            cells.append(", ".join(f"{row[ratio]:.2f}" for kind, row in by_kind.items() if kind != "floor"))
        assert f"| {label} | {' | '.join(cells)} |" in page
    files = ("serving_floor", "serving_floor_second", "serving_floor_third", "serving_floor_busy")
    runs = [json.loads((ROOT / "benchmarks" / "results" / f"{f}.json").read_text())["results"]["cases"] for f in files]
    for kind in ("small binary", "small JSON", "large binary"):
        per_s = ", ".join(f"{run[f'{kind}, 32 clients']['2']['ratio_per_s']:.2f}" for run in runs)
        p50 = ", ".join(f"{run[f'{kind}, 1 client']['one']['ratio_p50']:.2f}" for run in runs)
        assert f"| {kind} | {per_s} | {p50} |" in page


def test_the_trust_page_has_the_busy_machine_beside_the_quiet_one(monkeypatch: pytest.MonkeyPatch) -> None:
    stored = json.loads((ROOT / "benchmarks" / "results" / "trust_calibration.json").read_text())["results"]
    quiet = {key: each for key, each in stored.items() if key != "busy"}
    both = {**quiet, "busy": {**quiet, "programs": 8}}
    for found, machines in ((quiet, ["quiet"]), (both, ["quiet", "busy"])):
        monkeypatch.setattr(quoted_trust, "stored", {"trust_calibration": found}.__getitem__)
        rows = [line.strip("| ").split(" | ")[0] for line in quoted_trust.calibration().splitlines()[2:]]
        assert rows == [machine for machine in machines for _ in quiet["loads"]]
        programs = next(line for line in quoted_trust.calibrated_on().splitlines() if "programs" in line)
        assert programs.strip("| ").split(" | ")[1:] == ["0", "8"][: len(machines)]


def test_the_trust_page_quotes_a_campaign_of_one_server(monkeypatch: pytest.MonkeyPatch) -> None:
    virtual = quoted_trust.stored("trust_campaign")
    of_one = {key: each for key, each in virtual.items() if key != "earlier"} | {"servers": virtual["servers"][-1:]}
    monkeypatch.setattr(quoted_trust, "stored", {"trust_campaign": virtual, "trust_campaign_h200": of_one}.__getitem__)
    assert sum(line.startswith("| H200 |") for line in quoted_trust.servers().splitlines()) == 1
    assert quoted_trust.load().count("| H200 | 1 |") == 1
    assert quoted_trust.longest_earlier_s() == max(each["recovery_s"] for each in virtual["earlier"])


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


def test_the_gallery_quotes_how_long_pictures_took() -> None:
    found = json.loads((ROOT / "benchmarks" / "results" / "plot_speed.json").read_text())["results"]
    page = (ROOT / "docs" / "pictures.md").read_text()
    took = [found[name]["s"] for name in ("plot", "plot, drawn by Chromium", "explore, zoomed")]
    assert re.search("".join(rf"\|[^|]+\| {s:.2f} \|\n" for s in took), page)
    assert took[0] + took[1] < 2


def test_points_of_other_runs_are_named_and_compared_with_nothing(tmp_path: Path) -> None:
    sys.path.insert(0, str(ROOT / "benchmarks"))
    import paper_report

    stored = json.loads((ROOT / "benchmarks" / "results" / "paper.json").read_text())
    path, measured = tmp_path / "paper.json", stored["results"]["commits"]
    measured["light"] = "0123456"
    for key in [key for key in measured if key.startswith("fig11|slack|")]:
        del measured[key]
    for known in (True, False):
        if not known:  # as they were written before each point named its commit
            del stored["results"]["commits"]
        path.write_text(json.dumps(stored))
        if known:  # with its picture
            paper_report.report(path, tmp_path)
        page = (ROOT / "docs" / "results.md").read_text()
        text = (tmp_path / "results.md").read_text() if known else paper_report.filled(page, paper_report.tables(path))
        row = next(line for line in text.splitlines() if line.startswith("| slack |"))
        assert bool(re.search(r"at 0123456 light[;.]", text)) == known
        assert ("at unknown " in text) == known
        assert ("×" in row) == (not known)


def test_only_points_with_the_same_requests_are_compared() -> None:
    sys.path.insert(0, str(ROOT / "benchmarks"))
    import paper_report

    ours = [{"seed": seed, "commit": "a", "p": seed} for seed in (5, 6, 7)]
    streams = [{"seed": seed, "commit": commit, "p": 10 * seed} for seed, commit in ((7, "a"), (0, "a"), (6, "b"))]
    assert [(a["p"], b["p"]) for a, b in paper_report.same_requests(ours, streams)] == [(7, 70)]
    points = {f"fig11|x|1.5|{rate}|{seed}": {"within_4x": 1.0} for rate, seed in ((1000, 5), (2000, 5), (1000, 6))}
    assert paper_report.sustained(paper_report.series(points, "fig11"), "x", "1.5") == {5: 2000.0}
