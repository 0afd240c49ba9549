"""The engine on the virtual GPU: right answers under load, and a clear one to every mistake."""

from __future__ import annotations

import asyncio
import math
import os
import threading
import time
import warnings
from dataclasses import replace

import numpy as np
import pytest
from core_check import check_at_rest
from engine_models import (
    faulty_model,
    lookup_model,
    lose_the_gpu_on_faults,
    mlp_model,
    mlp_reference,
    random_inputs,
    scale_model,
    scale_reference,
)
from engine_requests import post
from failing import failing
from waiting import held_core

import paellapy as pp
from paellapy.instrument.errors import OutOfBoundsError, PaellaError, TraceError
from paellapy.scheduler.core import codes
from paellapy.scheduler.core.errors import (
    CaptureError,
    DeadlineError,
    EngineClosedError,
    EngineFailedError,
    InputError,
    MemoryPlanError,
    ModelError,
    QueueFullError,
    RequestFailedError,
    TooManyRequestsError,
    UnknownModelError,
)
from paellapy.scheduler.core.state import Limits
from paellapy.scheduler.engine import client as requests_module
from paellapy.scheduler.engine.engine import Engine
from paellapy.scheduler.policies.policy import find_policy, policy, policy_names

pytestmark = pytest.mark.quick

DEVICE = "virtual:h200"
KINDS = {
    "short": (scale_model("short", 3.0, batch=(1, 4)), scale_reference(3.0)),
    "long": (scale_model("long", 2.0, steps=30, batch=(1, 2)), scale_reference(2.0, 30)),
    "mlp": (mlp_model("mlp", batch=(1, 2, 4, 8), target_ms=50.0), mlp_reference()),
}


def check(outputs, expected):
    assert outputs.keys() == expected.keys()
    for key, value in expected.items():
        np.testing.assert_allclose(outputs[key], value, rtol=1e-4, atol=1e-6)


@pytest.fixture(scope="module")
def loaded():
    """An engine with three models, for tests that leave it as they found it."""
    with Engine(DEVICE, quantum_us=10) as engine:
        for model, _ in KINDS.values():
            engine.load(model)
        yield engine


@pytest.fixture
def engine():
    with Engine(DEVICE, quantum_us=10) as engine:
        yield engine


def requests(n, seed=0):
    rng = np.random.default_rng(seed)
    for name in rng.choice(list(KINDS), n):
        model, reference = KINDS[name]
        inputs = random_inputs(model, rng)
        yield str(name), inputs, reference(inputs)


# -- right answers


def test_one_request_blocks_until_it_is_answered(loaded):
    for name, inputs, expected in requests(20):
        check(loaded.infer_sync(name, inputs), expected)


@pytest.mark.parametrize("name", policy_names())
def test_every_request_is_answered_right_under_every_policy(loaded, name):
    loaded.set_policy(name)
    assert loaded.policy == name
    before = {k: v["completed"] for k, v in loaded.stats()["models"].items()}
    work = list(requests(600, seed=len(name)))

    async def one(k, model, inputs, expected):
        found = await loaded.infer(model, inputs, priority=k % 3, client=k % 5)
        check(found, expected)

    async def main():
        await asyncio.gather(*(one(k, *each) for k, each in enumerate(work)))

    asyncio.run(main())
    after = loaded.stats()["models"]
    assert sum(after[k]["completed"] - before[k] for k in before) == 600
    check_at_rest(loaded.state)


def test_threads_and_loops_share_an_engine(loaded):
    failures = []

    def blocking(seed):
        try:
            for name, inputs, expected in requests(60, seed):
                check(loaded.infer_sync(name, inputs, client=f"thread {seed}"), expected)
        except BaseException as e:
            failures.append(e)

    def looping(seed):
        async def one(name, inputs, expected):
            check(await loaded.infer(name, inputs), expected)

        async def main():
            await asyncio.gather(*(one(*each) for each in requests(150, seed)))

        try:
            asyncio.run(main())
        except BaseException as e:
            failures.append(e)

    threads = [threading.Thread(target=f, args=(k,)) for k, f in enumerate([blocking, looping] * 3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def test_requests_that_wait_run_as_batches(loaded):
    before = loaded.stats()["models"]["mlp"]
    rng = np.random.default_rng(5)
    work = [random_inputs(KINDS["mlp"][0], rng) for _ in range(64)]

    async def main():
        return await asyncio.gather(*(loaded.infer("mlp", each) for each in work))

    for outputs, inputs in zip(asyncio.run(main()), work, strict=True):
        check(outputs, KINDS["mlp"][1](inputs))
    after = loaded.stats()["models"]["mlp"]
    n = after["completed"] - before["completed"]
    assert n == 64
    batched = after["mean_batch"] * after["completed"] - before["mean_batch"] * before["completed"]
    assert batched / n > 1.5


def test_outputs_are_the_callers_own(loaded):
    inputs = {"x": np.ones(64, np.float32)}
    first = loaded.infer_sync("short", inputs)
    kept = first["y"].copy()
    for _ in range(20):
        loaded.infer_sync("short", {"x": np.zeros(64, np.float32)})
    np.testing.assert_array_equal(first["y"], kept)
    assert first["y"].flags.owndata


def test_inputs_need_not_be_contiguous(loaded):
    wide = np.arange(128, dtype=np.float32)
    check(loaded.infer_sync("short", {"x": wide[::2]}), {"y": 3 * wide[::2]})


def test_several_inputs_and_outputs_find_their_places(engine):
    from engine_models import scale

    from paellapy.scheduler.models.model import Model, TensorSpec

    def fn(weights, inputs, outputs):
        for k, name in enumerate(("a", "b", "c")):
            array = inputs[name]
            n = int(np.prod(array.shape))
            scale[(1,)](array, outputs[name], float(k + 2), n, B=128)

    specs = {"a": TensorSpec((5,)), "b": TensorSpec((2, 7)), "c": TensorSpec(())}
    engine.load(Model("three", fn, inputs=specs, outputs=specs, batch=(1, 3)))
    rng = np.random.default_rng(0)
    work = [{k: rng.standard_normal(s.shape).astype(np.float32) for k, s in specs.items()} for _ in range(40)]

    async def main():
        return await asyncio.gather(*(engine.infer("three", each) for each in work))

    for outputs, inputs in zip(asyncio.run(main()), work, strict=True):
        check(outputs, {k: inputs[k] * np.float32(f) for k, f in (("a", 2), ("b", 3), ("c", 4))})


# -- slots


def test_closing_gives_up_slots_that_were_never_submitted():
    engine = Engine(DEVICE)
    engine.load(scale_model(batch=(1,)))
    slot = engine.reserve("scale")
    engine.close()
    with pytest.raises(InputError, match="cancelled"):
        slot.submit_sync()


def test_a_request_that_meets_the_end_of_closing_is_refused(monkeypatch):
    engine, checked, ends = Engine(DEVICE), requests_module.check_inputs, []
    engine.load(scale_model())

    def close_meanwhile(*given):
        engine.close()
        return checked(*given)

    def ask():
        try:
            engine.infer_sync("scale", {"x": np.ones(64, np.float32)})
        except EngineClosedError as e:
            ends.append(e)

    monkeypatch.setattr(requests_module, "check_inputs", close_meanwhile)
    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    asking.join(30)
    assert len(ends) == 1


def test_a_slot_that_comes_too_late_keeps_no_engine_open(monkeypatch):
    engine = Engine(DEVICE)
    engine.load(scale_model(batch=(1,)))
    slot = engine.client.reserve(engine.client.find("scale"), in_turn=True)  # its inputs are staged

    def closed() -> None:
        raise EngineClosedError

    with monkeypatch.context() as patch:
        patch.setattr(engine.core, "check_open", closed)
        with pytest.raises(EngineClosedError):
            slot.submit_sync()
    assert engine.core.ring.waiting == 0
    engine.close()


def test_a_slot_is_written_in_place(loaded):
    slot = loaded.reserve("short")
    slot.inputs["x"][:] = 7
    check(slot.submit_sync(), {"y": np.full(64, 21, np.float32)})
    with pytest.raises(InputError, match="already"):
        slot.submit_sync()


def test_slots_beyond_the_open_instance_are_staged(loaded):
    slots = [loaded.reserve("short") for _ in range(40)]
    assert any(slot._place is None for slot in slots)
    assert any(slot._place is not None for slot in slots)
    for k, slot in enumerate(slots):
        slot.inputs["x"][:] = k

    async def main():
        return await asyncio.gather(*(slot.submit() for slot in slots))

    for k, outputs in enumerate(asyncio.run(main())):
        assert (outputs["y"] == 3 * k).all()


def test_a_slot_that_is_given_back_holds_nobody_up(loaded):
    with loaded.reserve("short"):
        pass
    forgotten = loaded.reserve("short")
    del forgotten
    check(loaded.infer_sync("short", {"x": np.ones(64, np.float32)}), {"y": np.full(64, 3, np.float32)})
    assert loaded.stats()["live"] == 0


def test_a_slot_that_expires_says_so_when_it_is_submitted(loaded):
    slot = loaded.reserve("short", deadline_ms=1)
    settle(loaded)
    with pytest.raises(DeadlineError):
        slot.submit_sync()
    check(loaded.infer_sync("short", {"x": np.ones(64, np.float32)}), {"y": np.full(64, 3, np.float32)})


@pytest.mark.parametrize(
    "wrong",
    [{"memory_bytes": -1}, {"max_active": 0}, {"max_active": "2"}, {"quantum_us": 0}, {"quantum_us": "100"},
     {"quantum_us": math.nan}, {"sm_partitions": 2}, {"sm_partitions": None}],
)  # fmt: skip
def test_settings_that_cannot_be_are_refused(wrong):
    with pytest.raises(ModelError, check=lambda e: e.field in wrong):
        Engine(DEVICE, **wrong)


def test_a_process_that_was_forked_is_told_that_the_engine_is_not_its_own(loaded):
    reading, writing = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of Python's, that threads and forks do not go together
        child = os.fork()
    if child == 0:
        try:
            loaded.infer_sync("short", {"x": np.ones(64, np.float32)}, deadline_ms=2000)
        except EngineClosedError as e:
            os.write(writing, str(e).encode())
        finally:
            loaded.close()
            os._exit(0)
    os.close(writing)
    os.waitpid(child, 0)
    with os.fdopen(reading) as said:
        assert "parent process" in said.read()
    check(loaded.infer_sync("short", {"x": np.ones(64, np.float32)}), {"y": np.full(64, 3, np.float32)})


# -- taking requests back


def test_cancelling_the_task_frees_its_request(loaded):
    rng = np.random.default_rng(2)
    cancelled = loaded.stats()["models"]["long"]["cancelled"]

    async def main():
        tasks = [asyncio.create_task(loaded.infer("long", random_inputs(KINDS["long"][0], rng))) for _ in range(100)]
        await asyncio.sleep(0)
        for task in tasks[10:]:
            task.cancel()
        found = await asyncio.gather(*tasks, return_exceptions=True)
        assert sum(isinstance(each, asyncio.CancelledError) for each in found) == 90
        await loaded.infer("short", {"x": np.ones(64, np.float32)})

    asyncio.run(main())
    settle(loaded)
    assert loaded.stats()["models"]["long"]["cancelled"] > cancelled
    assert loaded.stats()["live"] == 0
    check_at_rest(loaded.state)


def settle(engine):
    """Reads completions until none is outstanding."""
    while engine.core.ring.waiting:
        engine.core.ring.drain()


def test_a_timeout_around_infer_takes_the_request_back(loaded):
    async def main():
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0):
                await loaded.infer("short", {"x": np.ones(64, np.float32)})

    asyncio.run(main())
    settle(loaded)
    assert loaded.stats()["live"] == 0


def test_a_deadline_that_passes_in_the_queue_is_an_error(engine):
    engine.load(scale_model("slow", steps=200, batch=(1,), instances=1))
    x = {"x": np.ones(64, np.float32)}

    async def main():
        work = [engine.infer("slow", x) for _ in range(30)]
        late = [engine.infer("slow", x, deadline_ms=0.2) for _ in range(5)]
        return await asyncio.gather(*work, *late, return_exceptions=True)

    found = asyncio.run(main())
    assert not any(isinstance(each, Exception) for each in found[:30])
    assert all(isinstance(each, DeadlineError) for each in found[30:])
    assert engine.stats()["models"]["slow"]["expired"] == 5


def test_a_deadline_far_away_changes_nothing(loaded):
    check(loaded.infer_sync("short", {"x": np.ones(64, np.float32)}, deadline_ms=1e9), {"y": np.full(64, 3.0)})


# -- mistakes


@pytest.mark.parametrize("deadline", [0, -5, float("nan")])
def test_a_deadline_in_the_past_is_refused_at_once(loaded, deadline):
    with pytest.raises(DeadlineError, check=lambda e: e.field == "deadline_ms"):
        loaded.infer_sync("short", {"x": np.ones(64, np.float32)}, deadline_ms=deadline)


@pytest.mark.parametrize(
    ("inputs", "facts"),
    [
        ({}, {"missing": ["x"]}),
        ({"x": np.ones(64, np.float32), "z": 1}, {"missing": [], "unknown": ["z"]}),
        ({"y": np.ones(64, np.float32)}, {"missing": ["x"], "unknown": ["y"]}),
        ({"x": np.ones(65, np.float32)}, {"field": "x", "given": (65,), "limit": (64,)}),
        ({"x": np.ones((1, 64), np.float32)}, {"field": "x", "given": (1, 64), "limit": (64,)}),
        ({"x": np.ones(64)}, {"field": "x", "given": np.float64, "limit": np.float32}),
        ({"x": "text"}, {"field": "x", "given": (), "limit": (64,)}),
        ({"x": [[1.0], [1.0, 2.0]]}, {"field": "x", "given": [[1.0], [1.0, 2.0]]}),
        ({"x": np.ones(64, np.float32), 7: 1}, {"unknown": ["7"]}),
        (None, {"given": "NoneType"}),
        ([np.ones(64, np.float32)], {"given": "list"}),
    ],
)
def test_wrong_inputs_are_named(loaded, inputs, facts):
    with pytest.raises(InputError) as caught:
        loaded.infer_sync("short", inputs)
    error = caught.value
    assert {key: getattr(error, key) for key in ("model", *facts)} == {"model": "short", **facts}
    assert loaded.stats()["live"] == 0


@pytest.mark.parametrize(
    "options",
    [{"deadline_ms": "x"}, {"deadline_ms": np.ones(2)}, {"priority": "x"}, {"priority": 1 << 70},
     {"priority": float("inf")}, {"client": []}],
)  # fmt: skip
def test_a_request_that_makes_no_sense_is_refused_and_holds_nothing(loaded, options):
    x = {"x": np.ones(64, np.float32)}
    for ask in (lambda: loaded.infer_sync("short", x, **options), lambda: loaded.reserve("short", **options)):
        with pytest.raises(InputError, check=lambda e: options[e.field] is e.given):
            ask()
    assert loaded.stats()["live"] == 0
    check(loaded.infer_sync("short", x), {"y": np.full(64, 3.0)})


def test_an_unknown_model_is_named_beside_the_known(loaded):
    with pytest.raises(UnknownModelError, check=lambda e: e.model == "nope"):
        loaded.infer_sync("nope", {})
    with pytest.raises(UnknownModelError):
        loaded.unload("nope")
    with pytest.raises(UnknownModelError):
        loaded.reserve("nope")


def test_one_name_is_loaded_once(loaded):
    with pytest.raises(ModelError, check=lambda e: e.field == "name"):
        loaded.load(scale_model("short"))


def test_a_full_queue_refuses(engine_with_few_rows):
    engine = engine_with_few_rows
    x = {"x": np.ones(64, np.float32)}

    async def main():
        with held_core(engine):  # so nothing is done before all have asked
            asked = [asyncio.ensure_future(engine.infer("scale", x)) for _ in range(40)]
            await asyncio.sleep(0)
        return await asyncio.gather(*asked, return_exceptions=True)

    found = asyncio.run(main())
    refused = [each for each in found if isinstance(each, QueueFullError)]
    assert len(refused) == 24
    assert "16 requests" in str(refused[0])
    assert all(isinstance(each, dict | QueueFullError) for each in found)
    check(engine.infer_sync("scale", x), {"y": np.full(64, 2, np.float32)})


def test_a_client_that_floods_the_engine_leaves_room_for_others(engine_with_few_rows):
    engine = engine_with_few_rows
    x = {"x": np.ones(64, np.float32)}

    async def main():
        with held_core(engine):
            asked = [asyncio.ensure_future(engine.infer("scale", x, client="flood")) for _ in range(40)]
            await asyncio.sleep(0)
            others = [asyncio.ensure_future(engine.infer("scale", x, client="other"))]
            await asyncio.sleep(0)
        return [await asyncio.gather(*each, return_exceptions=True) for each in (asked, others)]

    flood, others = asyncio.run(main())
    refused = [each for each in flood if isinstance(each, TooManyRequestsError)]
    assert 24 < len(refused) < 40
    assert f"{40 - len(refused)} of the engine's 16 requests" in str(refused[0])
    for answer in others + [each for each in flood if each not in refused]:
        check(answer, {"y": np.full(64, 2, np.float32)})
    check(engine.infer_sync("scale", x, client="flood"), {"y": np.full(64, 2, np.float32)})


@pytest.fixture
def engine_with_few_rows():
    with Engine(DEVICE, limits=Limits(requests=16)) as engine:
        engine.load(scale_model(batch=(1,), instances=2))
        yield engine


def test_a_model_that_does_not_fit_is_refused_with_the_figures():
    with Engine(DEVICE, memory_bytes=1 << 20) as engine:
        engine.load(scale_model("small"))
        held = engine.memory.held_bytes
        with failing(MemoryPlanError, model="large", limit_bytes=1 << 20):
            engine.load(scale_model("large", n=1 << 20))
        with failing(MemoryPlanError, model="heavy", limit_bytes=1 << 20):
            engine.load(mlp_model("heavy", weights={"w": np.zeros(1 << 20, np.float32)}))
        assert engine.memory.held_bytes == held
        assert list(engine.models) == ["small"]


def test_fewer_instances_than_wanted_where_memory_is_short():
    with Engine(DEVICE, memory_bytes=20 * 1024) as engine:
        engine.load(scale_model(batch=(1, 2, 4, 8)))
        assert 1 <= engine.stats()["models"]["scale"]["instances"] < 8
        assert engine.stats()["memory"]["held_bytes"] <= 20 * 1024


def test_a_model_that_cannot_be_captured_leaves_the_engine_as_it_was(engine):
    def fn(weights, inputs, outputs):
        pp.Device.current().synchronize()
        raise AssertionError

    from paellapy.scheduler.models.model import Model, TensorSpec

    with pytest.raises(CaptureError):
        engine.load(Model("bad", fn, inputs={"x": TensorSpec(4)}, outputs={"y": TensorSpec(4)}))
    assert engine.memory.held_bytes == 0
    assert not engine.models
    engine.load(scale_model())
    check(engine.infer_sync("scale", {"x": np.ones(64, np.float32)}), {"y": np.full(64, 2, np.float32)})


@pytest.mark.parametrize(
    ("what", "field"),
    [
        ({"batch": tuple(range(1, 20))}, "batch sizes"),
        ({"batch": (1, 500)}, "requests in its largest batch"),
        ({"instances": 1000}, "instances"),
    ],
)
def test_a_model_beyond_the_engines_limits_is_refused(engine, what, field):
    with pytest.raises(ModelError, check=lambda e: e.field == field and e.given > e.limit):
        engine.load(scale_model(**what))


def test_a_policy_of_the_users_own(loaded):
    @policy
    def latest(job):
        return -job.arrival_ns

    loaded.set_policy(latest)
    for name, inputs, expected in requests(10, seed=9):
        check(loaded.infer_sync(name, inputs), expected)
    with pytest.raises(PaellaError, match="nope"):
        loaded.set_policy("nope")
    assert loaded.policy == "latest"
    loaded.set_policy("paella")


# -- order


def test_segments_of_a_job_run_in_order_and_short_jobs_pass(engine):
    engine.set_policy("srpt")
    engine.load(scale_model("long", steps=100, batch=(1,)))
    engine.load(scale_model("short", batch=(1,)))
    x = {"x": np.ones(64, np.float32)}
    finished = []

    async def one(name, k):
        await engine.infer(name, x)
        finished.append((name, k))

    async def main():
        await asyncio.gather(*(one("long", k) for k in range(12)), *(one("short", k) for k in range(4)))

    with engine.trace() as t:
        asyncio.run(main())
    assert len(finished) == 16
    last_short = max(k for k, (name, _) in enumerate(finished) if name == "short")
    assert any(name == "long" for name, _ in finished[last_short:])
    for instance in np.unique(t.segments["instance"]):
        mine = t.segments[t.segments["instance"] == instance]
        for job in t.jobs[t.jobs["instance"] == instance]:
            inside = mine[(mine["start_ns"] >= job["start_ns"]) & (mine["end_ns"] <= job["end_ns"])]
            numbers = inside["segment"].tolist()
            assert numbers == ([-1] if numbers == [-1] else list(range(len(numbers))))


# -- loading and unloading


def test_models_come_and_go_while_others_run(loaded):
    stop = threading.Event()
    failures = []

    def load():
        rng = np.random.default_rng(3)
        try:
            while not stop.is_set():
                inputs = random_inputs(KINDS["mlp"][0], rng)
                check(loaded.infer_sync("mlp", inputs), KINDS["mlp"][1](inputs))
        except BaseException as e:
            failures.append(e)

    thread = threading.Thread(target=load)
    thread.start()
    try:
        held = loaded.memory.held_bytes
        for k in range(4):
            loaded.load(scale_model(f"guest{k}", factor=float(k), batch=(1, 2)))
            check(loaded.infer_sync(f"guest{k}", {"x": np.ones(64, np.float32)}), {"y": np.full(64, k, np.float32)})
        for k in range(4):
            loaded.unload(f"guest{k}")
        assert loaded.memory.held_bytes == held
    finally:
        stop.set()
        thread.join()
    assert not failures
    assert list(loaded.models) == list(KINDS)


def test_unloading_finishes_what_was_accepted(engine):
    engine.load(scale_model("leaving", steps=20, batch=(1, 2)))
    x = {"x": np.ones(64, np.float32)}

    async def main():
        tasks = [asyncio.create_task(engine.infer("leaving", x)) for _ in range(50)]
        await asyncio.sleep(0)
        await asyncio.to_thread(engine.unload, "leaving")
        return await asyncio.gather(*tasks)

    for outputs in asyncio.run(main()):
        check(outputs, {"y": np.full(64, 2.0**20, np.float32)})
    with pytest.raises(UnknownModelError):
        engine.infer_sync("leaving", x)
    assert engine.memory.held_bytes == 0
    engine.load(scale_model("leaving"))
    check(engine.infer_sync("leaving", x), {"y": np.full(64, 2, np.float32)})


# -- the end


def test_closing_drains():
    engine = Engine(DEVICE)
    engine.load(scale_model(steps=20, batch=(1, 2)))
    x = {"x": np.ones(64, np.float32)}

    async def main():
        tasks = [asyncio.create_task(engine.infer("scale", x)) for _ in range(60)]
        await asyncio.sleep(0)
        await asyncio.to_thread(engine.close)
        with pytest.raises(EngineClosedError):
            await engine.infer("scale", x)
        return await asyncio.gather(*tasks)

    for outputs in asyncio.run(main()):
        check(outputs, {"y": np.full(64, 2.0**20, np.float32)})
    engine.close()
    for use in (lambda: engine.infer_sync("scale", x), lambda: engine.load(scale_model()), lambda: engine.trace()):
        with pytest.raises(EngineClosedError):
            use()
    assert "closed" in repr(engine)


def test_an_engine_is_an_async_context_too():
    async def main():
        async with Engine(DEVICE) as engine:
            engine.load(scale_model(batch=(1,)))
            return await engine.infer("scale", {"x": np.ones(64, np.float32)})

    check(asyncio.run(main()), {"y": np.full(64, 2, np.float32)})


def test_without_a_device_an_engine_is_on_the_current_one():
    with pp.Device("virtual:a100"), Engine() as engine:
        assert engine.device.name == "virtual:a100"
        engine.load(scale_model("short", 3.0, batch=(1,)))
    with pp.Device("virtual:a100"), Engine(DEVICE) as engine:
        assert engine.device.name == DEVICE


def test_two_engines_live_side_by_side(loaded, engine):
    engine.load(scale_model("mine", 5.0))
    x = {"x": np.ones(64, np.float32)}
    check(engine.infer_sync("mine", x), {"y": np.full(64, 5, np.float32)})
    check(loaded.infer_sync("short", x), {"y": np.full(64, 3, np.float32)})
    with pytest.raises(UnknownModelError):
        loaded.infer_sync("mine", x)


def test_an_idle_engine_sleeps(loaded):
    loaded.infer_sync("short", {"x": np.ones(64, np.float32)})
    while not loaded.backend._bell.armed:
        threading.Event().wait(0.01)
    before = int(loaded.state.core["steps"][0])
    threading.Event().wait(0.2)
    assert int(loaded.state.core["steps"][0]) - before <= 3


# -- faults


@pytest.mark.parametrize("together", [1, 5])
def test_a_bad_value_fails_its_own_request_and_no_other(engine, together):
    engine.load(lookup_model(batch=(1, 8), instances=1))
    engine.load(scale_model(batch=(1,)))
    told = []
    engine.on_fault(lambda name, error: told.append((name, type(error))))

    async def main(bad):
        values = [bad if k == together // 2 else k for k in range(together)]
        inputs = [{"i": np.array([v], np.int64)} for v in values]
        beside = engine.infer("scale", {"x": np.ones(64, np.float32)})
        found = await asyncio.gather(*(engine.infer("lookup", each) for each in inputs), beside, return_exceptions=True)
        assert found.pop()["y"][0] == 2
        return values, found

    for bad in (1 << 20, -5, 1 << 40):
        values, found = asyncio.run(main(bad))
        for value, answer in zip(values, found, strict=True):
            if value == bad:
                assert isinstance(answer, RequestFailedError)
                assert isinstance(answer.__cause__, OutOfBoundsError)
                assert "look_up" in str(answer)
            else:
                assert set(answer["y"]) == {value}
    assert told == [("lookup", OutOfBoundsError)] * 3
    assert engine.stats()["models"]["lookup"]["failed"] == 3
    check_at_rest(engine.state)


def test_what_a_bad_value_left_in_an_instance_harms_nobody(engine):
    """A batch of three runs in the program for eight: the other slots hold what was in them last."""
    engine.load(lookup_model(batch=(8,), instances=1))

    async def main(*values):
        inputs = [{"i": np.array([v], np.int64)} for v in values]
        return await asyncio.gather(*(engine.infer("lookup", each) for each in inputs), return_exceptions=True)

    found = asyncio.run(main(*[1 << 20] * 8))
    assert all(isinstance(each, RequestFailedError) for each in found)
    told = []
    engine.on_fault(lambda name, error: told.append(error))
    assert [set(each["y"]) for each in asyncio.run(main(3, 4, 5))] == [{3}, {4}, {5}]
    assert not told


def test_a_fault_answers_everybody_and_nothing_hangs(monkeypatch):
    lose_the_gpu_on_faults(monkeypatch)
    engine = Engine(DEVICE)
    engine.load(faulty_model())
    engine.load(scale_model(steps=30, batch=(1,), instances=1))
    good, bad = {"x": -np.ones(64, np.float32)}, {"x": np.ones(64, np.float32)}
    np.testing.assert_array_equal(engine.infer_sync("faulty", good)["y"], good["x"])

    async def main():
        work = [engine.infer("scale", good) for _ in range(20)]
        return await asyncio.gather(engine.infer("faulty", bad), *work, return_exceptions=True)

    first, *others = asyncio.run(main())
    assert isinstance(first, EngineFailedError)
    assert isinstance(first.__cause__, OutOfBoundsError)
    assert "fault_if" in str(first)
    whose = str(first).rpartition("running at that time: ")[2]  # the models whose work was on the GPU
    assert "'faulty'" in whose
    assert any(isinstance(each, EngineFailedError) for each in others)
    assert all(isinstance(each, dict | EngineFailedError) for each in others)
    with pytest.raises(EngineFailedError, match="takes no more"):
        engine.infer_sync("scale", good)
    with pytest.raises(EngineFailedError):
        engine.load(scale_model("another"))
    assert "failed" in repr(engine)
    engine.close()


@pytest.mark.parametrize("error", [PaellaError("freeing failed"), RuntimeError("device-side assert triggered")])
def test_an_engine_whose_gpu_is_lost_is_closed_although_nothing_can_be_freed(monkeypatch, error):
    lose_the_gpu_on_faults(monkeypatch)
    engine, abandoned, tried = Engine(DEVICE), [], []
    engine.load(faulty_model())
    engine.load(scale_model())
    real, backend = engine.loaded_models.free, engine.backend

    def fail(free):
        free()
        tried.append(free)
        raise error

    monkeypatch.setattr(backend, "abandon", lambda loaded: abandoned.append(loaded.model.name))
    with pytest.raises(EngineFailedError):
        engine.infer_sync("faulty", {"x": np.ones(64, np.float32)})
    assert sorted(abandoned) == ["faulty", "scale"]
    end = backend.close
    monkeypatch.setattr(engine.loaded_models, "free", lambda loaded: fail(lambda: real(loaded)))
    monkeypatch.setattr(backend, "close", lambda: fail(end))
    engine.close()
    assert engine.closed
    assert len(tried) == 3


# -- what can be seen


def test_statistics_count_what_happened(engine):
    engine.load(scale_model(steps=2, batch=(1, 2)))
    for _ in range(5):
        engine.infer_sync("scale", {"x": np.ones(64, np.float32)})
    found = engine.stats()
    assert found["models"]["scale"]["completed"] == 5
    assert found["models"]["scale"]["latency_ms"]["p99"] >= found["models"]["scale"]["latency_ms"]["p50"] > 0
    assert found["models"]["scale"]["gpu_ms"] > 0
    assert found["launches"] >= found["whole_launches"] == 5
    assert found["memory"]["held_bytes"] == engine.memory.held_bytes > 0
    assert engine.profile("scale")[0].batch == 1


def test_an_empty_gpu_is_empty(loaded):
    settle(loaded)
    found = loaded.occupancy()
    assert found.jobs_active == found.jobs_on_gpu == found.requests == 0
    assert found.share == found.blocks.resident == 0
    assert found.warps.capacity == 132 * 64


def test_a_watcher_sees_every_completion_until_it_stops(loaded):
    seen = []
    stop = loaded.watch(lambda entry: seen.append(int(entry["status"])))
    for name, inputs, _ in requests(5):
        loaded.infer_sync(name, inputs)
    stop()
    loaded.infer_sync("short", {"x": np.ones(64, np.float32)})
    assert seen == [codes.OK] * 5
    assert loaded.failure is None


def test_a_trace_has_requests_segments_and_blocks_on_one_clock(loaded):
    with loaded.trace() as t:
        for name, inputs, _ in requests(12, seed=4):
            loaded.infer_sync(name, inputs)
    assert len(t.jobs) == 12
    assert set(t.models) == set(KINDS)
    assert (t.jobs["arrival_ns"] <= t.jobs["start_ns"]).all()
    assert (t.jobs["start_ns"] < t.jobs["end_ns"]).all()
    assert len(t.segments) >= 12
    assert t.segments["blocks"].sum() == len(t.blocks)
    for segment in t.segments:
        jobs = t.jobs[(t.jobs["instance"] == segment["instance"]) & (t.jobs["start_ns"] <= segment["start_ns"])]
        assert (jobs["end_ns"] >= segment["end_ns"]).any()
    assert t.occupancy().resident.max() > 0
    assert str(t.summary())


def test_traces_cannot_be_nested(loaded):
    with loaded.trace(), pytest.raises(TraceError, match="nested"), loaded.trace():
        pass
    loaded.infer_sync("short", {"x": np.ones(64, np.float32)})


@pytest.mark.parametrize("told", [True, False])
def test_one_segment_at_a_time(engine, told):
    """Segments say when their last block has started. Where the core is not told of that it goes by the end that is
    predicted, and does not wait for a word that nobody writes.
    """
    model = scale_model("long", 2.0, steps=60, batch=(1,))
    engine.load(model)
    loaded = next(iter(engine.loaded_rows().values()))
    segments = len(engine.profile("long")[0].segments)
    assert segments > 2
    if not told:
        engine.state.launch["draining"] = 0
    engine.set_policy(replace(find_policy("srpt"), name="careful", max_in_flight=1))
    rng = np.random.default_rng(0)

    async def main():
        inputs = [random_inputs(model, rng) for _ in range(20)]
        found = await asyncio.gather(*(engine.infer("long", each) for each in inputs))
        for each, outputs in zip(inputs, found, strict=True):
            check(outputs, scale_reference(2.0, 60)(each))

    asyncio.run(main())
    check_at_rest(engine.state)
    assert any(instance.draining[: segments - 1].all() for instance in loaded.instances) or not told
    assert not any(instance.draining[segments - 1] for instance in loaded.instances)  # nothing follows the last


@pytest.mark.parametrize("instances", [1, 2])
def test_outputs_read_while_the_core_sleeps_free_their_instance_for_the_next_request(engine, instances):
    """The core is not woken for every answer that has been read, only where somebody waits for the instance."""
    engine.load(scale_model(batch=(1,), instances=instances))
    x = {"x": np.arange(64, dtype=np.float32)}
    for _ in range(200):
        np.testing.assert_array_equal(engine.infer_sync("scale", x)["y"], 2 * x["x"])
        while not engine.core.bell.armed:  # until it is asleep
            os.sched_yield()

    async def several():
        return await asyncio.gather(*(engine.infer("scale", x) for _ in range(50)))

    assert all((found["y"] == 2 * x["x"]).all() for found in asyncio.run(several()))
    engine.unload("scale")  # waits for the instances whose outputs were read last
    check_at_rest(engine.state)


@pytest.mark.parametrize("active", [3, 8])
def test_a_policy_that_says_how_many_jobs_run_at_once_is_obeyed(active):
    wanted = replace(find_policy("srpt"), active=active)
    with Engine("virtual:h200") as engine:
        assert np.isfinite(engine.state.core["demand_limit"][0])  # by demand, where nobody says
        engine.set_policy(wanted)
        assert engine.state.core["max_active"][0] == active
        assert np.isinf(engine.state.core["demand_limit"][0])


def until_completed(engine, n):
    """Waits while nobody reads answers, as when an event loop is busy."""
    end = time.monotonic() + 30
    while engine.stats()["models"]["scale"]["completed"] < n:
        assert time.monotonic() < end, "a request waits for an instance that nothing but an unread answer holds"
        os.sched_yield()


@pytest.mark.parametrize("instances", [1, 2, 3])
def test_a_request_that_finds_no_instance_open_reads_the_answers_that_hold_them(engine, instances):
    engine.load(scale_model(batch=(1,), instances=instances))
    x, answers = {"x": np.arange(64, dtype=np.float32)}, []
    for n in range(1, 21):
        post(engine, "scale", x, lambda entry: answers.append(engine.client.result(entry)))
        until_completed(engine, n)
        assert len(answers) >= n - instances
    engine.core.ring.drain()
    assert len(answers) == 20
    assert all((found["y"] == 2 * x["x"]).all() for found in answers)
    engine.unload("scale")
    check_at_rest(engine.state)


def test_an_answer_that_fails_is_told_by_who_reads_next_and_not_by_a_request_beside_it(engine):
    engine.load(scale_model(batch=(1,), instances=1))
    x = {"x": np.arange(64, dtype=np.float32)}

    def fails(entry):
        raise ZeroDivisionError("not the other's fault")

    post(engine, "scale", x, fails)
    until_completed(engine, 1)
    told = []

    async def main():
        asyncio.get_running_loop().set_exception_handler(lambda _, context: told.append(context["exception"]))
        found = await engine.infer("scale", x)
        while not told:
            await asyncio.sleep(0.001)
        return found

    np.testing.assert_array_equal(asyncio.run(main())["y"], 2 * x["x"])
    assert [type(each) for each in told] == [ZeroDivisionError]


def test_a_value_outside_its_range_is_refused_before_it_runs(engine):
    inputs = {"i": pp.TensorSpec((1,), np.int64, low=0, high=15)}
    engine.load(lookup_model(batch=(1, 4), inputs=inputs))
    told = []
    engine.on_fault(lambda name, error: told.append(error))
    for bad in (16, -1, 1 << 40):
        with pytest.raises(InputError, check=lambda e: e.limit == (0, 15)):
            engine.infer_sync("lookup", {"i": np.array([bad])})
        slot = engine.reserve("lookup")
        slot.inputs["i"][...] = bad
        with pytest.raises(InputError, check=lambda e: e.limit == (0, 15)):
            slot.submit_sync()
    assert set(engine.infer_sync("lookup", {"i": np.array([15])})["y"]) == {15}
    assert not told
    check_at_rest(engine.state)
