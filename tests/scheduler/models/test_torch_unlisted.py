"""What a step changes that its state lacks: tensors are put back after loading, optimizers are refused by name."""

from __future__ import annotations

import functools
import sys
import types

import pytest

import paellapy as pp
from paellapy.scheduler.core.errors import ModelError

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

from paellapy.scheduler.models.torch_state import (  # noqa: E402
    find_touched,
    watching,
)


@pytest.fixture(scope="module")
def engine():
    with pp.Engine("virtual:h200", policy="priority") as engine:
        yield engine


class Trainer:
    """Everything of a training loop, with an optimizer that has moments."""

    def __init__(self, rate=0.1):
        torch.manual_seed(0)
        self.net = torch.nn.Linear(4, 1)
        self.opt = torch.optim.Adam(self.net.parameters(), lr=rate)
        self.schedule = torch.optim.lr_scheduler.StepLR(self.opt, 10)

    def loss(self, x):
        return self.net(x).square().mean()

    def update(self, x):
        self.opt.zero_grad()
        loss = self.loss(x)
        loss.backward()
        self.opt.step()
        return loss


def data(n):
    draw = torch.Generator().manual_seed(5)
    return [torch.randn(8, 4, generator=draw) for _ in range(n)]


def losses(engine, step, state, n=12):
    found = []
    job = engine.background(step, state=state, data=data(n), every=1,
                            callback=lambda job: found.append(float(job.outputs["output"])))  # fmt: skip
    assert job.join(60)
    if job.error is not None:
        raise job.error
    return found


mine = Trainer()


def update_global(x):
    return mine.update(x)


def test_an_optimizer_is_refused_by_name_wherever_a_step_finds_it(engine):
    trainer = Trainer()
    net, opt = trainer.net, trainer.opt

    def apply():
        opt.step()

    def in_a_closure(x):
        loss = net(x).sum()
        loss.backward()
        apply()
        return loss

    steps = {
        "mine.opt": lambda x: update_global(x),
        "opt": in_a_closure,
        "trainer.opt": lambda x: trainer.update(x),
    }
    for label, step in steps.items():
        with pytest.raises(ModelError, match=rf"optimizer {label}, which .* state=\[net, {label}\]"):
            engine.background(step, state=[mine.net if label == "mine.opt" else net], data=data(3))
    for step in (trainer.update, functools.partial(Trainer.update, trainer)):
        with pytest.raises(ModelError, match=r"optimizer .*, which .* state=\[net, "):
            engine.background(step, state=[trainer.net], data=data(3))
    assert engine.jobs == {}


def test_an_optimizer_that_no_name_leads_to_is_refused_by_its_kind(engine):
    hidden = {"both": [Trainer()]}
    trainer = hidden["both"][0]
    with pytest.raises(ModelError, match="optimizer Adam, which"):
        engine.background(lambda x: hidden["both"][0].update(x), state=[trainer.net], data=data(3))
    in_backward = Trainer()
    for p in in_backward.net.parameters():
        p.register_post_accumulate_grad_hook(lambda p: in_backward.opt.step())

    def step(x):
        loss = in_backward.loss(x)
        loss.backward()
        return loss

    with pytest.raises(ModelError, match=r"optimizer .*, which"):
        engine.background(step, state=[in_backward.net], data=data(3))


@pytest.mark.parametrize("rate", [0.1, torch.tensor(0.1)], ids=["number", "tensor"])
def test_a_schedule_in_a_helper_is_refused(engine, rate):
    trainer = Trainer(rate)

    def go_on():
        trainer.schedule.step()

    def step(x):
        loss = trainer.update(x)
        go_on()
        return loss

    with pytest.raises(ModelError, match=r"trainer\.schedule\.step\(\) in the callback"):
        engine.background(step, state=[trainer.net, trainer.opt], data=data(3))


class Counting(torch.optim.Optimizer):
    """Its rate falls with a count that is a number of Python."""

    def __init__(self, params):
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure=None):
        for p in self.param_groups[0]["params"]:
            count = self.state[p].setdefault("step", 0) + 1
            self.state[p]["step"] = count
            p.add_(p.grad, alpha=-0.1 / count)


def test_an_optimizer_that_counts_in_python_is_refused(engine):
    trainer = Trainer()
    trainer.opt = Counting(trainer.net.parameters())
    with pytest.raises(ModelError, match=r"'step' of its optimizer in Python \(1, then 2\).*in a tensor"):
        engine.background(trainer.update, state=[trainer.net, trainer.opt], data=data(3))


class Averaged(Trainer):
    """With a normalisation and an average of the weights, which feed back into the loss."""

    def __init__(self):
        super().__init__()
        self.norm = torch.nn.BatchNorm1d(4).train()
        self.average = [torch.zeros_like(p) for p in self.net.parameters()]

    def loss(self, x):
        return super().loss(self.norm(x)) + sum(map(torch.sum, self.average)) + self.norm.running_mean.sum()

    def update(self, x):
        loss = super().update(x)
        torch._foreach_lerp_(self.average, [p.detach() for p in self.net.parameters()], 0.5)
        return loss


def test_tensors_that_state_lacks_are_put_back_after_loading(engine):
    plain, job = Averaged(), Averaged()
    expected = [float(plain.update(x).detach()) for x in data(12)]
    step = functools.partial(lambda update, x: update(x), job.update)
    assert losses(engine, step, [job.net, job.opt]) == expected
    for found, wanted in zip([*job.average, *job.norm.buffers()], [*plain.average, *plain.norm.buffers()], strict=True):
        assert torch.equal(found, wanted)


def test_an_optimizer_that_works_for_a_listed_one_is_no_other(engine):
    class Wrapper(torch.optim.Optimizer):
        def __init__(self, params):
            super().__init__(params, {})
            self.inner = torch.optim.Adam(self.param_groups[0]["params"], lr=0.1)

        def step(self, closure=None):
            self.inner.step()

    plain, job = Trainer(), Trainer()
    for each in (plain, job):
        each.opt = Wrapper(each.net.parameters())
    expected = [float(plain.update(x).detach()) for x in data(12)]
    assert losses(engine, job.update, [job.net, job.opt]) == expected


def test_a_tensor_that_a_run_makes_is_not_of_others():
    def run():
        total = torch.tensor(1.0)
        total.add_(1.0)
        return total

    found, touched = find_touched(torch, [], run)
    assert float(found) == 2.0
    assert touched.changed == []


def test_compiled_code_runs_as_written_under_a_watch(monkeypatch):
    stances, seen = [], []

    class Stance:
        def __init__(self, stance):
            stances.append(stance)

        def __enter__(self):
            stances.append("in")

        def __exit__(self, *_):
            stances.append("out")

    monkeypatch.setitem(sys.modules, "torch._dynamo", types.ModuleType("torch._dynamo"))
    monkeypatch.setattr(torch.compiler, "set_stance", Stance)
    monkeypatch.setattr(torch, "_disable_dynamo", lambda f, recursive=True: f)

    def see(func, args, named):
        seen.append(func._schema.name)
        return func(*args, **named)

    with watching(see):
        torch.ones(2).add_(1)
    assert stances == ["force_eager", "in", "out"]
    assert "aten::add_" in seen
