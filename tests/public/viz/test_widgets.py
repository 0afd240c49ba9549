"""The live widget: it follows an engine from Python, draws in a real browser, and leaves nothing behind.

Set PAELLAPY_SCREENSHOTS to a folder to keep the pictures.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
from aiohttp import web
from browser import Browser, find_chromium
from engine_models import random_inputs, scale_model
from waiting import wait_until

import paellapy as pp
from paellapy.scheduler.core.errors import EngineClosedError
from paellapy.scheduler.engine.engine import Engine
from paellapy.viz import widgets

RNG = np.random.default_rng(5)


@pytest.fixture
def engine():
    with Engine("virtual:h200") as engine:
        engine.load(scale_model("scale", target_ms=1000.0))
        yield engine


@pytest.fixture
def view(engine):
    view = pp.live(engine, hz=30)
    yield view
    view.close()


def ask(engine, count=1):
    for _ in range(count):
        engine.infer_sync("scale", random_inputs(engine.models["scale"], RNG))


def looking():
    return [each for each in threading.enumerate() if each.name == "paellapy-live"]


def test_it_follows_the_requests_that_run(engine, view):
    changes = []
    view.observe(changes.append, "snapshot")
    ask(engine, 4)
    wait_until(lambda: view.snapshot["models"][0]["recent"] == 4)
    ask(engine, 3)
    wait_until(lambda: view.snapshot["models"][0]["recent"] == 7)
    assert len(changes) >= 2
    assert view.snapshot["device"] == engine.device.title


def test_a_paused_view_stands_still_and_watches_nothing(engine, view):
    watchers = len(engine.core.ring.watchers)
    view.paused = True
    assert len(engine.core.ring.watchers) == watchers - 1
    seen = view.snapshot
    ask(engine, 3)
    assert view.snapshot["models"][0]["recent"] == seen["models"][0]["recent"] == 0
    view.paused = False
    ask(engine, 2)
    wait_until(lambda: view.snapshot["models"][0]["recent"] == 2)


def test_closing_it_leaves_no_thread_and_the_engine_running(engine):
    before, watchers = looking(), len(engine.core.ring.watchers)
    view = pp.live(engine)
    assert len(looking()) == len(before) + 1
    view.close()
    view.close()
    assert looking() == before
    assert len(engine.core.ring.watchers) == watchers
    ask(engine)


@pytest.mark.parametrize("paused", [False, True])
def test_it_ends_with_its_engine(paused):
    with Engine("virtual:h200") as engine:
        engine.load(scale_model())
        view = pp.live(engine)
        view.paused = paused
    view._thread.join()
    assert view.snapshot["state"] == "closed"
    view.close()


def test_a_message_from_the_browser_switches_the_policy(engine, view):
    sent = []
    view.send = sent.append
    view._handle_custom_msg({"kind": "policy", "number": 1, "name": "srpt"}, [])
    assert engine.policy == "srpt"
    view._handle_custom_msg({"kind": "policy", "number": 2, "name": "nope"}, [])
    assert engine.policy == "srpt"
    view._handle_custom_msg({"kind": "something else"}, [])
    assert [each["number"] for each in sent] == [1, 2]
    assert sent[0]["error"] is None
    assert "choose one of" in sent[1]["error"]


def test_bad_input_is_named(engine):
    with pytest.raises(pp.ArgumentError, check=lambda e: e.field == "engine"):
        pp.live("engine")
    with pytest.raises(pp.ArgumentError, check=lambda e: (e.field, e.given) == ("hz", 0)):
        pp.live(engine, hz=0)
    engine.close()
    with pytest.raises(EngineClosedError):
        pp.live(engine)


def test_without_anywidget_it_says_which_extra_to_install(engine, monkeypatch):
    widgets._widget_class.cache_clear()
    monkeypatch.setitem(sys.modules, "anywidget", None)
    with pytest.raises(pp.MissingExtraError, check=lambda e: (e.library, e.extra) == ("anywidget", "viz")):
        pp.live(engine)
    assert not looking()


# -- in a browser: the module that Jupyter gets, with a model that behaves as Jupyter's

_PAGE = """<!doctype html><html><head><meta charset="utf-8"><link rel="icon" href="data:,">
<link rel="stylesheet" href="widget.css"></head><body data-jp-theme-light="true"><div id="cell"></div>
<script type="module">
import widget from "./widget.js";
const state = { snapshot: {}, paused: false }, heard = {};
const on = (name) => (heard[name] ??= new Set());
window.sent = [];
window.saved = [];
window.model = {
  get: (key) => state[key],
  set(key, value) { state[key] = value; on(`change:${key}`).forEach((f) => f()); },
  save_changes() { saved.push({ ...state, snapshot: null }); },
  send(message) { sent.push(message); },
  on: (name, f) => on(name).add(f),
  off: (name, f) => on(name).delete(f),
  receive: (message) => on("msg:custom").forEach((f) => f(message)),
  listeners: () => Object.values(heard).reduce((sum, each) => sum + each.size, 0),
};
window.leave = await widget.render({ model, el: document.getElementById("cell") });
</script></body></html>"""


@contextlib.asynccontextmanager
async def served():
    """The page on a free port."""

    def answer(text, kind):
        async def handler(_):
            return web.Response(text=text, content_type=kind)

        return handler

    app = web.Application()
    app.router.add_get("/", answer(_PAGE, "text/html"))
    app.router.add_get("/widget.js", answer(widgets.javascript(), "text/javascript"))
    app.router.add_get("/widget.css", answer(widgets.css(), "text/css"))
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


@pytest.mark.skipif(find_chromium() is None, reason="needs chromium")
def test_the_module_draws_a_real_engine_and_its_controls_work(engine, view, tmp_path):
    shots = Path(os.environ.get("PAELLAPY_SCREENSHOTS") or tmp_path)

    async def main():
        async with served() as host, Browser() as browser:
            page = await browser.page(900, 700)
            await page.goto(host + "/")
            await page.wait_for("window.leave")
            for count in (3, 5):
                await asyncio.to_thread(ask, engine, count)
            await asyncio.to_thread(wait_until, lambda: view.snapshot["models"][0]["recent"] == 8)
            shown = view.snapshot
            await page.evaluate(f"model.set('snapshot', {json.dumps(shown)})")
            assert await page.evaluate("document.querySelectorAll('.pp-cell').length") == 132
            assert await page.evaluate("document.querySelector('.pp-status').textContent") == "live"
            assert await page.evaluate("document.querySelector('.pp-model h3').textContent") == "scale"
            assert await page.evaluate("document.querySelectorAll('.pp-slow tbody tr').length") == len(shown["slow"])
            assert await page.unreadable() == []
            await page.screenshot(shots / "live.png")

            await page.evaluate(
                "(() => { const s = document.querySelector('.pp-controls select'); s.value = 'srpt';"
                " s.dispatchEvent(new Event('change')); })()"
            )
            message = (await page.wait_for("sent.length && sent"))[0]
            answers = []
            view.send = answers.append
            view._handle_custom_msg(message, [])
            assert engine.policy == "srpt"
            await page.evaluate(f"model.receive({json.dumps(answers[0])})")
            await page.wait_for("!document.querySelector('.pp-controls select').disabled")
            await asyncio.to_thread(wait_until, lambda: view.snapshot["policy"]["current"] == "srpt")
            await page.evaluate(f"model.set('snapshot', {json.dumps(view.snapshot)})")
            assert await page.evaluate("document.querySelector('.pp-controls select').value") == "srpt"

            await page.evaluate("document.querySelector('.pp-controls button').click()")
            assert await page.evaluate("saved.at(-1).paused") is True
            assert await page.evaluate("document.querySelector('.pp-status').textContent") == "paused"

            ground = "getComputedStyle(document.querySelector('.pp-widget')).backgroundColor"
            light = await page.evaluate(ground)
            await page.evaluate("document.body.dataset.jpThemeLight = 'false'")
            await page.wait_for(f"{ground} !== {json.dumps(light)}")
            await page.screenshot(shots / "live-dark.png")

            await page.evaluate("leave()")
            assert await page.evaluate("model.listeners()") == 0
            assert page.errors == []
            assert {url.split("/")[2] for url in page.requests if url.startswith("http")} == {host.split("/")[2]}

    asyncio.run(main())
