"""What people see, in a real browser: every view of a trace, and the dashboard of a server under load.

Set PAELLAPY_SCREENSHOTS to a folder to keep the pictures.
"""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import os
import threading
from pathlib import Path

import numpy as np
import pytest
import triton
from engine_models import gemm, mlp_model, random_inputs, scale, scale_model
from serving_server import infer_body, running

import paellapy as pp
from paellapy import demo
from paellapy.scheduler.engine.engine import Engine
from paellapy.viz import data

pytest.importorskip("plotly", reason="the extra `viz` is not installed")

from browser import Browser, find_chromium

pytestmark = pytest.mark.skipif(find_chromium() is None, reason="needs chromium: apt-get install chromium")

WIDE, PHONE = (1366, 768), (390, 844)
FIGURE = "document.querySelector('.js-plotly-plot')"
DRAWN = "document.querySelectorAll('.js-plotly-plot')"


@pytest.fixture
def shots(tmp_path):
    return Path(os.environ.get("PAELLAPY_SCREENSHOTS") or tmp_path)


@pytest.fixture(scope="module")
def chromium():
    """Runs a coroutine function with a browser, which is one for all tests, and closes its pages."""
    with asyncio.Runner() as runner:
        browser = runner.run(Browser().__aenter__())

        def run(main):
            try:
                runner.run(main(browser))
            finally:
                runner.run(browser.close_pages())

        yield run
        runner.run(browser.__aexit__())


# -- views of a trace


def traced(policy):
    """Two models on the virtual H200, some requests with a deadline."""
    rng = np.random.default_rng(1)
    with Engine("virtual:h200", policy, quantum_us=5) as engine:
        engine.load(mlp_model("mlp", target_ms=50.0))
        engine.load(scale_model("scale", steps=6))

        async def ask(name, **options):
            await engine.infer(name, random_inputs(engine.models[name], rng), **options)

        async def main():
            await asyncio.gather(*(ask(name, deadline_ms=5000.0) for name in ("mlp", "scale", "mlp") * 4))

        with engine.trace() as t:
            asyncio.run(main())
    return t


def kernels(n, gemm_first=False):
    """Two kernels on two streams of the virtual H200: one of several waves with a tail, one of few blocks."""
    rng = np.random.default_rng(2)
    with pp.Device("virtual:h200"):
        x, a, b = (pp.array(rng.random(size, np.float32)) for size in (n, 512 * 256, 256 * 512))
        y, out = pp.empty(n), pp.empty((512, 512))

        def wide():
            scale[(triton.cdiv(n, 1024),)](x, y, 2.0, n, B=1024)

        def deep():
            with pp.stream():
                gemm[(16, 16)](a, b, out, 512, 512, 256, BM=32, BN=32, BK=32)

        with pp.trace() as t:
            for launch in (deep, wide, wide) if gemm_first else (wide, deep, wide):
                launch()
    return t


@pytest.fixture(scope="module")
def trace():
    return kernels(1_400_000)


@pytest.fixture(scope="module")
def requests():
    return traced("paella")


def check_heat(shown, picture):
    z = np.array(shown["heatmap"][0]["z"], np.float32)
    np.testing.assert_allclose(z, data.heat(picture).resident.astype(np.float32), atol=1e-6)


def check_gantt(shown, picture):
    blocks = data.prepare(picture.trace, kernel="gemm").trace.blocks
    assert len(blocks)
    lengths = np.concatenate([bar["x"] for bar in shown["bar"] if bar["base"] is not None])
    assert len(lengths) == len(blocks)
    expected = (blocks["end_ns"] - blocks["start_ns"]) / picture.axis.ns_per_unit
    assert lengths.sum() == pytest.approx(expected.sum(), rel=1e-6)


def check_residency(shown, picture):
    drawn = [line for line in shown["scatter"] if line["fill"] == "tozeroy"]
    np.testing.assert_allclose(
        [line["y"][:-1] for line in drawn], data.residency(picture).resident, atol=1e-9
    )


VIEWS = {
    "plot": (lambda t, **o: t.plot(**o), (check_heat, check_residency)),
    "heatmap": (lambda t, **o: t.plot_heatmap(**o), (check_heat,)),
    "gantt": (lambda t, **o: t.plot_gantt(kernel="gemm", **o), (check_gantt,)),  # few enough lanes for bars
    "residency": (lambda t, **o: t.plot_residency(**o), (check_residency,)),
}


def shown_by(figure=FIGURE):
    """An expression for the numbers that a figure shows. Plotly has them in typed arrays, which JSON does not know."""
    return f"""(() => {{
  const list = (values) => values == null ? null : Array.from(values, (v) => ArrayBuffer.isView(v) || Array.isArray(v) ? Array.from(v) : v);
  const found = {{heatmap: [], bar: [], scatter: []}};
  for (const t of {figure}._fullData)
    found[t.type]?.push({{name: t.name, meta: t.meta, fill: t.fill, x: list(t.x), y: list(t.y), z: list(t.z), base: list(t.base)}});
  return found;
}})()"""  # noqa: E501


async def look(browser, path, shots, name, width=1200, dark=False):
    """Opens a file, takes its picture, and makes the checks common to all pages."""
    page = await browser.page(width, 800, dark=dark)
    await page.goto(path.as_uri())
    await page.wait_for(f"{FIGURE}?._fullData && document.querySelector('.js-plotly-plot [class$=tick] text')")
    await page.screenshot(shots / f"{name}.png")
    assert await page.unreadable() == [], name
    assert page.errors == [], name
    assert [url for url in page.requests if not url.startswith(("file:", "data:", "blob:"))] == []
    return page


def write(figure, folder, name):
    path = folder / f"{name}.html"
    figure.write_html(path, include_plotlyjs="directory", config={"displayModeBar": False, "responsive": True})
    return path


def test_every_view_is_readable_and_shows_the_numbers_of_the_trace(chromium, trace, tmp_path, shots):
    """All views are on one page: reading Plotly takes longer than drawing most of them."""

    async def main(browser):
        path = write(VIEWS["plot"][0](trace, theme="dark"), tmp_path, "plot-dark")  # with Plotly beside it
        page = await look(browser, path, shots, "view-plot-dark", dark=True)
        check_heat(await page.evaluate(shown_by()), data.prepare(trace))
        await page.close()
        drawn = [draw(trace, theme="light") for draw, _ in VIEWS.values()]
        parts = [each.to_html(include_plotlyjs=False, full_html=False, default_height=800) for each in drawn]
        path = tmp_path / "views.html"
        path.write_text('<meta charset="utf-8"><script src="plotly.min.js"></script>' + "".join(parts))
        page = await look(browser, path, shots, "views")
        for k, (_, checks) in enumerate(VIEWS.values()):
            await page.wait_for(f"!!{DRAWN}[{k}]?._fullData")
            shown = await page.evaluate(shown_by(f"{DRAWN}[{k}]"))
            for check in checks:
                check(shown, data.prepare(trace))

    chromium(main)


def test_requests_are_readable_and_as_many_as_ran(chromium, requests, tmp_path, shots):
    async def main(browser):
        for name, draw in (("requests", requests.plot_requests), ("engine", requests.plot)):
            page = await look(browser, write(draw(theme="dark"), tmp_path, name), shots, f"view-{name}", dark=True)
            bars = [bar for bar in (await page.evaluate(shown_by()))["bar"] if bar.get("meta") == "queued"]
            jobs = requests.jobs
            waited = (jobs["start_ns"] - jobs["arrival_ns"]) / data.prepare(requests).axis.ns_per_unit
            lengths = sorted(length for bar in bars for length in bar["x"])
            np.testing.assert_allclose(lengths, sorted(np.maximum(waited, 0)), rtol=1e-6)
            await page.close()

    chromium(main)


def test_two_traces_side_by_side_are_readable(chromium, trace, tmp_path, shots):
    other = kernels(1_200_000, gemm_first=True)

    async def main(browser):
        path = write(pp.compare(trace, other, ("wide first", "deep first")), tmp_path, "compare")
        page = await look(browser, path, shots, "view-compare", width=1500)
        shown = await page.evaluate(shown_by())
        pictures = data.on_one_scale([data.prepare(trace), data.prepare(other)])
        heats = [each for each in shown["heatmap"] if each["name"] == "occupancy"]  # others are lanes of a full GPU
        for heat, picture in zip(heats, pictures, strict=True):
            check_heat({"heatmap": [heat]}, picture)

    chromium(main)


def test_exploring_shows_the_window_one_zooms_into(chromium, trace, tmp_path, shots):
    pytest.importorskip("anywidget", reason="the extra `viz` is not installed")
    figure = trace.explore()
    whole = data.prepare(trace)
    middle = whole.axis.length / 2
    figure.update_xaxes(range=[middle, whole.axis.length])

    async def main(browser):
        page = await look(browser, write(figure, tmp_path, "explore"), shots, "view-explore")
        start = whole.axis.origin_ns + round(middle * whole.axis.ns_per_unit)
        end = whole.axis.origin_ns + round(whole.axis.length * whole.axis.ns_per_unit)
        check_heat(await page.evaluate(shown_by()), data.prepare(trace, start_ns=start, end_ns=end))

    chromium(main)


def test_the_report_says_what_the_trace_says(chromium, trace, tmp_path, shots):
    path = trace.to_html(tmp_path / "report.html", theme="dark")

    async def main(browser):
        page = await look(browser, path, shots, "report")
        cells = "(r) => [...r.children].map((c) => c.textContent.trim())"
        _, *shown = await page.evaluate(f"[...document.querySelectorAll('table tr')].map({cells})")
        assert shown == [list(row) for row in trace.summary().cells()]
        check_heat(await page.evaluate(shown_by()), data.prepare(trace))

    chromium(main)


# -- the dashboard


@contextlib.contextmanager
def load_on(server, names, width):
    """Three clients that send requests one after another, until the end of the block."""
    stop = threading.Event()
    body = json.dumps(infer_body("x", np.ones((1, width), np.float32)))

    def client(k):
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
        while not stop.is_set():
            connection.request("POST", f"/v2/models/{names[k % len(names)]}/infer", body)
            connection.getresponse().read()
            k += 1
        connection.close()

    threads = [threading.Thread(target=client, args=(k,)) for k in range(3)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        stop.set()
        for thread in threads:
            thread.join()


def tile(name):
    return (
        "[...document.querySelectorAll('.pp-tile')].find((t) => t.querySelector('dt').textContent === "
        f"'{name}').querySelector('dd span').textContent"
    )


STATUS = "document.querySelector('.pp-status').textContent"
POLICY = "document.querySelector('.pp-controls select')"


def test_the_dashboard_of_a_server_under_load(chromium, shots):
    async def main(browser):
        page = await browser.page(*WIDE)
        await page.goto(f"{server.url}/")
        await page.wait_for(f"{STATUS} === 'live'")
        await page.wait_for("document.querySelectorAll('.pp-slow tbody tr').length > 1")
        assert await page.evaluate("document.querySelectorAll('.pp-cell').length") == 132
        await page.wait_for("document.querySelectorAll('.pp-cell.pp-on').length > 0")
        shown = tile("Throughput")  # as people read it: 1,234
        first = await page.wait_for(f"/[1-9]/.test({shown}) && {shown}")
        await page.wait_for(f"{shown} !== {json.dumps(first)}")
        names = "[...document.querySelectorAll('.pp-model h3')].map((h) => h.textContent)"
        assert await page.evaluate(names) == ["scale", "longer-name"]

        assert await page.evaluate(f"{POLICY}.value") == server.engine.policy == "paella"
        await page.evaluate(f"{POLICY}.value = 'srpt'; {POLICY}.dispatchEvent(new Event('change'))")
        await asyncio.to_thread(server.wait_until, lambda: server.engine.policy == "srpt")
        await page.wait_for(f"!{POLICY}.disabled && {POLICY}.value === 'srpt'")
        await page.wait_for("document.querySelector('.pp-about').textContent.startsWith('Shortest remaining')")

        for dark in (False, True):
            await page.theme(dark)
            for where, size in (("wide", WIDE), ("phone", PHONE)):
                await page.resize(*size)
                for _ in range(2):  # frames: one that sees the new size, one that is drawn for it
                    await page.evaluate("new Promise(requestAnimationFrame)")
                assert await page.unreadable() == [], where
                await page.screenshot(shots / f"dashboard-{where}-{'dark' if dark else 'light'}.png")
        assert page.errors == []
        assert {url.split("/")[2] for url in page.requests} == {server.address}

    models = [scale_model("scale", target_ms=100.0, steps=3), scale_model("longer-name", factor=3.0, steps=8)]
    with running(models, admission="off") as server, load_on(server, ("scale", "longer-name"), 64):
        chromium(main)


def test_a_page_whose_server_is_gone_says_so_and_tries_again(chromium, shots):
    async def main(browser):
        page = await browser.page(*WIDE)
        with running([scale_model("scale")]) as server:
            await page.goto(f"{server.url}/")
            await page.wait_for(f"{STATUS} === 'live'")
            await page.screenshot(shots / "dashboard-empty.png")
            assert await page.unreadable() == []
        await page.wait_for(f"{STATUS}.startsWith('server gone, retrying')")
        assert await page.evaluate(f"{POLICY}.disabled")
        await page.screenshot(shots / "dashboard-gone.png")
        asked = len(page.requests)
        while len(page.requests) == asked:
            await asyncio.sleep(0.05)

    chromium(main)


def test_a_server_with_keys_asks_for_one(chromium, shots):
    async def main(browser):
        page = await browser.page(*WIDE)
        await page.goto(f"{server.url}/")
        await page.wait_for("document.querySelector('.pp-banner input')")
        await page.screenshot(shots / "dashboard-key.png")
        for key, then in (("wrong", "document.querySelector('.pp-banner').textContent.includes('does not know')"),
                          ("secret", f"{STATUS} === 'live'")):  # fmt: skip
            box = "document.querySelector('.pp-banner input')"
            await page.evaluate(f"{box}.value = '{key}'; {box}.form.requestSubmit()")
            await page.wait_for(then)

    with running([scale_model("scale")], keys={"me": "secret"}) as server:
        chromium(main)


def test_a_prompt_is_answered_as_the_model_writes(chromium, shots):
    async def main(browser):
        page = await browser.page(*WIDE)
        await page.goto(f"{server.url}/")
        await page.wait_for("!document.querySelector('.pp-writer').hidden")
        await page.evaluate("document.querySelector('.pp-writer form').requestSubmit()")
        await page.wait_for("document.querySelector('.pp-writer [role=status]').textContent.startsWith('8 tokens')")
        await page.evaluate("document.querySelector('.pp-writer button').click()")
        written = "document.querySelector('.pp-written')"
        await page.wait_for("document.querySelector('.pp-writer button').textContent === 'Write'")
        prompt = await page.evaluate("document.querySelector('.pp-writer textarea').value")
        assert (await page.evaluate(f"{written}.textContent")).startswith(prompt)
        assert len(await page.evaluate(f"{written}.textContent")) > len(prompt)
        await page.screenshot(shots / "dashboard-writer.png")
        assert page.errors == []

    with running([pp.LanguageModel(demo.AUSTEN)]) as server:
        chromium(main)
