"""More models than memory, end to end: right answers whoever comes and goes, clear errors, and nothing left behind."""

from __future__ import annotations

import contextlib
import os
import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from chain_models import SMALL, WEIGHTS, N, ask, chain, come_and_go, room_for, settle
from core_check import check_at_rest
from engine_models import scale
from failing import failing
from waiting import wait_until

import paellapy as pp
from paellapy.scheduler.backends.virtual_memory import VirtualWeights
from paellapy.scheduler.core.errors import MemoryPlanError, ModelError, UnknownModelError, WeightsError
from paellapy.scheduler.models.weights import WeightFileError, map_weights, write_weights


def test_more_models_than_fit_answer_rightly(device):
    with pp.Engine(device, memory_bytes=room_for(device, 3), quantum_us=2, tuning=SMALL) as server:
        weights = {}
        for k in range(8):
            model, weights[f"m{k}"] = chain(f"m{k}", k)
            server.load(model)
        pick = random.Random(1)
        names = [f"m{min(int(pick.expovariate(0.5)), 7)}" for _ in range(80)]
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(lambda item: ask(server, item[1], weights[item[1]], item[0]), enumerate(names)))
        account = server.memory()
        assert account["evicted"] > 5
        assert account["failed"] == 0
        assert account["instances_bytes"] + account["weights_bytes"] <= account["budget_bytes"]
        assert sum(each["state"] == "resident" for each in account["models"].values()) <= 3
        check_at_rest(server.state)


def test_a_job_of_low_priority_runs_where_models_fill_the_memory():
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    with pp.Engine("virtual:h200", memory_bytes=room_for("virtual:h200", 2), quantum_us=2, tuning=SMALL) as server:
        made = dict(chain(f"m{k}", k) for k in range(4))
        for model in made:
            server.load(model)
        held = torch.zeros(4)
        job = server.background(lambda: held.add_(1.0), name="count", state=[held], priority=-1)
        for k, weights in enumerate(made.values()):
            ask(server, f"m{k}", weights)
        before = job.steps
        while job.steps < before + 3:
            assert job.error is None
        job.stop()
        assert job.join(30)
        check_at_rest(server.state)


def test_a_model_of_high_priority_does_not_wait_for_the_memory_of_another(device):
    with pp.Engine(device, memory_bytes=room_for(device, 12), quantum_us=2, tuning=SMALL) as server:
        for k, priority in enumerate((0, 0, 1, 0, 1)):
            server.load(chain(f"m{k}", k, priority=priority)[0])
        arenas = server.weight_cache.arenas._all.values()
        assert all(len({*each.users.values()}) == 1 for each in arenas)
        assert any({*each.users.values()} == {1} for each in arenas)


def test_by_hand_and_as_seen(device):
    with pp.Engine(device, memory_bytes=room_for(device, 1), quantum_us=2, tuning=SMALL) as server:
        one, first = chain("one", 1)
        two, second = chain("two", 2, resident=False)
        server.load(one)
        server.load(two)
        assert server.weights_state("one") == "host"
        ask(server, "one", first)
        assert server.weights_state("one") == "resident"
        server.evict("one")
        settle(server, "one", "host")
        server.evict("one")  # it is out already
        server.prefetch("one")
        settle(server, "one", "resident")
        ask(server, "two", second)
        ask(server, "one", first)
        row = server.memory()["models"]["one"]
        assert row["misses"] == 2
        assert row["brought"] == 3
        assert row["reload_s"] > 0


def test_segments_need_their_own_weights_only(device):
    with pp.Engine(device, memory_bytes=1 << 28, quantum_us=1, tuning=SMALL) as server:
        server.load(chain("one", 1)[0])
        (profile,) = server.profile("one")
        assert profile.needs[-1] == WEIGHTS
        if len(profile.needs) > 2:
            assert profile.needs[0] < WEIGHTS
        assert list(profile.needs) == sorted(profile.needs)


def test_a_budget_below_one_model_is_refused_with_figures(device):
    with pp.Engine(device, memory_bytes=WEIGHTS // 2) as server:
        with failing(MemoryPlanError, model="one", limit_bytes=WEIGHTS // 2):
            server.load(chain("one", 1)[0])
        assert server.models == {}


def test_what_stays_leaves_noroom_for(device):
    with pp.Engine(device, memory_bytes=room_for(device, 1), quantum_us=2, tuning=SMALL) as server:
        first, weights = chain("first", 1, resident=True)
        server.load(first)
        with failing(MemoryPlanError, model="second", limit_bytes=room_for(device, 1)):
            server.load(chain("second", 2)[0])
        with pytest.raises(ModelError, match="resident=True"):
            server.evict("first")
        ask(server, "first", weights)


def test_beyond_the_hosts_memory_weights_are_in_files(device, tmp_path):
    room = room_for(device, 1)
    with pp.Engine(device, memory_bytes=room, host_bytes=WEIGHTS + 5000, quantum_us=2, tuning=SMALL) as server:
        server.weight_cache.store.folder = tmp_path
        weights = {}
        for k in range(3):
            model, weights[f"m{k}"] = chain(f"m{k}", k)
            server.load(model)
        states = [server.weights_state(f"m{k}") for k in range(3)]
        assert states.count("disk") == 2
        for k in (0, 1, 2, 0):
            ask(server, f"m{k}", weights[f"m{k}"])
        server.evict("m0")
        kept = server.weight_cache.store._kept["m0"]
        if kept.host is not None:
            kept = server.weight_cache.store._kept["m1"]
            server.evict("m1") if server.weights_state("m1") == "resident" else None
        name = "m0" if kept is server.weight_cache.store._kept["m0"] else "m1"
        whole = kept.file.read_bytes()
        kept.file.write_bytes(whole[: len(whole) // 2])
        with pytest.raises(WeightsError, match="truncated"):
            ask(server, name, weights[name])
        kept.file.unlink()
        with pytest.raises(WeightsError, match="No such file"):
            ask(server, name, weights[name])
        kept.file.write_bytes(whole)
        ask(server, name, weights[name])
        ask(server, "m2", weights["m2"])


def test_a_model_in_demand_moves_from_its_file_to_the_hosts_memory(device, tmp_path):
    """It takes the memory of a model that nobody asks for, which goes to a file."""
    room, host = room_for(device, 1), 2 * WEIGHTS + 5000
    with pp.Engine(device, memory_bytes=room, host_bytes=host, quantum_us=2, tuning=SMALL) as server:
        server.weight_cache.store.folder = tmp_path
        weights = {}
        for k in range(3):
            model, weights[f"m{k}"] = chain(f"m{k}", k)
            server.load(model)

        def stored():
            return [server.memory()["models"][f"m{k}"]["stored"] for k in range(3)]

        assert stored() == ["disk", "host", "host"]
        ask(server, "m2", weights["m2"])
        ask(server, "m0", weights["m0"])
        wait_until(lambda: stored() == ["host", "disk", "host"])
        account = server.memory()
        assert (account["promoted"], account["promoted_bytes"], account["displaced"]) == (1, WEIGHTS, 2)
        assert account["host_bytes"] == 2 * WEIGHTS <= account["host_budget_bytes"]
        assert len(list(tmp_path.iterdir())) == 2
        for name in ("m1", "m0", "m2", "m1", "m0"):
            ask(server, name, weights[name])
        server.evict("m0")
        assert server.weights_state("m0") == "host"
        check_at_rest(server.state)


def test_the_weights_of_a_model_that_is_being_loaded_stay_in_the_hosts_memory(monkeypatch):
    with pp.Engine("virtual:h200", memory_bytes=1 << 28, host_bytes=WEIGHTS + 5000, tuning=SMALL) as server:
        residents, seen = server.weight_cache, []
        settle_needs = residents.settle

        def watched(loaded):
            others = residents.store.promote("first", lambda name: float(name == "first"))
            seen.append((others, residents.store.where("second")))
            settle_needs(loaded)

        first, weights = chain("first", 1)
        server.load(first)
        monkeypatch.setattr(residents, "settle", watched)
        server.load(chain("second", 2)[0])
        assert seen == [(False, "host")]
        assert residents.store.promote("first", lambda name: float(name == "first"))  # now it may leave
        ask(server, "first", weights)


def test_weights_are_right_while_they_move_between_files_and_memory(device):
    """Demand that changes, loads and unloads, with room for two of six models on the host."""
    with pp.Engine(
        device, memory_bytes=room_for(device, 2), host_bytes=2 * WEIGHTS + 5000, quantum_us=2,
        tuning={**SMALL, "demand_memory_ns": 2e7},
    ) as server:  # fmt: skip
        made = {f"m{k}": chain(f"m{k}", k) for k in range(6)}
        for model, _ in made.values():
            server.load(model)
        store, over = server.weight_cache.store, threading.Event()

        def client(seed):
            pick = random.Random(seed)
            while not over.is_set():
                often = f"m{pick.randrange(5)}"  # one model after the other is in demand
                for _ in range(8):
                    ask(server, often, made[often][1], pick.randrange(100))

        with ThreadPoolExecutor(2) as pool:
            asked = [pool.submit(client, seed) for seed in range(2)]
            try:
                for _ in range(5):
                    server.unload("m5")
                    server.load(made["m5"][0])
                    assert store.held_bytes <= store.budget_bytes
                wait_until(lambda: server.memory()["promoted"] > 5)
            finally:
                over.set()
            for each in asked:
                each.result()
        check_at_rest(server.state)
        for name in made:
            server.unload(name)
        assert (store.held_bytes, store.file_bytes) == (0, 0)


def test_models_come_and_go_while_requests_arrive(device):
    """Loads, unloads, evictions and prefetches at random beside requests: right answers, and bytes as before."""
    rounds = 60 if device == "cuda" else 15
    with pp.Engine(device, memory_bytes=room_for(device, 2), quantum_us=2, tuning=SMALL) as server:
        made = {f"m{k}": chain(f"m{k}", k) for k in range(5)}
        for model, _ in made.values():
            server.load(model)
        before = server.memory.instances_bytes
        come_and_go(server, made, 3, rounds)
        check_at_rest(server.state)
        assert server.memory.instances_bytes == before
        for name in made:
            server.unload(name)
        assert server.memory.held_bytes == 0
        assert server.weight_cache.store.held_bytes == 0
        assert server.weight_cache.budget.taken == {}


def test_while_a_model_is_loaded_nobody_else_runs_in_its_memory(device):
    with pp.Engine(device, memory_bytes=room_for(device, 2), quantum_us=2, tuning=SMALL) as server:
        made = dict([chain("m0", 0), chain("m1", 1)])
        for model in made:
            server.load(model)
        over, alone = threading.Event(), []
        backend, run = server.backend, server.backend.run_segment

        def watched(launches, k):
            arenas = server.weight_cache.arenas._all.values()
            alone.append(all(server.state.arena[each.index] == 0 for each in arenas if "late" in each.users))
            run(launches, k)

        def client(name, weights):
            while not over.is_set():
                ask(server, name, weights)

        backend.run_segment = watched
        with ThreadPoolExecutor(2) as pool:
            asked = [pool.submit(client, f"m{k}", weights) for k, weights in enumerate(made.values())]
            try:
                for _ in range(5):
                    server.load(chain("late", 7)[0])
                    server.unload("late")
            finally:
                over.set()
            for each in asked:
                each.result()
        assert alone
        assert all(alone)
        check_at_rest(server.state)


def test_unloading_while_a_copy_runs(device):
    with pp.Engine(device, memory_bytes=room_for(device, 1), quantum_us=2, tuning=SMALL) as server:
        one, first = chain("one", 1)
        two, _ = chain("two", 2)
        server.load(one)
        server.load(two)
        with ThreadPoolExecutor(1) as pool:
            answer = pool.submit(ask, server, "one", first)
            while server.weights_state("one") == "host" and not answer.done():
                pass
            server.unload("one")
            with contextlib.suppress(UnknownModelError):
                answer.result()
        assert server.memory()["models"].keys() == {"two"}


def test_weights_may_still_be_leaving_when_the_engine_closes(monkeypatch):
    device, leaving, evict = "virtual:h200", threading.Event(), VirtualWeights.evict

    def slowly(weights):
        leaving.set()
        time.sleep(0.2)  # longer than an idle engine takes to end its loop
        evict(weights)

    with pp.Engine(device, memory_bytes=room_for(device, 2), quantum_us=2, tuning=SMALL) as server:
        model, weights = chain("m", 0, resident=False)
        server.load(model)
        monkeypatch.setattr(VirtualWeights, "evict", slowly)
        ask(server, "m", weights)
        assert leaving.wait(60)


def test_a_model_that_changes_its_weights_stays(device):
    def fn(weights, inputs, outputs):
        scale[(1,)](weights["state"], weights["state"], 2.0, N, B=128)
        scale[(1,)](weights["state"], outputs["y"], 1.0, N, B=128)

    specs = {"inputs": {"x": pp.TensorSpec((N,))}, "outputs": {"y": pp.TensorSpec((N,))}}
    kind = {"weights": {"state": np.ones(N, np.float32)}, "batch": (1,), "instances": 1}
    with pp.Engine(device, memory_bytes=1 << 28) as server:
        server.load(pp.Model("counter", fn, **specs, **kind))
        with pytest.raises(ModelError, match="resident=True"):
            server.evict("counter")
        with pytest.raises(ModelError, match="changes its own weights"):
            server.load(pp.Model("other", fn, resident=False, **specs, **kind))


def test_weights_from_a_file(tmp_path):
    _, made = chain("m", 1)
    write_weights(tmp_path / "m.safetensors", made)
    model, _ = chain("m", 1, weights=tmp_path / "m.safetensors")
    with pp.Engine("virtual:h200", memory_bytes=1 << 28) as server:
        server.load(model)
        ask(server, "m", made)
    assert map_weights(tmp_path / "m.safetensors").keys() == made.keys()


@pytest.mark.parametrize("memory_bytes", [None, 1 << 28])
def test_a_file_that_is_truncated_after_the_model_was_made_is_an_error(tmp_path, memory_bytes):
    path = tmp_path / "m.safetensors"
    _, made = chain("m", 1)
    write_weights(path, made)
    model, _ = chain("m", 1, weights=path)
    os.truncate(path, 100)
    with pp.Engine("virtual:h200", memory_bytes=memory_bytes) as server:
        with pytest.raises(WeightFileError, match="100 bytes"):
            server.load(model)
        write_weights(path, made)
        server.load(chain("m", 1, weights=path)[0])
        ask(server, "m", made)


def test_tied_weights_of_a_module_are_there_once(device):
    torch = pytest.importorskip("torch")

    class Tied(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.c = (torch.nn.Linear(64, 64) for _ in range(3))
            self.c.weight = self.a.weight
            self.register_buffer("offset", torch.ones(64))

        def forward(self, x):
            return self.c(torch.relu(self.b(torch.relu(self.a(x))))) + self.offset

    torch.manual_seed(0)
    module = Tied().eval()
    with pp.Engine(device, memory_bytes=1 << 30) as server:
        server.load(pp.Model.from_torch(module, torch.zeros(1, 64), name="tied", batch=(1,), instances=1))
        assert len(server.weight_cache._rows[0].range.layout.offsets) == 6  # five of layers, and the buffer
        x = torch.randn(1, 64)
        for _ in range(2):
            server.evict("tied")
            found = server.infer_sync("tied", {"input": x[0].numpy()})["output"]
            with torch.no_grad():
                np.testing.assert_allclose(found, module(x)[0].numpy(), rtol=1e-3, atol=1e-3)


def test_weights_come_in_the_order_in_which_the_function_takes_them(device):
    """The first segment waits for the first chunk only, however the weights are listed."""
    with pp.Engine(device, memory_bytes=1 << 30, quantum_us=2, tuning=SMALL) as server:
        model, made = chain("there", 1)
        turned = chain("back", 1, weights=dict(reversed(made.items())))[0]
        for each in (model, turned):
            server.load(each)
        there, back = ([each.needs for each in server.profile(name)] for name in ("there", "back"))
        assert back == there
        assert there[0][0] < there[0][-1]
        for name in ("there", "back"):
            server.evict(name)
            ask(server, name, made)


def test_a_module_s_weights_come_in_the_order_in_which_it_runs(device):
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")

    class Net(torch.nn.Module):
        def __init__(self, turned):
            super().__init__()
            layers = [torch.nn.Linear(N, N) for _ in range(6)]
            self.parts = torch.nn.ModuleList(reversed(layers) if turned else layers)
            self.turned = turned

        def forward(self, x):
            for each in reversed(self.parts) if self.turned else self.parts:
                x = each(x)
            return x

    with pp.Engine(device, memory_bytes=1 << 30, quantum_us=2, tuning=SMALL) as server:
        for turned in (False, True):
            torch.manual_seed(0)
            server.load(
                pp.Model.from_torch(Net(turned), torch.zeros(1, N), name=f"net{turned}", batch=(1,), instances=1)
            )
        plain, turned = ([each.needs for each in server.profile(f"net{turned}")] for turned in (False, True))
        assert turned == plain
        assert plain[0][0] < plain[0][-1]
        x = np.random.default_rng(0).standard_normal(N).astype(np.float32)
        answers = []
        for name in ("netFalse", "netTrue"):
            server.evict(name)
            answers.append(server.infer_sync(name, {"input": x})["output"])
        np.testing.assert_allclose(*answers, rtol=1e-5, atol=1e-5)
