"""Requests of several items: they run together where they fit, and end together where they do not."""

from __future__ import annotations

import asyncio
import time
from types import SimpleNamespace

import numpy as np
import pytest
from core_check import check_at_rest
from engine_models import scale_model
from engine_requests import Asked, ask_items
from waiting import held_core

import paellapy as pp
from paellapy.scheduler.core.errors import (
    DeadlineError,
    EngineAwayError,
    EngineFailedError,
    QueueFullError,
    SuspectError,
)
from paellapy.scheduler.engine.callbacks import Call, CallbackClient, ItemCall
from paellapy.scheduler.engine.remote import RemoteEngine


@pytest.fixture
def engine():
    with pp.Engine("virtual:h200") as found:
        found.load(scale_model(batch=(1, 2, 4)))
        yield found


async def submit(engine, items):
    x = np.arange(items * 64, dtype=np.float32).reshape(items, 64)
    np.testing.assert_array_equal((await ask_items(engine, "scale", x))["y"], 2 * x)


def test_items_that_fit_into_a_batch_are_one(engine):
    for items in (4, 2, 3, 4, 1):
        asyncio.run(submit(engine, items))
    whole = (4 * 4 + 2 * 2 + 3 * 3 + 4 * 4 + 1) / 14  # the mean over items of the batch that each was in
    assert engine.stats()["models"]["scale"]["mean_batch"] == pytest.approx(whole)


class Lost:
    """An engine that ends each item of a request with one of these errors."""

    errors = (SuspectError("lost", (7,), 2, 5), EngineFailedError("lost"), SuspectError("lost", (9,), 2, 5))

    def result(self, entry, length):
        return self.errors[entry]


def test_items_of_one_request_are_not_others_beside_it_when_the_gpu_fails():
    told = []
    call = Call(Lost(), 3, 0, SimpleNamespace(failed=told.append))
    for k in (2, 0, 1):
        assert not told
        call.finish(k, k)
    (error,) = told
    assert (error.digests, error.others, error.failure) == ((7, 9), 1, 5)


def test_items_that_were_on_the_gpu_are_told_if_the_process_ends_before_the_others_are():
    told = []
    call = Call(Lost(), 3, 0, SimpleNamespace(failed=told.append))
    call.finish(0, 0)
    call.fail(EngineAwayError("gone"))
    assert told[0].digests == (7,)


def test_more_items_than_fit_are_all_answered(engine):
    asyncio.run(submit(engine, 23))


def test_items_that_find_no_memory_end_all_and_hold_nothing(engine, monkeypatch):
    def none(nbytes):
        raise QueueFullError("no memory for inputs; try again later")

    with monkeypatch.context() as without:
        without.setattr(engine.core.ring.stage, "take", none)
        with pytest.raises(QueueFullError):
            asyncio.run(submit(engine, 40))
        without.setattr(engine.core.ring, "claim", lambda loaded, client: None)
        with pytest.raises(QueueFullError):
            asyncio.run(submit(engine, 1))
        with pytest.raises(QueueFullError):
            engine.reserve("scale")
    asyncio.run(submit(engine, 4))
    assert engine.core.ring.waiting == 0
    check_at_rest(engine.state)


def test_items_that_find_no_open_instance_are_one_batch_too(engine, monkeypatch):
    # as while a model's only instance is being read
    monkeypatch.setattr(engine.core.ring, "claim", lambda loaded, client: None)
    for _ in range(5):
        asyncio.run(submit(engine, 4))
    assert engine.stats()["models"]["scale"]["mean_batch"] == 4


def test_items_of_a_model_with_one_instance_are_one_batch():
    with pp.Engine("virtual:h200") as engine:
        engine.load(scale_model(batch=(1, 2, 4), instances=1))

        async def several() -> None:
            for _ in range(20):
                await submit(engine, 4)

        asyncio.run(several())
        assert engine.stats()["models"]["scale"]["mean_batch"] == 4


def test_the_trial_of_a_full_batch_is_one_batch(engine):
    assert engine.try_batch("scale") > 0
    assert engine.stats()["models"]["scale"]["mean_batch"] == 4


class AskedInBytes:
    """As `Asked`, for a request of bytes."""

    def __init__(self) -> None:
        self.answer = asyncio.get_running_loop().create_future()

    def done_in(self, instance, slot) -> None:
        if not self.answer.done():
            self.answer.set_result(b"".join(instance.slot_bytes(slot)[1].values()))

    def failed(self, error: Exception) -> None:
        self.answer.set_exception(error)


def submit_bytes(door, value, deadline_ms=None):
    asked = AskedInBytes()
    piece = memoryview(np.full(64, value, np.float32).tobytes())
    return asked, door.submit_bytes("scale", (piece,), deadline_ms, None, None, asked, asyncio.get_running_loop())


def test_requests_of_bytes_are_answered_from_slots_and_from_memory_for_inputs_without_one(engine):
    async def ask():
        door = CallbackClient(engine.client)
        with held_core(engine):  # so that the later ones find no open instance
            asked = [submit_bytes(door, k)[0] for k in range(40)]
        return [await asyncio.wait_for(each.answer, 60) for each in asked]

    assert asyncio.run(ask()) == [np.full(64, 2 * k, np.float32).tobytes() for k in range(40)]
    check_at_rest(engine.state)


def test_a_request_of_bytes_is_told_once_of_its_failure_and_of_nothing_after_it_is_withdrawn(engine):
    async def ask():
        door = CallbackClient(engine.client)
        with held_core(engine):
            late, _ = submit_bytes(door, 1, deadline_ms=1e-3)
            lost, call = submit_bytes(door, 2)
            left, withdrawn = submit_bytes(door, 3)
            call.fail(EngineAwayError("the engine is away"))
            withdrawn.cancel()
        last, _ = submit_bytes(door, 4)
        await asyncio.wait_for(last.answer, 60)
        for each, error in ((late, DeadlineError), (lost, EngineAwayError)):
            with pytest.raises(error):
                await asyncio.wait_for(each.answer, 60)
        while engine.core.ring.waiting:
            await asyncio.sleep(1e-3)
        assert not left.answer.done()

    asyncio.run(ask())
    check_at_rest(engine.state)


def test_requests_of_bytes_are_told_that_their_engine_is_lost():
    async def lose():
        engine, asked = RemoteEngine(), AskedInBytes()
        engine.core.ring.take_row(ItemCall(engine.client, None, asked), 0)
        engine.lose()
        with pytest.raises(EngineAwayError):
            await asyncio.wait_for(asked.answer, 60)

    asyncio.run(lose())


@pytest.mark.parametrize("other", [False, True])
def test_answers_that_an_event_loop_has_not_read_keep_no_request_from_its_instance(other):
    """All in one turn of the event loop, which therefore reads no completion by itself."""
    x = np.arange(64, dtype=np.float32).reshape(1, 64)

    async def ask(engine) -> None:
        loop, door, asked = asyncio.get_running_loop(), CallbackClient(engine.client), [Asked() for _ in range(6)]
        row = engine.client.find("scale").row

        def completed(n: int) -> bool:
            end = loop.time() + 30
            while int(engine.state.model["completed"][row]) < n and loop.time() < end:
                time.sleep(1e-3)
            return int(engine.state.model["completed"][row]) == n

        def submit_to(name: str, asked: Asked) -> None:
            door.submit(name, {"x": x}, 1, None, None, None, asked)

        first = 0 if other else 3
        for k in range(first):
            submit_to("scale", asked[k])
        assert completed(first)
        with held_core(engine):
            for k in range(first, 5):  # the fifth finds no open instance
                submit_to("scale", asked[k])
        if other:  # nothing could be read when the fifth came: a later request lets it in
            assert completed(4)
            submit_to("other", asked[5])
        assert completed(5)
        await asyncio.wait_for(asyncio.gather(*(each.answer for each in asked[: 6 if other else 5])), 60)

    with pp.Engine("virtual:h200") as engine:
        engine.load(scale_model(instances=4, batch=(1,)))
        engine.load(scale_model("other", instances=4, batch=(1,)))
        asyncio.run(ask(engine))
        check_at_rest(engine.state)
