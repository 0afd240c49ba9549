"""The server on loopback: statuses and error bodies, limits, keys, clients that leave, metrics, documentation."""

from __future__ import annotations

import asyncio
import io
import json
import re
from urllib.parse import urljoin

import aiohttp
import numpy as np
import pytest
from aiohttp import web
from engine_models import faulty_model, lookup_model, lose_the_gpu_on_faults, scale_model
from serving_server import BODY, DEVICE, INFER, ask, infer_body, running

from paellapy.scheduler.core.errors import ModelError
from paellapy.scheduler.core.state import Limits
from paellapy.scheduler.engine.engine import Engine
from paellapy.scheduler.models.model import TensorSpec
from paellapy.serving.app import create_app
from paellapy.serving.openapi import document
from paellapy.serving.registry import Entry

pytestmark = pytest.mark.quick

ONES = np.ones((1, 64), np.float32)


def broken():
    raise ModelError("its weights are gone")


@pytest.fixture(scope="module")
def server():
    models = [
        scale_model(batch=(1, 4)),
        Entry("broken", broken, wanted=False),
    ]
    with running(models, max_body_bytes=100_000) as found:
        yield found


def check_serves(server):
    status, _, found = ask(server, "POST", INFER, BODY)
    assert status == 200
    assert found["outputs"][0] == {"name": "y", "datatype": "FP32", "shape": [1, 64], "data": [2.0] * 64}


# -- answers


def test_health_bodies_are_json(server):
    assert ask(server, "GET", "/v2/health/live")[::2] == (200, {"live": True})
    assert ask(server, "GET", "/v2/health/ready")[::2] == (200, {"ready": True})
    assert ask(server, "GET", "/v2/models/scale/ready")[::2] == (200, {"name": "scale", "ready": True})
    assert ask(server, "GET", "/v2/models/broken/ready")[::2] == (503, {"name": "broken", "ready": False})
    assert ask(server, "GET", "/v2/models/nope/ready")[0] == 404


def test_both_addresses_of_a_model_serve(server):
    check_serves(server)
    assert ask(server, "POST", "/v2/models/scale/versions/1/infer", BODY)[0] == 200
    assert ask(server, "GET", "/v2/models/scale/versions/1")[2]["versions"] == ["1"]


@pytest.mark.parametrize(
    ("method", "path", "body", "status"),
    [
        ("POST", "/v2/models/nope/infer", BODY, 404),
        ("POST", "/v2/models/scale/versions/2/infer", BODY, 404),
        ("POST", "/v2/models/broken/infer", BODY, 404),
        ("GET", "/v2/models/nope", None, 404),
        ("GET", "/v2/models/nope/config", None, 404),
        ("GET", "/v2/models/nope/stats", None, 404),
        ("POST", "/v2/repository/models/nope/load", b"", 404),
        ("POST", "/v2/repository/models/nope/unload", b"{}", 404),
        ("GET", "/nothing/here", None, 404),
        ("GET", INFER, None, 405),
        ("DELETE", "/v2/models/scale", None, 405),
        ("PUT", "/v2", b"", 405),
        ("POST", INFER, b"", 400),
        ("POST", INFER, b"not json", 400),
        ("POST", "/v2/repository/index", b"[]", 400),
        ("POST", "/v2/repository/index", b'{"\x80": 1}', 400),
        ("POST", "/v2/repository/index", b'{"ready": 1}', 400),
        ("POST", "/v2/repository/models/scale/load", b'{"parameters": []', 400),
        ("POST", "/v2/repository/models/scale/unload", b'{"parameters": {"force": true}}', 400),
        ("POST", INFER, b" " * 100_001, 413),
    ],
)
def test_every_error_is_json_with_its_status(server, method, path, body, status):
    found, headers, content = ask(server, method, path, body)
    assert found == status
    assert list(content) == ["error"]
    assert "Traceback" not in content["error"]
    if status == 405:
        assert headers["Allow"]
    check_serves(server)


def test_long_names_come_back_short(server):
    name = "n" * 4000
    for method, path, body in (
        ("POST", f"/v2/models/{name}/infer", BODY),
        ("GET", f"/v2/models/{name}", None),
        ("GET", f"/v2/models/{name}/ready", None),
        ("POST", f"/v2/repository/models/{name}/load", b""),
        ("POST", f"/v2/models/scale/versions/{name}/infer", BODY),
    ):
        status, _, content = ask(server, method, path, body)
        assert status == 404
        assert "nnn…; " in content["error"], "it goes on after the name"
        assert content["error"].count("n") < 120
    for verb in ("load", "unload"):
        body = json.dumps({"parameters": {name: 1}}).encode()
        status, _, content = ask(server, "POST", f"/v2/repository/models/scale/{verb}", body)
        assert status == 400
        assert len(content["error"]) < 200


def test_a_model_that_fails_to_load_says_why_and_harms_nobody(server):
    status, _, content = ask(server, "POST", "/v2/repository/models/broken/load", b"")
    assert status == 400
    assert "its weights are gone" in content["error"]
    index = {each["name"]: each for each in ask(server, "POST", "/v2/repository/index")[2]}
    assert index["broken"]["state"] == "UNAVAILABLE"
    assert "weights" in index["broken"]["reason"]
    ready = ask(server, "POST", "/v2/repository/index", b'{"ready": true}')[2]
    assert {each["name"] for each in ready} == {"scale"}
    check_serves(server)


def test_request_ids_and_traces_come_back(server):
    given = {"X-Request-Id": "mine", "traceparent": f"00-{'a' * 32}-{'b' * 16}-01", "tracestate": "v=1"}
    _, headers, _ = ask(server, "POST", INFER, BODY, given)
    assert headers["X-Request-Id"] == "mine"
    version, trace, span, flags = headers["traceparent"].split("-")
    assert (version, trace, flags) == ("00", "a" * 32, "01")
    assert span != "b" * 16
    assert headers["tracestate"] == "v=1"
    _, headers, _ = ask(server, "GET", "/nothing", headers={"traceparent": "nonsense", "X-Request-Id": "two words"})
    assert "traceparent" not in headers
    assert headers["X-Request-Id"] != "two words"


def test_the_index_names_batch_sizes_that_are_captured_on_demand():
    with running([scale_model(batch=(1, 2, 4, 8), capture="on_demand"), scale_model("ahead")]) as server:

        def sizes():
            index = ask(server, "POST", "/v2/repository/index", b"{}")[2]
            return {each["name"]: each.get("batch_sizes") for each in index}

        assert sizes() == {"scale": {"captured": [1, 8], "later": [2, 4], "failed": []}, "ahead": None}
        for items in (2, 4):
            x = np.arange(items, dtype=np.float32).repeat(64).reshape(items, 64)
            found = ask(server, "POST", INFER, json.dumps(infer_body("x", x)))[2]
            assert found["outputs"][0]["data"] == (2 * x).reshape(-1).tolist()
        server.wait_until(lambda: sizes()["scale"] is None)
        assert server.engine.stats()["models"]["scale"]["sizes"]["captured"] == [1, 2, 4, 8]


# -- keys


def test_keys():
    with running([scale_model(batch=(1,))], keys={"alice": "a-key", "bob": "b-key"}) as server:
        assert ask(server, "GET", "/v2/health/ready")[0] == 200
        for headers in ({}, {"X-API-Key": "wrong"}, {"Authorization": "Bearer"}, {"Authorization": "Basic a-key"}):
            status, found, content = ask(server, "POST", INFER, BODY, headers)
            assert status == 401
            assert found["WWW-Authenticate"] == "Bearer"
            assert "key" in content["error"]
        for path in ("/metrics", "/v2/models/x%2Fv2%2Fhealth%2Flive", "/x/v2/health/live", "/v2/models/scale"):
            assert ask(server, "GET", path)[0] == 401


# -- what can be seen


def test_the_documentation_lists_every_address(server):
    status, _, spec = ask(server, "GET", "/openapi.json")
    assert status == 200
    assert spec == json.loads(json.dumps(document()))
    known = {(r.method.lower(), r.resource.canonical) for r in server.server.app.router.routes() if r.method != "HEAD"}
    known -= {(method, f"/openai{path}") for method, path in known}  # KServe's prefix
    listed = {(method, path) for path, methods in spec["paths"].items() for method in methods}
    unlisted = ("/docs", "/openapi.json", "/v2/", "/dashboard", "/dashboard/", "/dashboard/{file}")
    assert known - listed == {("get", path) for path in unlisted}
    assert not listed - known
    needed = {path for path, methods in spec["paths"].items() for each in methods.values() if "security" not in each}
    assert set(spec["paths"]) - needed == {"/", "/health", "/v2/health/live", "/v2/health/ready"}
    assert {name for each in spec["security"] for name in each} == set(spec["components"]["securitySchemes"])
    status, headers, page = ask(server, "GET", "/docs")
    assert status == 200
    assert headers["Content-Type"].startswith("text/html")
    assert b"/v2/models/{model}/infer" in page
    assert b'name="viewport"' in page
    for link in re.findall(rb'href="([^"]+)"', page):
        assert ask(server, "GET", urljoin("/docs", link.decode()))[0] == 200, link
    assert b"http://" not in page
    assert b"https://" not in page


# -- within another application


def test_it_lives_under_another_application():
    async def main():
        with Engine(DEVICE) as engine:
            engine.load(scale_model("wide", n=1 << 19, batch=(1,)))
            outer = web.Application()
            outer.add_subapp("/inference", create_app(engine))
            runner = web.AppRunner(outer, handler_cancellation=True)
            await runner.setup()
            await web.TCPSite(runner, "127.0.0.1", 0).start()
            url = f"http://127.0.0.1:{runner.addresses[0][1]}/inference"
            x = np.arange(1 << 19, dtype=np.float32)  # 2 MiB: more than the outer application takes
            tensor = {"name": "x", "shape": [len(x)], "datatype": "FP32", "parameters": {"binary_data_size": x.nbytes}}
            header = json.dumps({"inputs": [tensor], "parameters": {"binary_data_output": True}}).encode()
            async with aiohttp.ClientSession() as session:
                headers = {"Inference-Header-Content-Length": str(len(header))}
                body = io.BytesIO(header + x.tobytes())
                async with session.post(f"{url}/v2/models/wide/infer", data=body, headers=headers) as answer:
                    assert answer.status == 200
                    body = await answer.read()
                    length = int(answer.headers["Inference-Header-Content-Length"])
                np.testing.assert_array_equal(np.frombuffer(body[length:], np.float32), 2 * x)
                async with session.get(f"{url}/v2/models/nope") as answer:
                    assert answer.status == 404
                    assert "error" in await answer.json()
            await runner.cleanup()

    asyncio.run(main())


# -- faults


def test_a_value_that_a_model_fails_on_is_a_500_of_its_own_and_not_to_be_tried_again():
    with running([faulty_model(), scale_model(batch=(1,))]) as server:
        for _ in range(2):
            status, headers, content = ask(server, "POST", "/v2/models/faulty/infer", BODY)
            assert status == 500
            assert "Retry-After" not in headers
            assert headers["X-Request-Id"] in content["error"]
            assert ".py" not in content["error"]
            assert ask(server, "POST", INFER, BODY)[0] == 200
            assert ask(server, "GET", "/v2/health/ready")[0] == 200


def test_a_lost_gpu_is_a_503_and_not_ready(monkeypatch):
    lose_the_gpu_on_faults(monkeypatch)
    with running([faulty_model(), scale_model(batch=(1,))]) as server:
        assert ask(server, "GET", "/v2/health/ready")[0] == 200
        status, headers, content = ask(server, "POST", "/v2/models/faulty/infer", BODY)
        assert status == 500  # nobody else was on the GPU
        assert "Retry-After" not in headers
        assert ".py" not in content["error"]  # nothing of the server's own code
        status, headers, _ = ask(server, "POST", INFER, BODY)
        assert status == 503
        assert "Retry-After" in headers
        assert ask(server, "GET", "/v2/health/ready")[::2] == (503, {"ready": False})
        assert ask(server, "GET", "/v2/health/live")[0] == 200


def test_a_full_queue_is_a_503():
    slow = scale_model("long", steps=300, batch=(1,), instances=1)

    async def one(session, url):
        async with session.post(f"{url}/v2/models/long/infer", data=BODY) as answer:
            return answer.status, await answer.json()

    async def main(url):
        async with aiohttp.ClientSession() as session:
            return await asyncio.gather(*(one(session, url) for _ in range(60)))

    with running([slow], limits=Limits(requests=16)) as server:
        found = asyncio.run(main(server.url))
        refused = [content for status, content in found if status == 503]
        assert refused
        assert "16 requests" in refused[0]["error"]
        assert {status for status, _ in found} == {200, 503}
        assert server.service.counters.of("long").refused["queue_full"] == len(refused)


@pytest.mark.parametrize("more", [{}, {"Connection": "close"}])  # the fast path, and aiohttp's
def test_a_client_that_floods_the_server_gets_429_and_others_are_served(more):
    slow = scale_model("long", steps=300, batch=(1,), instances=1)

    async def one(session, url, name):
        headers = {"X-Client-Id": name, **more}
        async with session.post(f"{url}/v2/models/long/infer", data=BODY, headers=headers) as answer:
            return answer.status, answer.headers, await answer.json()

    async def main(url):
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
            flood = [asyncio.ensure_future(one(session, url, "flood")) for _ in range(60)]
            await asyncio.wait(flood, return_when=asyncio.FIRST_COMPLETED)
            others = [await one(session, url, f"other {k}") for k in range(3)]
            return await asyncio.gather(*flood), others

    with running([slow], limits=Limits(requests=16)) as server:
        flood, others = asyncio.run(main(server.url))
        refused = [(headers, content) for status, headers, content in flood if status == 429]
        assert refused
        assert {status for status, *_ in flood} == {200, 429}
        assert "Retry-After" in refused[0][0]
        assert "16 requests" in refused[0][1]["error"]
        assert [status for status, *_ in others] == [200] * 3
        assert server.service.counters.of("long").refused["client_full"] == len(refused)


def test_a_value_outside_its_range_is_a_400_on_both_ways():
    indices = {"i": TensorSpec((1,), np.int64, low=0, high=15)}
    with running([lookup_model(batch=(1, 4), inputs=indices)]) as server:
        for more in ({}, {"Connection": "close"}):  # the fast path, and aiohttp's
            for value, status in ((15, 200), (16, 400), (15, 200), (-1, 400)):
                body = json.dumps(infer_body("i", np.array([[value]]), "INT64")).encode()
                found, _, content = ask(server, "POST", "/v2/models/lookup/infer", body, more)
                assert found == status
                if status == 400:
                    assert f"has the value {value}; it takes 0 to 15" in content["error"]
