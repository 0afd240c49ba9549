"""Triton finds the virtual GPU's driver from the moment both packages are imported, in whichever order."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest


def output_of(tmp_path: Path, script: str, command: tuple[str, ...] = ()) -> str:
    """What a script prints in a fresh process, whose driver nobody has asked for, on a machine without a GPU."""
    path = tmp_path / "script.py"
    path.write_text(script)
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "-1", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, *command, str(path)], env=environment, cwd=tmp_path, capture_output=True, text=True
    )
    return done.stdout + done.stderr


def test_a_script_in_the_manner_of_tritons_tutorials_runs_unchanged(tmp_path: Path):
    pytest.importorskip("torch")
    said = output_of(
        tmp_path,
        """
import warnings
import torch
import triton
import triton.language as tl
import paellapy as pp

DEVICE = triton.runtime.driver.active.get_active_torch_device()
bench = triton.runtime.driver.active.get_benchmarker()


@triton.jit
def halve(x, out, n, B: tl.constexpr):
    i = tl.program_id(0) * B + tl.arange(0, B)
    tl.store(out + i, tl.load(x + i, mask=i < n) / 2, mask=i < n)


tuned = triton.autotune([triton.Config({"B": b}) for b in (64, 256)], ["n"])(halve)
driver = triton.runtime.driver.active
print(driver.get_current_target().arch, driver.utils.get_device_properties(0)["multiprocessor_count"])
print(torch.cuda.get_device_capability()[0], torch.cuda.get_device_properties("cuda").multi_processor_count)
x = torch.rand(300, device=DEVICE)
out = torch.empty_like(x)
assert x.device == DEVICE
stream = getattr(torch, DEVICE.type).Stream()
getattr(torch, DEVICE.type).set_stream(stream)
grid = lambda meta: (triton.cdiv(300, meta["B"]),)
halve[grid](x, out, 300, B=128)
assert torch.equal(out, x / 2)
made = halve.warmup(x, out, 300, B=128, grid=(1,))
made._init_handles()
made[3, 1, 1](x, out.zero_(), 300, 128)
assert torch.equal(out, x / 2) and made.n_regs > 0
tuned[grid](x, out.zero_(), 300)
assert torch.equal(out, x / 2) and tuned.best_config in tuned.configs
assert bench(lambda: halve[grid](x, out, 300, B=128)) > 0
assert triton.testing.do_bench(lambda: halve[grid](x, out, 300, B=128), warmup=0.02, rep=0.05) > 0
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    small, big = (torch.ones(n, n) for n in (16, 1024))
    times = [triton.testing.do_bench(lambda: a @ a, quantiles=[0.5, 0.2, 0.8]) for a in (small, big)]
    assert 0 < times[0][0] and times[1][0] > times[0][0] + 2 * 1024**3 / 66.9e9
print(caught[0].message.operations)
with pp.trace() as t:
    halve[grid](x, out, 300, B=128)
print(len(t.blocks), t.kernels[0])
""",
    )
    assert said.splitlines() == ["90 132", "9 132", "('mm',)", "3 halve"]


def test_a_benchmarks_table_marks_lines_that_are_estimated(tmp_path: Path):
    for package in ("torch", "pandas", "matplotlib"):
        pytest.importorskip(package)
    said = output_of(
        tmp_path,
        """
import paellapy, torch, triton
from triton.testing import Benchmark, do_bench, perf_report


@perf_report(Benchmark(["n"], [8, 16], "provider", ["torch", "none"], ["Torch", "None"], "table", {}, ylabel="ms"))
def table(n, provider, factor):
    x = torch.ones(n)
    return factor * do_bench(lambda: x + x) if provider == "torch" else 7


found = table.run(return_df=True, factor=1000)
print(list(found.columns), found["None (ms)"].tolist(), (found["Torch (estimate) (ms)"] > 1).all())
""",
    )
    assert "['n', 'Torch (estimate) (ms)', 'None (ms)'] [7.0, 7.0] True" in said.splitlines()


def test_a_script_without_a_decorated_kernel_is_traced_on_the_virtual_gpu(tmp_path: Path):
    lone = """
import numpy as np, triton
import triton.language as tl

print(triton.runtime.driver.active.get_current_target().arch)


@triton.jit
def lone(x):
    tl.store(x + tl.program_id(0), 1.0)


lone[5,](np.zeros(5, np.float32))
"""
    said = output_of(tmp_path, lone, ("-m", "paellapy", "trace", "--json", "--device", "virtual:h200"))
    first, *_, last = [line for line in said.splitlines() if line[:1] in "9{"]
    assert first == "90"
    assert [(k["kernel"], k["blocks"]) for k in json.loads(last)["summary"]["kernels"]] == [("lone", 5)]


def test_other_failures_of_the_search_remain(tmp_path: Path):
    said = output_of(
        tmp_path,
        """import os, paellapy, triton
os.environ["TRITON_DEFAULT_BACKEND"] = "abacus"
triton.runtime.driver.active
""",
    )
    assert "abacus" in said.splitlines()[-1]
