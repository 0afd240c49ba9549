"""On a real GPU: torch.compile's caches on disk, shared by processes with and without instrumentation."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.gpu

SCRIPT = """
import json
import sys

import numpy as np
import torch
from torch._dynamo.utils import counters

import paellapy as pp


def f(a, b):
    return torch.nn.functional.gelu(a * b + a).sum(dim=-1)


with pp.Device("cuda"):
    a, b = (torch.linspace(-2, 2, 256 * 2048, device="cuda").reshape(256, 2048) for _ in range(2))
    if sys.argv[1] == "traced":
        pp.instrument_torch()
    compiled = torch.compile(f)
    compiled(a, b)
    with pp.trace() as t:
        got = compiled(a, b)
torch.cuda.synchronize()
numbers = [np.sort(t.blocks["block"][t.blocks["launch"] == row["launch"]]) for row in t.launches]
found = {
    "right": torch.allclose(got, f(a, b), rtol=1e-4, atol=1e-3),
    "hits": counters["inductor"]["fxgraph_cache_hit"] + counters["aot_autograd"]["autograd_cache_hit"],
    "kernels": list(t.kernels),
    "unseen": list(t.unseen),
    "launches": len(t.launches),
    "every block once": [n.tolist() == list(range(row["blocks"])) for n, row in zip(numbers, t.launches)],
    "warps": t.launches["warps"].tolist(),
    "plain registers": t.work["plain_registers"].tolist(),
}
print("FOUND", json.dumps(found))
"""


@pytest.fixture
def run(tmp_path: Path) -> Callable[[str], dict[str, Any]]:
    """Runs the script in a process of its own; all processes share the caches."""
    script = tmp_path / "compiled.py"
    script.write_text(SCRIPT)
    others = ("TRITON_", "TORCHINDUCTOR_", "TORCH_COMPILE_")  # settings of caches, which the tests choose
    environment = {name: value for name, value in os.environ.items() if not name.startswith(others)}
    environment |= {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "inductor"), "TORCHINDUCTOR_COMPILE_THREADS": "1"}

    def started(how: str) -> dict[str, Any]:
        command = [sys.executable, str(script), how]
        done = subprocess.run(command, capture_output=True, text=True, timeout=240, env=environment, check=False)
        lines = [line for line in done.stdout.splitlines() if line.startswith("FOUND ")]
        assert lines, done.stderr[-3000:]
        found: dict[str, Any] = json.loads(lines[0].removeprefix("FOUND "))
        return found

    return started


@pytest.mark.timeout(900)
def test_a_warm_cache_of_plain_kernels_does_not_hide_them_from_a_trace(run: Callable[[str], dict[str, Any]]) -> None:
    pytest.importorskip("torch")
    first = run("plain")
    assert first["right"]
    assert first["hits"] == 0
    assert first["launches"] == 0

    traced = run("traced")
    assert traced["right"]
    assert traced["hits"] == 0, "plain entries of the cache are not used"
    assert traced["unseen"] == []
    assert traced["launches"] >= 1
    assert all(name.startswith("triton_") for name in traced["kernels"])
    assert all(traced["every block once"])
    assert min(traced["plain registers"]) > 0

    again = run("traced")  # from its own entries
    assert again["hits"] >= 1
    assert again == {**traced, "hits": again["hits"]}

    last = run("plain")
    assert last["right"]
    assert last["hits"] >= 1
    assert last["launches"] == 0
