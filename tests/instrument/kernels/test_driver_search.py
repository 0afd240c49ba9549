"""Triton finds the virtual GPU's driver from the moment both packages are imported, in whichever order."""

from __future__ import annotations

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


def test_a_script_in_the_manner_of_tritons_tutorials_needs_only_the_decorator(tmp_path: Path):
    pytest.importorskip("torch")
    said = output_of(
        tmp_path,
        """
import torch
import triton
import triton.language as tl
import paellapy as pp

DEVICE = triton.runtime.driver.active.get_active_torch_device()
bench = triton.runtime.driver.active.get_benchmarker()


@pp.kernel
@triton.jit
def halve(x, out, n, B: tl.constexpr):
    i = tl.program_id(0) * B + tl.arange(0, B)
    tl.store(out + i, tl.load(x + i, mask=i < n) / 2, mask=i < n)


driver = triton.runtime.driver.active
print(driver.get_current_target().arch, driver.utils.get_device_properties(0)["multiprocessor_count"])
x = torch.rand(300, device=DEVICE)
out = torch.empty_like(x)
assert x.device == DEVICE
grid = lambda meta: (triton.cdiv(300, meta["B"]),)
halve[grid](x, out, 300, B=128)
assert torch.equal(out, x / 2)
assert bench(lambda: halve[grid](x, out, 300, B=128)) > 0
assert triton.testing.do_bench(lambda: halve[grid](x, out, 300, B=128), warmup=0.02, rep=0.05) > 0
print("done")
""",
    )
    assert said.split() == ["90", "132", "done"]


LONE = """
import triton
import triton.language as tl

print(triton.runtime.driver.active.get_current_target().arch)


@triton.jit
def lone(x):
    tl.store(x, 1.0)


lone[1,](0)
"""


@pytest.mark.parametrize(
    ("head", "command"),
    [("import paellapy", ()), ("", ("-m", "paellapy", "trace", "--device", "virtual:h200"))],
    ids=["python", "paellapy trace"],
)
def test_a_script_without_a_decorated_kernel_is_told_so(tmp_path: Path, head: str, command: tuple[str, ...]):
    said = output_of(tmp_path, head + LONE, command)
    assert "'lone' is not a pp.kernel" in said
    assert "active drivers" not in said
    assert said.startswith("90\n")


def test_other_failures_of_the_search_remain(tmp_path: Path):
    said = output_of(
        tmp_path,
        """import os, paellapy, triton
os.environ["TRITON_DEFAULT_BACKEND"] = "abacus"
triton.runtime.driver.active
""",
    )
    assert "abacus" in said.splitlines()[-1]
