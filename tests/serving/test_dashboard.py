"""The dashboard's addresses: a page that needs nothing from elsewhere, events while somebody looks, one switch."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import re
import threading
from urllib.parse import urljoin

import pytest
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer
from engine_models import scale_model
from raw_client import Client
from serving_server import BODY, INFER, ask, running

from paellapy.scheduler.engine.engine import Engine
from paellapy.serving import rpc
from paellapy.serving.app import create_app
from paellapy.serving.dashboard_routes import HUB, MAX_VIEWERS, SWITCH_HEADER, Hub
from paellapy.serving.registry import Entry, entry_of

SWITCH = {"Content-Type": "application/json", SWITCH_HEADER: "1"}


@pytest.fixture(scope="module")
def server():
    with running([scale_model("scale", target_ms=500.0)]) as server:
        yield server


class Viewer:
    """A viewer of the dashboard: reads events as they come."""

    def __init__(self, server, path="/dashboard/events", headers=None):
        self._connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
        self._connection.request("GET", path, headers=headers or {})
        self.answer = self._connection.getresponse()

    def next(self):
        line = self.answer.readline()
        while line and not line.startswith(b"data: "):
            line = self.answer.readline()
        return json.loads(line[6:]) if line else None

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.answer.close()
        self._connection.close()


def test_the_page_and_its_parts_come_from_here_and_from_nowhere_else(server):
    status, headers, page = ask(server, "GET", "/")
    assert status == 200
    assert headers["Content-Type"] == "text/html; charset=utf-8"
    policy = headers["Content-Security-Policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    parts = re.findall(r'(?:src|href)="(dashboard/[^"]+)"', page.decode())
    assert parts
    seen = set()
    while parts:
        name = parts.pop()
        if name in seen:
            continue
        seen.add(name)
        status, headers, text = ask(server, "GET", f"/{name}")
        assert status == 200, name
        assert headers["X-Content-Type-Options"] == "nosniff"
        assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)", text.decode()), name
        parts += [f"dashboard/{each}" for each in re.findall(r'from "\./([^"]+)"', text.decode())]
    assert {"dashboard/view.js", "dashboard/slow.js", "dashboard/view.css"} <= seen


def test_the_head_of_the_events_has_no_body_and_takes_no_seat(server):
    with Client(server) as client:
        for _ in range(MAX_VIEWERS + 1):
            client.send(b"HEAD /dashboard/events HTTP/1.1\r\nHost: x\r\n\r\n")
            status, headers, body = client.answer()
            assert (status, headers["content-type"], body) == (200, "text/event-stream", b"")


@pytest.mark.parametrize("path", ["/dashboard", "/dashboard/"])
def test_its_name_leads_to_it(server, path):
    status, headers, _ = ask(server, "GET", path)
    assert (status, urljoin(path, headers["Location"])) == (302, "/")


@pytest.mark.parametrize("path", ["/inference/dashboard", "/inference/dashboard/"])
def test_under_a_prefix_its_name_leads_to_it_and_not_to_the_outer_application(path):
    async def main():
        app = web.Application()
        with Engine("virtual:t4") as engine:
            app.add_subapp("/inference", create_app(engine))
            async with TestClient(TestServer(app)) as client, client.get(path) as answer:
                return answer.status, answer.url.path

    assert asyncio.run(main()) == (200, "/inference/")


def test_models_that_failed_are_not_said_to_be_loading():
    def broken():
        raise ValueError("its weights are gone")

    entries = [Entry("bad", broken), entry_of(scale_model("good"))]
    with running(entries, load=False) as server:
        with Viewer(server) as viewer:
            found = viewer.next()
            assert (found["ready"], found["failed"], found["loading"]) == (False, [], ["bad", "good"])
        server.call(server.server.load())
        with Viewer(server) as viewer:
            found = viewer.next()
            assert (found["ready"], found["loading"]) == (False, [])
            (failed,) = found["failed"]
            assert failed["name"] == "bad"
            assert "ValueError: its weights are gone" in failed["reason"]
        server.server.registry.unload("bad")
        with Viewer(server) as viewer:
            found = viewer.next()
            assert (found["ready"], found["failed"], found["loading"]) == (True, [], [])


@pytest.mark.parametrize("name", ["nothing.js", "..%2fapp.py", "%2e%2e", ".", "view.js/x"])
def test_other_files_are_not_there(server, name):
    assert ask(server, "GET", f"/dashboard/{name}")[0] == 404


def test_events_show_what_the_engine_does(server):
    with Viewer(server) as viewer:
        assert viewer.answer.headers["Content-Type"] == "text/event-stream"
        first = viewer.next()
        assert first["models"][0]["name"] == "scale"
        assert first["models"][0]["recent"] == 0
        for _ in range(5):
            assert ask(server, "POST", INFER, BODY)[0] == 200
        found = viewer.next()
        while found["models"][0]["recent"] < 5:
            found = viewer.next()
        assert found["models"][0]["refused"] == 0
        assert found["loading"] == []
        assert len(found["sms"]["occupancy"]) == 132


def test_viewers_share_snapshots_and_without_any_nothing_is_computed(server, monkeypatch):
    monkeypatch.setattr(rpc, "UNWATCHED_S", 0.2)
    hub, watchers = server.server.app[HUB], server.engine.core.ring.watchers
    server.wait_until(lambda: hub.viewers == 0)
    with Viewer(server) as viewer:  # an earlier test's monitor ends with this one's
        assert viewer.next()
        busy = len(watchers)
    server.wait_until(lambda: len(watchers) < busy)
    idle = len(watchers)
    with Viewer(server) as one, Viewer(server) as other:
        assert one.next()
        assert other.next()
        assert hub.viewers == 2
        assert len(watchers) == idle + 1
    server.wait_until(lambda: len(watchers) == idle)
    assert hub.viewers == 0


def test_only_so_many_may_look(server):
    hub = server.server.app[HUB]
    server.wait_until(lambda: hub.viewers == 0)
    before, hub.max_viewers = hub.max_viewers, 1
    try:
        with Viewer(server) as viewer:
            assert viewer.next()
            assert ask(server, "GET", "/dashboard/events")[0] == 503
    finally:
        hub.max_viewers = before


def test_the_policy_is_switched(server):
    found = ask(server, "POST", "/dashboard/policy", b'{"policy": "srpt"}', SWITCH)
    assert found[::2] == (200, {"policy": "srpt"})
    assert server.engine.policy == "srpt"
    with Viewer(server) as viewer:
        assert viewer.next()["policy"]["current"] == "srpt"


@pytest.mark.parametrize(
    ("body", "headers", "status", "says"),
    [
        (b'{"policy": "nope"}', SWITCH, 400, "choose one of"),
        (b'{"policy": 3}', SWITCH, 400, "Expected `str`"),
        (b'{"polcy": "fifo"}', SWITCH, 400, "policy"),
        (b"\xff", SWITCH, 400, "the body must be"),
        (b'{"policy": "fifo"}', {"Content-Type": "application/json"}, 403, SWITCH_HEADER),
        (b'{"policy": "fifo"}', {SWITCH_HEADER: "1"}, 403, "application/json"),
        (b'{"policy": "fifo"}', {**SWITCH, "Content-Type": "text/plain"}, 403, "application/json"),
        (b'{"policy": "fifo"}', {**SWITCH, "Sec-Fetch-Site": "cross-site"}, 403, "another site"),
    ],
)
def test_what_no_page_of_ours_would_send_changes_nothing(server, body, headers, status, says):
    before = server.engine.policy
    found, _, answer = ask(server, "POST", "/dashboard/policy", body, headers)
    assert found == status
    assert says in answer["error"]
    assert server.engine.policy == before


def test_no_other_site_is_allowed_to_ask(server):
    headers = {"Origin": "http://elsewhere", "Access-Control-Request-Method": "POST"}
    status, answered, _ = ask(server, "OPTIONS", "/dashboard/policy", None, headers)
    assert status == 405
    assert not [name for name in answered if name.startswith("Access-Control-")]


def test_with_keys_the_page_is_open_and_everything_else_is_not():
    with running([scale_model("scale")], keys={"me": "secret"}) as server:
        assert ask(server, "GET", "/")[0] == 200
        assert ask(server, "GET", "/dashboard/view.js")[0] == 200
        assert ask(server, "GET", "/docs")[0] == 200  # the page links to it, and a link carries no key
        assert ask(server, "GET", "/openapi.json")[0] == 200
        assert ask(server, "GET", "/metrics")[0] == 401
        assert ask(server, "GET", "/dashboard/events")[0] == 401
        assert ask(server, "POST", "/dashboard/policy", b'{"policy": "fifo"}', SWITCH)[0] == 401
        assert server.engine.policy == "paella"
        with Viewer(server, headers={"X-API-Key": "secret"}) as viewer:
            assert viewer.next()["state"] == "running"
        headers = {**SWITCH, "X-API-Key": "secret"}
        assert ask(server, "POST", "/dashboard/policy", b'{"policy": "fifo"}', headers)[0] == 200
        assert server.engine.policy == "fifo"


def test_a_server_that_stops_lets_its_viewers_go():
    with contextlib.ExitStack() as stack:
        with running([scale_model("scale")]) as server:
            viewer = stack.enter_context(Viewer(server))
            assert viewer.next()
        while viewer.next() is not None:
            pass
        assert viewer.next() is None


# -- the hub alone


def hub_of(take, **options):
    return Hub(take, lambda more: more, tick_s=0.0, **options)


def test_a_viewer_that_takes_nothing_is_dropped_and_nothing_piles_up_for_it():
    made = 0

    async def take():
        nonlocal made
        made += 1
        return {"made": made}

    async def main():
        hub = hub_of(take, patience_s=0.05)
        got, stuck = [], asyncio.Event()

        async def quick(message):
            got.append(message)
            if len(got) == 50:
                hub.close()

        async def never(message):
            await stuck.wait()

        slow = asyncio.create_task(hub.show(never))
        with pytest.raises(TimeoutError):
            await slow
        assert hub.viewers == 0
        before = made
        await asyncio.sleep(0.05)
        assert made == before  # nobody watches
        await hub.show(quick)
        assert len(got) == 50
        numbers = [json.loads(each[6:])["made"] for each in got]
        assert numbers == sorted(set(numbers))

    asyncio.run(main())


def test_a_viewer_that_was_busy_gets_the_latest_and_not_what_it_missed():
    async def main():
        made = 0

        async def take():
            nonlocal made
            made += 1
            return {"made": made}

        hub = hub_of(take)
        got = []

        async def send(message):
            got.append(json.loads(message[6:])["made"])
            wanted = made + 20
            while made < wanted:
                await asyncio.sleep(0)
            if len(got) == 3:
                hub.close()

        await hub.show(send)
        assert got[1] >= got[0] + 20
        assert got[2] >= got[1] + 20

    asyncio.run(main())


def test_a_snapshot_that_fails_ends_the_events_and_not_the_server(caplog):
    async def take():
        raise ValueError("broken")

    async def main():
        hub = hub_of(take)
        await hub.show(lambda message: asyncio.sleep(0))
        assert hub.viewers == 0

    asyncio.run(main())
    assert "snapshot" in caplog.text


def test_threads_may_ask_while_the_policy_changes(server):
    """Switching waits for the loop's thread: many at once all get an answer."""
    answers = []

    def switch(name):
        body = json.dumps({"policy": name}).encode()
        answers.append(ask(server, "POST", "/dashboard/policy", body, SWITCH)[0])

    threads = [threading.Thread(target=switch, args=(name,)) for name in ("fifo", "edf", "srpt", "paella") * 2]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == [200] * 8
