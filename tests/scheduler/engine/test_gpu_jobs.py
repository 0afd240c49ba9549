"""Background jobs on a real GPU: captured through PyTorch, cut, replayed; and what a plain loop gives."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

import paellapy as pp

torch = pytest.importorskip("torch", reason="PyTorch is not installed")
pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("default:The AccumulateGrad")]

from engine_models import scale_model  # noqa: E402
from training import batches, job_losses, losses_now_and_then, plain_losses, trainee  # noqa: E402

TESTS = Path(__file__).parents[2]


@pytest.mark.parametrize("kind", ["adam", "sgd"])
def test_200_captured_steps_lose_what_the_plain_loop_loses_bit_for_bit(kind):
    with pp.Engine("cuda", policy="priority") as engine:
        expected = plain_losses(200, "cuda", kind)
        assert job_losses(engine, 200, "cuda", kind) == expected
    assert np.mean(expected[-20:]) < 0.5 * np.mean(expected[:20])


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_steps_that_follow_each_other_lose_what_the_plain_loop_loses(dropout):
    with pp.Engine("cuda", policy="priority") as engine:
        expected, found = losses_now_and_then(engine, 200, 20, "cuda", dropout)
    assert found == expected


def test_requests_are_right_beside_a_job():
    with pp.Engine("cuda", policy="priority", quantum_us=20) as engine:
        engine.load(scale_model())
        made = trainee("cuda", width=512)
        job = engine.background(made.step, state=made.state, data=batches(10_000, 256))
        x = np.arange(64, dtype=np.float32)
        for k in range(200):
            assert np.array_equal(engine.infer_sync("scale", {"x": x + k}, priority=1)["y"], 2 * (x + k))
        before = job.steps
        while job.steps < before + 5:
            assert job.error is None
        job.stop()
        assert job.join(30)
        assert job.error is None


def test_an_optimizer_that_counts_on_the_host_is_refused_with_the_remedy():
    net = torch.nn.Linear(4, 4).cuda()
    optimizer = torch.optim.Adam(net.parameters())
    with pp.Engine("cuda") as engine, pytest.raises(pp.PaellaError, match="capturable=True"):
        engine.background(lambda: optimizer.step(), state=[net, optimizer])


def test_a_generator_of_its_own_draws_on():
    draw = torch.Generator("cuda").manual_seed(5)
    expected = [torch.rand(4, device="cuda", generator=draw).cpu().numpy() for _ in range(20)]
    draw.manual_seed(5)
    held = torch.zeros(1, device="cuda")
    found = []
    with pp.Engine("cuda") as engine:

        def step():
            held.add_(1.0)
            return torch.rand(4, device="cuda", generator=draw)

        def note(job):
            found.append(job.outputs["output"].copy())
            if job.steps == 20:
                job.stop()

        job = engine.background(step, state=[held, draw], every=1, callback=note)
        assert job.join(60)
        assert job.error is None
    assert np.array_equal(found, expected)


def test_a_served_module_that_draws_random_numbers_draws_new_ones_each_time():
    class Noisy(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.body = torch.nn.Linear(8, 8)

        def forward(self, x):
            return torch.nn.functional.dropout(self.body(x), 0.5, training=True) + torch.rand_like(x)

    torch.manual_seed(3)
    before = torch.cuda.get_rng_state()
    with pp.Engine("cuda") as engine:
        model = pp.Model.from_torch(Noisy().cuda(), torch.zeros(1, 8), name="noisy", batch=(1, 2), instances=2)
        engine.load(model)
        assert torch.equal(torch.cuda.get_rng_state(), before)
        x = {"input": np.ones(8, np.float32)}
        answers = [engine.infer_sync("noisy", x)["output"] for _ in range(40)]
    assert len({each.tobytes() for each in answers}) == 40
    assert np.std(answers, axis=0).min() > 0.1
    assert torch.equal(torch.cuda.get_rng_state(), before)


def test_a_graph_that_pytorch_captured_gives_what_it_gave():
    net = torch.nn.Sequential(*(torch.nn.Linear(256, 256) for _ in range(8))).cuda()
    x = torch.zeros(16, 256, device="cuda")
    side = torch.cuda.Stream()
    with torch.no_grad(), torch.cuda.stream(side):
        net(x)
        side.synchronize()
        graph = torch.cuda.CUDAGraph(keep_graph=True)
        with torch.cuda.graph(graph, stream=side):
            y = net(x)
    graph.instantiate()
    with pp.Engine("cuda", quantum_us=10) as engine:
        engine.load(pp.Model.from_graph(graph, inputs={"x": x}, outputs={"y": y}, name="net"))
        for seed in range(5):
            given = np.random.default_rng(seed).standard_normal((16, 256)).astype(np.float32)
            found = engine.infer_sync("net", {"x": given})["y"]
            x.copy_(torch.from_numpy(given))
            graph.replay()
            torch.cuda.synchronize()
            assert np.array_equal(found, y.cpu().numpy())
    forgotten = torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(forgotten):
        y = net(x)
    with pytest.raises(pp.PaellaError, match="keep_graph=True"):
        pp.Model.from_graph(forgotten, inputs={"x": x}, outputs={"y": y})


SCRIPT = """
import time, torch
a = torch.randn(512, 512, device="cuda")
end = time.monotonic() + 60
while time.monotonic() < end:
    a = torch.tanh(a @ a)
    a.sum().item()
"""


@pytest.mark.parametrize("options", [(), ("--in-flight", "4")])
def test_an_unmodified_script_waits_at_the_gate(tmp_path, monkeypatch, options):
    monkeypatch.setenv("PAELLAPY_RUNTIME_DIR", str(tmp_path))
    (tmp_path / "script.py").write_text(SCRIPT)
    with pp.Engine("cuda", policy="priority") as engine:
        engine.load(scale_model())
        line = [sys.executable, "-m", "paellapy", "run", "--best-effort", *options, str(tmp_path / "script.py")]
        process = subprocess.Popen(line)
        try:
            end = time.monotonic() + 50
            x = np.arange(64, dtype=np.float32)
            while (engine.job_stats().get("script") or {"waits": 0})["waits"] < 3:
                assert time.monotonic() < end, engine.job_stats()
                assert process.poll() is None
                assert np.array_equal(engine.infer_sync("scale", {"x": x})["y"], 2 * x)
            while engine.job_stats()["script"]["launches"] < 100:  # nobody asks: it goes on
                assert time.monotonic() < end, engine.job_stats()
                time.sleep(0.01)
        finally:
            process.kill()
            process.wait()
        assert np.array_equal(engine.infer_sync("scale", {"x": x})["y"], 2 * x)


ENDS = """
import torch
from torch.profiler import ProfilerActivity, profile
net = torch.nn.Conv2d(3, 8, 3).cuda()
x = torch.randn(4, 3, 32, 32, device="cuda")
for _ in range(300):
    net(x).sum().backward()
with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]):
    net(x).sum().item()
print("end")
"""


def test_a_script_that_is_profiled_and_ends_by_itself_ends_well(tmp_path, monkeypatch):
    monkeypatch.setenv("PAELLAPY_RUNTIME_DIR", str(tmp_path))
    (tmp_path / "script.py").write_text(ENDS)
    with pp.Engine("cuda", policy="priority"):
        line = [sys.executable, "-m", "paellapy", "run", "--best-effort", str(tmp_path / "script.py")]
        found = subprocess.run(line, capture_output=True, text=True, timeout=120)
    assert (found.returncode, found.stdout.splitlines()[-1:]) == (0, ["end"]), found.stderr


FAULT = """
import numpy as np, torch
import paellapy as pp
from engine_models import scale_model
from paellapy.scheduler.core.errors import EngineFailedError

table = torch.randn(16, 8, device="cuda")
total = torch.zeros(8, device="cuda")
index = torch.zeros(4, dtype=torch.long, device="cuda")

def look_up():
    total.add_(table.index_select(0, index).sum(0))

def spoil(job=None):
    index.fill_(1 << 30)  # PyTorch may take it as 32 bits

engine = pp.Engine("cuda", policy="priority")
engine.load(scale_model())
x = {"x": np.ones(64, np.float32)}
engine.infer_sync("scale", x)
error = None
try:
    if WHERE == "a step":
        job = engine.background(look_up, name="train", state=[total], every=20, callback=spoil)
        assert job.join(60)
        error = job.error
    elif WHERE == "the first step":
        spoil()
        engine.background(look_up, name="train", state=[total])
    else:
        with engine.lease("script"):
            spoil()
            look_up()
except Exception as e:
    error = e
print("failed" if error is not None else "no error")
try:
    engine.infer_sync("scale", x)
except EngineFailedError as e:
    print(str(e).rpartition("running at that time: ")[2])
engine.close()
print("closed")
"""


@pytest.mark.parametrize("where", ["a step", "the first step", "a lease"])
def test_a_fault_on_the_gpu_names_whose_it_was_and_nothing_hangs(where):
    # In a process of its own: a fault takes the CUDA context with it.
    path = os.pathsep.join(filter(None, (str(TESTS), os.environ.get("PYTHONPATH"))))
    run = subprocess.run(
        [sys.executable, "-c", f"WHERE = {where!r}\n{FAULT}"], env={**os.environ, "PYTHONPATH": path},
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    whose = "lease 'script'" if where == "a lease" else "job 'train'"
    assert run.stdout.splitlines() == ["failed", f"{whose})", "closed"], run.stderr
