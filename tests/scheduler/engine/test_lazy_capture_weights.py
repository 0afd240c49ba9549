"""Batch sizes captured on demand in an engine with a memory budget: weights may be away when a size is wanted."""

from __future__ import annotations

import asyncio
import functools
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from chain_models import SMALL, N, chain, come_and_go, expected
from chain_models import ask as ask_one
from core_check import check_at_rest
from engine_models import scale
from engine_requests import ask_items
from waiting import wait_until

import paellapy as pp
from paellapy.scheduler.core import codes

BATCH = (1, 2, 4, 8)
LATER = {"batch": BATCH, "capture": "on_demand"}


@pytest.fixture(autouse=True)
def _nothing_measured(tmp_path, monkeypatch):
    monkeypatch.setenv("PAELLAPY_CACHE_DIR", str(tmp_path))


@functools.cache
def room(device, models, instances):
    """Memory for the weights of this number of models, and for this number of instances."""
    with pp.Engine(device, memory_bytes=1 << 30, quantum_us=2, tuning=SMALL) as server:
        server.load(chain("probe", 0, batch=BATCH, instances=instances)[0])
        account = server.memory()
        return models * account["weights_bytes"] + account["instances_bytes"] + 256


def engine(device, models, instances=1, **options):
    options.setdefault("memory_bytes", room(device, models, instances))
    return pp.Engine(device, **{"quantum_us": 2, "tuning": SMALL, **options})


def ask(server, name, made, items, seed=0):
    """A request of several items, which are one batch on an idle engine; checks its answer."""
    x = np.random.default_rng(seed).standard_normal((items, N)).astype(np.float32)
    found = asyncio.run(ask_items(server, name, x))["y"]
    np.testing.assert_allclose(found, expected(made, x), rtol=2e-3, atol=2e-3)


def sizes(server, name):
    return server.stats()["models"][name]["sizes"]


def until_captured(server, name, made):
    """Sends batches of all sizes until every size is captured."""

    def captured():
        for items in range(1, 9):
            ask(server, name, made, items)
        return not sizes(server, name)["later"]

    wait_until(captured)


@pytest.mark.parametrize("instances", [1, 2])
def test_sizes_come_and_answer_rightly_after_evictions(device, instances):
    with engine(device, 1, instances) as server:
        model, made = chain("m", 1, instances=instances, **LATER)
        server.load(model)
        assert sizes(server, "m") == {"captured": [1, 8], "later": [2, 4], "failed": []}
        until_captured(server, "m", made)
        assert sizes(server, "m") == {"captured": [1, 2, 4, 8], "later": [], "failed": []}
        for items in range(1, 9):
            server.evict("m")
            ask(server, "m", made, items)
        assert server.memory()["models"]["m"]["evicted"] == 8
        check_at_rest(server.state)
        server.unload("m")
        assert server.memory.held_bytes == 0
        assert server.weight_cache.budget.taken == {}


@pytest.mark.parametrize("alike", [True, False])
def test_segments_of_later_sizes_wait_for_their_weights(alike):
    """A later size has the needs of a size that was tried out if it runs the same kernels; else it needs all."""
    with engine("virtual:h200", 3, tuning={"chunk_bytes": N * N * 4}) as server:
        model, made = chain("later", 1, instances=1, **LATER)
        if not alike:  # one more kernel at sizes 2 and 4
            model.fn = with_another(model.fn)
        server.load(model)
        server.load(chain("ahead", 1, instances=1, batch=BATCH)[0])
        until_captured(server, "later", made)
        rows = [server.client.find(name).row for name in ("later", "ahead")]
        later, ahead = (server.state.segment["chunks"][row] for row in rows)
        whole = int(server.state.weights["chunks"][rows[0]])
        for k in range(4):
            n = int(server.state.size["segments"][rows[0], k])
            assert ahead[k, 0] < whole == ahead[k, : int(server.state.size["segments"][rows[1], k])].max()
            if alike or k in (0, 3):
                assert later[k].tolist() == ahead[k].tolist()
            else:
                assert (later[k, :n] == whole).all()
        for items in range(1, 9):
            server.evict("later")
            ask(server, "later", made, items)


def with_another(fn):
    def run(weights, inputs, outputs):
        fn(weights, inputs, outputs)
        if inputs["x"].shape[0] in (2, 4):
            y = outputs["y"]
            scale[(1,)](y, y, 1.0, y.shape[0] * N, B=512)

    return run


def test_weights_that_are_away_are_not_brought_for_a_capture():
    with engine("virtual:h200", 3) as server:
        model, made = chain("m", 1, instances=1, **LATER)
        server.load(model)
        with server.loaded_models.lock:  # no capture begins
            ask(server, "m", made, 4)
            server.evict("m")
        assert server.loaded_models.lazy_capture.wanted(server.client.find("m"))
        brought = server.memory()["models"]["m"]["brought"]
        wait_until(lambda: server.state.weights["locked"][server.client.find("m").row] == 1)
        assert server.weights_state("m") == "host"
        assert sizes(server, "m")["captured"] == [1, 8]
        ask(server, "m", made, 1)  # a request brings them
        wait_until(lambda: len(sizes(server, "m")["captured"]) > 2)
        assert server.memory()["models"]["m"]["brought"] == brought + 1
        server.evict("m")
        assert server.weights_state("m") == "host"


@pytest.mark.parametrize("resident", ["auto", False])
def test_weights_stay_while_a_size_is_captured(monkeypatch, resident):
    with engine("virtual:h200", 1) as server:
        made = {}
        for k, name in enumerate(("m", "other")):
            model, made[name] = chain(name, k, instances=1, resident=resident, **LATER)
            server.load(model)
        began, go, add_size = threading.Event(), threading.Event(), server.loader.add_size

        def slowly(loaded, batch, alone):
            began.set()
            assert go.wait(60)
            assert server.state.weights["location"][loaded.row] == codes.RESIDENT
            add_size(loaded, batch, alone)
            assert server.state.weights["location"][loaded.row] == codes.RESIDENT

        monkeypatch.setattr(server.loader, "add_size", slowly)
        ask(server, "m", made["m"], 2)
        if not began.wait(1):  # they left at once: the next request brings them
            ask(server, "m", made["m"], 2)
        assert began.wait(60)
        with ThreadPoolExecutor(2) as pool:
            asked = pool.submit(ask_one, server, "other", made["other"])  # there is memory for one model only
            ask_one(server, "m", made["m"])
            assert not asked.done()
            assert server.weights_state("m") == "resident"
            go.set()
            asked.result(60)
        wait_until(lambda: not server.state.weights["locked"].any())
        check_at_rest(server.state)


def test_a_load_does_not_wait_for_weights_that_are_held():
    """The memory that a load waits for is let go by the thread that captures, which in turn waits for the load."""
    with engine("virtual:h200", 1) as server:
        model, made = chain("m", 1, instances=1, **LATER)
        server.load(model)
        row = server.client.find("m").row
        with server.loaded_models.lock:
            ask(server, "m", made, 2)
            server.weight_cache.hold([server.client.find("m")])
            assert server.state.weights["locked"][row] == 1
            server.load(chain("new", 2, instances=1)[0])
        assert server.weights_state("m") in ("host", "resident")
        until_captured(server, "m", made)


@pytest.mark.parametrize("plenty", [True, False])
def test_a_capture_has_memory_apart_if_it_is_free(plenty):
    with engine("virtual:h200", 1, **({"memory_bytes": 1 << 30} if plenty else {})) as server:
        model, made = chain("m", 1, instances=1, **LATER)
        server.load(model)
        held, own = server.memory.instances_bytes, server.client.find("m").instances[0].arena
        with server.weight_cache.arenas.beside(model, own) as arena:
            assert (arena is not own) == plenty
            assert server.memory.instances_bytes == held + (arena.total_bytes if plenty else 0)
            assert server.state.arena_kept[own.index] == (not plenty)
            if plenty:
                ask(server, "m", made, 1)
        assert server.memory.instances_bytes == held
        ask(server, "m", made, 1)


def test_models_come_and_go_while_their_sizes_come(device):
    """Evictions, prefetches and reloads at random beside batches: right answers, and bytes as before."""
    with engine(device, 2, 2) as server:
        made = {f"m{k}": chain(f"m{k}", k, instances=1 + k % 2, **LATER) for k in range(4)}
        for model, _ in made.values():
            server.load(model)
        before = server.memory.instances_bytes

        def some_came():
            wait_until(lambda: any(len(sizes(server, name)["captured"]) > 2 for name in ("m0", "m1", "m2")))

        come_and_go(server, made, 8, 10, some_came)  # some of the clients' requests form batches
        wait_until(lambda: server.memory.instances_bytes == before)
        check_at_rest(server.state)
        for name, (_, weights) in made.items():
            assert sizes(server, name)["failed"] == []
            server.evict(name)
            for items in (2, 3, 4, 8):
                ask(server, name, weights, items)
        wait_until(lambda: not server.state.weights["locked"].any())
        for name in made:
            server.unload(name)
        assert server.memory.held_bytes == 0
        assert server.weight_cache.budget.taken == {}


def test_an_engine_is_closed_while_weights_are_held():
    with engine("virtual:h200", 1) as server:
        made = {}
        for k in range(2):
            model, made[f"m{k}"] = chain(f"m{k}", k, instances=1, **LATER)
            server.load(model)
        ask(server, "m0", made["m0"], 3)
        ask(server, "m1", made["m1"], 3)


def test_a_pytorch_module_gets_its_sizes(device):
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(N, 256), torch.nn.ReLU(), torch.nn.Linear(256, 8)).eval()
    x = torch.randn(8, N)
    with torch.no_grad():
        right = net(x).numpy()
    with pp.Engine(device, memory_bytes=1 << 30, tuning=SMALL) as server:
        server.load(pp.Model.from_torch(net, torch.zeros(1, N), name="net", instances=2, **LATER))

        async def some(n):
            return await asyncio.gather(*(server.infer("net", {"input": each.numpy()}) for each in x[:n]))

        def right_until_captured():
            for n in range(1, 9):
                found = np.stack([each["output"] for each in asyncio.run(some(n))])
                np.testing.assert_allclose(found, right[:n], rtol=1e-3, atol=1e-3)
            return not sizes(server, "net")["later"]

        wait_until(right_until_captured)
        server.evict("net")
        assert right_until_captured()
        check_at_rest(server.state)
