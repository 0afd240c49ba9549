"""Models and functions one after the other: values by name, fan-out, one deadline, one cancellation, errors."""

from __future__ import annotations

import asyncio
import threading

import numpy as np
import pytest
from engine_models import scale_model
from step_functions import halves, join, numbers
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

DEVICE = "virtual:h200"


def ocr(name="ocr", processes=False, **options):
    """A text of numbers → doubled → split into single numbers → each tripled → their sum and words."""
    double, triple = scale_model("double", batch=(1, 4)), scale_model("triple", factor=3.0, batch=(1, 4))
    steps = [numbers, double, halves, triple, join]
    given = {"takes": {"text": str}, "gives": {"words": str, "total": "float32"}, **options}
    return pp.Pipeline(name, steps, processes=processes, workers=2, **given)


def check(found, *values):
    assert found == {"words": " ".join(f"{6 * v:g}" for v in values), "total": 6 * sum(values)}


@pytest.fixture(scope="module", params=[False, True], ids=["threads", "processes"])
def engine(request):
    with pp.Engine(DEVICE) as engine:
        engine.load(ocr(processes=request.param))
        yield engine


def test_each_element_runs_by_itself(engine):
    check(engine.infer_sync("ocr", {"text": "1 2 3"}, deadline_ms=60_000), 1, 2, 3)
    check(engine.infer_sync("ocr", {"text": ""}))

    async def many():
        return await asyncio.gather(*(engine.infer("ocr", {"text": f"{k} 1"}) for k in range(20)))

    for k, found in enumerate(asyncio.run(many())):
        check(found, *([k, 1] if k else [1]))
    assert engine.stats()["models"]["triple"]["completed"] >= 40


@pytest.mark.parametrize(
    ("text", "error", "facts"),
    [
        ("a", InputError, {"field": "numbers:0"}),
        (3, InputError, {"field": "text"}),
        ("666", StepError, {"step": "halves:2"}),
        ("777", StepError, {"step": "halves:2"}),  # returns no dict
        ("999", StepError, {"step": "triple"}),  # of a wrong shape
    ],
)
def test_an_error_is_that_requests_own(engine, text, error, facts):
    async def beside():
        ask = [engine.infer("ocr", {"text": each}) for each in ("1", text)]
        return await asyncio.gather(*ask, return_exceptions=True)

    good, failed = asyncio.run(beside())
    check(good, 1)
    assert type(failed) is error, failed
    assert {key: getattr(failed, key) for key in facts} == facts


def test_the_deadline_is_the_whole_pipelines(engine):
    with pytest.raises(DeadlineError):
        engine.infer_sync("ocr", {"text": "hang"}, deadline_ms=100)
    check(engine.infer_sync("ocr", {"text": "5"}, deadline_ms=60_000), 5)


def test_stages_leave_later_ones_their_time():
    """The deadline that a stage is given lies before the pipeline's by the time of what follows."""
    seen = {}
    double, triple = scale_model("double", batch=(1,)), scale_model("triple", factor=3.0, batch=(1,), steps=5)
    again = pp.Pipeline("again", [double, lambda y: {"x": y}, triple])
    with pp.Engine(DEVICE) as engine:
        engine.load(again)
        run = engine.client.infer_given

        def spy(loaded, values, terms):
            seen[loaded.model.name] = terms[3]
            return run(loaded, values, terms)

        engine.client.infer_given = spy
        x = np.ones(64, np.float32)
        assert engine.infer_sync("again", {"x": x}, deadline_ms=60_000)["y"][0] == 2 * 3.0**5
        assert seen["triple"] - seen["double"] >= int(engine.profile("triple")[0].whole_ns)


def test_cancelling_withdraws_the_stage_that_runs():
    gate, entered = threading.Event(), threading.Event()

    def wait(y):
        entered.set()
        gate.wait(60)
        return {"x": y}

    models = scale_model("a", batch=(1,)), scale_model("b", batch=(1,))
    with pp.Engine(DEVICE) as engine:
        engine.load(pp.Pipeline("p", [models[0], wait, models[1]]))

        async def leave():
            task = asyncio.create_task(engine.infer("p", {"x": np.ones(64, np.float32)}))
            await asyncio.to_thread(entered.wait, 60)
            task.cancel()
            await asyncio.wait([task])
            assert task.cancelled()

        asyncio.run(leave())
        gate.set()
        wait_until(lambda: engine.stats()["models"]["a"]["completed"] == 1)
        assert engine.stats()["models"]["b"]["completed"] == 0


def test_a_request_that_meets_the_end_of_the_engine_is_refused():
    gate, entered, ends = threading.Event(), threading.Event(), []

    def wait(y):
        entered.set()
        gate.wait(60)
        return {"x": y}

    engine = pp.Engine(DEVICE)
    engine.load(pp.Pipeline("p", [scale_model("a", batch=(1,)), wait, scale_model("b", batch=(1,))]))

    def ask():
        try:
            engine.infer_sync("p", {"x": np.ones(64, np.float32)})
        except EngineClosedError as e:
            ends.append(e)

    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    assert entered.wait(60)
    engine.close()
    gate.set()
    asking.join(60)
    assert len(ends) == 1


def test_models_are_shared_with_their_own_requests():
    double = scale_model("double", batch=(1,))
    twice = pp.Pipeline("twice", [double, lambda y: {"x": y}, double])
    with pp.Engine(DEVICE) as engine:
        engine.load(double)
        engine.load(twice)
        assert list(engine.pipelines) == ["twice"]
        x = np.ones(64, np.float32)
        assert engine.infer_sync("twice", {"x": x})["y"][0] == 4.0
        with pytest.raises(ModelError):
            engine.load(twice)
        engine.unload("twice")
        assert engine.infer_sync("double", {"x": x})["y"][0] == 2.0
        with pytest.raises(UnknownModelError):
            engine.infer_sync("twice", {"x": x})


def test_unloading_takes_the_models_that_came_with_it():
    with pp.Engine(DEVICE) as engine:
        engine.load(ocr())
        assert set(engine.models) == {"double", "triple"}
        engine.unload("ocr")
        assert (engine.models, engine.pipelines) == ({}, {})


def test_a_pipeline_without_an_end_for_its_elements_fails():
    double, triple = scale_model("double", batch=(1,)), scale_model("triple", batch=(1,))
    endless = pp.Pipeline("endless", [double, lambda y: [{"x": y}, {"x": y}], triple])
    with pp.Engine(DEVICE) as engine:
        engine.load(endless)
        with pytest.raises(StepError):
            engine.infer_sync("endless", {"x": np.ones(64, np.float32)})


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"steps": [len], "takes": {"a": str}, "gives": {"b": str}}, "steps"),
        ({"steps": ["double"]}, "steps"),
        ({"name": ""}, "name"),
        ({"workers": 0}, "workers"),
        ({"takes": None}, "takes"),
        ({"gives": None}, "gives"),
        ({"takes": {"text": object}}, "takes"),
    ],
)
def test_a_wrong_pipeline_is_refused(options, field):
    steps = [numbers, scale_model("double", batch=(1,)), join]
    with pytest.raises(ModelError) as e:
        pp.Pipeline(**{"name": "p", "steps": steps, "takes": {"text": str}, "gives": {"words": str}, **options})
    assert e.value.field == field


def test_a_pipeline_is_simulated_as_its_models_in_a_row():
    pipeline = ocr()
    with pp.Engine(DEVICE) as engine:
        engine.load(pipeline)
        profiles = {name: engine.model_profile(name) for name in ("double", "triple")}
    alone = {name: each.alone_ns(1) for name, each in profiles.items()}
    assert pipeline.profile(profiles).alone_ns() == pytest.approx(alone["double"] + alone["triple"])
    three = alone["double"] + 3 * alone["triple"]
    assert pipeline.profile(profiles, elements=3).alone_ns() == pytest.approx(three)
    result = pp.simulate(pipeline, pp.Poisson(1000, {"ocr": 1.0}, duration=0.01), device=DEVICE)
    assert result.model("ocr").completed > 0


# Models in a row as one program.


def renamed(name, source, target, factor, batch=(1, 4), **options):
    """target = source · factor."""
    return scale_model(name, factor=factor, x=source, y=target, batch=batch, **options)


def three(**options):
    models = [renamed("a", "x", "h", 2.0), renamed("b", "h", "g", 3.0), renamed("c", "g", "y", 5.0)]
    return pp.Pipeline("p", models, **options)


def kinds(engine, name):
    """The nodes of a program at batch 1."""
    (loaded,) = (each for each in engine.loaded_rows().values() if each.model.name == name)
    return [node.kind for node in loaded.launches[0][0].program.nodes]


X = np.arange(64, dtype=np.float32)


def test_values_between_models_stay_on_the_gpu():
    with pp.Engine(DEVICE) as engine:
        engine.load(three())
        assert kinds(engine, "p[a+b+c]") == ["h2d", "kernel", "kernel", "kernel", "d2h"]
        np.testing.assert_array_equal(engine.infer_sync("p", {"x": X})["y"], 30 * X)

        async def many():
            return await asyncio.gather(*(engine.infer("p", {"x": X + k}) for k in range(20)))

        for k, found in enumerate(asyncio.run(many())):
            np.testing.assert_array_equal(found["y"], 30 * (X + k))
        done = {name: each["completed"] for name, each in engine.stats()["models"].items()}
        assert done == {"a": 0, "b": 0, "c": 0, "p[a+b+c]": 21}
        np.testing.assert_array_equal(engine.infer_sync("b", {"h": X})["g"], 3 * X)
        engine.unload("p")
        assert not engine.loaded_rows()


def test_values_that_others_read_go_through_the_host():
    with pp.Engine(DEVICE) as engine:
        engine.load(three(gives={"g": pp.TensorSpec(64), "y": pp.TensorSpec(64)}))
        assert {each.model.name for each in engine.loaded_rows().values()} == {"a", "b", "c", "p[a+b]"}
        found = engine.infer_sync("p", {"x": X})
        np.testing.assert_array_equal(found["g"], 6 * X)
        np.testing.assert_array_equal(found["y"], 30 * X)


@pytest.mark.parametrize(
    "options",
    [{"batch": (1,)}, {"n": 32}, {"before": halves, "takes": {"y": str}}],
    ids=["other batches", "other shape", "a function before it"],
)
def test_models_that_do_not_fit_each_other_are_not_joined(options):
    models = [renamed("a", "x", "h", 2.0), renamed("b", "h", "y", 3.0, **options)]
    with pp.Engine(DEVICE) as engine:
        engine.load(pp.Pipeline("p", models, gives={"y": pp.TensorSpec(64)}))
        assert {each.model.name for each in engine.loaded_rows().values()} == {"a", "b"}


def test_joined_models_follow_those_that_are_loaded_anew():
    with pp.Engine(DEVICE) as engine:
        pipeline = three()
        for each in pipeline.models:
            engine.load(each)
        engine.load(pipeline)
        engine.unload("b")
        with pytest.raises(UnknownModelError):
            engine.infer_sync("p", {"x": X})
        engine.load(renamed("b", "h", "g", 7.0))
        np.testing.assert_array_equal(engine.infer_sync("p", {"x": X})["y"], 70 * X)
        assert engine.stats()["models"]["p[a+b+c]"]["completed"] == 1


def test_elements_of_a_request_pass_joined_models():
    def split(x):
        return [{"e": x[:32]}, {"e": x[32:]}]

    def total(y):
        return {"total": np.float32(sum(each.sum() for each in y))}

    models = renamed("a", "e", "h", 2.0, n=32), renamed("b", "h", "y", 3.0, n=32)
    steps = [split, *models, total]
    with pp.Engine(DEVICE) as engine:
        engine.load(pp.Pipeline("p", steps, takes={"x": pp.TensorSpec(64)}, gives={"total": "float32"}))
        assert engine.infer_sync("p", {"x": X})["total"] == 6 * X.sum()
        assert engine.stats()["models"]["p[a+b]"]["completed"] == 2


def test_torch_modules_are_joined_over_one_copy_of_their_weights():
    torch = pytest.importorskip("torch")
    first, second = torch.nn.Linear(4, 8), torch.nn.Linear(8, 3)
    models = [
        pp.Model.from_torch(first, {"input": torch.zeros(1, 4)}, name="first"),
        pp.Model.from_torch(lambda output: {"label": second(output)}, {"output": torch.zeros(1, 8)}, name="second"),
    ]
    with pp.Engine(DEVICE) as engine:
        engine.load(pp.Pipeline("p", models))
        assert "d2h" not in kinds(engine, "p[first+second]")[:-1]
        held = engine.memory()["models"]
        assert (held["first"]["weights_bytes"], held["p[first+second]"]["weights_bytes"]) == (4 * 8 * 4 + 8 * 4, 0)
        x = torch.arange(4.0)
        found = engine.infer_sync("p", {"input": x.numpy()})["label"]
    np.testing.assert_allclose(found, second(first(x)).detach().numpy(), rtol=1e-5)


def test_a_trace_shows_a_pipelines_request_with_its_steps():
    with pp.Engine(DEVICE) as engine:
        engine.load(ocr())
        engine.load(three())
        with engine.trace() as t:
            engine.infer_sync("ocr", {"text": "1 2"})
            engine.infer_sync("p", {"x": X})
    number = {name: k for k, name in enumerate(t.models)}
    for name, stages in (("ocr", 5), ("p", 1)):
        (job,) = t.jobs[t.jobs["model"] == number[name]]
        steps = t.segments[t.segments["instance"] == job["instance"]]
        assert steps["segment"].tolist() == list(range(stages))
        assert (steps["start_ns"][0], steps["end_ns"][-1]) == (job["arrival_ns"], job["end_ns"])
    (job,) = t.jobs[t.jobs["model"] == number["p[a+b+c]"]]
    kernels = t.launches[t.model_of_launch() == number["p[a+b+c]"]]
    assert len(kernels) == 3  # one after the other, with no copy between them
