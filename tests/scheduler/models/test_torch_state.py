"""The state of a PyTorch step: optimizers and schedules that the step uses are found wherever they come from."""

from __future__ import annotations

import dataclasses
import functools
import types

import pytest

import paellapy as pp

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

from paellapy.scheduler.core.errors import ModelError  # noqa: E402
from paellapy.scheduler.models.model import Model  # noqa: E402
from paellapy.scheduler.models.torch_state import (  # noqa: E402  # noqa: E402
    check_complete,
    find_touched,
    generators_of,
    settings_of,
    state_behind,
    tensors_of,
)


class Trainer:
    """A user's training loop: the step is a method, and everything else is in `self`."""

    def __init__(self):
        self.net = torch.nn.Linear(4, 1)
        self.opt = torch.optim.SGD(self.net.parameters(), lr=0.1)
        self.schedule = torch.optim.lr_scheduler.StepLR(self.opt, 10)
        self.plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(self.opt)

    def plain(self):
        self.opt.zero_grad()
        loss = self.net(torch.ones(4)).sum()
        loss.backward()
        self.opt.step()
        return loss

    def scheduled(self):
        self.plain()
        self.schedule.step()

    def by_loss(self):
        self.plateau.step(self.plain())


def use(optimizer, schedule=None):
    optimizer.step()
    if schedule is not None:
        schedule.step()


def test_an_optimizer_that_state_lacks_is_found_in_self_and_in_partial():
    mine = Trainer()
    for step, label in ((mine.plain, "opt"), (functools.partial(use, optimizer=mine.opt), "optimizer")):
        with pytest.raises(ModelError, match=rf"state=\[net, {label}\]"):
            check_complete(torch, "train", step, [mine.net])
        check_complete(torch, "train", step, [mine.net, mine.opt])


def test_a_step_that_uses_a_schedule_is_refused_with_the_remedy():
    mine = Trainer()
    opt, decay = mine.opt, mine.schedule

    def inner():
        opt.step()
        decay.step()

    partly = functools.partial(use, opt, schedule=decay)
    steps = (mine.scheduled, mine.by_loss, inner, partly)
    for step, label in zip(steps, ("schedule", "plateau", "decay", "schedule"), strict=True):
        with pytest.raises(ModelError, match=rf"{label}\.step\(\) in the callback"):
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
    check_complete(torch, "train", mine.plain, state)
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


class Slotted:
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
    slotted = Slotted()
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
