"""PyTorch modules as models, on the virtual GPU, where PyTorch computes on the CPU; `test_gpu_torch` has the rest."""

from __future__ import annotations

import asyncio
import functools
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from failing import failing

import paellapy as pp
from paellapy.scheduler.core.errors import CaptureError, InputError, ModelError, RequestFailedError

torch = pytest.importorskip("torch", reason="PyTorch is not installed: pip install torch==2.13.0")

DEVICE = "virtual:h200"


class SmallNet(torch.nn.Module):
    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.conv = torch.nn.Conv2d(3, 8, 3, padding=1)
        self.norm = torch.nn.BatchNorm2d(8)
        self.head = torch.nn.Linear(8, 10)

    def forward(self, x):
        x = torch.relu(self.norm(self.conv(x)))
        return self.head(x.mean((2, 3)))


@pytest.fixture
def engine():
    with pp.Engine(DEVICE, quantum_us=30) as engine:
        yield engine


def images(n: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((n, 3, 16, 16)).astype(np.float32)


def test_a_module_that_draws_random_numbers_draws_new_ones_for_every_request(engine):
    def noisy(x):
        return x + torch.rand_like(x)

    torch.manual_seed(3)
    before = torch.get_rng_state()
    engine.load(pp.Model.from_torch(noisy, torch.zeros(1, 8), name="noisy", batch=(1, 2)))
    assert torch.equal(torch.get_rng_state(), before)
    answers = [engine.infer_sync("noisy", {"input": np.ones(8, np.float32)})["output"] for _ in range(5)]
    assert len({each.tobytes() for each in answers}) == 5
    assert all(((each >= 1) & (each < 2)).all() for each in answers)


@pytest.mark.parametrize("channels_last", [False, True])
def test_a_module_gives_what_it_gives_by_itself_at_every_batch_size(engine, channels_last):
    net, options = SmallNet().eval(), {"channels_last": channels_last, "batch": (1, 2, 4)}
    model = pp.Model.from_torch(net, torch.zeros(1, 3, 16, 16), name="net", **options)
    assert model.inputs["input"].shape == (3, 16, 16)
    assert model.outputs["output"].shape == (10,)
    engine.load(model)
    x = images(40)
    with torch.no_grad():
        expected = net(torch.from_numpy(x)).numpy()

    async def main():
        return await asyncio.gather(*(engine.infer("net", {"input": each}) for each in x))

    found = asyncio.run(main())
    np.testing.assert_allclose([each["output"] for each in found], expected, rtol=1e-4, atol=1e-5)
    assert engine.stats()["models"]["net"]["mean_batch"] > 1


def test_operations_become_kernels_with_blocks_and_time(engine):
    engine.load(pp.Model.from_torch(SmallNet(), torch.zeros(1, 3, 16, 16), name="net", batch=(1, 8)))
    one, eight = engine.profile("net")
    assert sum(s.kernels for s in one.segments) >= 4
    assert 1e3 < one.whole_ns <= eight.whole_ns < 1e6
    with engine.trace() as t:
        engine.infer_sync("net", {"input": images(1)[0]})
    names = set(t.kernels)
    assert any("conv" in name for name in names)
    assert any("addmm" in name for name in names)


def test_inputs_and_outputs_may_have_names(engine):
    def blend(a, b):
        return {"sum": a + b, "difference": a - b}

    model = pp.Model.from_torch(blend, {"a": torch.zeros(1, 5), "b": torch.zeros(1, 5)}, batch=(1,))
    assert model.name == "blend"
    engine.load(model)
    found = engine.infer_sync("blend", {"a": np.full(5, 3, np.float32), "b": np.ones(5, np.float32)})
    np.testing.assert_array_equal(found["sum"], np.full(5, 4))
    np.testing.assert_array_equal(found["difference"], np.full(5, 2))


class Layers(torch.nn.Module):
    """Returns what one of its layers computed, too, with the batch behind the number of the layer."""

    def forward(self, x):
        return {"logits": x * 2, "states": torch.stack([x, x + 1])}


def test_results_without_the_batch_first_are_left_out_if_outputs_say_so(engine):
    example = torch.zeros(1, 3)
    with failing(ModelError, field="states", given=(2, 1, 3)) as caught:
        pp.Model.from_torch(Layers(), example)
    assert "['logits']" in caught.value.remedies[0]
    with failing(ModelError, field="outputs", given=["logits", "scores"]):
        pp.Model.from_torch(Layers(), example, outputs=["logits", "scores"])
    engine.load(pp.Model.from_torch(Layers(), example, name="layers", outputs=["logits"], batch=(1,)))
    try:
        found = engine.infer_sync("layers", {"input": np.ones(3, np.float32)})
    finally:
        engine.unload("layers")
    assert {key: value.tolist() for key, value in found.items()} == {"logits": [2.0, 2.0, 2.0]}


def test_tensors_in_a_list_of_a_named_result_are_numbered(engine):
    def call(x):
        return {"levels": [x, x[:, :2] * 2, None], "y": x + 1}

    engine.load(pp.Model.from_torch(call, torch.zeros(1, 3), name="levels", batch=(1,)))
    found = engine.infer_sync("levels", {"input": np.ones(3, np.float32)})
    assert {key: each.tolist() for key, each in found.items()} == {
        "levels.0": [1, 1, 1], "levels.1": [2, 2], "y": [2, 2, 2],
    }  # fmt: skip
    engine.unload("levels")


def test_several_positional_inputs_are_numbered_or_named_by_the_caller():
    def product(a, b):
        return a * b, a

    examples = (torch.zeros(1, 2), torch.zeros(1, 2))
    model = pp.Model.from_torch(product, examples)
    assert list(model.inputs) == ["input0", "input1"]
    assert list(model.outputs) == ["output0", "output1"]
    assert list(pp.Model.from_torch(product, examples, input_names=("x", "y")).inputs) == ["x", "y"]


@pytest.mark.parametrize(("options", "goes_in", "comes_out"), [
    ({"dtype": torch.float16}, "float16", "float16"), ({"dtype": "bfloat16"}, "bfloat16", "bfloat16"),
    ({"autocast": torch.bfloat16}, "float32", "bfloat16"),
    ({"dtype": "float16", "autocast": "bfloat16"}, "float16", "bfloat16"),
])  # fmt: skip
def test_half_precision_goes_in_and_comes_out(engine, options, goes_in, comes_out):
    net = torch.nn.Linear(6, 4)
    model = pp.Model.from_torch(net, torch.zeros(1, 6), name="half", batch=(1,), **options)
    assert (model.inputs["input"].dtype.name, model.outputs["output"].dtype.name) == (goes_in, comes_out)
    engine.load(model)
    x = np.linspace(-1, 1, 6, dtype=np.float32)
    found = engine.infer_sync("half", {"input": x.astype(model.inputs["input"].dtype)})["output"]
    np.testing.assert_allclose(found.astype(np.float32), net(torch.from_numpy(x)).detach().numpy(), 2e-2, 2e-2)


def test_the_weights_count_once_whatever_the_number_of_instances(engine):
    net = SmallNet()
    model = pp.Model.from_torch(net, torch.zeros(1, 3, 16, 16), name="net", batch=(1, 2), instances=3)
    engine.load(model)
    parameters = sum(t.numel() * t.element_size() for t in [*net.parameters(), *net.buffers()])
    assert engine.memory.reservations["net"].weights_bytes == parameters == model.weights_bytes


@pytest.mark.parametrize("options", [{}, {"dtype": torch.float16}, {"channels_last": True}, {"autocast": "bfloat16"}])
def test_the_callers_module_stays_as_it_was(engine, options):
    net = torch.nn.Sequential(SmallNet(), torch.nn.Dropout())
    net[1].eval()  # one part in another mode than the rest
    before = {key: (t, t.clone(), t.data_ptr(), t.stride()) for key, t in net.state_dict(keep_vars=True).items()}
    engine.load(pp.Model.from_torch(net, torch.zeros(1, 3, 16, 16), name="net", batch=(1, 2), **options))
    engine.infer_sync("net", {"input": images(1)[0].astype(engine.models["net"].inputs["input"].dtype)})
    engine.unload("net")
    assert (net.training, net[0].norm.training, net[1].training) == (True, True, False)
    assert all(p.requires_grad for p in net.parameters())
    for key, t in net.state_dict(keep_vars=True).items():
        was, value, where, strides = before[key]
        assert t is was
        assert (t.dtype, t.data_ptr(), t.stride()) == (value.dtype, where, strides)
        assert torch.equal(t, value)
    net(torch.zeros(2, 3, 16, 16)).sum().backward()
    assert net[0].head.weight.grad is not None


def test_weights_that_are_not_converted_are_those_of_the_module(engine):
    net = torch.nn.Linear(3, 2, bias=False)
    for name, dtype in (("same", None), ("half", torch.float16)):
        engine.load(pp.Model.from_torch(net, torch.zeros(1, 3), name=name, dtype=dtype, batch=(1,)))
    ones, kept = np.ones(3, np.float32), net.weight.sum(1).detach().numpy()
    with torch.no_grad():
        net.weight.mul_(2)  # as a step of an optimiser does
    np.testing.assert_allclose(engine.infer_sync("same", {"input": ones})["output"], 2 * kept, rtol=1e-5)
    found = engine.infer_sync("half", {"input": ones.astype(np.float16)})["output"]
    np.testing.assert_allclose(found.astype(np.float32), kept, atol=1e-2)
    net.half()  # gives the module new memory; the model keeps the old
    np.testing.assert_allclose(engine.infer_sync("same", {"input": ones})["output"], 2 * kept, rtol=1e-5)


def test_weights_that_are_tied_stay_tied():
    net = torch.nn.Sequential(torch.nn.Linear(4, 4, bias=False), torch.nn.Linear(4, 4, bias=False))
    net[1].weight = net[0].weight
    assert pp.Model.from_torch(net, torch.zeros(1, 4), dtype=torch.float16).weights_bytes == 4 * 4 * 2


def test_a_module_that_is_not_initialised_yet_is_by_its_example(engine):
    engine.load(pp.Model.from_torch(torch.nn.LazyLinear(2), torch.zeros(1, 5), name="lazy", batch=(1,)))
    assert engine.infer_sync("lazy", {"input": np.zeros(5, np.float32)})["output"].shape == (2,)


class Twice(torch.nn.Linear):
    """Holds a tensor that autograd made, as torch.nn.utils.weight_norm leaves one."""

    def __init__(self) -> None:
        super().__init__(2, 2, bias=False)
        self.doubled = self.weight * 2

    def forward(self, x):
        return x @ self.doubled.T


def test_a_module_may_hold_what_autograd_made(engine):
    net = Twice()
    engine.load(pp.Model.from_torch(net, torch.zeros(1, 2), name="twice", batch=(1,)))
    found = engine.infer_sync("twice", {"input": np.ones(2, np.float32)})["output"]
    np.testing.assert_allclose(found, 2 * net.weight.sum(1).detach().numpy(), rtol=1e-5)


def test_a_module_that_cannot_be_copied_is_refused_with_the_way_around():
    net = torch.nn.Linear(2, 2)
    net.lock = threading.Lock()
    with failing(ModelError, model="Linear", field="module"):
        pp.Model.from_torch(net, torch.zeros(1, 2))
    assert pp.Model.from_torch(lambda x: net(x), torch.zeros(1, 2)).outputs["output"].shape == (2,)


@pytest.mark.parametrize("wrong", ["half precision", "nn", np.float16, torch.int8, 16])
@pytest.mark.parametrize("option", ["dtype", "autocast"])
def test_what_is_no_floating_point_type_is_refused(option, wrong):
    with failing(ModelError, field=option, given=wrong):
        pp.Model.from_torch(torch.nn.Linear(2, 2), torch.zeros(1, 2), **{option: wrong})


def test_a_model_can_be_unloaded_and_loaded_again(engine):
    model = pp.Model.from_torch(SmallNet(), torch.zeros(1, 3, 16, 16), name="net", batch=(1,))
    answers = []
    for _ in range(2):
        engine.load(model)
        answers.append(engine.infer_sync("net", {"input": images(1)[0]})["output"])
        engine.unload("net")
    np.testing.assert_array_equal(*answers)


@pytest.mark.parametrize(("call", "example", "field"), [
    (3, torch.zeros(1, 2), "module"), (torch.relu, (), "example_inputs"), (torch.relu, (np.zeros(3),), "input"),
    (torch.relu, torch.tensor(1.0), "input"), (lambda x: x.sum(), torch.zeros(1, 2), "output"),
    (lambda x: x.reshape(2, 1), torch.zeros(1, 2), "output"), (lambda x: "text", torch.zeros(1, 2), "outputs"),
    (lambda x: [x, 3], torch.zeros(1, 2), "output1"), (lambda x: x @ x, torch.zeros(1, 2), "example_inputs"),
])  # fmt: skip
def test_what_cannot_be_a_model_is_refused_with_the_reason(call, example, field):
    with failing(ModelError, field=field):
        pp.Model.from_torch(call, example)


def test_a_shape_that_depends_on_the_batch_elsewhere_is_refused_when_it_is_loaded(engine):
    def twisted(x):
        return x.repeat(1, x.shape[0])

    with failing(CaptureError, field="output", given=(2, 6), limit=(2, 3)):
        engine.load(pp.Model.from_torch(twisted, torch.zeros(1, 3), batch=(1, 2)))


WAITS = {
    "item": lambda x: x * x.sum().item(),
    "condition": lambda x: x if x.sum() > 0 else -x,
    "cpu": lambda x: x * x.cpu(),
    "tolist": lambda x: x * x.tolist()[0][0],
    "numpy": lambda x: x * float(np.asarray(x)[0, 0]),
    "equal": lambda x: x * torch.equal(x, x),
    "nonzero": lambda x: x * len(x.nonzero()),
    "mask": lambda x: x * x[x > 0].sum(),
    "unique": lambda x: x * torch.unique(x).sum(),
    "index": lambda x: x * x[x.sum().long() * 0],
    "written": lambda x: x * torch.zeros(()).add_(x.sum()).item(),
}


@pytest.mark.parametrize("kind", WAITS)
def test_what_would_wait_for_a_gpu_is_refused_with_the_line_without_one(engine, kind):
    with pytest.raises(CaptureError) as caught:
        engine.load(pp.Model.from_torch(WAITS[kind], torch.ones(1, 4), name=kind, batch=(1,)))
    path, line = caught.value.location.rsplit(":", 1)
    assert (caught.value.model, caught.value.doing, path) == (kind, "waits for the GPU", __file__)
    assert f'"{kind}": lambda' in Path(__file__).read_text().splitlines()[int(line) - 1]
    assert not engine.models


class Layer(torch.nn.Linear):
    """With the settings of a library's model, and a line that waits."""

    def __init__(self, kind: str) -> None:
        super().__init__(4, 4)
        self.kind, self.set_attn_implementation, self.set_experts_implementation = kind, print, print

    def forward(self, x, sizes):
        if self.kind == "experts":
            return x * super().forward(x).sum().item()  # an expert
        if self.kind == "sdpa":
            return x * super().forward(x).sum().item()  # sdpa
        assert super().forward(x).sum().item() < 1e9
        return x


@pytest.mark.parametrize(("kind", "words"), [
    ("experts", ["dtype=torch.bfloat16", "set_experts_implementation", "sizes", "ends before", "lease"]),
    ("sdpa", ["set_attn_implementation", "sizes", "ends before", "lease"]),
    ("assertion", ["python -O", "sizes", "ends before", "lease"]),
])  # fmt: skip
def test_a_refused_wait_comes_with_what_to_do_about_it(engine, kind, words):
    example = {"x": torch.ones(1, 4), "sizes": torch.ones(1, 4)}
    with pytest.raises(CaptureError) as caught:
        engine.load(pp.Model.from_torch(Layer(kind), example, batch=(1,)))
    found = caught.value.remedies
    assert len(found) == len(words)
    assert all(word in remedy for word, remedy in zip(words, found, strict=True))


class Padded(torch.nn.Module):
    """A pre-built encoder, whose fast path packs the rows that the mask keeps: a shape that depends on data."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        layer = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        self.encoder = torch.nn.TransformerEncoder(layer, 1)

    def forward(self, x, mask):
        return self.encoder(x, src_key_padding_mask=mask)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_a_prebuilt_encoder_is_refused_while_its_fast_path_packs_rows(engine):
    module = Padded()
    example = {"x": torch.ones(1, 4, 8), "mask": torch.zeros(1, 4, dtype=torch.bool)}
    with pytest.raises(CaptureError) as caught:
        engine.load(pp.Model.from_torch(module, example, name="padded", batch=(1,)))
    assert any("use_nested_tensor = False" in each for each in caught.value.remedies)
    module.encoder.use_nested_tensor = False
    engine.load(pp.Model.from_torch(module, example, name="padded", batch=(1,)))
    x, mask = np.random.default_rng(0).standard_normal((4, 8)).astype(np.float32), np.array([False, False, True, True])
    answer = engine.infer_sync("padded", {"x": x, "mask": mask})["output"]
    with torch.no_grad():
        eager = module.eval()(torch.tensor(x)[None], torch.tensor(mask)[None])[0]
    np.testing.assert_allclose(answer, eager, atol=1e-5)


def test_products_of_experts_wait_in_all_types_but_one(engine):
    def product(x, dtype):
        made = torch.ones(2, 16, 16, dtype=dtype)
        ends = torch.tensor([1, len(x)], dtype=torch.int32)
        return torch.nn.functional.grouped_mm(x.to(dtype), made, offs=ends).float()

    def load(dtype):
        call = functools.partial(product, dtype=dtype)
        engine.load(pp.Model.from_torch(call, torch.ones(1, 16), name="experts", batch=(2, 4)))

    with failing(CaptureError, doing="waits for the GPU"):
        load(torch.float16)
    load(torch.bfloat16)
    assert (engine.infer_sync("experts", {"input": np.ones(16, np.float32)})["output"] == 16).all()


def test_code_that_avoids_waits_in_captures_avoids_them_in_trial_runs(engine):
    def captured():
        try:
            return torch.cuda.is_current_stream_capturing()
        except RuntimeError:  # a build of PyTorch without CUDA
            return False

    elsewhere = []

    def masked(x, mask):
        asking = threading.Thread(target=lambda: elsewhere.append(captured()))
        asking.start()
        asking.join()
        return x if not captured() and mask.all() else x * mask

    example = {"x": torch.ones(1, 4), "mask": torch.ones(1, 4)}
    engine.load(pp.Model.from_torch(masked, example, batch=(1, 2)))
    given = {"x": np.full(4, 3, np.float32), "mask": np.array([1, 1, 0, 1], np.float32)}
    np.testing.assert_array_equal(engine.infer_sync("masked", given)["output"], [3, 3, 0, 3])
    assert elsewhere
    assert not any([*elsewhere, captured()])


class Weighing(torch.nn.Module):
    """Reads a weight, which would be on the GPU, and a constant, which would not."""

    def __init__(self, weight: bool) -> None:
        super().__init__()
        self.register_buffer("scale", torch.tensor(2.0))
        self.constant = torch.tensor(3.0)
        self.weight = weight

    def forward(self, x):
        return x * (self.scale if self.weight else self.constant).item()


def test_weights_are_on_the_gpu_and_other_tensors_where_they_were(engine):
    with failing(CaptureError, doing="waits for the GPU"):
        engine.load(pp.Model.from_torch(Weighing(True), torch.ones(1, 4), name="scale", batch=(1,)))
    engine.load(pp.Model.from_torch(Weighing(False), torch.ones(1, 4), name="constant", batch=(1,)))
    np.testing.assert_array_equal(engine.infer_sync("constant", {"input": np.ones(4, np.float32)})["output"], 3)


@pytest.mark.parametrize(
    "call",
    [
        lambda x: x if x.shape[0] > 1 else -x,
        lambda x: x * torch.linspace(0, 1, 3)[1].item(),
        lambda x: x * sum(torch.tensor([1.0, 2.0]).tolist()),
        lambda x: torch.where(x > 0, x, 0.0),
        lambda x: x.masked_fill(x > 0, 1.0),
        lambda x: x.clone().index_put_((x > 0,), torch.tensor(1.0)),
        lambda x: x.gather(1, x.argmax(1, keepdim=True)),
        lambda x: x + torch.arange(4, device=x.device),
    ],
)
def test_what_needs_not_wait_is_not_refused(engine, call):
    engine.load(pp.Model.from_torch(call, torch.ones(1, 4), name="fine", batch=(1, 2)))
    assert engine.infer_sync("fine", {"input": np.ones(4, np.float32)})["output"].shape[0] in (1, 4)


def test_kernels_that_do_not_report_are_traced_at_segment_grain(engine, monkeypatch):
    """As cuDNN's are on a real GPU; here the reports are thrown away."""
    net = torch.nn.Sequential(*(torch.nn.Linear(512, 512) for _ in range(40)))
    engine.load(pp.Model.from_torch(net, torch.zeros(1, 512), name="deep", batch=(1,)))
    assert len(engine.profile("deep")[0].segments) > 2
    ends = engine.backend.end_trace

    def silent(models):
        found = ends(models)
        pieces = [replace(p, launches=()) for p in found.pieces]
        return replace(found, blocks=found.blocks[:0], launches=found.launches[:0], pieces=pieces)

    monkeypatch.setattr(engine.backend, "end_trace", silent)
    x = np.ones(512, np.float32)

    async def main():
        await asyncio.gather(*(engine.infer("deep", {"input": x}) for _ in range(6)))

    with engine.trace() as t:
        engine.infer_sync("deep", {"input": x})
        asyncio.run(main())
    assert len(t.jobs) == 7
    assert len(t.segments[t.segments["segment"] == -1]) >= 1  # the first was alone: one launch
    for job in t.jobs:
        of_instance = t.segments[t.segments["instance"] == job["instance"]]
        mine = of_instance[(of_instance["start_ns"] >= job["start_ns"]) & (of_instance["end_ns"] <= job["end_ns"])]
        assert len(mine) in (1, len(engine.profile("deep")[0].segments))
        assert (mine["start_ns"][1:] >= mine["end_ns"][:-1]).all()


def test_a_module_with_other_settings_is_still_that_module(engine):
    """As a configuration gives them to what a factory made."""
    net = SmallNet().eval()
    model = pp.Model.from_torch(net, torch.zeros(1, 3, 16, 16), name="net", batch=(1, 2), priority=3)
    other = model.changed(name="other", target_ms=5.0, batch=(1, 4))
    assert (other.name, other.target_ms, other.batch, other.priority) == ("other", 5.0, (1, 4), 3)
    assert (model.name, model.target_ms, model.batch) == ("net", None, (1, 2))
    engine.load(other)
    engine.load(model)
    x = images(1)[0]
    with torch.no_grad():
        expected = net(torch.from_numpy(x[None])).numpy()[0]
    for name in ("other", "net"):
        np.testing.assert_allclose(engine.infer_sync(name, {"input": x})["output"], expected, rtol=1e-4, atol=1e-5)
    assert model.source is other.source
    assert set(model.source.operations) == {1, 2, 4}


def test_counting_operations_leaves_pytorchs_compiler_alone():
    """Its import takes longer than everything else about a small model."""
    code = (
        "import sys, torch\n"
        "from paellapy.scheduler.models.torch_cpu import count_operations\n"
        "x = torch.ones(4)\n"
        "assert len(count_operations(torch, lambda: x + 1, [x.untyped_storage().data_ptr()])) == 1\n"
        "assert 'torch._dynamo' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=200)


class Lookups(torch.nn.Module):
    """Indices on several ways to their tables: as they come, converted, reshaped, into two tables, and computed."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = torch.nn.Embedding(100, 4), torch.nn.Embedding(7, 4)
        self.register_buffer("table", torch.zeros(20, 4))

    def forward(self, word, place, row, shifted):
        found = self.words(word.long()) + self.places(place) + self.words(place)
        found = found + self.table[row.flatten()].view(found.shape) + self.words(shifted + 1)
        return found.sum(1) + torch.gather(self.table, 0, place[:, :1].expand(-1, 4))


def test_the_ranges_of_indices_are_those_of_their_tables(engine):
    whole = torch.zeros(1, 3, dtype=torch.int64)
    example = {"word": whole.int(), "place": whole, "row": whole, "shifted": whole}
    model = pp.Model.from_torch(Lookups(), example, name="lookups", batch=(1, 2))
    found = {key: (spec.low, spec.high) for key, spec in model.inputs.items()}
    assert found == {"word": (0, 99), "place": (0, 6), "row": (-20, 19), "shifted": (None, None)}
    engine.load(model)
    good = {key: np.zeros(3, spec.dtype) for key, spec in model.inputs.items()}
    engine.infer_sync("lookups", good)
    with failing(InputError, model="lookups", field="word", limit=(0, 99)):
        engine.infer_sync("lookups", {**good, "word": np.array([0, 100, 3], np.int32)})
    with pytest.raises(RequestFailedError):  # what could not be seen fails by itself
        engine.infer_sync("lookups", {**good, "shifted": np.array([0, 99, 3])})
    engine.infer_sync("lookups", good)


@pytest.mark.parametrize("change", [
    lambda table, ids, ones: table.index_add_(0, ids, ones),
    lambda table, ids, ones: table.index_add(0, ids, ones),
    lambda table, ids, ones: table.scatter_(0, ids, ones),
    lambda table, ids, ones: table.scatter_add_(0, ids, ones),
    lambda table, ids, ones: table.scatter_reduce_(0, ids, ones, "sum"),
    lambda table, ids, ones: table.index_copy_(0, ids, ones),
])  # fmt: skip
def test_indices_of_places_that_are_written_have_ranges_too(change):
    def histogram(ids):
        return change(torch.zeros(12), ids.flatten(), torch.ones(3))[None]

    model = pp.Model.from_torch(histogram, torch.zeros(1, 3, dtype=torch.int64), batch=(1,))
    assert [(spec.low, spec.high) for spec in model.inputs.values()] == [(0, 11)]


class TunedLayer(torch.nn.Module):
    """Stands for a layer whose kernels are tuned by timing: modules from elsewhere may launch such kernels."""

    def forward(self, x):
        return x


def convolutions(n, *more):
    return torch.nn.Sequential(*(torch.nn.Conv2d(3, 3, 3) for _ in range(n)), *more)


@pytest.mark.parametrize(("module", "options", "plans"), [
    (convolutions(2), {}, True),
    (torch.nn.Sequential(convolutions(1), convolutions(1)), {}, True),
    (convolutions(1), {}, False),  # one convolution is planned in no time
    (convolutions(2), {"compile": True}, False),
    (convolutions(2, TunedLayer()), {}, False),
])  # fmt: skip
def test_a_network_of_convolutions_is_planned_for_each_batch_size(module, options, plans):
    model = pp.Model.from_torch(module, torch.zeros(1, 3, 16, 16), **options)
    assert model.source.plans_convolutions == plans


def test_settings_of_this_thread_keep_a_network_in_it(monkeypatch):
    source = pp.Model.from_torch(convolutions(2), torch.zeros(1, 3, 16, 16)).source
    with torch.inference_mode():
        assert not source.plans_convolutions
    with torch.device("meta"):
        assert not source.plans_convolutions
    with torch.autocast("cuda", torch.float16, enabled=torch.cuda.is_available()):
        assert source.plans_convolutions != torch.cuda.is_available()
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    assert not source.plans_convolutions
