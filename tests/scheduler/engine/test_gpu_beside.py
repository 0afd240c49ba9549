"""On a real GPU, beside requests: graphs of others, leases, scripts that fork or outlive the engine, moving weights."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from contextlib import contextmanager

import numpy as np
import pytest

import paellapy as pp

torch = pytest.importorskip("torch", reason="PyTorch is not installed")
pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("default:The AccumulateGrad")]

from chain_models import SMALL, ask, chain, room_for  # noqa: E402
from core_check import check_at_rest  # noqa: E402
from engine_models import scale_model  # noqa: E402
from training import batches, trainee  # noqa: E402
from waiting import wait_until  # noqa: E402

from paellapy.scheduler.core.errors import CaptureError, ModelError, WeightsError  # noqa: E402

MIB = 1 << 20
X = np.arange(64, dtype=np.float32)


@pytest.fixture
def engine():
    with pp.Engine("cuda", policy="priority", quantum_us=20) as engine:
        engine.load(scale_model())
        yield engine


def scales(engine) -> None:
    assert np.array_equal(engine.infer_sync("scale", {"x": X}, priority=1)["y"], 2 * X)


def test_a_capture_of_cupy_s_gives_what_it_gave():
    cupy = pytest.importorskip("cupy")
    x, y = cupy.zeros(1024, cupy.float32), cupy.empty(1024, cupy.float32)
    stream = cupy.cuda.Stream(non_blocking=True)

    def work() -> None:
        cupy.multiply(x, 3.0, out=y)
        cupy.add(y, 1.0, out=y)

    with stream:
        work()  # compiles the kernels
        stream.synchronize()
        stream.begin_capture()
        work()
        kept = stream.end_capture()
        stream.begin_capture()
        work()
        handle = cupy.cuda.runtime.streamEndCapture(stream.ptr)
    with pytest.raises(ModelError, match="streamEndCapture"):
        pp.Model.from_graph(kept, inputs={"x": x}, outputs={"y": y})
    with pp.Engine("cuda", quantum_us=5) as engine:
        engine.load(pp.Model.from_graph(handle, inputs={"x": x}, outputs={"y": y}, name="net"))
        for seed in range(3):
            given = np.random.default_rng(seed).standard_normal(1024).astype(np.float32)
            assert np.array_equal(engine.infer_sync("net", {"x": given})["y"], given * np.float32(3) + np.float32(1))


def test_the_handle_of_a_graph_is_a_graph():
    x = torch.zeros(64, device="cuda")
    graph = torch.cuda.CUDAGraph(keep_graph=True)
    with torch.cuda.graph(graph):
        y = x * 3.0 + 1.0
    with pp.Engine("cuda", quantum_us=5) as engine:
        engine.load(pp.Model.from_graph(int(graph.raw_cuda_graph()), inputs={"x": x}, outputs={"y": y}, name="net"))
        assert np.array_equal(engine.infer_sync("net", {"x": X})["y"], 3 * X + 1)


def test_work_in_leases_and_requests_are_both_right(engine):
    twos, made, stop = 2 * torch.eye(256, device="cuda"), [], threading.Event()

    def script() -> None:
        with engine.lease("script", give_back_ms=5) as lease:
            while not stop.is_set():
                product = twos
                for _ in range(8):
                    product = product @ twos
                made.append(float(product.trace()))
                lease.give_way()

    thread = threading.Thread(target=script)
    thread.start()
    try:
        for _ in range(50):
            scales(engine)
        wait_until(lambda: len(made) > 5)
    finally:
        stop.set()
        thread.join()
    assert set(made) == {256 * 2.0**9}
    with pytest.raises(ZeroDivisionError), engine.lease("script"):
        _ = [twos.add_(0.0), 1 / 0]
    scales(engine)


def test_a_job_is_paused_resumed_and_stopped_and_an_error_in_its_data_is_its_own(engine):
    def faulty():
        yield from batches(20)
        raise ValueError("no more")

    made = trainee("cuda")
    job = engine.background(made.step, state=made.state, data=batches(1_000_000))
    wait_until(lambda: job.steps > 5)
    job.pause()
    wait_until(lambda: job.state == "paused")
    before = job.steps
    for _ in range(20):
        scales(engine)
    assert job.steps == before
    job.resume()
    wait_until(lambda: job.steps > before + 5)
    job.stop()
    assert job.join(30)
    assert (job.state, job.error) == ("ended", None)
    made = trainee("cuda")
    job = engine.background(made.step, state=made.state, data=faulty())
    assert job.join(30)
    assert (job.state, job.steps, str(job.error)) == ("failed", 20, "no more")
    scales(engine)


LOOP = """
import os, sys
if sys.argv[1] == "forks" and os.fork():
    os.wait()
    sys.exit()
import torch
a = torch.eye(64, device="cuda")
k = 0
while True:
    a = a @ a
    torch.cuda.synchronize()
    k += 1
    if k % 50 == 0:
        print(k, flush=True)
"""


@contextmanager
def script(tmp_path, monkeypatch, how: str, *options: str):
    """A script that goes on until it is killed; one that hangs is killed after a minute."""
    monkeypatch.setenv("PAELLAPY_RUNTIME_DIR", str(tmp_path))
    (tmp_path / "loop.py").write_text(LOOP)
    line = [sys.executable, "-m", "paellapy", "run", "--best-effort", *options, str(tmp_path / "loop.py"), how]
    with pp.Engine("cuda", policy="priority") as engine, (tmp_path / "counts").open("w") as counts:
        engine.load(scale_model())
        process = subprocess.Popen(line, stdout=counts, start_new_session=True)

        def end() -> None:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)

        late = threading.Timer(60, end)
        late.start()
        try:
            wait_until(lambda: (engine.job_stats().get("loop") or {"launches": 0})["launches"] > 100)
            yield engine, process
        finally:
            end()
            late.cancel()
            process.wait()


def test_a_forked_script_waits_at_the_gate_and_leaves_when_it_is_killed(tmp_path, monkeypatch):
    with script(tmp_path, monkeypatch, "forks") as (engine, process):

        def held() -> bool:
            scales(engine)
            return engine.job_stats()["loop"]["waits"] > 3

        wait_until(held)
        os.killpg(process.pid, signal.SIGKILL)
        wait_until(lambda: "loop" not in engine.job_stats())
        scales(engine)


def test_a_script_with_a_share_goes_on_when_the_engine_leaves(tmp_path, monkeypatch):
    with script(tmp_path, monkeypatch, "stays", "--share", "0.2") as (engine, process):
        wait_until(lambda: engine.job_stats()["loop"]["waits"] > 0)
        engine.close()
        before = (tmp_path / "counts").stat().st_size
        wait_until(lambda: (tmp_path / "counts").stat().st_size > before + 200)
        assert process.poll() is None


def padded(name: str, seed: int, nbytes: int):
    """A model whose own weights come last, behind a large tensor that nobody reads."""
    _, made = chain(name, seed)
    return chain(name, seed, weights={"pad": np.full(nbytes, seed, np.uint8), **made})[0], made


def test_a_load_that_needs_host_memory_leaves_running_copies_alone():
    with pp.Engine("cuda", memory_bytes=1 << 30, host_bytes=66 * MIB) as server:
        first, made = padded("first", 1, 64 * MIB)
        server.load(first)
        for seed in range(2, 5):
            server.evict("first")
            late, others = padded("late", seed, 64 * MIB)
            bringing = threading.Thread(target=server.prefetch, args=("first",))
            bringing.start()
            server.load(late)  # displaces the first model's host memory, unless it is being copied
            bringing.join()
            ask(server, "first", made, seed)
            ask(server, "late", others, seed)
            server.unload("late")
        check_at_rest(server.state)


@pytest.mark.alone
def test_memory_that_others_took_is_named_and_requests_are_answered_once_it_is_back():
    with pp.Engine("cuda", memory_bytes=1 << 30) as server:
        model, made = padded("one", 1, 512 * MIB)
        server.load(model)
        server.evict("one")
        server.backend._pages.trim()
        taken = torch.cuda.mem_get_info()[0] - 128 * MIB
        hog = None
        while hog is None:
            try:
                hog = torch.empty(taken, dtype=torch.uint8, device="cuda")
            except torch.cuda.OutOfMemoryError:
                taken -= 64 * MIB
        with pytest.raises(WeightsError, match=r"'one'.*memory_bytes"):
            ask(server, "one", made)
        assert server.weights_state("one") == "host"
        del hog
        torch.cuda.empty_cache()
        ask(server, "one", made)
        check_at_rest(server.state)


def test_a_job_runs_where_models_fill_the_memory():
    with pp.Engine("cuda", memory_bytes=room_for("cuda", 2), quantum_us=2, tuning=SMALL) as server:
        made = dict(chain(f"m{k}", k) for k in range(4))
        for model in made:
            server.load(model)
        held = torch.zeros(4, device="cuda")
        job = server.background(lambda: held.add_(1.0), name="count", state=[held], priority=-1)
        for seed in range(3):
            for model, weights in made.items():
                ask(server, model.name, weights, seed)
        before = job.steps
        wait_until(lambda: job.steps > before + 3 or job.error)
        job.stop()
        assert job.join(30)
        assert job.error is None
        assert held.tolist() == [float(job.steps)] * 4
        check_at_rest(server.state)


class Leaves(torch.nn.Module):
    """Fails when the GPU still has much to do with its weights."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(4096, 4096))

    def forward(self, x):
        if not x.is_cuda:
            return x @ self.weight
        for _ in range(300):
            x = x @ self.weight
        raise ValueError("on purpose")


def test_a_load_that_fails_while_its_kernels_run_harms_nobody():
    with pp.Engine("cuda", memory_bytes=1 << 30) as server:
        model, made = chain("one", 1)
        server.load(model)
        for _ in range(3):
            with pytest.raises(CaptureError, match="on purpose"):
                server.load(pp.Model.from_torch(Leaves(), torch.zeros(1, 4096), name="leaves", batch=(1,)))
            ask(server, "one", made)
        check_at_rest(server.state)


class Late(torch.nn.Module):
    """Its table lies behind all other weights, is used first, and counts only where the mask says so."""

    def __init__(self):
        super().__init__()
        self.body = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(4)))
        self.table = torch.nn.Embedding(200_000, 64)

    def forward(self, ids, mask):
        return self.body(torch.where(mask[..., None], self.table(ids), 0.0))


def test_a_table_behind_a_mask_is_waited_for():
    torch.manual_seed(0)
    module, draw = Late().eval(), np.random.default_rng(0)
    with pp.Engine("cuda", memory_bytes=1 << 28, quantum_us=2, tuning={"chunk_bytes": 2 * MIB}) as server:
        example = (torch.zeros(1, 8, dtype=torch.int64), torch.zeros(1, 8, dtype=torch.bool))
        server.load(pp.Model.from_torch(module, example, name="late", batch=(1,), instances=1))
        for _ in range(5):
            ids, mask = draw.integers(0, 200_000, 8), draw.integers(0, 2, 8).astype(bool)
            server.evict("late")
            found = server.infer_sync("late", {"input0": ids, "input1": mask})["output"]
            with torch.no_grad():
                expected = module(torch.from_numpy(ids)[None], torch.from_numpy(mask)[None])[0]
            np.testing.assert_allclose(found, expected.numpy(), rtol=1e-2, atol=1e-2)
