"""The memory budget: a model that is loaded can run, whatever is loaded before and after it."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
from chain_models import SMALL, WEIGHTS, N, ask, chain, room_for
from core_bench import Bench
from engine_models import scale
from failing import failing

import paellapy as pp
from paellapy.scheduler.core import codes
from paellapy.scheduler.core.errors import MemoryPlanError, ModelError, UnknownModelError
from paellapy.scheduler.engine.memory_budget import Budget


def test_a_model_that_stays_takes_no_instances_that_the_others_need(device):
    """Instances of the model that stays, in memory of their own, would leave too little for the weights of the others.
    """
    with pp.Engine(device, memory_bytes=room_for(device, 2), quantum_us=2, tuning=SMALL) as server:
        made = dict([chain("one", 1), chain("stays", 3, resident=True), chain("two", 2)])
        for model in made:
            server.load(model)
        for seed in range(2):
            for model, weights in made.items():
                ask(server, model.name, weights, seed)
        budget = server.weight_cache.budget
        assert budget.needed_bytes() <= budget.nbytes


@pytest.mark.parametrize("order", [("low", "high1", "high2"), ("high1", "high2", "low")])
def test_models_that_could_never_run_beside_higher_priorities_are_refused(device, order):
    """Weights never leave for lower priority, so all weights of higher priority must fit beside a model."""
    with pp.Engine(device, memory_bytes=room_for(device, 2), quantum_us=2, tuning=SMALL) as server:
        made = {name: chain(name, k, priority=int(name != "low")) for k, name in enumerate(order)}
        for name in order[:2]:
            server.load(made[name][0])
        with failing(MemoryPlanError, model=order[2], limit_bytes=room_for(device, 2)):
            server.load(made[order[2]][0])
        for name in order[:2]:
            ask(server, name, made[name][1])
        server.unload(order[0])
        server.load(chain("again", 7, priority=int(order[0] != "low"))[0])


def test_models_of_higher_priority_that_leave_by_themselves_need_no_room_of_their_own(device):
    with pp.Engine(device, memory_bytes=room_for(device, 2), quantum_us=2, tuning=SMALL) as server:
        made = dict(chain(f"m{k}", k, priority=k, resident=False if k else "auto") for k in range(3))
        for model in made:
            server.load(model)
        for seed in range(2):
            for model, weights in made.items():
                ask(server, model.name, weights, seed)


def test_instances_of_a_model_of_low_priority_take_no_memory_from_a_higher_one():
    device = "virtual:h200"  # weights have pages of their own on a GPU, and instances as small as these displace none
    with pp.Engine(device, memory_bytes=room_for(device, 4), quantum_us=2, tuning=SMALL) as server:
        made = {name: chain(name, k, priority=int(name == "high")) for k, name in enumerate(("high", "low", "other"))}
        for model, _ in made.values():
            server.load(model)
        for name in ("low", "other"):
            ask(server, name, made[name][1])
        server.load(chain("new", 5, batch=(1, 64))[0])
        assert server.weights_state("high") == "resident"
        assert "host" in {server.weights_state(name) for name in ("low", "other")}


def test_a_model_that_turns_out_to_stay_is_refused_where_the_others_would_not_fit(device):
    def fn(weights, inputs, outputs):
        scale[(1,)](weights["state"], weights["state"], 2.0, N, B=128)
        scale[(1,)](weights["state"], outputs["y"], 1.0, N, B=128)

    specs = {"inputs": {"x": pp.TensorSpec((N,))}, "outputs": {"y": pp.TensorSpec((N,))}}
    large = np.ones(WEIGHTS // 4, np.float32)
    with pp.Engine(device, memory_bytes=room_for(device, 1), quantum_us=2, tuning=SMALL) as server:
        one, weights = chain("one", 1)
        server.load(one)
        with failing(MemoryPlanError, model="counter"):
            server.load(pp.Model("counter", fn, weights={"state": large}, batch=(1,), instances=1, **specs))
        ask(server, "one", weights)
        assert list(server.models) == ["one"]


def budget_whose_core_grants(state, at_last):
    """A budget over a core that never takes a step. With `at_last` it grants the memory just before the load gives up.
    """
    r = state.residency[0]
    r["budget_bytes"] = 100
    calls = []

    def in_loop(function):
        calls.append(function.__name__)
        if function.__name__ == "drop" and at_last:
            r["load_granted"], r["held_bytes"] = 1, r["load_bytes"]
        function()

    return Budget(SimpleNamespace(state=state, run=in_loop, check_open=lambda: None), 100), calls


@pytest.mark.parametrize("at_last", [False, True])
def test_a_load_does_not_wait_for_ever_for_memory_of_models_in_use(monkeypatch, at_last):
    monkeypatch.setattr("paellapy.scheduler.engine.memory_budget.ORDER_S", 0.01)
    state = Bench([]).state
    budget, calls = budget_whose_core_grants(state, at_last)
    if at_last:
        budget.place("low", 60, 0, codes.AUTO)
        assert calls == ["ask", "drop", "take"]
    else:
        with failing(MemoryPlanError, model="low", needed_bytes=60, limit_bytes=100):
            budget.place("low", 60, 0, codes.AUTO)
        assert calls == ["ask", "drop"]
    r = state.residency[0]
    assert (r["load_bytes"], r["load_granted"], r["held_bytes"]) == (0, 0, 0)
    assert budget.taken == ({"low": 60} if at_last else {})


@pytest.mark.parametrize("name", ["memory_bytes", "host_bytes"])
@pytest.mark.parametrize("given", ["1GB", 1.5, True, 1 << 70, float("nan")])
def test_budgets_that_are_no_numbers_of_bytes_are_refused(name, given):
    with pytest.raises(ModelError, match=name):
        pp.Engine("virtual:h200", **{"memory_bytes": 1 << 30, name: given})


def test_models_that_are_not_loaded_are_unknown_with_and_without_a_budget():
    for budget in (None, 1 << 30):
        with pp.Engine("virtual:h200", memory_bytes=budget) as server:
            for what in (server.prefetch, server.evict, server.weights_state):
                with pytest.raises(UnknownModelError, match="'nobody'"):
                    what("nobody")
