"""Tenants of a server: from the configuration, by key and by header, in the metrics."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import aiohttp
import pytest
from engine_models import scale_model
from serving_server import BODY, INFER, ask, running, scrape

from paellapy.scheduler.core.state import Limits
from paellapy.serving.access import Key
from paellapy.serving.build import build_engine, build_keys
from paellapy.serving.config import load_config
from paellapy.serving.errors import ConfigError


@pytest.fixture(scope="module")
def server():
    with running([scale_model(batch=(1,))], policy="fair") as found:
        for name, share in (("a", 1), ("b", 3), ("c", 6)):
            found.server.service.engine.tenant(name, share=share)
        yield found


def test_metrics_say_whose_the_gpus_time_was(server) -> None:
    ask(server, "POST", INFER, BODY, {"X-Client-Id": "b"})
    samples = {(s.name, s.labels.get("tenant") or s.labels.get("model")): s.value for s in scrape(server)}
    busy = samples["paellapy_gpu_busy_seconds_total", None]
    assert 0 < samples["paellapy_tenant_gpu_seconds_total", "b"] <= busy
    assert samples["paellapy_model_gpu_seconds_total", "scale"] == pytest.approx(busy, rel=0.03)
    assert samples["paellapy_tenant_items_total", "b"] >= 1


def test_requests_over_http_count_for_their_tenant_and_no_other(server) -> None:
    engine = server.server.service.engine
    for name, share in {"a": 1.0, "b": 3.0, "c": 6.0}.items():
        before = engine.tenants
        assert before[name]["share"] == share
        for each in (name, "stranger"):
            assert ask(server, "POST", INFER, BODY, {"X-Client-Id": each})[0] == 200
        after = engine.tenants
        had = {each: after[each]["completed"] - before[each]["completed"] for each in "abc"}
        assert had == {**dict.fromkeys("abc", 0), name: 1}
        assert after[name]["alone_ms"] > before[name]["alone_ms"]


def test_who_waits_over_http_is_served_by_shares(server) -> None:
    engine = server.server.service.engine
    released, order = threading.Event(), list[int]()
    unwatch = engine.watch(lambda entry: order.append(int(entry["client"])))
    engine.core.call(released.wait)  # until all have asked
    with ThreadPoolExecutor(36) as clients:
        answers = [
            clients.submit(ask, server, "POST", INFER, BODY, {"X-Client-Id": name}) for name in "abc" for _ in range(12)
        ]
        while engine.core.ring.waiting < len(answers):
            assert not any(each.done() for each in answers)
            time.sleep(0.01)
        released.set()
        assert [each.result()[0] for each in answers] == [200] * len(answers)
    unwatch()
    had = Counter(order[:20])
    for name, share in {"a": 0.1, "b": 0.3, "c": 0.6}.items():
        assert had[engine.core.ring.client_number(name)] == pytest.approx(20 * share, abs=2)


def test_nobody_is_refused_for_requests_that_a_limit_holds_back() -> None:
    with running([scale_model(batch=(1,), target_ms=60_000.0)]) as server, ThreadPoolExecutor(12) as clients:
        engine = server.server.service.engine
        engine.tenant("alice", limit=1e-5)
        held = [clients.submit(ask, server, "POST", INFER, BODY, {"X-Client-Id": "alice"}) for _ in range(12)]
        while engine.tenants["alice"]["held_back"] < 8:
            time.sleep(0.01)
        assert [ask(server, "POST", INFER, BODY, {"X-Client-Id": "bob"})[0] for _ in range(5)] == [200] * 5
        assert server.server.service.admission.limits["scale"].in_flight == 0
        assert engine.tenants["alice"]["held_back"] > 0
        engine.tenant("alice")
        assert [each.result()[0] for each in held] == [200] * 12


async def ask_from(server, host: str, names: list[str]) -> list[int]:
    """The answers to one request under each name, sent at once from an address of this machine."""
    made = aiohttp.TCPConnector(limit=0, local_addr=(host, 0))

    async def one(session: aiohttp.ClientSession, name: str) -> int:
        async with session.post(server.url + INFER, data=BODY, headers={"X-Client-Id": name}) as answer:
            return answer.status

    async with aiohttp.ClientSession(connector=made) as session:
        return await asyncio.gather(*(one(session, name) for name in names))


def test_whoever_invents_names_takes_no_places_from_other_addresses() -> None:
    with running([scale_model(batch=(1,))], limits=Limits(requests=16)) as server, ThreadPoolExecutor(2) as clients:
        assert asyncio.run(ask_from(server, "127.0.0.2", ["honest"])) == [200]
        released = threading.Event()
        server.engine.core.call(released.wait)
        flood = clients.submit(asyncio.run, ask_from(server, "127.0.0.1", [f"invented {k}" for k in range(20)]))
        server.wait_until(lambda: server.service.counters.of("scale").refused["client_full"] == 6)
        honest = clients.submit(asyncio.run, ask_from(server, "127.0.0.2", ["honest too"]))
        server.wait_until(lambda: server.engine.core.ring.waiting == 15)
        released.set()
        assert honest.result() == [200]
        assert Counter(flood.result()) == {200: 14, 429: 6}


def test_a_name_from_another_address_is_another_client_unless_it_is_a_tenant() -> None:
    numbers = list[int]()
    with running([scale_model(batch=(1,))]) as server:
        server.engine.tenant("tenant")
        server.engine.watch(lambda entry: numbers.append(int(entry["client"])))
        for host in ("127.0.0.1", "127.0.0.2"):
            for name in ("alice", "tenant"):
                assert asyncio.run(ask_from(server, host, [name])) == [200]
    alice, tenant, thief, same = numbers
    assert alice != thief
    assert tenant == same


def test_keys_belong_to_tenants() -> None:
    keys = {"alice": "secret-a", "robot": Key("secret-r", tenant="alice")}
    with running([scale_model(batch=(1,))], keys=keys) as server:
        engine = server.server.service.engine
        engine.tenant("alice", share=2)
        for key in ("secret-a", "secret-r"):
            assert ask(server, "POST", INFER, BODY, {"X-API-Key": key, "X-Client-Id": "eve"})[0] == 200
        assert engine.tenants["alice"]["completed"] == 2


def test_tenants_come_from_the_configuration(tmp_path) -> None:
    file = tmp_path / "server.toml"
    file.write_text(
        'device = "virtual:h200"\n[keys]\nrobot = { key = "k", tenant = "alice" }\n'
        "[tenants.alice]\nshare = 3\nlimit = 0.5\n[tenants.bob]\n"
    )
    config, source = load_config(file)
    assert build_keys(config, source)["robot"].tenant == "alice"
    with build_engine(config, source) as engine:
        found = engine.tenants
    assert (found["alice"]["share"], found["alice"]["limit"], found["bob"]["share"]) == (3.0, 0.5, 1.0)


@pytest.mark.parametrize("text", ["share = 0", "limit = 1.5", "weight = 2"])
def test_a_wrong_tenant_is_pointed_at(tmp_path, text: str) -> None:
    file = tmp_path / "server.toml"
    file.write_text(f"[tenants.alice]\n{text}\n")
    with pytest.raises(ConfigError) as caught:
        load_config(file)
    assert (caught.value.field, caught.value.line) == (f"tenants.alice.{text.partition(' ')[0]}", 2)
