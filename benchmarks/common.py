"""Helpers of all benchmarks: the place of results, and the facts stored with them."""

from __future__ import annotations

import argparse
import functools
import json
import os
import platform
import subprocess
import time
from pathlib import Path
from typing import Any

from paellapy.instrument.device import CudaDevice, Device
from paellapy.instrument.env import versions

RESULTS = Path(__file__).parent / "results"


@functools.cache
def commit() -> str:
    """The commit measured; "+" marks uncommitted changes. $PAELLAPY_COMMIT names it in a tree copied without git."""
    if named := os.environ.get("PAELLAPY_COMMIT"):
        return named
    try:
        run = subprocess.run(["git", "describe", "--always", "--dirty=+"], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return run.stdout.strip()


@functools.cache
def cpu_name() -> str:
    """As lscpu names it: /proc/cpuinfo has no name of an ARM core."""
    try:
        run = subprocess.run(["lscpu"], capture_output=True, text=True, check=True, env={**os.environ, "LC_ALL": "C"})
    except (OSError, subprocess.CalledProcessError):
        return platform.machine()
    found = [line.split(":", 1)[1].strip() for line in run.stdout.splitlines() if line.startswith("Model name:")]
    return next(iter(found), platform.machine())


def need_gpu(why: str) -> CudaDevice:
    """The GPU of this machine, or the end."""
    device = Device("auto")
    if not isinstance(device, CudaDevice):
        raise SystemExit(f"{why}: this needs a GPU")
    return device


def facts(device: Device | None = None) -> dict[str, Any]:
    """What a result was measured on."""
    return {
        "device": device.title if device else None,
        "cpu": cpu_name(),
        "versions": versions(),
        "commit": commit(),
        "date": time.strftime("%Y-%m-%d"),
    }


def save(name: str, results: Any, device: Device | None = None, folder: Path | None = None) -> Path:
    """Writes results/NAME.json with what it was measured on."""
    path = (folder or RESULTS) / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    # Whole or not at all: what was measured before must survive a run that is stopped while it writes.
    part = path.with_suffix(".part")
    part.write_text(json.dumps({"on": facts(device), "results": results}, indent=1) + "\n")
    os.replace(part, path)
    return path


SEEDS_HELP = "from which requests are drawn: how many, from 0 on, or which, as in 5-9"


def seeds(text: str) -> range:
    first, dash, last = text.partition("-")
    found = range(int(first), int(last) + 1) if dash else range(int(first))
    if not found:
        raise argparse.ArgumentTypeError(f"there is no seed in {text!r}: {SEEDS_HELP}")
    return found
