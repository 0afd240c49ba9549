"""Stores results of these scripts like those of the benchmarks in the folder above."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any


def save(name: str, results: Any, folder: Path | None = None) -> Path:
    """Writes results/NAME.json with what it was measured on."""
    spec = importlib.util.spec_from_file_location("benchmarks_common", Path(__file__).parents[1] / "common.py")
    assert spec is not None
    assert spec.loader is not None
    common = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(common)
    path: Path = common.save(name, results, folder=folder)
    return path
