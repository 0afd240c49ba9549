"""Batch sizes that are captured while their model serves, when a batch first wants them."""

from __future__ import annotations

import asyncio
import threading

import numpy as np
import pytest
from core_check import check_at_rest, check_integrity
from engine_models import scale_model
from engine_requests import ask_items
from waiting import wait_until

import paellapy as pp
from paellapy.scheduler.core.errors import ModelError

BATCH = (1, 2, 4, 8)


def ask(engine, items: int, name: str = "scale", times: int = 2) -> None:
    """Runs a request of several items, which are one batch on an idle engine, and checks its answer."""
    x = np.random.default_rng(items).standard_normal((items, 64)).astype(np.float32)
    np.testing.assert_array_equal(asyncio.run(ask_items(engine, name, x))["y"], times * x)


def sizes(engine, name: str = "scale"):
    return engine.stats()["models"][name]["sizes"]


@pytest.fixture
def engine(tmp_path, monkeypatch):
    monkeypatch.setenv("PAELLAPY_CACHE_DIR", str(tmp_path))  # no size was measured before
    with pp.Engine("virtual:h200", quantum_us=5) as found:
        yield found
        check_at_rest(found.state)


def test_every_size_comes_when_a_batch_first_wants_it(engine):
    engine.load(scale_model(batch=BATCH, capture="on_demand"))
    held = engine.memory.held_bytes
    assert sizes(engine) == {"captured": [1, 8], "later": [2, 4], "failed": []}
    for items in (1, 7, 8):  # there is no better size for these than those that are there
        ask(engine, items)
    ask(engine, 2)
    wait_until(lambda: sizes(engine)["captured"] == [1, 2, 8])
    assert sizes(engine)["later"] == [4]
    ask(engine, 3)
    wait_until(lambda: sizes(engine)["captured"] == [1, 2, 4, 8])
    wait_until(lambda: engine.memory.held_bytes < held)  # the memory for captures is not needed any more
    check_integrity(engine.state)
    for items in range(1, 9):
        ask(engine, items)
    assert [each.batch for each in engine.profile("scale")] == [1, 2, 4, 8]


def test_in_the_end_the_core_knows_what_it_knows_of_a_model_captured_ahead(engine):
    options = {"steps": 4, "batch": BATCH, "instances": 2}  # several segments, the ends of some are reported
    engine.load(scale_model(**options, capture="on_demand"))
    for items in (2, 3):
        ask(engine, items, times=16)
    engine.load(scale_model("ahead", **options))
    wait_until(lambda: not sizes(engine)["later"])
    ahead, later = (engine.client.find(name).row for name in ("ahead", "scale"))
    for column in ("batch", "segments", "total_ns"):
        assert engine.state.size[column][later].tolist() == engine.state.size[column][ahead].tolist()
    for column in ("time_ns", "tail_ns", "blocks", "copy_bytes"):
        assert engine.state.segment[column][later].tolist() == engine.state.segment[column][ahead].tolist()
    assert engine.model_profile("scale").sizes == engine.model_profile("ahead").sizes
    for items in range(1, 9):
        ask(engine, items, times=16)


def test_requests_of_all_go_on_while_sizes_come(engine):
    engine.load(scale_model("other", batch=(1, 2)))
    engine.load(scale_model(batch=(1, 2, 3, 4, 8), instances=1, capture="on_demand"))
    stop, failed, asked = threading.Event(), [], [0, 0]

    def client(k: int, name: str) -> None:
        x = np.full(64, k + 1, np.float32)
        while not stop.is_set():
            y = engine.infer_sync(name, {"x": x})["y"]
            asked[k] += 1
            if not np.array_equal(y, 2 * x):
                failed.append(y)

    clients = [threading.Thread(target=client, args=each) for each in enumerate(("other", "scale"))]
    for each in clients:
        each.start()
    try:

        def all_there() -> bool:
            for items in (2, 3, 4):
                ask(engine, items)
            return not sizes(engine)["later"]

        wait_until(all_there)
        before = list(asked)
        wait_until(lambda: min(now - then for now, then in zip(asked, before, strict=True)) > 5)
    finally:
        stop.set()
        for each in clients:
            each.join()
    assert failed == []


def test_a_model_is_unloaded_and_loaded_again_while_a_size_is_captured(engine, monkeypatch):
    began, go = threading.Event(), threading.Event()
    add_size = engine.loader.add_size

    def slowly(*given) -> None:
        began.set()
        assert go.wait(60)
        add_size(*given)

    monkeypatch.setattr(engine.loader, "add_size", slowly)
    engine.load(scale_model(batch=BATCH, capture="on_demand"))
    ask(engine, 2)
    assert began.wait(60)
    ask(engine, 2)  # requests go on meanwhile
    unloading = threading.Thread(target=engine.unload, args=("scale",))
    unloading.start()
    go.set()
    unloading.join(60)
    assert not unloading.is_alive()
    assert engine.models == {}
    assert engine.memory.held_bytes == 0
    engine.load(scale_model(batch=BATCH, capture="on_demand"))
    assert sizes(engine)["later"] == [2, 4]
    ask(engine, 4)
    wait_until(lambda: sizes(engine)["captured"] == [1, 4, 8])


def test_an_engine_is_closed_while_a_size_is_wanted():
    for _ in range(3):
        with pp.Engine("virtual:h200") as engine:
            engine.load(scale_model(batch=BATCH, capture="on_demand"))
            ask(engine, 2)
        assert not any(each.name == "paellapy-sizes" and each.is_alive() for each in threading.enumerate())


def test_a_size_that_cannot_be_captured_is_that_size_s_fault_alone(engine, caplog):
    model = scale_model(batch=BATCH, capture="on_demand")
    fn = model.fn

    def fails_at_2(weights, inputs, outputs):
        if inputs["x"].shape[0] == 2:
            raise FloatingPointError("not with two")
        fn(weights, inputs, outputs)

    model.fn = fails_at_2
    engine.load(model)
    engine.load(scale_model("other", batch=BATCH, capture="on_demand"))
    ask(engine, 2)
    wait_until(lambda: sizes(engine)["failed"] == [2])
    (error,) = engine.stats()["models"]["scale"]["size_errors"].items()
    assert error[0] == 2
    assert "not with two" in error[1]
    for name in ("scale", "other"):
        for items in (2, 4):
            ask(engine, items, name)
    wait_until(lambda: sizes(engine) == {"captured": [1, 4, 8], "later": [], "failed": [2]})
    wait_until(lambda: sizes(engine, "other")["captured"] == [1, 2, 4, 8])
    assert engine.client.find("scale").spare is None


def test_sizes_wait_for_the_end_of_a_trace(engine):
    engine.load(scale_model(batch=BATCH, capture="on_demand"))
    with engine.trace():
        ask(engine, 2)
        with engine.loaded_models.lock:
            assert engine.loaded_models.lazy_capture.wanted(engine.client.find("scale")) == [2]
            engine.loaded_models.lazy_capture.capture_next()
        assert sizes(engine)["later"] == [2, 4]
    wait_until(lambda: sizes(engine)["later"] == [4])


def test_models_without_sizes_between_have_none_to_come(engine):
    for batch in ((1,), (2, 8)):
        engine.load(scale_model(batch=batch, capture="on_demand"))
        assert sizes(engine) == {"captured": list(batch), "later": [], "failed": []}
        assert engine.client.find("scale").spare is None
        engine.unload("scale")


def test_what_cannot_be_captured_on_demand_is_refused():
    with pytest.raises(ModelError, match="capture='later'"):
        scale_model(capture="later")
    assert scale_model(batch=BATCH).changed(capture="on_demand").later_batch == (2, 4)


def test_a_function_with_state_of_its_own_is_captured_ahead(engine):
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    net = torch.nn.Linear(64, 4)
    options = {"batch": BATCH, "capture": "on_demand"}
    assert pp.Model.from_torch(lambda x: net(x), torch.zeros(1, 64), name="f", **options).later_batch == ()
    assert pp.Model.from_torch(lambda x: 2 * x, torch.zeros(1, 64), name="g", **options).later_batch == (2, 4)
    engine.load(pp.Model.from_torch(net, torch.zeros(1, 64), name="net", **options))
    assert sizes(engine, "net")["later"] == [2, 4]
    x = np.random.default_rng(0).standard_normal((2, 64)).astype(np.float32)

    async def both():
        return await asyncio.gather(*(engine.infer("net", {"input": each}) for each in x))

    def there() -> bool:
        found = np.stack([each["output"] for each in asyncio.run(both())])
        np.testing.assert_allclose(found, net(torch.from_numpy(x)).detach().numpy(), rtol=1e-5, atol=1e-5)
        return 2 in sizes(engine, "net")["captured"]

    wait_until(there)
