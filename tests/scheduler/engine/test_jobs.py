"""Background jobs on the virtual GPU: the CPU trains, the SM model takes its time, requests are served beside it."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from core_check import check_at_rest

import paellapy as pp
from paellapy.instrument.errors import LaunchError
from paellapy.scheduler.core.errors import (
    CaptureError,
    EngineClosedError,
    EngineFailedError,
    MemoryPlanError,
    ModelError,
    UnknownModelError,
)
from paellapy.scheduler.engine import lease as turn_module
from paellapy.scheduler.engine.monitor import Monitor

torch = pytest.importorskip("torch", reason="PyTorch is not installed: pip install torch==2.13.0")

from engine_models import asking, scale_model  # noqa: E402
from training import batches, job_losses, losses_now_and_then, plain_losses, trainee  # noqa: E402
from waiting import wait_until  # noqa: E402

DEVICE = "virtual:h200"


@pytest.fixture
def engine():
    with pp.Engine(DEVICE, policy="priority") as engine:
        yield engine
        check_at_rest(engine.state)


@pytest.mark.parametrize("kind", ["adam", "sgd"])
def test_a_job_s_losses_are_those_of_the_plain_loop_bit_for_bit(engine, kind):
    expected = plain_losses(50, kind=kind)
    assert job_losses(engine, 50, kind=kind) == expected
    assert np.mean(expected[-5:]) < 0.7 * np.mean(expected[:5])  # it learns
    assert engine.jobs == {}


def test_steps_that_follow_each_other_lose_what_the_plain_loop_loses(engine):
    expected, found = losses_now_and_then(engine, 30, 10)
    assert found == expected


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_data_may_draw_from_the_default_generator(engine, dropout):
    def drawn():
        for _ in range(12):
            x = torch.randn(32, 8)
            yield x, x.sum(1, keepdim=True)

    made = trainee(kind="sgd", dropout=dropout)
    expected = [float(made.step(x, y).detach()) for x, y in drawn()]
    made, found, fetched, seen = trainee(kind="sgd", dropout=dropout), [], [0], []

    def data():
        for each in drawn():
            fetched[0] += 1
            yield each

    def step(x, y):
        seen.append(fetched[0])
        return made.step(x, y)

    job = engine.background(step, state=made.state, data=data(), every=1,
                            callback=lambda job: found.append(float(job.outputs["output"])))  # fmt: skip
    assert job.join(60)
    assert found == expected
    assert seen[:2] == [1, 1]  # loading sets generators back, so nothing may be drawn meanwhile


@pytest.mark.parametrize("policy", ["tally", "antman", "token", "fair", "paella"])
def test_a_job_trains_under_policies_with_priorities_limits_and_duties(policy):
    with pp.Engine(DEVICE, policy=policy) as engine:
        params = {"performance": 0.5, "limit": 0.5}
        made = trainee()
        job = engine.background(made.step, state=made.state, data=batches(6), params=params)
        assert job.join(60)
        assert job.error is None
        assert job.steps == 6


@pytest.mark.parametrize("fed", [True, False])
def test_requests_are_answered_beside_a_job_that_is_paused_resumed_and_stopped(engine, fed):
    engine.load(scale_model())
    made = trainee()
    x, y = next(batches(1))
    step, data = (made.step, batches(100_000)) if fed else (lambda: made.step(x, y), None)
    job = engine.background(step, name="train", state=made.state, data=data)
    stop, wrong, answered = threading.Event(), [], [0]

    def ask() -> None:
        x = np.arange(64, dtype=np.float32)
        while not stop.is_set():
            y = engine.infer_sync("scale", {"x": x}, priority=1)["y"]
            answered[0] += 1
            if not np.array_equal(y, 2 * x):
                wrong.append(y)

    asking = threading.Thread(target=ask)
    asking.start()
    wait_until(lambda: job.steps > 40 and answered[0] > 40)
    assert job.steps_per_s > 0
    assert engine.stats()["jobs"]["train"]["state"] == "running"
    job.pause()
    wait_until(lambda: job.state == "paused")
    steps, there = job.steps, answered[0]
    wait_until(lambda: answered[0] > there + 20)
    assert job.steps == steps
    assert job.steps_per_s == 0.0
    job.resume()
    wait_until(lambda: job.steps > steps + 3)
    job.stop()
    assert job.join(30)
    there = answered[0]
    wait_until(lambda: answered[0] > there + 5)
    stop.set()
    asking.join()
    assert wrong == []
    assert (job.state, job.error) == ("ended", None)


def test_a_job_without_data_runs_until_it_is_stopped(engine):
    x = torch.zeros(4)

    def step() -> None:
        x.add_(1.0)

    seen = []
    unwatch = engine.watch(lambda entry: seen.append(int(entry["serial"])))
    job = engine.background(step, name="count", state=[x])
    wait_until(lambda: job.steps > 100)
    job.stop()
    assert job.join(30)
    unwatch()
    assert x.tolist() == [float(job.steps)] * 4
    seen = [serial for serial in seen if serial]  # not that the model is closed
    assert seen == sorted(seen)  # steps are done in the order in which they were handed in
    assert len(seen) >= 99


def test_an_optimizer_that_state_lacks_is_named(engine):
    net = torch.nn.Linear(4, 1)
    momentum = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)

    def step() -> None:
        momentum.zero_grad()
        net(torch.ones(4)).sum().backward()
        momentum.step()

    before = net.weight.clone()
    with pytest.raises(ModelError, match=r"momentum.*state=\[net, momentum\]"):
        engine.background(step, name="forgot", state=[net])
    assert torch.equal(net.weight, before)


def test_steps_are_no_slow_requests(engine):
    engine.load(scale_model())
    x = torch.zeros(4)
    with Monitor(engine) as monitor:
        job = engine.background(lambda: x.add_(1.0), name="count", state=[x])
        wait_until(lambda: job.steps > 10)
        engine.infer_sync("scale", {"x": np.ones(64, np.float32)})
        seen = monitor.snapshot()
        job.stop()
        assert job.join(30)
    assert {each["model"] for each in seen["slow"]} == {"scale"}
    assert [each["name"] for each in seen["jobs"]] == ["count"]


def test_loading_a_job_leaves_its_state_and_random_numbers_after_its_first_step(engine):
    made, alone = trainee(), trainee()
    x, y = next(batches(1))
    torch.manual_seed(7)
    alone.step(x, y)
    state = torch.get_rng_state()
    torch.manual_seed(7)
    job = engine.background(made.step, state=made.state, data=batches(1))
    assert job.join(30)
    assert torch.equal(torch.get_rng_state(), state)
    for mine, others in zip(made.net.state_dict().values(), alone.net.state_dict().values(), strict=True):
        assert torch.equal(mine, others)
    assert float(job.outputs["output"]) > 0


def test_the_first_callback_sees_the_gradients_of_the_first_step(engine):
    made, alone, found = trainee(kind="sgd"), trainee(kind="sgd"), []
    alone.step(*next(batches(1)))
    torch.manual_seed(7)
    job = engine.background(made.step, state=made.state, data=batches(2), every=1,
                            callback=lambda job: found.append(made.net[0].weight.grad.clone()))  # fmt: skip
    assert job.join(60)
    assert torch.equal(found[0], alone.net[0].weight.grad)


def test_outputs_of_the_first_step_stay_as_they_were(engine):
    x, seen = torch.zeros(4), []
    job = engine.background(lambda batch: x.add_(batch), state=[x], data=[torch.ones(4)] * 5, every=1,
                            callback=lambda job: seen.append(job.outputs["output"]))  # fmt: skip
    assert job.join(60)
    assert [each.tolist() for each in seen] == [[float(k)] * 4 for k in range(1, 6)]


def test_a_loss_of_bfloat16_is_an_output(engine):
    x = torch.zeros(4, dtype=torch.bfloat16)
    job = engine.background(lambda batch: x.add_(batch).sum(), state=[x], data=[torch.ones(4)] * 3)
    assert job.join(60)
    assert (job.error, job.outputs["output"].dtype.name, float(job.outputs["output"])) == (None, "bfloat16", 12.0)


def test_a_step_that_returns_other_tensors_than_at_first_is_told_so(engine):
    x, calls = torch.zeros(4), [0]

    def step(batch):
        calls[0] += 1
        x.add_(batch)
        return x if calls[0] < 5 else (x, x)

    job = engine.background(step, state=[x], data=[torch.ones(4)] * 9)
    assert job.join(60)
    assert isinstance(job.error, ModelError)
    assert "same tensors every time" in str(job.error)


def test_groups_may_not_come_and_a_schedule_may(engine):
    made, late = trainee(kind="sgd"), torch.zeros(1, requires_grad=True)

    def callback(job):
        if job.steps == 1:
            torch.optim.lr_scheduler.StepLR(made.optimizer, 1000)  # adds a number to each group
        elif job.steps == 3:
            made.optimizer.add_param_group({"params": [late]})

    job = engine.background(made.step, state=made.state, data=batches(6), every=1, callback=callback)
    assert job.join(60)
    assert job.steps == 3
    assert isinstance(job.error, ModelError)
    assert "start another" in str(job.error)


@pytest.mark.parametrize("where", ["step", "data", "callback", "shape", "rate"])
def test_what_goes_wrong_is_the_job_s_alone(engine, where):
    engine.load(scale_model())
    made = trainee(kind="sgd")

    def step(x, y):
        if where == "step" and job and job[0].steps == 3:
            raise FloatingPointError("in the step")
        return made.step(x, y)

    def data():
        yield from batches(3)
        if where == "data":
            raise OSError("in the data")
        yield from batches(2, 16 if where == "shape" else 32)

    def callback(job):
        if job.steps == 3 and where == "callback":
            raise ZeroDivisionError("in the callback")
        if job.steps == 3 and where == "rate":
            made.optimizer.param_groups[0]["lr"] = 0.5

    job = []
    with asking(engine) as answered:
        job.append(engine.background(step, name="train", state=made.state, data=data(), every=1, callback=callback))
        assert job[0].join(30)
        wait_until(lambda before=answered[0]: answered[0] > before + 5)
    kinds = {"step": FloatingPointError, "data": OSError, "callback": ZeroDivisionError}
    assert type(job[0].error) is kinds.get(where, ModelError)
    assert job[0].state == "failed"


@pytest.mark.parametrize("fault", ["shape", "data"])
def test_steps_before_a_fault_of_the_data_count(engine, fault):
    x, seen = torch.zeros(4), []

    def data():
        for _ in range(5):
            yield torch.ones(3)
        if fault == "data":
            raise OSError("in the data")
        yield torch.ones(2)

    def step(batch):
        x.add_(batch.sum())

    job = engine.background(step, state=[x], data=data(), every=5, callback=lambda job: seen.append(job.steps))
    assert job.join(60)
    assert type(job.error) is (OSError if fault == "data" else ModelError)
    assert (job.steps, x.tolist(), seen) == (5, [15.0] * 4, [5])


def test_ragged_batches_are_left_out_if_the_job_says_so(engine):
    x = torch.zeros(4)
    sizes = [3, 3, 2, 3, 1]

    def step(batch):
        x.add_(batch.sum())

    job = engine.background(step, state=[x], data=(torch.ones(n) for n in sizes), skip_ragged=True)
    assert job.join(60)
    assert (job.state, job.steps, job.skipped, x.tolist()) == ("ended", 3, 2, [9.0] * 4)
    assert job.stats()["skipped"] == 2


def test_a_job_that_is_over_has_the_mean_speed_of_its_life(engine):
    x = torch.zeros(4)
    job = engine.background(lambda batch: x.add_(batch), state=[x], data=(torch.ones(4) for _ in range(20)))
    assert job.join(60)
    assert job.state == "ended"
    assert job.steps_per_s > 0
    assert job.stats()["steps_per_s"] == job.steps_per_s
    alone = engine.background(lambda batch: x.add_(batch), state=[x], data=[torch.ones(4)])
    assert alone.join(60)
    assert (alone.steps, alone.steps_per_s) == (1, 0.0)


def test_a_job_that_waits_for_data_can_be_stopped(engine):
    x, more = torch.zeros(4), threading.Event()

    def data():
        yield torch.ones(4)
        more.wait(120)
        yield torch.ones(4)

    job = engine.background(lambda batch: x.add_(batch), state=[x], data=data())
    job.stop()
    assert job.join(60)
    more.set()
    assert (job.steps, job.error) == (1, None)


def test_a_job_is_no_model_to_ask(engine):
    x = torch.zeros(4)
    job = engine.background(lambda: x.add_(1.0), name="count", state=[x])
    with pytest.raises(UnknownModelError):
        engine.infer_sync("count", {"nothing": np.zeros(1, np.uint8)})
    assert engine.models == {}
    with pytest.raises(ModelError, check=lambda e: (e.field, e.given) == ("name", "count")):
        engine.background(lambda: x.add_(1.0), name="count", state=[x])
    job.stop()


def test_what_cannot_be_a_job_is_refused_with_the_remedy(engine):
    x = torch.zeros(4)
    with pytest.raises(ModelError, match=r"state=\[net, optimizer\]"):
        engine.background(lambda: None, state=[])
    with pytest.raises(ModelError, match=r"loss\.item\(\)"):
        engine.background(lambda: 3.0, state=[x])
    with pytest.raises(CaptureError, match="waits for the GPU"):
        engine.background(lambda: x.mul_(float(x.sum())), state=[x])
    for given in ({"every": 0}, {"every": 2.5}, {"callback": 5}, {"data": 5}):
        with pytest.raises(ModelError, match="=".join(map(str, *given.items()))):
            engine.background(lambda *_: x.add_(1), state=[x], **given)
    for given in ({"share": 0}, {"name": ""}, {"params": {"a": "b"}}, {"memory_bytes": "1 GiB"},
                  {"quantum_us": "5"}, {"quantum_us": 0}):  # fmt: skip
        before = x.clone()
        with pytest.raises(ModelError, match=next(iter(given))):
            engine.background(lambda: x.add_(1), state=[x], **given)
        assert torch.equal(x, before)  # refused before the first step
    with pytest.raises(ModelError, match=r"state=\[net, optimizer\]"):
        engine.background(lambda: None, state=torch.nn.Linear(1, 1))
    with pytest.raises(ModelError, match=r"list\(net\.parameters\(\)\)"):
        engine.background(lambda: x.add_(1), state=[x, torch.nn.Linear(1, 1).parameters()])
    with pytest.raises(ModelError, check=lambda e: e.field == "data"):
        engine.background(lambda batch: x.add_(1), state=[x], data=[])
    with pytest.raises(MemoryPlanError, check=lambda e: (e.field, e.given) == ("memory_bytes", 10)):
        engine.background(lambda: x.add_(1), state=[x], memory_bytes=10)
    assert engine.jobs == {}


def test_closing_the_engine_ends_its_jobs():
    x = torch.zeros(4)
    with pp.Engine(DEVICE) as engine:
        job = engine.background(lambda: x.add_(1.0), name="count", state=[x])
        wait_until(lambda: job.steps > 2)
    assert job.join(10)
    assert job.error is None
    assert x[0] == job.steps


def test_an_engine_that_several_threads_close_is_closed_once():
    x, go, errors = torch.zeros(4), threading.Event(), []
    go.set()

    def step():
        go.wait(60)
        x.add_(1.0)

    def close():
        try:
            engine.close()
        except BaseException as e:
            errors.append(e)

    engine = pp.Engine(DEVICE)
    job = engine.background(step, state=[x])
    go.clear()
    threads = [threading.Thread(target=close) for _ in range(3)]
    for thread in threads:
        thread.start()
    go.set()
    for thread in threads:
        thread.join(60)
    assert (errors, engine.core.over, job.error) == ([], True, None)


def test_closing_an_engine_that_starts_a_job_ends():
    x, begun, go, jobs = torch.zeros(4), threading.Event(), threading.Event(), []

    def step():
        begun.set()
        go.wait(60)
        x.add_(1.0)

    engine = pp.Engine(DEVICE)
    starting = threading.Thread(target=lambda: jobs.append(engine.background(step, state=[x])))
    starting.start()
    assert begun.wait(60)
    closing = threading.Thread(target=engine.close, daemon=True)
    closing.start()
    wait_until(lambda: engine.closed)
    go.set()
    starting.join(60)
    closing.join(60)
    assert engine.core.over
    assert jobs[0].join(60)
    assert isinstance(jobs[0].error, EngineClosedError)


def test_a_pause_does_not_keep_a_job_that_ends(engine, monkeypatch):
    x = torch.zeros(4)
    job = engine.background(lambda: x.add_(1.0), state=[x])
    rest = job._rest

    def late(batch):  # another thread stops and pauses it just before it waits
        job.stop()
        job.pause()
        rest(batch)

    monkeypatch.setattr(job, "_rest", late)
    job.pause()
    assert job.join(60)
    assert job.state == "ended"


def test_loading_a_function_leaves_the_weights_it_refers_to_untouched(engine):
    net = torch.nn.Sequential(torch.nn.Linear(8, 4), torch.nn.Unflatten(1, (2, 2)), torch.nn.BatchNorm1d(2)).train()
    before = {key: value.clone() for key, value in net.state_dict().items()}

    def answer(x):
        return net(x)  # in training: its running means move

    engine.load(pp.Model.from_torch(answer, torch.randn(2, 8), batch=(2,)))
    for key, value in net.state_dict().items():
        assert torch.equal(value, before[key])


def lose_the_gpu(engine, while_running):
    """Fails the engine, in its loop's thread, when these names are on the GPU."""
    cause = LaunchError("the GPU is gone")

    def look():
        if engine.core.on_gpu == [while_running]:
            engine.core.fail(cause)

    wait_until(lambda: engine.core.run(look) or engine.failure is not None)


def test_a_fault_of_the_gpu_names_the_job_and_nothing_hangs():
    x = torch.zeros(4)
    with pp.Engine(DEVICE) as engine:
        engine.load(scale_model())
        job = engine.background(lambda: x.add_(1.0), name="train", state=[x])
        lose_the_gpu(engine, "job 'train'")
        assert job.join(30)
        assert isinstance(job.error, EngineFailedError)
        for told in (str(job.error), engine.failure_text, Monitor(engine).snapshot()["failure"]):
            assert told.endswith("the GPU is gone (running at that time: job 'train')")
        with pytest.raises(EngineFailedError, check=lambda e: e.running == ["job 'train'"]):
            engine.infer_sync("scale", {"x": np.ones(64, np.float32)})
        with pytest.raises(EngineFailedError, check=lambda e: e.running == ["job 'train'"]):
            engine.background(lambda: x.add_(1.0), name="again", state=[x])


def test_a_fault_of_the_gpu_names_the_lease_also_when_it_was_taken_back():
    with pp.Engine(DEVICE) as engine:
        engine.load(scale_model())
        with engine.lease("script") as lease:
            assert engine.core.on_gpu == ["lease 'script'"]
            lease.take_back()
            lose_the_gpu(engine, "lease 'script'")
        with pytest.raises(EngineFailedError, check=lambda e: e.running == ["lease 'script'"]):
            engine.infer_sync("scale", {"x": np.ones(64, np.float32)})


@pytest.mark.parametrize("where", ["the first step", "a callback", "a lease", "a load"])
def test_work_outside_of_the_core_that_loses_the_gpu_is_named(monkeypatch, where):
    x = torch.zeros(4)

    def lose(*_):
        monkeypatch.setattr(engine.backend, "lost", lambda: LaunchError("the GPU is gone"))
        raise RuntimeError("CUDA error")

    with pp.Engine(DEVICE) as engine:
        whose = {"a lease": "lease 'script'", "a load": "'lost'"}.get(where, "job 'train'")
        if where == "a callback":
            job = engine.background(lambda: x.add_(1.0), name="train", state=[x], every=1, callback=lose)
            assert job.join(30)
            error = job.error
        else:
            with pytest.raises(pp.PaellaError) as caught:  # noqa: PT012
                if where == "a lease":
                    monkeypatch.setattr(turn_module, "_wait_for_work", lose)
                    with engine.lease("script"):
                        pass
                elif where == "a load":
                    specs = {"inputs": {"x": pp.TensorSpec((4,))}, "outputs": {"y": pp.TensorSpec((4,))}}
                    engine.load(pp.Model("lost", lose, batch=(1,), **specs))
                else:
                    engine.background(lose, name="train", state=[x])
            error = caught.value
        assert whose.rpartition(" ")[2] in str(error)
        with pytest.raises(EngineFailedError, check=lambda e: e.running == [whose]):
            engine.infer_sync("scale", {"x": np.ones(64, np.float32)})


def test_an_ordinary_error_outside_of_the_core_leaves_the_engine_as_it_is(engine):
    x = torch.zeros(4)
    with pytest.raises(ZeroDivisionError):
        engine.background(lambda: 1 / 0, name="train", state=[x])
    engine.load(scale_model())
    assert engine.failure is None
    assert engine.state.core["outside"][0] == 0
