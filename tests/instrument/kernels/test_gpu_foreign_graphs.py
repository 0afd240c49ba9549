"""On a real GPU: programs that know nothing of paellapy capture CUDA graphs, and every replay is in the trace."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import triton
import triton.language as tl

import paellapy as pp

pytestmark = pytest.mark.gpu
torch = pytest.importorskip("torch")


@triton.jit
def triple(x, out, n, B: tl.constexpr):
    i = tl.program_id(0) * B + tl.arange(0, B)
    tl.store(out + i, tl.load(x + i, mask=i < n) * 3, mask=i < n)


@pytest.fixture
def instrumented(gpu: pp.Device) -> Iterator[None]:
    pp.instrument_torch()
    yield
    pp.instrument_torch(False)
    torch._dynamo.reset()


def times_of_blocks(t: pp.Trace) -> Counter[tuple[str, int]]:
    """How many launches of each kernel there are whose blocks all ran that many times."""
    found: Counter[tuple[str, int]] = Counter()
    for row in t.launches:
        own = t.blocks["block"][t.blocks["launch"] == row["launch"]]
        times = np.bincount(own, minlength=row["blocks"])
        assert set(times) == {times[0]}, "every block as often as the others"
        found[t.kernels[row["kernel"]], int(times[0])] += 1
    return found


@pytest.mark.timeout(600)
@pytest.mark.filterwarnings("default")
def test_graphs_of_torch_compile_report_on_every_replay(instrumented: None) -> None:
    def f(a: Any, b: Any) -> Any:
        return torch.nn.functional.gelu((a @ b) * 2 + a).softmax(-1)

    a, b = (torch.randn(512, 512, device="cuda") for _ in range(2))
    compiled = torch.compile(f, mode="reduce-overhead")
    with torch.no_grad():
        for _ in range(4):  # compiles, warms up, captures
            compiled(a, b)
        torch.cuda.synchronize()
        with pp.trace() as t:
            for _ in range(5):
                got = compiled(a, b)
            torch.cuda.synchronize()
        torch.testing.assert_close(got, f(a, b), rtol=1e-3, atol=1e-3)
    found = times_of_blocks(t)
    assert found, "Inductor made at least one Triton kernel"
    assert {times for _, times in found} == {5}
    assert all(name.startswith("triton_") for name, _ in found)
    assert t.unseen == ()
    assert t.dropped == 0


SERVER = """
import queue, threading
import torch, triton, triton.language as tl

@triton.jit
def scale(x, out, n, B: tl.constexpr):
    i = tl.program_id(0) * B + tl.arange(0, B)
    tl.store(out + i, tl.load(x + i, mask=i < n) * 3, mask=i < n)

class Runner:
    "One graph per batch size, captured in a thread of its own, as servers of language models do."

    def __init__(self):
        self.model = torch.compile(lambda x: torch.nn.functional.silu(x) + 1)
        self.stream, self.graphs = torch.cuda.Stream(), {}
        for batch in (1, 2, 4):
            x, out = torch.ones(batch, 1024, device="cuda"), torch.empty(batch, 1024, device="cuda")
            with torch.cuda.stream(self.stream):
                self.step(x, out)
            self.stream.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=self.stream):
                self.step(x, out)
            self.graphs[batch] = graph, x, out

    def step(self, x, out):
        scale[x.numel() // 256,](self.model(x), out, x.numel(), B=256)

    def run(self, batch):
        graph, x, out = self.graphs[batch]
        with torch.cuda.stream(self.stream):
            graph.replay()
        self.stream.synchronize()
        return float(out[0, 0])

def serve(asked, answers):
    runner = Runner()
    while (batch := asked.get()) is not None:
        answers.put(runner.run(batch))

asked, answers = queue.Queue(), queue.Queue()
worker = threading.Thread(target=serve, args=(asked, answers))
worker.start()
for batch in [1, 2, 4, 4, 4, 2]:
    asked.put(batch)
asked.put(None)
worker.join()
print("answers", sorted({round(answers.get(), 3) for _ in range(6)}))
"""


@pytest.mark.timeout(600)
def test_a_server_that_knows_nothing_of_it_is_traced_from_the_command_line(tmp_path: Path) -> None:
    script = tmp_path / "server.py"
    script.write_text(SERVER)
    command = [sys.executable, "-m", "paellapy", "trace", "--device", "cuda", "--json", "--no-explain"]
    done = subprocess.run([*command, script], capture_output=True, text=True, timeout=500, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    *_, answers, facts = done.stdout.splitlines()
    assert answers == "answers [5.193]"
    t = pp.Trace.load(tmp_path / json.loads(facts)["trace"])
    found = times_of_blocks(t)
    mine = Counter({times: n for (name, times), n in found.items() if name == "scale"})
    # Each batch size once while it warms up, then its graph: one, two and three replays.
    assert mine == Counter({1: 3 + 1, 2: 1, 3: 1})
    assert any(name.startswith("triton_") for name, _ in found)


def test_proton_may_run_beside_it(instrumented: None, tmp_path: Path) -> None:
    proton = pytest.importorskip("triton.profiler")
    x = torch.arange(1000, dtype=torch.float32, device="cuda")
    out = torch.empty_like(x)
    try:
        session = proton.start(str(tmp_path / "profile"), hook="triton")
    except RuntimeError as error:
        pytest.skip(f"Proton cannot start: {error}")
    try:
        triple[8,](x, out, 1000, B=128)
        with pp.trace() as t:
            triple[8,](x, out, 1000, B=128)
    finally:
        proton.finalize(session)
    assert torch.equal(out, 3 * x)
    assert times_of_blocks(t) == {("triple", 1): 1}
    assert "triple" in (tmp_path / "profile.hatchet").read_text()
