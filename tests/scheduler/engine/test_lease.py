"""Leases on the virtual GPU: granted by the core, wanted back, taken back in time; in threads and in asyncio."""

from __future__ import annotations

import asyncio
import threading
import time

import numpy as np
import pytest
from core_check import check_at_rest
from engine_models import scale_model

import paellapy as pp
from paellapy.scheduler.core.errors import EngineClosedError, ModelError
from paellapy.scheduler.engine.monitor import Monitor
from paellapy.serving.metrics import job_metrics

X = np.arange(64, dtype=np.float32)


@pytest.fixture(params=["priority", "serial", "fair"])
def engine(request):
    with pp.Engine("virtual:h200", policy=request.param) as engine:
        engine.load(scale_model())
        yield engine
        check_at_rest(engine.state)


def ask(engine) -> None:
    assert np.array_equal(engine.infer_sync("scale", {"x": X}, priority=1)["y"], 2 * X)


def test_requests_are_answered_before_beside_and_after_a_lease(engine):
    ask(engine)
    with engine.lease("script", give_back_ms=20) as lease:
        assert not lease.wanted()
        ask(engine)  # at the latest when the lease is taken back
        assert engine.stats()["jobs"]["script"]["priority"] == -1
        assert "script" not in engine.stats()["models"]
    ask(engine)
    with engine.lease("script", give_back_ms=20):
        pass


def test_a_lease_that_hangs_is_taken_back_and_given_anew():
    with pp.Engine("virtual:h200", policy="serial") as engine:
        engine.load(scale_model())
        with engine.lease("script", give_back_ms=5) as lease:
            ask(engine)  # one job at a time: it ends by the lease being over
            assert lease.over
            assert engine.state.core["outside"][0] == 1  # its code may still use the GPU
            assert lease.give_way()
            assert not lease.over
            assert not lease.give_way()
        assert engine.state.core["outside"][0] == 0
        ask(engine)


def test_who_gives_way_lets_others_in(engine):
    stop, answered = threading.Event(), [0]

    def asking() -> None:
        while not stop.is_set():
            ask(engine)
            answered[0] += 1

    with engine.lease("script", give_back_ms=1000) as lease:
        thread = threading.Thread(target=asking)
        thread.start()
        ways, end = 0, time.monotonic() + 20
        while (ways < 3 or answered[0] < 10) and time.monotonic() < end:
            ways += lease.give_way()
    stop.set()
    thread.join()
    assert answered[0] >= 10


def test_leases_in_asyncio(engine):
    async def script(name: str, done: list[str]) -> None:
        async with engine.lease(name, give_back_ms=50) as lease:
            for _ in range(3):
                await asyncio.sleep(0.001)
                await lease.give_way_async()
            done.append(name)

    async def main() -> list[str]:
        done: list[str] = []
        work = [script("a", done), script("b", done), script("a", done)]
        asks = [engine.infer("scale", {"x": X}, priority=1) for _ in range(20)]
        answers = await asyncio.gather(*asks, *work)
        assert all(np.array_equal(each["y"], 2 * X) for each in answers[:20])
        return done

    assert sorted(asyncio.run(main())) == ["a", "a", "b"]


def test_an_exception_in_a_lease_is_its_owner_s(engine):
    with pytest.raises(ZeroDivisionError), engine.lease("script"):
        raise ZeroDivisionError
    ask(engine)
    with engine.lease("script"):
        pass


def test_what_cannot_be_a_lease_is_refused(engine):
    with pytest.raises(ModelError, check=lambda e: e.field == "give_back_ms"):
        engine.lease("script", give_back_ms=0)
    with pytest.raises(ModelError, check=lambda e: (e.field, e.given) == ("name", "scale")):
        engine.lease("scale")
    with engine.lease("script"):
        pass
    with pytest.raises(ModelError, check=lambda e: e.priority == -1):
        engine.lease("script", priority=3)


def test_a_lease_inside_a_lease_of_the_same_name_is_refused(engine):
    with engine.lease("script") as lease:
        with pytest.raises(ModelError, check=lambda e: e.given == "script"), engine.lease("script"):
            pass
        with pytest.raises(ModelError, check=lambda e: e.given == "script"), lease:
            pass
        with engine.lease("other", give_back_ms=1):
            pass

    async def nested() -> None:
        async with engine.lease("script"), engine.lease("script"):
            pass

    with pytest.raises(ModelError, check=lambda e: e.given == "script"):
        asyncio.run(nested())
    with engine.lease("script"):
        ask(engine)


def test_who_has_no_lease_cannot_give_way(engine):
    lease = engine.lease("script")
    for _ in range(2):  # before it and after it
        with pytest.raises(ModelError, match="'script'"):
            lease.give_way()
        with pytest.raises(ModelError, match="'script'"):
            asyncio.run(lease.give_way_async())
        with lease:
            assert not lease.give_way()
    ask(engine)


@pytest.mark.parametrize("policy", ["priority", "serial"])
def test_a_lease_that_is_given_up_is_not_the_next_one_s(policy):
    async def main() -> None:
        async with engine.lease("first", priority=5, give_back_ms=60_000):
            for _ in range(5):
                with pytest.raises(TimeoutError):
                    async with asyncio.timeout(0.01), engine.lease("script"):
                        pass
        async with engine.lease("script", give_back_ms=60_000) as lease:
            await asyncio.sleep(0.01)
            assert lease._instance.draining[0]  # granted, and not ended by those that gave up
            assert not lease.over

    with pp.Engine("virtual:h200", policy=policy) as engine:
        engine.load(scale_model())
        asyncio.run(asyncio.wait_for(main(), 60))
        ask(engine)
        check_at_rest(engine.state)


def test_who_is_cancelled_while_it_gives_way_leaves_the_lease_to_others():
    async def low(begun: asyncio.Event) -> None:
        async with engine.lease("script") as lease:
            begun.set()
            while True:
                await asyncio.sleep(0.001)
                await lease.give_way_async()

    async def main() -> None:
        begun = asyncio.Event()
        task = asyncio.create_task(low(begun))
        await begun.wait()
        async with engine.lease("first", priority=5, give_back_ms=60_000):
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        async with engine.lease("script") as lease:
            assert not lease.over

    with pp.Engine("virtual:h200", policy="priority") as engine:
        engine.load(scale_model())
        asyncio.run(asyncio.wait_for(main(), 60))
        ask(engine)
        check_at_rest(engine.state)


def test_names_of_leases_are_limited_with_the_remedy():
    with pp.Engine("virtual:h200") as engine:
        for k in range(len(engine.state.model)):
            engine.lease(f"script{k}")
        with pytest.raises(ModelError, check=lambda e: e.field == "name" and e.limit):
            engine.lease("one more")
        with engine.lease("script0"):
            pass


def test_closing_the_engine_ends_leases():
    engine = pp.Engine("virtual:h200")
    lease = engine.lease("script")
    with lease:
        engine.close()
        assert lease.over
    with pytest.raises(EngineClosedError), lease:
        pass


def test_leases_are_among_what_the_dashboard_and_the_metrics_show():
    with pp.Engine("virtual:h200") as engine, engine.lease("script"):
        (shown,) = Monitor(engine).snapshot()["jobs"]
        assert (shown["name"], shown["kind"], shown["state"]) == ("script", "leases", "running")
        text = "\n".join(
            str((sample.name, sample.labels, sample.value))
            for family in job_metrics(engine.stats()["jobs"])
            for sample in family.samples
        )
        assert "('paellapy_job_running', {'job': 'script', 'kind': 'leases'}, 1.0)" in text
        assert "paellapy_job_steps_total" in text
