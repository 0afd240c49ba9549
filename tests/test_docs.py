"""The documents stay true: every module in the map, every quoted number from a result file."""

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
import sys
import textwrap
import tomllib
from operator import itemgetter
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from aiohttp.test_utils import TestClient, TestServer

import paellapy as pp
from paellapy import demo, serve_demo
from paellapy.demo import reference
from paellapy.serving.config import Config, ModelConfig, ServerConfig, TlsConfig

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
    launches = json.loads((ROOT / "benchmarks" / "results" / "launch_overhead.json").read_text())["results"]
    assert f"{launches['pp.kernel, count']['ratio']:.2f} times what Triton's own launcher takes" in readme


_QUOTED = ("count", "trace", "notify", "one counter")


def test_the_virtual_gpu_s_errors_are_those_of_the_recordings() -> None:
    page, readme = (ROOT / "docs" / "virtual-gpu.md").read_text(), (ROOT / "README.md").read_text()
    fresh, fitted = (_errors(f"calibration_{name}_h200") for name in ("check1", "error"))
    rows = re.findall(r"^\| .* \((\d+) (?:launches|pairs)\) \| ([\d.]+) % \| ([\d.]+) % \|$", page, re.M)
    assert rows == [*fresh, *fitted]
    assert f"off by {fresh[0][1]} % in the median, {fresh[0][2]} % at the 90th percentile" in readme
    assert f"expect\n{fitted[-1][1]} %" in readme


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
    page, readme = (ROOT / "docs" / "serving.md").read_text(), (ROOT / "README.md").read_text()
    results = json.loads((ROOT / "benchmarks" / "results" / "serving_demo.json").read_text())
    assert results["on"]["device"] == "NVIDIA H200"
    found = results["results"]["found"]
    titles = {"engine": "engine, no HTTP", "one": "one process", "1": "1 worker"}
    for kind, row in found.items():
        alone = [f"{row[m]['p50'] * 1e3:.0f} / {row[m]['p99'] * 1e3:.0f}" for m in ("mlp", "cnn", "transformer")]
        many = row["many"]
        cells = [*alone, f"{many['per_s']:,.0f}", f"{many['p50']:.2f} / {many['p99']:.2f}"]
        assert f"| {titles.get(kind, f'{kind} workers')} | {' | '.join(cells)} |" in page
    for kind in ("one", "8"):
        assert f"{found[kind]['many']['per_s']:,.0f}" in readme


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


def snippets(page: str) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```$", (ROOT / page).read_text(), re.M | re.S)


def test_the_gallery_quotes_how_long_pictures_took() -> None:
    found = json.loads((ROOT / "benchmarks" / "results" / "plot_speed.json").read_text())["results"]
    page = " ".join((ROOT / "docs" / "pictures.md").read_text().split())
    built, drawn, anew = (found[name]["s"] for name in ("plot", "plot, drawn by Chromium", "explore, zoomed"))
    assert f"took {built:.2f} s to build and Chromium {drawn:.2f} s to draw" in page
    assert f"made a window of them anew in {anew:.2f} s" in page
    assert built + drawn < 2


def run_in(folder: Path, *command: str) -> str:
    ran = subprocess.run(
        [sys.executable, "-W", "error", *command], capture_output=True, text=True, check=False, cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


def run_snippets(folder: Path, *parts: str) -> str:
    """What a script of these parts prints, run in a folder of its own."""
    script = folder / "script.py"
    script.write_text("\n\n".join(parts))
    return run_in(folder, str(script))


def run_line(folder: Path, line: str) -> str:
    """What one of our command lines prints."""
    return run_in(folder, "-c", "from paellapy.cli import main; main()", *line.split()[1:])


def shell_lines(page: str) -> list[str]:
    """The command lines of a page, which are all of ours."""
    return re.findall(r"^paellapy .*$", (ROOT / page).read_text(), re.M)


def test_the_readme_s_code_runs_as_it_stands(tmp_path: Path) -> None:
    """Also beside files of the user's own that have the names of our folders."""
    for name in ("instrument", "scheduler", "serving"):
        (tmp_path / f"{name}.py").write_text("raise RuntimeError('this is not paellapy')")
    kernel, cuda, engine = snippets("README.md")
    if not any(name.startswith("cuda") for name in pp.devices()):  # then it is compiled, and refused with the reason
        cuda = f"try:\n{textwrap.indent(cuda, '    ')}\nexcept pp.LaunchError as e:\n    print(e)"
    ran = run_snippets(tmp_path, kernel, cuda, engine)
    assert "4,096 blocks, 1 launch of 1 kernel in" in ran
    assert "theoretical: 100% occupancy: 16 blocks, 64 of 64 warps per SM, limited by threads" in ran
    assert cuda.startswith("CUDA_C") or "kernel 'saxpy' is CUDA C" in ran
    assert "[0. 2. 4. 6.] <Trace" in ran
    assert "1 request under slack>" in ran


def test_the_readme_says_how_far_its_kernel_s_time_is_off_on_the_virtual_gpu(tmp_path: Path) -> None:
    on_virtual = "import paellapy as pp\npp.Device('virtual:h200').__enter__()"
    ran = run_snippets(tmp_path, on_virtual, snippets("README.md")[0])
    readme = (ROOT / "README.md").read_text()
    simulated, measured = (float(re.search(r"1 kernel in ([\d.]+) µs", text)[1]) for text in (ran, readme))
    assert "here less than half of that" in readme
    assert simulated < measured / 2


def test_the_readme_has_the_line_that_the_demo_server_prints() -> None:
    readme = (ROOT / "README.md").read_text()
    images, labels = demo.held_out()
    line = re.search(r"^curl .*?'$", readme, re.M | re.S)
    assert line is not None
    assert line[0].replace("\n", "") == serve_demo.curl_line("http://127.0.0.1:8000", images[0])
    scores = reference.forward("cnn", demo.load_weights("cnn"), images[:1])[0]
    assert f'"{scores[labels[0]]:.2f}…:{labels[0]}"' in readme


def test_the_code_of_the_scheduling_page_runs(tmp_path: Path) -> None:
    policy, own = snippets("docs/scheduling.md")
    assert "shortest_first on virtual:h200" in run_snippets(tmp_path, policy)
    assert "srpt on virtual:h200" in run_snippets(tmp_path, own)
    assert "streams on virtual:h200" in run_line(tmp_path, "paellapy simulate mine.json -p streams --seconds 0.1")


def test_the_code_of_the_pytorch_page_runs(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    (code,), (line,) = snippets("docs/pytorch.md"), shell_lines("docs/pytorch.md")
    assert "(10,)" in run_snippets(tmp_path, code, "print(probabilities.shape)")
    assert "slack on virtual:h200" in run_line(tmp_path, line)


def test_the_background_page_quotes_what_a_gate_costs() -> None:
    (added,) = json.loads((ROOT / "benchmarks/results/gate_cost.json").read_text())["results"]["added_ns"]
    assert f"adds {added:.0f} ns" in (ROOT / "docs/background.md").read_text()


def test_the_code_of_the_background_page_runs(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    training, turn, simulated = snippets("docs/background.md")
    assert "300 steps" in run_snippets(tmp_path, training)
    run_snippets(tmp_path, "import paellapy as pp", turn)
    assert "tally on virtual:h200" in run_snippets(tmp_path, "import paellapy as pp", simulated)


def test_every_snippet_of_the_gallery_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for needed in ("plotly", "matplotlib", "perfetto"):
        pytest.importorskip(needed)
    monkeypatch.chdir(tmp_path)
    found = snippets("docs/pictures.md")
    assert len(found) == 7
    for snippet in found:
        commented = re.findall(r"# (?:or, .*: )?((?:t|pp)\..*\))$", snippet, re.M)  # what the remark says to write
        exec("import paellapy as pp\n" + snippet + "\n".join(commented), {})
    made = {"tail.svg", "gantt.png", "residency.png", "requests.png", "both.png"}
    assert {path.name for path in tmp_path.iterdir()} == made | {"mix.pftrace", "mix.json", "mix.html", "mix.pptrace"}


def test_readme_quotes_what_scheduling_gains() -> None:
    rows = json.loads((ROOT / "benchmarks" / "results" / "engine_h200.json").read_text())["results"]["mixed"]
    text = (ROOT / "README.md").read_text().replace("\n", " ")
    for policy, digits in (("srpt", 1), ("streams", 0), ("streams, 32 queues", 0)):
        p99 = sorted(row["p99"] for row in rows if row["policy"] == policy and row["load"] == 0.8)
        assert f"{p99[0]:.{digits}f} to {p99[-1]:.{digits}f} times" in text, (policy, p99)


def test_the_results_page_is_what_the_results_say(tmp_path: Path) -> None:
    sys.path.insert(0, str(ROOT / "benchmarks"))
    import paper_report

    paper_report.report(ROOT / "benchmarks" / "results" / "paper.json", tmp_path)
    assert (ROOT / "docs" / "results.md").read_text() == (tmp_path / "results.md").read_text()


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
        paper_report.report(path, tmp_path)
        text = (tmp_path / "results.md").read_text()
        row = next(line for line in text.splitlines() if line.startswith("| slack |"))
        assert bool(re.search(r"only with those of the same commit: .*at 0123456 light[;.]", text)) == known
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


def test_the_scheduling_page_quotes_the_engine_on_the_gpu() -> None:
    found = json.loads((ROOT / "benchmarks" / "results" / "engine_h200.json").read_text())["results"]
    text = (ROOT / "docs" / "scheduling.md").read_text()
    assert f"{found['checked']:,}" in text.replace("\n", " ")
    targets = found["targets"]
    for quoted in (
        f"| {targets['light load, engine / one graph launch']['median']:.3f} |",
        f"| {targets['p99 slowdown at 60%, srpt / streams']['median']:.3f} / ",
        f" / {targets['saturation, slack / streams']['median']:.3f} |",
        f"| {targets['saturation with batches, slack / streams']['median']:.2f} |",
        f"| {targets['saturation with batches, srpt / streams']['median']:.2f} |",
    ):
        assert quoted in text, quoted


def test_the_scheduling_page_quotes_the_core_s_speed() -> None:
    found = json.loads((ROOT / "benchmarks" / "results" / "core_speed.json").read_text())["results"]
    text = (ROOT / "docs" / "scheduling.md").read_text().replace("\n", " ")
    for waiting, quoted in ((1_000, "with 1,000 waiting"), (100_000, "with 100,000")):
        us = [d["ns_per_decision_median"] / 1e3 for d in found["decision"] if d["waiting_requests"] == waiting]
        assert f"{min(us):.2f} to {max(us):.2f} µs {quoted}" in text
    rates = [each["segment_events_per_s_median"] / 1e6 for each in found["simulation"]]
    assert f"{min(rates):.2f} to {max(rates):.2f} million events" in text


def test_the_scheduling_page_quotes_what_batches_carry() -> None:
    points = json.loads((ROOT / "benchmarks" / "results" / "paper.json").read_text())["results"]["points"]
    text = (ROOT / "docs" / "scheduling.md").read_text().replace("\n", " ")

    def most(system: str) -> float:
        rates = [p["throughput"] for key, p in points.items() if key.startswith(f"saturation|{system}|")]
        return sorted(rates)[len(rates) // 2]

    assert f"did {most('hrrn, batches') / most('streams'):.1f} times the requests of streams" in text
    for other in ("srpt", "slack"):
        assert f"{most(other + ', batches') / most('streams'):.1f} times under" in text


def test_the_scheduling_page_quotes_a_short_model_beside_long_ones() -> None:
    found = json.loads((ROOT / "benchmarks" / "results" / "short_beside_long.json").read_text())["results"]
    text = (ROOT / "docs" / "scheduling.md").read_text().replace("\n", " ")
    segments, blocks = (
        {policy: each["p99_ratio_to_streams_and_fifo"][0] for policy, each in found[kind].items()}
        for kind in ("segments", "blocks")
    )
    assert f"{segments['paella']:.2f} times that under `streams`" in text
    assert f"({blocks['paella']:.2f} and {blocks['edf']:.2f} times with every block placed)" in text


def test_the_scheduling_page_quotes_the_flood() -> None:
    found = json.loads((ROOT / "benchmarks" / "results" / "flood.json").read_text())["results"]
    text = (ROOT / "docs" / "scheduling.md").read_text().replace("\n", " ")
    streams, ours, eight = (found[name] for name in ("streams", "srpt", "srpt, 8 jobs at once"))
    assert f"p99 of {streams['short_p99_ms']:.1f} ms on streams and of {ours['short_p99_ms']:.1f} ms" in text
    assert f"at {ours['long_per_s'] / streams['long_per_s']:.2f} of the throughput" in text
    assert f"{eight['short_p99_ms']:.1f} ms at {eight['long_per_s'] / streams['long_per_s']:.2f}" in text


def test_the_scheduling_page_quotes_what_windows_of_sms_bring() -> None:
    sys.path.insert(0, str(ROOT / "benchmarks"))
    import paper_report

    text = (ROOT / "docs" / "scheduling.md").read_text()
    rows = json.loads((ROOT / "benchmarks" / "results" / "sm_windows.json").read_text())["results"]
    starts = ("| all SMs", "| 8 windows", "| 4 windows", "| 2 windows")
    quoted = [line for line in text.splitlines() if line.startswith(starts)]
    figures = {
        f"| {np.mean(r['alone']):.2f} | {r['saturation']:,.0f}/s | {np.median(r['p99_4000']):.2f} | "
        f"{np.median(r['p99_5000']):.2f} |"
        for r in rows
    }
    assert len(quoted) == 8
    for line in quoted:
        assert any(line.endswith(each) for each in figures), line
    points = json.loads((ROOT / "benchmarks" / "results" / "paper.json").read_text())["results"]["points"]

    def median(name: str, which: str) -> float:
        return float(np.median([p[which] for key, p in points.items() if key.startswith(name)]))

    p99 = [
        median(f"fig11|{system}|1.5|5000|", "p99_slowdown")
        for system in ("slack, windows", "slack", "hrrn, batches, windows", "hrrn, batches")
    ]
    flat = text.replace("\n", " ")
    assert f"a p99 slowdown of {p99[0]:.1f} instead of {p99[1]:.1f} at 5000" in flat
    sweep = paper_report.series(points, "fig11")
    load, without = (
        np.mean(list(paper_report.sustained(sweep, system, "1.5").values()))
        for system in ("hrrn, batches, windows", "hrrn, batches")
    )
    assert f"batches, {p99[2]:.1f} instead of {p99[3]:.1f}, and {load / without:.2f} times the load" in flat
    twin = json.loads((ROOT / "benchmarks" / "results" / "paper_twin.json").read_text())["results"]["summary"]
    near = [
        100 * twin[f"{system}|below 90 %|p99_slowdown"]["within"]
        for system in ("slack, windows", "hrrn, batches, windows")
    ]
    assert f"{near[0]:.0f} and {near[1]:.0f} % of the p99 (without batches, and with) are within 20 %" in flat


def test_the_scheduling_page_quotes_what_it_costs_to_begin_a_graph_in_a_window() -> None:
    models = json.loads((ROOT / "benchmarks" / "results" / "window_starts.json").read_text())["results"]["models"]
    text = (ROOT / "docs" / "scheduling.md").read_text().replace("\n", " ")
    for where, quoted in (
        ("all SMs", "{} to {} µs on all SMs"),
        ("in a window", "{} to {} µs in a window from a stream of all SMs"),
        ("in a window, from its own stream", "{} to {} µs from one of the window's own"),
    ):
        us = sorted(each[where]["start_us"] for each in models.values())
        assert quoted.format(*(f"{each:.0f}" for each in us)) in text


def test_readme_quotes_the_load_that_meets_its_targets() -> None:
    sys.path.insert(0, str(ROOT / "benchmarks"))
    import paper_report

    points = json.loads((ROOT / "benchmarks" / "results" / "paper.json").read_text())["results"]["points"]
    sweep = paper_report.series(points, "fig11")
    ours, streams, batcher = (
        paper_report.sustained(sweep, system, "1.5")
        for system in ("hrrn, batches, windows", "streams", "dynamic batcher")
    )
    text = (ROOT / "README.md").read_text().replace("\n", " ")
    more, less = (np.median([each[seed] / streams[seed] for seed in each]) for each in (ours, batcher))
    assert f"at {more:.1f} times the load that streams do, and a dynamic batcher at {less:.1f} times" in text


def test_the_results_page_says_what_was_met() -> None:
    sys.path.insert(0, str(ROOT / "benchmarks"))
    import paper_report

    points = json.loads((ROOT / "benchmarks" / "results" / "paper.json").read_text())["results"]["points"]
    text = " ".join((ROOT / "docs" / "results_notes.md").read_text().split())
    sweep = paper_report.series(points, "fig11")

    def load(name: str, base: str = "streams") -> float:
        ours, other = (paper_report.sustained(sweep, each, "1.5") for each in (name, base))
        return float(np.median([ours[seed] / other[seed] for seed in ours]))

    def p99(name: str) -> list[float]:
        return [p["p99_slowdown"] for p in sorted(sweep[name, "1.5", "4000"], key=itemgetter("seed"))]

    def slower(name: str) -> list[float]:
        return [a / b for a, b in zip(p99(name), p99("streams"), strict=True)]

    def full(name: str) -> float:
        return float(np.median([p["throughput"] for p in paper_report.series(points, "saturation")[name,]]))

    one, many, apart = "slack", "hrrn, batches", ", windows"
    for quoted in (
        f"{load(one):.2f} times the load of streams with 99 % of the requests within",
        f"{load(one + apart):.2f} with windows of SMs; p99 slowdown at 4000/s {np.median(slower(one)):.2f} of streams'",
        f"with windows {full(one + apart) / full('streams'):.2f} times the throughput of streams at saturation",
        f"{load(many):.2f} times the load of streams with 99 % in time, with windows of SMs {load(many + apart):.2f}",
        f"that is {load(many, 'dynamic batcher'):.1f} times the dynamic batcher's",
        f"with windows {load(many + apart, 'dynamic batcher'):.1f} (aim 1.25)",
        f"{full(many) / full('streams'):.1f} times the throughput of streams at saturation (aim 2.2)",
        f"with windows {np.median(slower(many + apart)):.3f} ({min(slower(many + apart)):.2f} to "
        f"{max(slower(many + apart)):.2f} by seed",
        f"the means of the five are {np.mean(p99(many + apart)):.2f} and {np.mean(p99('streams')):.2f}",
    ):
        assert quoted in text, quoted
    beyond = [point for key, point in points.items() if key.startswith("beyond|")]
    worst, best = (f([p["p99_slowdown"] for p in beyond]) for f in (max, min))
    assert f"p99 of what is accepted is {best:.1f} to {worst:.1f} times alone" in text
    in_time = [100 * p["within_4x"] * p["offered"] / p["answered"] for p in beyond]
    assert f"and {min(in_time):.1f} to {max(in_time):.1f} % of it is in time" in text
    best, two = "best_effort|{}|gate, two best-effort jobs|{}", ("resnet50 x64", "vgg19 x32")
    costs = [[points[best.format(be, k)]["hp_p99_us"] for k in range(5, 10)] for be in two]
    alone = [[points[f"best_effort|{be}|alone|{k}"]["hp_p99_us"] for k in range(5, 10)] for be in two]
    ratios = [np.array(a) / np.array(b) for a, b in zip(costs, alone, strict=True)]
    shares = [np.median([points[best.format(be, k)]["be_share_1"] for k in range(5, 10)]) for be in two]
    spreads = [f"{np.median(r):.2f} times alone ({r.min():.2f} to {r.max():.2f})" for r in ratios[:1]]
    spreads += [f"{np.median(r):.2f} ({r.min():.2f} to {r.max():.2f})" for r in ratios[1:]]
    for spread, share, be in zip(spreads, shares, ("resnet50", "vgg19"), strict=True):
        assert f"{spread} with {share:.2f} beside {be}" in text
    ratios = [each["ratio"] for each in points["light"].values()]
    assert f"{min(ratios):.3f} to {max(ratios):.3f} of a copy of the inputs and one launch" in text


def test_the_results_page_says_what_else_was_measured() -> None:
    sys.path.insert(0, str(ROOT / "benchmarks"))
    import paper_report

    results = ROOT / "benchmarks" / "results"
    points = json.loads((results / "paper.json").read_text())["results"]["points"]
    text = " ".join((ROOT / "docs" / "results_notes.md").read_text().split())
    sweep = paper_report.series(points, "fig11")
    streams = paper_report.sustained(sweep, "streams", "2.0")
    wider = {}
    for name in ("slack", "slack, windows", "hrrn, batches, windows"):
        ours = paper_report.sustained(sweep, name, "2.0")
        wider[name] = f"{np.median([ours[seed] / streams[seed] for seed in ours]):.2f}"
    plain, apart = wider["slack"], wider["slack, windows"]
    assert f"With σ = 2 the load is {plain} times that of streams, {apart} with windows" in text
    assert f"With σ = 2 the load is {wider['hrrn, batches, windows']} times that of streams, with windows" in text
    for part, percent in (("p99 at 5000/s {} to {}. Windows", 25), ("With 100 % for each, MPS has {} to {}.", 100)):
        found = sorted(p["p99_slowdown"] for p in sweep[f"MPS, {percent} % each", "1.5", "5000"])
        assert part.format(f"{found[0]:.1f}", f"{found[-1]:.1f}") in text
    disb = paper_report.series(points, "disb")

    def gains(figure: str) -> list[str]:
        each = {(load, how): np.median([p[figure] for p in disb[load, how]]) for load, how in disb}
        return [f"{each[load, 'priority'] / each[load, 'streams']:.2f}" for load in "ABCDE"]

    p99, rate = gains("rt_p99_us"), gains("be_per_s")
    assert f"have {p99[2]}, {p99[3]} and {p99[4]} of the p99 under streams" in text
    assert f"at {rate[2]}, {rate[3]} and {rate[4]} of the best effort, and those of A {p99[0]} at {rate[0]}" in text
    assert f"{rate[1]} of the best effort is left" in text
    cold = json.loads((results / "cold_cache.json").read_text())["results"]["models"].values()
    ratios = sorted(100 * each["after_others_ratio"] - 100 for each in cold)
    assert f"five of the eight models take {ratios[3]:.0f} to {ratios[-1]:.0f} % longer" in text
    assert max(ratios[:3]) < 1.5
    assert min(each["weights_bytes"] for each in cold if each["after_others_ratio"] < 1.015) > 40e6


def test_the_results_page_says_how_good_the_twin_is() -> None:
    summary = json.loads((ROOT / "benchmarks" / "results" / "paper_twin.json").read_text())["results"]["summary"]
    text = " ".join((ROOT / "docs" / "results_notes.md").read_text().split())
    for system, called in (
        ("dynamic batcher", "the dynamic batcher"), ("slack", "`slack`"), ("slack, windows", "`slack` with windows"),
        ("streams", "streams"), ("streams, 32 queues", "streams with 32 queues"),
        ("hrrn, batches, windows", "`hrrn` with windows"),
    ):  # fmt: skip
        p99 = summary[f"{system}|below 90 %|p99_slowdown"]
        assert f"{100 * p99['within']:.0f} % for {called} ({100 * p99['median']:.0f} %)" in text, system
    outside = [round((1 - each["within"]) * each["n"]) for name, each in summary.items() if "below 90 %|p99" in name]
    assert f"The {sum(outside)} whose p99 is further off" in text


def test_the_results_page_says_how_far_apart_kernels_begin() -> None:
    results = ROOT / "benchmarks" / "results"
    text = " ".join((results.parent.parent / "docs" / "results_notes.md").read_text().split())
    found = json.loads((results / "kernel_gaps.json").read_text())["results"]
    longer = {case for case, each in found["cases"].items() if each["ratio"] > 1.1}
    assert longer == {
        "and 7 on another", "and 8 on another", "and 100 copies within the GPU on another",
        "4 graphs uploaded, not launched",
    }  # fmt: skip
    assert all(each["ratio"] < 1.02 for case, each in found["cases"].items() if case not in longer)
    whole = found["resnet34"]
    assert f"takes {whole['before_us']:.0f} µs, and {whole['after_us']:.0f} after eight kernels on a second" in text
    points = json.loads((results / "paper.json").read_text())["results"]["points"]
    looks = [p[when] for p in points.values() for when in ("gpu_before", "gpu_after") if when in p]
    gaps = [look["kernel_gap_ns"] for look in looks if "kernel_gap_ns" in look]
    assert len(gaps) > 900
    unseen = {key.split("|")[1] for key, p in points.items() if key.startswith("fig11|") and "gpu_before" not in p}
    assert all("MPS" in each or "eager" in each or each == "kernel by kernel, srpt" for each in unseen)
    assert f"began {min(gaps):.0f} to {max(gaps):.0f} ns after one another" in text


def test_the_results_page_says_how_streams_wait_for_each_other() -> None:
    found = json.loads((ROOT / "benchmarks" / "results" / "stream_queues.json").read_text())["results"]
    text = " ".join((ROOT / "docs" / "results_notes.md").read_text().split())
    few, many = ({len(each) for each in found[queues]["100"]["graphs"]} for queues in ("8", "32"))
    assert f"{few.pop()} of 63 with 8 queues, {many.pop()} with 32" in text
    assert not few | many
    assert not any(any(found[queues][length]["kernels"]) for queues in found for length in found[queues])
    assert not any(any(found[queues]["2"]["graphs"]) for queues in found)
    # Dealt out in the order of launches: not those whose stream has the same number modulo eight.
    assert [found["8"]["100"]["graphs"][k][0] for k in (0, 1, 5, 9)] == [8, 8, 8, 7]
