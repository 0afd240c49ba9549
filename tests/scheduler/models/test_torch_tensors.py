"""PyTorch modules whose weights come straight from a safetensors file."""

from __future__ import annotations

import os

import numpy as np
import pytest
from failing import failing

import paellapy as pp
from paellapy.scheduler.core.errors import ModelError
from paellapy.scheduler.models import host_store, torch_tensors, weights
from paellapy.scheduler.models.torch_tensors import as_array
from paellapy.scheduler.models.weights import WeightFileError, write_weights

torch = pytest.importorskip("torch", reason="PyTorch is not installed")


class Net(torch.nn.Module):
    """Two layers that share their weight, a norm with counters, and a buffer that is in no file."""

    def __init__(self, seed=0, width=16):
        super().__init__()
        torch.manual_seed(seed)
        self.first, self.second = torch.nn.Linear(width, width), torch.nn.Linear(width, width, bias=False)
        self.second.weight = self.first.weight
        self.norm = torch.nn.BatchNorm1d(width)
        self.register_buffer("scale", torch.full((width,), 3.0, device="cpu"), persistent=False)

    def forward(self, x):
        return self.norm(self.second(torch.relu(self.first(x)))) * self.scale


EXAMPLE = torch.zeros(1, 16)


@pytest.fixture
def trained():
    """A module with weights of its own, also in its counters and buffers."""
    net = Net(seed=7)
    net.norm.running_mean.uniform_()
    net.norm.num_batches_tracked.fill_(12)
    return net.eval()


def write(path, net, *, without=(), **changed):
    arrays = {name: as_array(torch, t) for name, t in net.state_dict().items() if name not in without}
    write_weights(path, {**arrays, **changed})
    return path


@pytest.fixture
def file(trained, tmp_path):
    return write(tmp_path / "net.safetensors", trained)


def on_meta():
    with torch.device("meta"):
        return Net()


def answers(model, x, **options):
    with pp.Engine("virtual:h200", **options) as engine:
        engine.load(model)
        found = []
        for each in x:
            if options:
                engine.evict(model.name)
            found.append(engine.infer_sync(model.name, {"input": each.numpy()})["output"])
        return np.stack(found)


@pytest.mark.parametrize("make", [Net, on_meta])
@pytest.mark.parametrize("options", [{}, {"memory_bytes": 1 << 28}])
@pytest.mark.parametrize("dtype", [None, "float16"])
def test_a_file_gives_the_answers_of_load_state_dict(file, trained, make, options, dtype):
    loaded = Net(seed=1)
    loaded.load_state_dict(trained.state_dict())
    right, found = (
        pp.Model.from_torch(module, EXAMPLE, name="net", dtype=dtype, batch=(1,), instances=1, **about)
        for module, about in ((loaded, {}), (make(), {"weights": file}))
    )
    x = torch.randn(3, 16).to(getattr(torch, dtype or "float32"))
    np.testing.assert_array_equal(answers(found, x, **options), answers(right, x))
    assert found.weights_bytes == right.weights_bytes


def test_the_module_of_the_caller_is_not_changed(file):
    net = Net(seed=1)
    before = {name: t.clone() for name, t in net.state_dict().items()}
    pp.Model.from_torch(net, EXAMPLE, weights=file)
    assert all(torch.equal(before[name], t) for name, t in net.state_dict().items())
    assert net.training


def test_the_file_is_read_once_and_straight_into_the_host_store(file, monkeypatch):
    opened = []
    real = weights.map_weights

    def counted(path, private=False):
        opened.append((path, real(path, private)))
        return opened[-1][1]

    for module in (torch_tensors, host_store):
        monkeypatch.setattr(module, "map_weights", counted)
    model = pp.Model.from_torch(on_meta(), EXAMPLE, name="net", weights=file, batch=(1,), instances=1)
    file.unlink()  # no one opens it again
    ((_, arrays),) = opened
    parts = model.weight_parts()
    shared = [any(np.shares_memory(part, array) for array in arrays.values()) for part in parts]
    assert len(shared) - sum(shared) == 1  # the buffer that is in no file
    with pp.Engine("virtual:h200", memory_bytes=1 << 28) as engine:
        for _ in range(2):
            engine.load(model)
            engine.unload("net")
    assert len(opened) == 1


@pytest.mark.parametrize("name", ["first.weight", "second.weight"])
def test_a_shared_tensor_is_there_once_under_any_of_its_names(trained, tmp_path, name):
    path = write(tmp_path / "one.safetensors", trained, without={name})
    both = write(tmp_path / "both.safetensors", trained)
    x = torch.randn(2, 16)
    for each in (path, both):
        model = pp.Model.from_torch(on_meta(), EXAMPLE, name="net", weights=each, batch=(1,), instances=1)
        assert len(model.weight_parts()) == 8
        np.testing.assert_allclose(answers(model, x), trained(x).detach().numpy(), rtol=1e-5, atol=1e-5)


def test_whatever_does_not_fit_is_in_one_error(trained, tmp_path):
    wrong = {"norm.running_mean": np.zeros(17, np.float32), "first.bias": np.zeros(16, np.float64)}
    path = write(tmp_path / "x.safetensors", trained, without={"norm.bias"}, head=np.zeros(1, np.float32), **wrong)
    with pytest.raises(ModelError) as caught:
        pp.Model.from_torch(on_meta(), EXAMPLE, name="net", weights=path)
    error = caught.value
    assert (error.model, error.given, error.missing, error.unknown) == ("net", path, ["norm.bias"], ["head"])
    assert ([*error.shapes], [*error.types]) == (["norm.running_mean"], ["first.bias"])


def test_an_error_names_some_of_many(tmp_path):
    path = tmp_path / "x.safetensors"
    write_weights(path, {f"w{k}": np.zeros(1, np.float32) for k in range(100)})
    with pytest.raises(ModelError) as caught:
        pp.Model.from_torch(on_meta(), EXAMPLE, weights=path)
    assert len(caught.value.unknown) == 100
    assert len(str(caught.value)) < 700


def test_types_are_converted_only_if_the_user_says_so(trained, tmp_path):
    half = write(tmp_path / "half.safetensors", trained.half())
    with pytest.raises(ModelError) as caught:
        pp.Model.from_torch(Net(), EXAMPLE, weights=half)
    assert caught.value.types["first.weight"] == (torch.float16, torch.float32)
    for dtype in (torch.float16, torch.float32, torch.bfloat16):
        made = pp.Model.from_torch(on_meta(), EXAMPLE, weights=half, dtype=dtype)
        kinds = {name: t.dtype for name, t in made.source._call.state_dict().items()}
        assert kinds.pop("norm.num_batches_tracked") == torch.int64
        assert set(kinds.values()) == {dtype}
    counter = {"norm.num_batches_tracked": np.zeros((), np.float16)}
    path = write(tmp_path / "counter.safetensors", trained, **counter)
    with pytest.raises(ModelError) as caught:
        pp.Model.from_torch(Net(), EXAMPLE, weights=path, dtype=torch.float16)
    assert [*caught.value.types] == ["norm.num_batches_tracked"]  # not even then from a number to a counter


def test_bfloat16_comes_bit_for_bit(trained, tmp_path):
    path = write(tmp_path / "b.safetensors", trained.bfloat16())
    made = pp.Model.from_torch(on_meta().bfloat16(), EXAMPLE.bfloat16(), weights=path)
    for name, t in made.source._call.state_dict().items():
        assert torch.equal(t, trained.state_dict()[name])


def test_a_buffer_without_values_is_an_error_with_its_name(file):
    net = on_meta()
    net.register_buffer("scale", torch.zeros(16, device="meta"), persistent=False)
    net.first.shift = torch.zeros(16, device="meta")
    with failing(ModelError, given=["scale", "first.shift"]):
        pp.Model.from_torch(net, EXAMPLE, weights=file)


def test_files_that_are_none_and_functions_are_refused(file, tmp_path):
    torch.save(Net().state_dict(), tmp_path / "net.pt")
    for name in ("no-file.safetensors", "net.pt"):
        with failing(WeightFileError, path=tmp_path / name):
            pp.Model.from_torch(Net(), EXAMPLE, weights=tmp_path / name)
    for call, given in ((lambda x: x, file), (Net(), Net().state_dict())):
        with failing(ModelError, field="weights"):
            pp.Model.from_torch(call, EXAMPLE, weights=given)


@pytest.mark.parametrize("options", [{}, {"memory_bytes": 1 << 28}])
def test_a_file_that_becomes_shorter_is_an_error_and_not_the_end_of_the_process(file, options):
    model = pp.Model.from_torch(on_meta(), EXAMPLE, name="net", weights=file)
    os.truncate(file, 100)
    with pp.Engine("virtual:h200", **options) as engine, failing(WeightFileError, given=100):
        engine.load(model)


@pytest.mark.gpu
@pytest.mark.parametrize("options", [{}, {"memory_bytes": 1 << 30}])
@pytest.mark.parametrize("make", [Net, on_meta, lambda: Net().cuda()])
def test_a_file_gives_the_module_s_answers_on_a_gpu(file, trained, make, options):
    x = torch.randn(4, 16)
    with pp.Engine("cuda", **options) as engine:
        engine.load(pp.Model.from_torch(make(), EXAMPLE, name="net", weights=file, batch=(1, 2)))
        for each in x:
            if options:
                engine.evict("net")
            found = engine.infer_sync("net", {"input": each.numpy()})["output"]
            np.testing.assert_allclose(found, trained(each[None])[0].detach().numpy(), rtol=1e-3, atol=1e-3)
