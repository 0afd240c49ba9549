"""Inputs whose length varies: padded to a size, masked, and cut back; sizes are captured when they are wanted."""

from __future__ import annotations

import asyncio
import json

import numpy as np
import pytest
from failing import failing
from serving_server import ask, running
from waiting import held_core, wait_until

import paellapy as pp
from paellapy.scheduler.core.errors import InputError, ModelError
from paellapy.scheduler.core.state import Limits
from paellapy.scheduler.policies.policy import find_policy
from paellapy.serving.registry import Registry, entry_of
from paellapy.serving.workers.engine_process import EngineHost, SavedState
from paellapy.serving.workers.worker import EngineLink

torch = pytest.importorskip("torch", reason="PyTorch is not installed: pip install torch==2.13.0")

DEVICE, SIZES, WORDS, PAD = "virtual:h200", (8, 16, 64), 50, 3


class Encoder(torch.nn.Module):
    """Words attend to the words that the mask has; the second result is their mean."""

    def __init__(self) -> None:
        super().__init__()
        # Not PyTorch's generator: a capture beside this thread sets it back.
        table = np.random.default_rng(0).normal(size=(WORDS, 8)).astype(np.float32)
        self.embed = torch.nn.Embedding.from_pretrained(torch.from_numpy(table))

    def forward(self, input_ids, attention_mask):
        x = self.embed(input_ids)
        words = (x @ x.transpose(1, 2)).masked_fill(attention_mask[:, None] == 0, -1e9).softmax(-1) @ x
        weights = attention_mask[..., None].to(words.dtype)
        return {"words": words, "mean": (words * weights).sum(1) / weights.sum(1)}


class PaddedWith(Encoder):
    """As a library's model: it has a number for padding, and says where a word has it."""

    def __init__(self) -> None:
        super().__init__()
        self.config = type("Config", (), {"pad_token_id": PAD})()

    def forward(self, input_ids, attention_mask):
        return {"padding": (input_ids == PAD).long() * (1 - attention_mask)}


EXAMPLE = {"input_ids": torch.zeros(1, 5, dtype=torch.int64)}


def encoder(**about):
    options = {"name": "encoder", "batch": (1, 2, 4), "lengths": {"input_ids": {1: SIZES}}, **about}
    return pp.Model.from_torch(Encoder(), EXAMPLE, **options)


def texts(*lengths):
    return [np.random.default_rng(n).integers(0, WORDS, n) for n in lengths]


def check(ids, found):
    with torch.no_grad():
        wanted = Encoder()(torch.from_numpy(ids)[None], torch.ones(1, len(ids), dtype=torch.int64))
    assert found["words"].shape == (len(ids), 8)
    for key, value in wanted.items():
        np.testing.assert_allclose(found[key], value[0].numpy(), rtol=1e-4, atol=1e-5)


@pytest.fixture(scope="module")
def engine():
    with pp.Engine(DEVICE) as engine:
        yield engine


@pytest.fixture
def loaded(engine):
    engine.load(encoder())
    yield engine
    engine.unload("encoder")


def captured(engine):
    return list(engine.core.models.by_name["encoder"].by_length)


def test_requests_of_any_length_are_answered_as_without_padding(loaded):
    async def main(given):
        return await asyncio.gather(*(loaded.infer("encoder", {"input_ids": ids}) for ids in given))

    given = texts(*range(1, 65, 3))
    for ids, found in zip(given, asyncio.run(main(given)), strict=True):
        check(ids, found)


def test_a_size_is_captured_when_a_request_first_wants_it(loaded):
    assert captured(loaded) == [64]
    for ids in texts(10):
        check(ids, loaded.infer_sync("encoder", {"input_ids": ids}))
        wait_until(lambda: captured(loaded) == [16, 64], 60)
        check(ids, loaded.infer_sync("encoder", {"input_ids": ids}))
    base = loaded.core.models.by_name["encoder"]
    base.wanted_lengths.add(16)  # as by a request that came during the capture
    wait_until(lambda: not base.wanted_lengths, 60)
    with loaded.loaded_models.lock:
        assert not base.length_errors
    stats = loaded.stats()["models"]
    assert [stats[name]["completed"] for name in ("encoder", "encoder[16]")] == [1, 1]


def test_all_sizes_share_the_weights_and_leave_with_the_model(engine):
    engine.load(encoder(capture="ahead"))
    assert captured(engine) == list(SIZES)
    profiles = [engine.model_profile("encoder", length=size) for size in (8, None)]
    assert [each.name for each in profiles] == ["encoder[8]", "encoder"]
    assert pp.simulate(profiles, pp.Poisson(1000, {each.name: 1.0 for each in profiles}, duration=0.01)).models
    with failing(ModelError, field="length", given=9, limit=list(SIZES)):
        engine.model_profile("encoder", length=9)
    held = {name: each.weights_bytes for name, each in engine.memory.reservations.items()}
    assert held == {"encoder": WORDS * 8 * 4, "encoder[8]": 0, "encoder[16]": 0}
    engine.unload("encoder")
    assert not engine.stats()["models"]
    assert not engine.memory.reservations


def test_a_size_without_room_is_given_up_and_a_longer_one_goes_on_serving(loaded, monkeypatch):
    held, base = loaded.memory.held_bytes, loaded.core.models.by_name["encoder"]
    monkeypatch.setattr(loaded.memory, "budget_bytes", held)
    for ids in texts(10, 3):
        check(ids, loaded.infer_sync("encoder", {"input_ids": ids}))
    wait_until(lambda: set(base.length_errors) == {8, 16}, 60)
    for ids in texts(3, 10, 60):
        check(ids, loaded.infer_sync("encoder", {"input_ids": ids}))
    assert captured(loaded) == [64]
    assert loaded.memory.held_bytes == held


def test_sizes_wanted_later_are_counted_as_those_captured_ahead(loaded):
    held = loaded.memory.held_bytes
    for ids in texts(3, 10):
        loaded.infer_sync("encoder", {"input_ids": ids})
    wait_until(lambda: captured(loaded) == list(SIZES), 60)
    by_size = {name: each.total_bytes for name, each in loaded.memory.reservations.items()}
    assert loaded.memory.held_bytes == sum(by_size.values()) > held == by_size["encoder"]
    assert all(0 < by_size[name] < held for name in ("encoder[8]", "encoder[16]"))
    assert {name: each["memory_bytes"] for name, each in loaded.stats()["models"].items()} == by_size


def test_weights_of_all_lengths_stay_where_others_come_and_go():
    """Two more models, of which memory has room for one, beside an encoder whose sizes are captured meanwhile."""
    with pp.Engine(DEVICE, memory_bytes=8 << 20) as engine:
        engine.load(encoder(batch=(1, 2), instances=1))
        nets = [torch.nn.Linear(1024, 1024, bias=False) for _ in range(2)]
        for k, net in enumerate(nets):
            model = pp.Model.from_torch(net, torch.zeros(1, 1024), name=f"net{k}", batch=(1,), instances=1)
            engine.load(model)
        x = np.ones(1024, np.float32)
        for ids in texts(3, 10, 60, 3, 10, 60):
            check(ids, engine.infer_sync("encoder", {"input_ids": ids}))
            for k, net in enumerate(nets):
                found = engine.infer_sync(f"net{k}", {"input": x})["output"]
                np.testing.assert_allclose(found, net(torch.from_numpy(x)).detach().numpy(), rtol=1e-4, atol=1e-5)
        wait_until(lambda: captured(engine) == list(SIZES), 60)
        for ids in texts(3, 10):
            check(ids, engine.infer_sync("encoder", {"input_ids": ids}))
        account = engine.weight_cache.account()
        assert account["evicted"] > 0
        assert account["models"]["encoder"]["state"] == "resident"
        assert account["models"]["encoder"]["evicted"] == account["models"]["encoder"]["misses"] == 0
        with failing(ModelError, field="resident"):
            engine.evict("encoder")
        engine.unload("encoder")
        assert "encoder" not in engine.weight_cache.account()["models"]
        with failing(ModelError, field="resident", given=False):
            engine.load(encoder(resident=False))


def test_a_request_joins_a_larger_batch_that_waits_if_that_is_cheaper(engine):
    engine.load(encoder(capture="ahead", batch=(1, 4)))
    base = engine.core.models.by_name["encoder"]
    sizes = base.by_length

    queued = engine.core.state.model["queued"]

    def chosen(waiting):
        for size, items in waiting.items():
            queued[sizes[size].row] = items
        found = [engine.client.for_length(base, n).model.length for n in (5, 17)]
        queued[[each.row for each in sizes.values()]] = 0
        return found

    try:
        with held_core(engine):
            assert chosen({}) == [8, 64]
            assert chosen({16: 2}) == [16, 64]  # there, a batch of 4 runs anyway
            assert chosen({16: 4}) == [8, 64]  # the next batch there is not begun
            assert chosen({8: 4, 16: 2}) == [8, 64]  # a whole batch waits: others will follow it
    finally:
        engine.unload("encoder")


def test_inputs_are_padded_with_what_the_module_says(engine):
    model = pp.Model.from_torch(PaddedWith(), EXAMPLE, name="padded", lengths={"input_ids": {1: (8,)}}, batch=(1,))
    assert model.lengths.pads["input_ids"] == PAD
    assert model.lengths.mask == "attention_mask"


def test_a_mask_in_the_request_counts(loaded):
    (ids,) = texts(12)
    mask = (np.arange(12) < 7).astype(np.int64)
    found = loaded.infer_sync("encoder", {"input_ids": ids, "attention_mask": mask})
    (shorter,) = (loaded.infer_sync("encoder", {"input_ids": ids[:7]}),)
    np.testing.assert_allclose(found["mean"], shorter["mean"], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("inputs", "field", "given", "limit"), [
    ({"input_ids": np.zeros(65, np.int64)}, "input_ids", 65, 64),
    ({"input_ids": np.zeros(0, np.int64)}, "input_ids", 0, 64),
    ({"input_ids": np.zeros(5, np.int64), "attention_mask": np.ones(6, np.int64)}, "input_ids", [5, 6], None),
    ({"input_ids": np.zeros((2, 2, 2), np.int64)}, "input_ids", (2, 2, 2), (64,)),
    ({"input_ids": np.zeros(5, np.float32)}, "input_ids", np.dtype(np.float32), np.dtype(np.int64)),
    ({"input_ids": np.full(5, WORDS)}, "input_ids", None, (0, WORDS - 1)),
])  # fmt: skip
def test_wrong_inputs_are_refused_with_the_extent(loaded, inputs, field, given, limit):
    with pytest.raises(InputError) as caught:
        loaded.infer_sync("encoder", inputs)
    assert caught.value.field == field
    assert given is None or caught.value.given == given
    assert getattr(caught.value, "limit", None) == limit
    check(texts(4)[0], loaded.infer_sync("encoder", {"input_ids": texts(4)[0]}))


@pytest.mark.parametrize("lengths", [
    {}, 5, {"words": {1: (8,)}}, {"input_ids": 8}, {"input_ids": {0: (8,)}}, {"input_ids": {2: (8,)}},
    {"input_ids": {1: ()}}, {"input_ids": {1: (16, 8)}}, {"input_ids": {1: (0, 8)}}, {"input_ids": {1: range(1, 20)}},
])  # fmt: skip
def test_wrong_lengths_are_refused(lengths):
    with failing(ModelError, field="lengths", model="encoder"):
        encoder(lengths=lengths)


def test_a_module_whose_answers_padding_changes_is_refused():
    net = torch.nn.Sequential(torch.nn.Embedding(WORDS, 4), torch.nn.Flatten(1), torch.nn.AdaptiveMaxPool1d(4))
    with failing(ModelError, field="lengths", given="output"):
        pp.Model.from_torch(net, EXAMPLE["input_ids"], lengths={"input": {1: SIZES}}, name="net")


def test_over_http_shapes_are_open_and_answers_have_the_requests_length():
    def asked(shape, numbers):
        tensor = {"name": "input_ids", "datatype": "INT64", "shape": shape, "data": numbers}
        return ask(server, "POST", "/v2/models/encoder/infer", json.dumps({"inputs": [tensor]}).encode())[::2]

    with running([encoder(capture="ahead")]) as server:
        about = ask(server, "GET", "/v2/models/encoder")[2]
        assert [each["shape"] for each in about["inputs"]] == [[-1, -1], [-1, -1]]
        assert {each["name"]: each["shape"] for each in about["outputs"]} == {"words": [-1, -1, 8], "mean": [-1, 8]}
        for ids in texts(5, 5, 20, 64):
            status, found = asked([1, len(ids)], ids.tolist())
            assert status == 200
            check(ids, {o["name"]: np.array(o["data"]).reshape(o["shape"])[0] for o in found["outputs"]})
        assert [o["shape"] for o in asked([2, 9], [1] * 18)[1]["outputs"]] == [[2, 9, 8], [2, 8]]
        assert asked([1, 65], [0] * 65)[0] == 400
        assert ask(server, "GET", "/v2/models/encoder/stats")[2]["model_stats"][0]["inference_count"] == 6


def test_workers_take_each_request_at_its_own_size(tmp_path):
    """As between two processes: the engine's host and a worker's link, here in one event loop."""

    async def main(engine):
        registry = Registry(engine, [entry_of(encoder())])
        await asyncio.to_thread(registry.load, "encoder")
        tried = engine.stats()["models"]["encoder"]["completed"]
        host = EngineHost(registry, tmp_path / "socket", SavedState(tmp_path / "saved"), "")
        host.start()
        link = EngineLink(tmp_path / "socket", 1, lambda name: find_policy(name or "paella"))
        connected = asyncio.create_task(link.run())
        client, (ids,) = link.engine.client, texts(10)

        def sizes():
            found = link.engine.core.models.by_name.get("encoder")
            return [] if found is None else list(found.by_length)

        try:
            for known in ([64], [16, 64]):
                while sizes() != known:
                    await link.changed()
                check(ids, await client.infer("encoder", {"input_ids": ids}, 60_000, None, None))
            stats = link.engine.stats()["models"]
            assert [stats[name]["completed"] for name in ("encoder", "encoder[16]")] == [tried + 1, 1]
            await asyncio.to_thread(registry.unload, "encoder")
            while sizes():
                await link.changed()
        finally:
            link.close()
            await connected
            await host.stop()

    with pp.Engine(DEVICE, limits=Limits(producers=2)) as engine:
        asyncio.run(main(engine))
