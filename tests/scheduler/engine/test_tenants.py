"""Tenants of an engine: shares and limits are kept, changed while it runs, and shown."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import numpy as np
import pytest
from core_check import check_at_rest

import paellapy as pp
from paellapy import demo
from paellapy.instrument.errors import ArgumentError
from paellapy.scheduler.core.tenants import client_numbers
from paellapy.scheduler.engine.monitor import Monitor


@pytest.fixture(scope="module")
def engine():
    with pp.Engine("virtual:h200", "fair") as found:
        found.load(demo.load("mlp", batch=(1, 2, 4)))
        yield found


def ask(engine: pp.Engine, client: str | None, n: int = 1) -> None:
    x = np.zeros(engine.models["mlp"].inputs["image"].shape, np.float32)
    for _ in range(n):
        engine.infer_sync("mlp", {"image": x}, client=client)


def test_a_tenant_has_its_counts(engine) -> None:
    engine.tenant("alice", share=3, limit=0.5)
    ask(engine, "alice", 3)
    ask(engine, "bob", 2)
    alice = engine.stats()["tenants"]["alice"]
    assert (alice["share"], alice["limit"], alice["completed"], alice["live"]) == (3.0, 0.5, 3, 0)
    assert 0 < alice["gpu_ms"] <= engine.stats()["gpu_ms"]
    assert "bob" not in engine.tenants
    assert engine.state.client["tenant"][alice["number"]]


def test_models_have_had_all_of_the_gpus_time(engine) -> None:
    stats = engine.stats()
    assert sum(each["gpu_ms"] for each in stats["models"].values()) == pytest.approx(stats["gpu_ms"], rel=0.03)
    by_client = float(engine.state.client["gpu_ns"].sum()) * 1e-6
    assert by_client == pytest.approx(stats["gpu_ms"], rel=0.03)


def test_the_monitor_shows_tenants_and_gpu_time(engine) -> None:
    engine.tenant("dora")
    with Monitor(engine) as monitor:
        monitor.snapshot()
        ask(engine, "dora", 3)
        found = monitor.snapshot()
    (dora,) = (each for each in found["tenants"] if each["name"] == "dora")
    assert 0 < dora["gpu_share"] <= 1
    assert 0 < found["models"][0]["gpu_share"] <= found["gpu_busy"] + 1e-4


def test_a_limit_holds_back_its_tenant_alone(engine) -> None:
    engine.tenant("eve", limit=1e-4)
    x = np.zeros(engine.models["mlp"].inputs["image"].shape, np.float32)

    async def flood() -> list[dict[str, np.ndarray]]:
        asked = [asyncio.create_task(engine.infer("mlp", {"image": x}, client="eve")) for _ in range(40)]
        await engine.infer("mlp", {"image": x}, client="frank")
        await asyncio.gather(*(engine.infer("mlp", {"image": x}, client="frank") for _ in range(20)))
        held = engine.stats()
        assert 0 < held["tenants"]["eve"]["held_back"] <= held["queued"]
        engine.tenant("eve")  # without a limit
        return await asyncio.gather(*asked)

    answers = asyncio.run(flood())
    for each in answers:  # batches of other sizes round differently
        np.testing.assert_allclose(each["scores"], answers[0]["scores"], rtol=1e-4, atol=1e-6)
    assert engine.tenants["eve"]["held_back"] == 0


def test_a_tenant_has_the_same_number_in_a_simulation(engine) -> None:
    names = ("alice", "gerd", "hugo")
    for each in names:
        engine.tenant(each)
    first, *others = [pp.ClosedLoop("mlp", duration=0.001, client=each) for each in names]
    load = first + others[0] + others[1] + pp.ClosedLoop("mlp", duration=0.001)
    run = pp.simulate([engine.model_profile("mlp")], load, tenants={each: {} for each in names})
    assert [run.numbers[each] for each in names] == [engine.tenants[each]["number"] for each in names]
    assert run.numbers["client 4"] == 0


def test_admit_holds_back_one_tenant_alone() -> None:
    held = client_numbers(["eve"], 256)["eve"]

    def admit(job: Any) -> bool:
        return job.tenant != held

    def oldest(job: Any) -> float:
        return job.arrival_ns

    made = pp.policy(name="without eve", admit=admit, may_idle=True)(oldest)
    x = demo.held_out()[0]
    with pp.Engine("virtual:h200", made) as engine:
        engine.load(demo.load("mlp", batch=(1, 2, 4)))
        engine.tenant("eve")
        right = [engine.infer_sync("mlp", {"image": each})["scores"] for each in x[:40]]

        async def flood() -> list[dict[str, np.ndarray]]:
            asked = [asyncio.create_task(engine.infer("mlp", {"image": each}, client="eve")) for each in x[:40]]
            for _ in range(3):
                await asyncio.gather(*(engine.infer("mlp", {"image": x[0]}, client="frank") for _ in range(20)))
            assert engine.tenants["eve"]["held_back"] == 40
            assert engine.stats()["queued"] >= 40
            engine.set_policy("fifo")
            return await asyncio.gather(*asked)

        for found, expected in zip(asyncio.run(flood()), right, strict=True):
            np.testing.assert_allclose(found["scores"], expected, rtol=1e-4, atol=1e-6)
        check_at_rest(engine.state)


def test_shares_change_while_requests_wait(engine) -> None:
    threads = [threading.Thread(target=ask, args=(engine, name, 10)) for name in ("alice", "carol", None)]
    for each in threads:
        each.start()
    for share in (1, 5, 2):
        engine.tenant("carol", share=share)
    for each in threads:
        each.join()
    assert engine.tenants["carol"]["completed"] == 10
    assert engine.state.core["shares"][0] == 0.0
    assert not engine.state.flow["live"].any()


def test_what_makes_no_sense_is_refused(engine) -> None:
    with pytest.raises(ArgumentError, match="limit=0"):
        engine.tenant("alice", limit=0)
    with pytest.raises(ArgumentError, match="share='much'"):
        engine.tenant("alice", share="much")
    with pytest.raises(ArgumentError, match="tenant name ''"):
        engine.tenant("")
