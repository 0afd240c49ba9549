"""The virtual GPU's loop: it pauses when asked, also under load, and decides after each launch."""

from __future__ import annotations

import asyncio
import threading

import numpy as np
import pytest
from engine_models import scale_model
from failing import failing
from waiting import wait_until

from paellapy.scheduler.backends import virtual_loop
from paellapy.scheduler.backends.virtual_loop import VirtualLoop
from paellapy.scheduler.core.errors import EngineFailedError
from paellapy.scheduler.engine.engine import Engine

pytestmark = pytest.mark.quick

X = {"x": np.ones(64, np.float32)}


BROKEN = SystemError("bad argument to internal function")


@pytest.mark.parametrize("role", ["threadpool_limits", "compile_for"])
def test_an_error_before_the_loop_begins_ends_requests_with_it(monkeypatch, role):
    may_fail, failed, right = threading.Event(), [], getattr(virtual_loop, role)

    def fails_once(*given):
        if may_fail.wait(60) and not failed:
            failed.append(role)
            raise BROKEN
        return right(*given)

    async def main():
        asked = [asyncio.ensure_future(engine.infer("scale", X)) for _ in range(3)]
        await asyncio.sleep(0)  # they are submitted
        may_fail.set()
        return await asyncio.wait_for(asyncio.gather(*asked, return_exceptions=True), 60)

    monkeypatch.setattr(virtual_loop, role, fails_once)
    with Engine("virtual:h200") as engine:
        engine.load(scale_model("scale"))
        assert [type(error) for error in asyncio.run(main())] == [EngineFailedError] * 3
        assert engine.failure.__cause__ is BROKEN
        with failing(EngineFailedError, __cause__=engine.failure):
            engine.infer_sync("scale", X)


def test_an_error_in_the_loop_ends_requests_with_it():
    def wrong():
        raise BROKEN

    with Engine("virtual:h200") as engine:
        engine.load(scale_model("scale"))
        engine.infer_sync("scale", X)
        engine.core.call(wrong)
        wait_until(lambda: engine.failure is not None)
        assert engine.failure.__cause__ is BROKEN
        with failing(EngineFailedError, __cause__=engine.failure):
            engine.infer_sync("scale", X)


def test_a_call_in_the_loop_waits_for_two_launches_at_most(monkeypatch):
    """The one that is being made when it is asked for, and the one the core has decided on."""
    launch, waited = VirtualLoop._launch, []

    def counted(self):
        if self._stop_word[0]:
            waited.append(True)
        return launch(self)

    monkeypatch.setattr(VirtualLoop, "_launch", counted)
    done = threading.Event()

    def client():
        while not done.is_set():
            engine.infer_sync("scale", X)

    with Engine("virtual:h200", quantum_us=1) as engine:
        engine.load(scale_model(steps=40, batch=(1,)))
        clients = [threading.Thread(target=client) for _ in range(8)]
        for each in clients:
            each.start()
        most = 0
        for _ in range(30):
            waited.clear()
            called = threading.Event()
            engine.core.call(called.set)
            called.wait()
            most = max(most, len(waited))
        done.set()
        for each in clients:
            each.join()
    assert most <= 2


def test_a_short_request_is_computed_before_long_ones_that_came_earlier(monkeypatch):
    """The first two launches wait for requests that come meanwhile."""
    begun, go, order = [threading.Event() for _ in range(2)], [threading.Event() for _ in range(2)], []
    compute = VirtualLoop._carry_out

    def carry_out(self, instance, *more):
        k = len(order)
        order.append(names[int(self._state.instance["model"][instance])])
        if k < 2:
            begun[k].set()
            assert go[k].wait(60)
        compute(self, instance, *more)

    async def main():
        longs = [asyncio.ensure_future(engine.infer("long", X))]
        await asyncio.to_thread(begun[0].wait, 60)
        longs += [asyncio.ensure_future(engine.infer("long", X)) for _ in range(3)]
        await asyncio.sleep(0)  # they are submitted
        go[0].set()
        await asyncio.to_thread(begun[1].wait, 60)
        short = asyncio.ensure_future(engine.infer("short", X))
        await asyncio.sleep(0)
        go[1].set()
        await asyncio.gather(short, *longs)

    with Engine("virtual:h200", policy="srpt") as engine:
        engine.load(scale_model("long", steps=40, batch=(1,), instances=4))
        engine.load(scale_model("short", batch=(1,)))
        names = {row: loaded.model.name for row, loaded in engine.loaded_rows().items()}
        monkeypatch.setattr(VirtualLoop, "_carry_out", carry_out)
        asyncio.run(main())
    assert order[:3] == ["long", "long", "short"]


@pytest.mark.parametrize(("partitions", "one_by_one"), [(0, 1), (8, 0)])
def test_jobs_share_the_virtual_gpu_only_where_partitions_keep_them_apart(partitions, one_by_one):
    with Engine("virtual:h200", sm_partitions=partitions) as engine:
        assert engine.state.core["one_by_one"][0] == one_by_one
