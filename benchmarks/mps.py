"""NVIDIA MPS for one run: a daemon of its own in a temporary folder, which is stopped in the end."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

CONTROL = "nvidia-cuda-mps-control"
MISSING = f"{CONTROL} is not on this machine: it comes with NVIDIA's driver"


def available() -> bool:
    return shutil.which(CONTROL) is not None


@contextmanager
def daemon() -> Iterator[dict[str, str]]:
    """Variables for the environment of processes that are to share the GPU through this daemon. Other processes and
    other daemons are not touched, nor are the GPU's clocks and compute mode.
    """
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        env = {"CUDA_MPS_PIPE_DIRECTORY": str(folder / "pipe"), "CUDA_MPS_LOG_DIRECTORY": str(folder / "log")}
        for each in env.values():
            Path(each).mkdir()
        whole = {**os.environ, **env}
        subprocess.run([CONTROL, "-d"], check=True, env=whole, timeout=30)
        try:
            yield env
        finally:
            try:
                subprocess.run([CONTROL], input="quit -t 10\n", text=True, env=whole, check=False, timeout=30)
            except subprocess.TimeoutExpired:
                print("the MPS daemon of this run did not stop within 30 s", file=sys.stderr, flush=True)
