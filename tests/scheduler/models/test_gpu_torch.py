"""PyTorch modules captured on a real GPU: cuDNN, cuBLAS and Triton kernels in instances that share nothing but
weights.
"""

from __future__ import annotations

import asyncio
import copy
import gc
import threading

import numpy as np
import pytest
from core_check import check_at_rest
from failing import failing

import paellapy as pp
from paellapy.scheduler.core.errors import CaptureError, MemoryPlanError
from paellapy.scheduler.policies.policy import policy_names

torch = pytest.importorskip("torch", reason="PyTorch is not installed")
pytestmark = pytest.mark.gpu
F = torch.nn.functional


class Net(torch.nn.Module):
    """Convolutions of cuDNN, products of cuBLAS, a softmax and a residual."""

    def __init__(self, seed: int, width: int = 32) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.stem = torch.nn.Conv2d(3, width, 3, 2, 1)
        self.body = torch.nn.ModuleList(torch.nn.Conv2d(width, width, 3, 1, 1) for _ in range(8))
        self.norm = torch.nn.BatchNorm2d(width)
        self.mix = torch.nn.Linear(width, 256)
        self.head = torch.nn.Linear(256, 64)

    def forward(self, x):
        x = F.relu(self.norm(self.stem(x)))
        for layer in self.body:
            x = x + F.relu(layer(x))
        return torch.softmax(self.head(F.relu(self.mix(x.mean((2, 3))))), -1)


class Branches(torch.nn.Module):
    """Two streams inside one module: a graph that forks and joins."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.left, self.right = torch.nn.Linear(64, 512), torch.nn.Linear(64, 512)
        self.side = None

    def forward(self, x):
        if not x.is_cuda:
            return torch.relu(self.left(x)) + torch.tanh(self.right(x))
        if self.side is None:
            self.side = torch.cuda.Stream()
        here = torch.cuda.current_stream()
        self.side.wait_stream(here)
        with torch.cuda.stream(self.side):
            b = torch.tanh(self.right(x))
        a = torch.relu(self.left(x))
        here.wait_stream(self.side)
        return a + b


def images(n, seed=0):
    return np.random.default_rng(seed).standard_normal((n, 3, 64, 64)).astype(np.float32)


def reference(net, x, dtype=torch.float32):
    """The module's own output on the GPU."""
    net = copy.deepcopy(net).eval().to("cuda", dtype)
    with torch.no_grad():
        return net(torch.from_numpy(x).to("cuda", dtype)).float().cpu().numpy()


def ask_all(engine, name, x):
    async def main():
        return await asyncio.gather(*(engine.infer(name, {"input": each}) for each in x))

    return [each["output"] for each in asyncio.run(main())]


def compare(engine, name, net, x, dtype=torch.float32, rtol=1e-2, atol=1e-4):
    """Compares the answers to single requests with the module's own outputs."""
    for each, wanted in zip(x, reference(net, x.astype(np.float32), dtype), strict=True):
        found = engine.infer_sync(name, {"input": each})["output"].astype(np.float32)
        np.testing.assert_allclose(found, wanted, rtol=rtol, atol=atol)


def model_of(net, **about):
    return pp.Model.from_torch(net, torch.zeros(1, 3, 64, 64), **about)


@pytest.fixture
def engine():
    with pp.Engine("cuda", quantum_us=20) as engine:
        yield engine


@pytest.fixture(scope="module")
def loaded():
    nets = {"a": Net(1), "b": Net(2, 48)}
    with pp.Engine("cuda", quantum_us=20) as engine:
        for name, net in nets.items():
            engine.load(model_of(net, name=name, channels_last=True))
        yield engine, nets


@pytest.mark.parametrize("policy", policy_names())
def test_every_answer_is_the_modules_own_under_every_policy_and_batch_size(loaded, policy):
    engine, nets = loaded
    engine.set_policy(policy)
    x = images(400)
    names = np.random.default_rng(0).choice(list(nets), len(x))
    expected = {name: reference(net, x) for name, net in nets.items()}

    async def main():
        return await asyncio.gather(*(engine.infer(n, {"input": each}) for n, each in zip(names, x, strict=True)))

    for name, k, found in zip(names, range(len(x)), asyncio.run(main()), strict=True):
        np.testing.assert_allclose(found["output"], expected[name][k], rtol=1e-2, atol=1e-4)
    check_at_rest(engine.state)


def test_a_module_is_cut_into_segments_and_keeps_its_chain(loaded):
    engine, _ = loaded
    profile = engine.profile("a")[0]
    assert profile.chain
    assert len(profile.segments) > 2
    assert sum(s.kernels for s in profile.segments) > 15


def test_an_engine_loads_models_whatever_the_number_of_pools_before(engine):
    pools = [torch.cuda.MemPool() for _ in range(300)]
    assert max(pools[-1].id) > 256  # up to there Python keeps its numbers for ever
    del pools
    net, x = Net(7), images(1)
    for k in range(5):
        engine.load(model_of(net, name=f"m{k}", batch=(1,), instances=2))
        gc.collect()
        compare(engine, f"m{k}", net, x)


@pytest.mark.alone  # whether partitions are used depends on their measured times
def test_a_crowd_is_confined_to_partitions_of_sms_and_answers_the_same():
    # Beside other processes a partition may be measured to be far too slow, and would not be used.
    tuning = {"most_partition_stretch": 1000.0}
    net, x = Net(6), images(300)
    expected = reference(net, x)
    with pp.Engine("cuda", "srpt", quantum_us=20, sm_partitions=8, tuning=tuning) as engine:
        engine.load(model_of(net, name="crowd", channels_last=True, batch=(1,), instances=12))
        profile = engine.profile("crowd")[0]
        assert profile.partition_ns > 0
        np.testing.assert_allclose(ask_all(engine, "crowd", x), expected, rtol=1e-2, atol=1e-4)
        assert 0 < engine.stats()["confined_launches"] < engine.stats()["launches"]
        check_at_rest(engine.state)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision(engine, dtype):
    net = Net(4)
    engine.load(model_of(net, name="half", dtype=dtype, channels_last=True))
    x = images(8).astype(engine.models["half"].inputs["input"].dtype)
    compare(engine, "half", net, x, dtype, rtol=1e-7, atol=2e-2)


def test_autocast(engine):
    net = Net(5)
    engine.load(model_of(net, name="cast", autocast=torch.float16, batch=(1, 4)))
    compare(engine, "cast", net, images(4), rtol=1e-7, atol=1e-2)


@pytest.mark.filterwarnings("default")  # Inductor's own, about TF32 for one
def test_a_compiled_module_with_triton_kernels(engine):
    net = Net(6)
    engine.load(model_of(net, name="compiled", compile=True, batch=(1, 2)))
    compare(engine, "compiled", net, images(6))


def test_a_graph_that_forks_and_joins(engine):
    net = Branches()
    x = np.random.default_rng(0).standard_normal((50, 64)).astype(np.float32)
    engine.load(pp.Model.from_torch(net, torch.zeros(1, 64), name="branches", batch=(1, 4)))
    assert not engine.profile("branches")[0].chain
    np.testing.assert_allclose(ask_all(engine, "branches", x), reference(net, x), rtol=1e-2, atol=1e-3)


def test_weights_are_there_once_and_instances_memory_is_counted(engine):
    net = Net(7, 64)
    model = model_of(net, name="net", batch=(1, 8), instances=4)
    engine.load(model)
    held = engine.memory.reservations["net"]
    assert held.instances == 4
    assert held.weights_bytes == model.weights_bytes
    assert held.instance_bytes > 8 * 64 * 32 * 32 * 4  # at least one activation of the largest batch


def test_unloading_gives_the_memory_back(engine):
    def used():
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        return torch.cuda.memory_reserved()

    net = Net(8, 64)
    model = model_of(net, name="net", batch=(1, 8), instances=4)
    engine.load(model)
    engine.infer_sync("net", {"input": images(1)[0]})
    assert not next(net.parameters()).is_cuda  # the caller's module stays where it was
    engine.unload("net")
    first = used()
    for _ in range(3):
        engine.load(model)
        engine.unload("net")
    assert used() <= first


def test_a_model_that_does_not_fit_is_refused_with_the_figures():
    with pp.Engine("cuda", memory_bytes=32 << 20) as engine:
        model = pp.Model.from_torch(Net(9, 64), torch.zeros(1, 3, 512, 512), name="big", batch=(1, 16))
        with failing(MemoryPlanError, model="big", limit_bytes=32 << 20):
            engine.load(model)


def test_waiting_for_the_gpu_is_refused_and_the_line_is_named(engine):
    def waits(x):
        if x.sum().item() > 0:
            return x
        return -x

    location = f"{__file__}:{waits.__code__.co_firstlineno + 1}"
    with failing(CaptureError, doing="waits for the GPU", location=location):
        engine.load(pp.Model.from_torch(waits, torch.zeros(1, 8), batch=(1,)))
    net = Net(10)
    engine.load(model_of(net, name="after", batch=(1,)))
    compare(engine, "after", net, images(1))


def test_kernels_that_do_not_report_are_traced_at_segment_grain(loaded):
    engine, _ = loaded
    with engine.trace() as t:
        for each in images(5):
            engine.infer_sync("a", {"input": each})
    assert len(t.jobs) == 5
    assert (t.segments["end_ns"] > t.segments["start_ns"]).all()
    for job in t.jobs:
        inside = (t.segments["start_ns"] >= job["arrival_ns"]) & (t.segments["end_ns"] <= job["end_ns"])
        numbers = t.segments["segment"][inside].tolist()
        assert numbers in ([-1], list(range(len(t.segments) // 5)))  # in one piece, or every segment


def test_other_threads_may_wait_for_the_gpu_while_a_module_is_loaded():
    stop, failed = threading.Event(), []

    def other() -> None:
        try:
            while not stop.is_set():
                torch.ones(8, device="cuda").sum().item()
        except RuntimeError as e:
            failed.append(e)

    thread = threading.Thread(target=other)
    thread.start()
    try:
        with pp.Engine("cuda") as engine:
            net = torch.nn.Linear(64, 64).cuda()
            engine.load(pp.Model.from_torch(net, torch.zeros(1, 64), name="net", batch=(1, 2, 4)))
            engine.infer_sync("net", {"input": np.ones(64, np.float32)})
    finally:
        stop.set()
        thread.join()
    assert not failed


def of_torch(seed, seen=lambda x: None):
    """A network of PyTorch's own layers only, whose sizes have threads; `seen` is called with every input."""
    torch.manual_seed(seed)
    layers = [torch.nn.Conv2d(3, 32, 3, 2, 1), torch.nn.BatchNorm2d(32)]
    layers += [each for _ in range(8) for each in (torch.nn.ReLU(), torch.nn.Conv2d(32, 32, 3, 1, 1))]
    layers += [torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten(), torch.nn.Linear(32, 64), torch.nn.Softmax(-1)]
    net = torch.nn.Sequential(*layers)
    net.register_forward_pre_hook(lambda module, given: seen(*given))
    return net


def test_sizes_planned_at_once_give_the_bits_of_sizes_planned_one_by_one(engine, monkeypatch):
    net, x = of_torch(11), images(8, seed=4)
    sizes, programs = (1, 2, 4, 8), {}

    def answers(name: str) -> dict[int, list[np.ndarray]]:
        model = model_of(net, name=name, batch=sizes, instances=3)
        assert model.source.plans_convolutions == (name != "one by one")
        engine.load(model)
        loaded = engine.core.models.by_name[name]
        programs[name] = [[each.program.content() for each in instance] for instance in loaded.launches]
        found = {}
        for k, batch in enumerate(sizes):
            for instance, launches in zip(loaded.instances, loaded.launches, strict=True):
                instance.inputs["input"][:batch] = x[:batch]
                for segment in range(len(launches[k].handles)):
                    engine.backend.run_segment(launches[k], segment)
                found.setdefault(batch, []).append(instance.outputs["output"][:batch].copy())
        return found

    at_once, again = answers("at once"), answers("again")
    with monkeypatch.context() as patch:
        patch.setattr(type(engine.models["again"].source), "plans_convolutions", False)
        one_by_one = answers("one by one")
    for batch in sizes:
        assert np.isfinite(one_by_one[batch][0]).all()
        for each in (*at_once[batch], *again[batch], *one_by_one[batch]):
            np.testing.assert_array_equal(each, one_by_one[batch][0])
    assert programs["at once"] == programs["again"] == programs["one by one"]
    assert len({tuple(instance) for instance in programs["at once"]}) == 1


def test_a_network_with_threads_is_traced_and_loaded_again(engine):
    net, x = of_torch(12), images(3)
    model = model_of(net, name="net", batch=(1, 2, 4), instances=2)
    assert model.source.plans_convolutions
    for _ in range(2):
        engine.load(model)
        with engine.trace() as t:
            compare(engine, "net", net, x)
        assert len(t.jobs) == 3
        engine.unload("net")


def test_a_network_that_fails_at_one_size_says_so_though_sizes_run_at_once(engine):
    error = ValueError("four is too many")

    def fails(x):
        if x.shape[0] == 4:
            raise error

    model = model_of(of_torch(13, fails), name="net", batch=(1, 2, 4, 8))
    assert model.source.plans_convolutions
    with failing(CaptureError, batch=4, __cause__=error):
        engine.load(model)
    net = of_torch(14)
    engine.load(model_of(net, name="net", batch=(1, 2)))
    compare(engine, "net", net, images(1))


def test_a_network_keeps_running_in_this_thread_where_its_settings_do(engine):
    threads = set()
    net = of_torch(15, lambda x: threads.add(threading.get_ident()))
    with torch.inference_mode():
        engine.load(model_of(net, name="here", batch=(1, 2)))
    assert threads == {threading.get_ident()}
    threads.clear()
    engine.load(model_of(net, name="there", batch=(1, 2)))
    assert len(threads) == 3  # of the example, and of each size
    threads.clear()
    engine.load(model_of(Around(net), name="other", batch=(1, 2)))  # modules from elsewhere may time their kernels
    assert threads == {threading.get_ident()}


class Around(torch.nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(x)
