"""The state of a PyTorch step: found wherever it comes from, put back after loading, or refused by name."""

from __future__ import annotations

import dataclasses
import functools
import sys
import types

import pytest
from failing import failing

import paellapy as pp
from paellapy.scheduler.core.errors import ModelError
from paellapy.scheduler.models.model import Model
from paellapy.scheduler.models.torch_state import (
    check_complete,
    find_touched,
    generators_of,
    settings_of,
    state_behind,
    tensors_of,
    watching,
)

torch = pytest.importorskip("torch", reason="PyTorch is not installed")


class Trainer:
    """A user's training loop: the step is a method, and everything else is in `self`."""

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

    def scheduled(self, x):
        self.update(x)
        self.schedule.step()

    def by_loss(self, x):
        self.plateau.step(self.update(x))


def use(optimizer, schedule=None):
    optimizer.step()
    if schedule is not None:
        schedule.step()


def test_an_optimizer_that_state_lacks_is_found_in_self_and_in_partial():
    mine = Trainer()
    for step, label in ((mine.update, "opt"), (functools.partial(use, optimizer=mine.opt), "optimizer")):
        with failing(ModelError, job="train", field="state", given=label):
            check_complete(torch, "train", step, [mine.net])
        check_complete(torch, "train", step, [mine.net, mine.opt])


def test_a_step_that_uses_a_schedule_is_refused_with_the_remedy():
    mine = Trainer()
    opt, decay = mine.opt, mine.schedule
    mine.plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(opt)

    def inner():
        opt.step()
        decay.step()

    partly = functools.partial(use, opt, schedule=decay)
    steps = (mine.scheduled, mine.by_loss, inner, partly)
    for step, label in zip(steps, ("schedule", "plateau", "decay", "schedule"), strict=True):
        with failing(ModelError, field="step", given=label):
            check_complete(torch, "train", step, [mine.net, opt, decay])


def test_what_cannot_be_looked_into_passes():
    check_complete(torch, "train", torch.nn.Linear(1, 1), [])
    check_complete(torch, "train", print, [])


@dataclasses.dataclass
class Box:
    content: object


@dataclasses.dataclass(slots=True)
class Slotted:
    content: object


class Called(Box):
    def __call__(self):
        return None


@pytest.mark.parametrize("put", [lambda it: {"it": it}, lambda it: [(it,)], Box, Slotted, Called])
def test_optimizers_tensors_and_generators_are_found_in_what_holds_them(put):
    mine, draw = Trainer(), torch.Generator()
    mine.opt.param_groups[0]["lr"] = 0.25
    state = [mine.net, put(mine.opt), put(draw), put(mine.net)]
    check_complete(torch, "train", mine.update, state)
    assert 0.25 in settings_of(torch, state).values()
    assert generators_of(torch, state) == [draw]
    assert any(t is mine.net.weight for t in tensors_of(torch, [put(mine.opt)]))


class Holder:
    """A function of its own, with its modules in a dict."""

    def __init__(self):
        self.parts = {"norm": norm()}

    def run(self, x):
        return self.parts["norm"](x)

    def __call__(self, x):
        return self.run(x)


def norm():
    """In training its running means move with every call."""
    return torch.nn.BatchNorm1d(8).train()


def functions():
    """Functions that change a module when they run, and the module."""
    listed, nested, held, called, given = [norm()], {"a": {"b": norm()}}, Holder(), Holder(), norm()
    yield lambda x: listed[0](x), listed[0]
    yield lambda x: nested["a"]["b"](x), nested["a"]["b"]
    yield held.run, held.parts["norm"]
    yield called, called.parts["norm"]
    yield functools.partial(lambda module, x: module(x), given), given


def test_a_function_leaves_modules_untouched_wherever_it_finds_them():
    for function, module in functions():
        with pp.Engine("virtual:h200") as engine:
            engine.load(Model.from_torch(function, torch.ones(2, 8, 5), name="net", batch=(2,)))
        assert module.num_batches_tracked == 0
        assert not module.running_mean.any()


class SlottedHolder:
    __slots__ = ("norm",)

    def __init__(self):
        self.norm = norm()

    def __call__(self, x):
        return self.norm(x)


def trainers():
    """Functions that train a module which no name of theirs leads to, and the module."""
    for given in (norm(), torch.nn.Linear(5, 5)):
        held = types.SimpleNamespace(net=given, optimizer=torch.optim.SGD(given.parameters(), lr=0.1, momentum=0.9))

        def step(held, x):
            with torch.enable_grad():
                held.optimizer.zero_grad()
                out = held.net(x)
                out.square().sum().backward()
                held.optimizer.step()
            return out.detach()

        trains = functools.partial(step, held)
        yield trains, given
        yield lambda x, trains=trains: trains(x), given
        yield lambda x, held=held: held.net(x), given


def test_a_function_leaves_modules_untouched_that_are_found_by_running_it_only():
    slotted = SlottedHolder()
    for function, module in (*trainers(), (slotted, slotted.norm), (lambda x, held=slotted: held(x), slotted.norm)):
        before = [t.clone() for t in (*module.parameters(), *module.buffers())]
        with pp.Engine("virtual:h200") as engine:
            engine.load(Model.from_torch(function, torch.randn(2, 8, 5), name="net", batch=(2,)))
        for t, kept in zip((*module.parameters(), *module.buffers()), before, strict=True):
            assert torch.equal(t, kept)


def test_loading_a_module_that_counts_its_calls_counts_none():
    class Counts(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("calls", torch.zeros(1))

        def forward(self, x):
            self.calls.add_(1)
            return x * self.calls

    net = Counts()
    with pp.Engine("virtual:h200") as engine:
        model = Model.from_torch(net, torch.ones(1, 4), name="net", batch=(1, 2))
        assert net.calls == 0
        engine.load(model)
        assert net.calls == 0


def test_changes_are_found_with_the_memory_and_put_back():
    kept, views, grown = torch.arange(6.0), torch.zeros(4, 4), [torch.zeros(3), torch.zeros(2)]

    def run():
        made = torch.ones(6)
        made.add_(kept)
        kept[2:4] = 7.0
        views.t()[1].mul_(2).add_(1)
        torch._foreach_add_(grown, 1.0)
        x.zero_()
        return made

    x = torch.ones(2)
    found, touched = find_touched(torch, [x], run)
    assert found.tolist() == [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]
    own = [t.data_ptr() for t in (kept, views, *grown)]
    assert [each for each in touched.used if each in own] == own  # beside constants
    assert [each.data_ptr() for each in touched.changed] == own
    assert kept.tolist() == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]
    assert not views.any()
    assert not any(each.any() for each in grown)
    assert not x.any()


class Stands(torch.Tensor):
    """Stands for another tensor and has no memory, as quantised and distributed tensors do."""

    @staticmethod
    def __new__(cls, inner):
        made = torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)
        made.inner = inner
        return made

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return func(*(each.inner if isinstance(each, Stands) else each for each in args), **(kwargs or {}))


def test_tensors_that_stand_for_others_are_no_obstacle():
    weight = torch.randn(4, 4)
    stands = Stands(weight)
    x = torch.randn(1, 4)
    with pp.Engine("virtual:h200") as engine:
        engine.load(Model.from_torch(lambda x: x @ stands, torch.zeros(1, 4), name="net", batch=(1,)))
        found = engine.infer_sync("net", {"input": x[0].numpy()})["output"]
    torch.testing.assert_close(torch.from_numpy(found), (x @ weight)[0])


def test_of_many_modules_in_a_dict_only_those_in_training_are_kept():
    nets = {k: torch.nn.Linear(2, 2).eval() for k in range(3)}
    assert state_behind(torch, lambda x: nets[0](x)) == []
    alone = nets[0]
    assert state_behind(torch, lambda x: alone(x)) == [alone]


@pytest.fixture(scope="module")
def engine():
    with pp.Engine("virtual:h200", policy="priority") as engine:
        yield engine


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


mine = None  # made by the test: PyTorch's optimizers import its compiler, which every collection would wait for


def update_global(x):
    return mine.update(x)


def refused_steps():
    """Steps with an optimizer that state lacks, whose it is, and what the error calls it."""
    trainer, hooked = Trainer(), Trainer()
    net, opt, hidden = trainer.net, trainer.opt, {"both": [trainer]}

    def apply():
        opt.step()

    def in_a_closure(x):
        loss = net(x).sum()
        loss.backward()
        apply()
        return loss

    for p in hooked.net.parameters():
        p.register_post_accumulate_grad_hook(lambda p: hooked.opt.step())

    def in_backward(x):
        loss = hooked.loss(x)
        loss.backward()
        return loss

    yield lambda x: update_global(x), mine, "mine.opt"
    yield in_a_closure, trainer, "opt"
    yield lambda x: trainer.update(x), trainer, "trainer.opt"
    yield trainer.update, trainer, "opt"
    yield functools.partial(Trainer.update, trainer), trainer, "argument 0.opt"
    yield lambda x: hidden["both"][0].update(x), trainer, "Adam"  # no name leads to it
    yield in_backward, hooked, "hooked.opt"


def test_an_optimizer_is_refused_by_name_wherever_a_step_finds_it(engine, monkeypatch):
    monkeypatch.setitem(globals(), "mine", Trainer())
    for step, owner, label in refused_steps():
        with failing(ModelError, field="state", given=label):
            engine.background(step, state=[owner.net], data=data(3))
    assert engine.jobs == {}


@pytest.mark.parametrize("rate", [0.1, torch.tensor(0.1)], ids=["number", "tensor"])
def test_a_schedule_in_a_helper_is_refused(engine, rate):
    trainer = Trainer(rate)

    def go_on():
        trainer.schedule.step()

    def step(x):
        loss = trainer.update(x)
        go_on()
        return loss

    with failing(ModelError, field="step", given="trainer.schedule"):
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
    with failing(ModelError, field="step", given=(1, 2)):
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
