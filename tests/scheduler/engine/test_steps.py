"""Functions before and after a model: values, order, deadlines, cancelling, and errors that stay with their request."""

from __future__ import annotations

import asyncio
import os
import signal
import threading

import numpy as np
import pytest
from engine_models import scale_model
from step_functions import GIVES, TAKES, read, say
from waiting import wait_until

import paellapy as pp
from paellapy.scheduler.core.errors import (
    DeadlineError,
    EngineClosedError,
    InputError,
    ModelError,
    StepError,
    UnknownModelError,
)
from paellapy.scheduler.engine import steps

DEVICE = "virtual:h200"
STEPS = {"before": read, "after": say, "takes": TAKES, "gives": GIVES}


def stepped(name="words", **options):
    return scale_model(name, batch=(1, 4), **{**STEPS, "workers": 2, **options})


def check(found, *numbers):
    assert (found["total"], found["words"]) == (2 * sum(numbers), " ".join(f"{2 * n:g}" for n in numbers))
    assert found["raw"][:1] == b"\xff"
    assert len(found["raw"]) == 257


@pytest.fixture(scope="module", params=[False, True], ids=["threads", "processes"])
def engine(request):
    with pp.Engine(DEVICE) as engine:
        engine.load(stepped(processes=request.param))
        engine.load(scale_model(batch=(1, 4)))
        yield engine


def test_values_pass_through_both_functions(engine):
    check(engine.infer_sync("words", {"text": "1 2 3"}), 1, 2, 3)

    async def many():
        return await asyncio.gather(*(engine.infer("words", {"text": f"{k} 1"}) for k in range(20, 40)))

    for k, found in enumerate(asyncio.run(many()), 20):
        check(found, k, 1)


@pytest.mark.parametrize(
    ("text", "error", "facts"),
    [
        ("a", InputError, {"field": "before"}),  # its ValueError
        ("break", StepError, {"step": "before"}),
        ("short", StepError, {"step": "before"}),
        ("exit", StepError, {"step": "before"}),
        ("13", StepError, {"step": "after"}),
        (b"1", InputError, {"field": "text", "given": "bytes", "limit": "str"}),
        (["1"], InputError, {"field": "text", "given": "list"}),
    ],
)
def test_an_error_is_that_requests_own(engine, text, error, facts):
    async def beside():
        ask = [engine.infer("words", {"text": each}) for each in ("1", text, "2")]
        return await asyncio.gather(*ask, return_exceptions=True)

    first, failed, last = asyncio.run(beside())
    check(first, 1)
    check(last, 2)
    assert type(failed) is error
    assert failed.model == "words"
    assert {key: getattr(failed, key) for key in facts} == facts
    with pytest.raises(error):
        engine.infer_sync("words", {"text": text})


def test_wrong_names_are_refused_before_anything_runs(engine):
    with pytest.raises(InputError) as e:
        engine.infer_sync("words", {"x": np.ones(64, np.float32)})
    assert (e.value.missing, e.value.unknown) == (["text"], ["x"])


def test_the_deadline_holds_for_a_function_too(engine):
    """One worker is busy for ever (its thread) or until it is ended (its process); the other one serves."""
    with pytest.raises(DeadlineError):
        engine.infer_sync("words", {"text": "hang"}, deadline_ms=50)
    check(engine.infer_sync("words", {"text": "4"}, deadline_ms=60_000), 4)


def test_threads_that_never_return_are_replaced(monkeypatch):
    monkeypatch.setattr(steps, "GRACE_S", 0.0)
    monkeypatch.setattr(steps, "MOST_LOST", 3)
    with pp.Engine(DEVICE) as engine:
        engine.load(stepped(workers=1))
        for k in range(4):
            with pytest.raises(DeadlineError):
                engine.infer_sync("words", {"text": "hang"}, deadline_ms=20)
            if k < 3:
                check(engine.infer_sync("words", {"text": "4"}), 4)
        with pytest.raises(DeadlineError):
            engine.infer_sync("words", {"text": "4"}, deadline_ms=20)


def test_a_killed_process_fails_its_request_only():
    model = stepped(processes=True, workers=2)
    with pp.Engine(DEVICE) as engine:
        engine.load(model)
        for _ in range(3):
            with pytest.raises(StepError) as e:
                engine.infer_sync("words", {"text": "die"})
            assert e.value.step == "before"
            check(engine.infer_sync("words", {"text": "5"}), 5)
        pids = [each.pid for each in engine.steps.of(model).processes]
        assert 1 <= len(pids) <= 2
        os.kill(pids[0], signal.SIGKILL)  # while it does nothing
        found = []
        for _ in range(4):
            try:
                found.append(engine.infer_sync("words", {"text": "6"})["total"])
            except StepError:
                found.append(None)
        assert found.count(12.0) >= 3


def test_a_cancelled_request_ends_its_process():
    model = stepped(processes=True, workers=1)
    with pp.Engine(DEVICE) as engine:
        engine.load(model)

        async def leave():
            task = asyncio.create_task(engine.infer("words", {"text": "hang"}))
            await asyncio.sleep(0.05)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

        asyncio.run(leave())
        check(engine.infer_sync("words", {"text": "7"}), 7)


def test_no_more_calls_than_workers_run_at_once_and_in_order():
    seen, gate, entered = [], threading.Event(), []

    def before(x):
        entered.append(float(x[0]))
        assert gate.wait(60)
        seen.append(float(x[0]))
        return x

    with pp.Engine(DEVICE) as engine:
        engine.load(scale_model("slow", batch=(1,), before=before, workers=1))

        async def run():
            tasks = []
            for k in range(4):
                tasks.append(asyncio.create_task(engine.infer("slow", {"x": np.full(64, k, np.float32)})))
                await asyncio.sleep(0)
            await asyncio.to_thread(wait_until, lambda: entered)
            tasks[2].cancel()  # it waits, and never runs
            await asyncio.wait([tasks[2]])
            gate.set()
            return await asyncio.gather(*tasks, return_exceptions=True)

        answers = asyncio.run(run())
    assert seen == [0.0, 1.0, 3.0]
    assert [type(each) for each in answers] == [dict, dict, asyncio.CancelledError, dict]


def test_the_models_own_tensors_need_no_names():
    model = scale_model("half", batch=(1,), before=lambda x: x / 4, after=lambda y: {"y": y + 1})
    assert (model.takes, model.gives) == (model.inputs, model.outputs)
    with pp.Engine(DEVICE) as engine:
        engine.load(model)
        assert engine.infer_sync("half", {"x": np.full(64, 4.0, np.float32)})["y"][0] == 3.0


def test_unloading_ends_the_functions():
    model = stepped(processes=True, workers=1)
    with pp.Engine(DEVICE) as engine:
        engine.load(model)
        pool = engine.steps.of(model)
        engine.unload("words")
        wait_until(lambda: not pool.processes)
        with pytest.raises(UnknownModelError):
            engine.infer_sync("words", {"text": "1"})
        with pytest.raises(EngineClosedError):
            engine.steps.of(model)


def test_loading_a_model_twice_leaves_its_functions():
    with pp.Engine(DEVICE) as engine:
        model = stepped()
        engine.load(model)
        with pytest.raises(ModelError):
            engine.load(model)
        check(engine.infer_sync("words", {"text": "1"}), 1)


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"before": 3}, "before"),
        ({"before": None}, "takes"),
        ({"after": None}, "gives"),
        ({"takes": {}}, "takes"),
        ({"takes": {"a": object}}, "takes"),
        ({"takes": {"a": "U5"}}, "takes"),
        ({"gives": {"a": {"size": 3}}}, "gives"),
        ({"workers": 0}, "workers"),
        ({"processes": 1}, "processes"),
    ],
)
def test_wrong_steps_are_refused(options, field):
    with pytest.raises(ModelError) as e:
        stepped(**options)
    assert e.value.field == field


def test_a_model_itself_takes_numbers_only():
    text = pp.TensorSpec((), str)
    with pytest.raises(ModelError) as e:
        pp.Model("m", lambda *_: None, inputs={"a": text}, outputs={"b": pp.TensorSpec(1)})
    assert e.value.field == "inputs"


def test_a_function_that_processes_cannot_import_is_refused():
    with pp.Engine(DEVICE) as engine:
        with pytest.raises(ModelError) as e:
            engine.load(stepped(before=lambda text: read(text), processes=True))
        assert e.value.field == "processes"
        assert engine.models == {}
