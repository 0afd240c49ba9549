"""Stores results of these scripts like those of the benchmarks in the folder above."""

from __future__ import annotations

import functools
import importlib.util
from pathlib import Path
from typing import Any


@functools.cache
def _common() -> Any:
    spec = importlib.util.spec_from_file_location("benchmarks_common", Path(__file__).parents[1] / "common.py")
    assert spec is not None
    assert spec.loader is not None
    common = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(common)
    return common


def facts() -> dict[str, Any]:
    """What a result is measured on."""
    found: dict[str, Any] = _common().facts()
    return found


def save(name: str, results: Any, folder: Path | None = None) -> Path:
    """Writes results/NAME.json with what it was measured on."""
    path: Path = _common().save(name, results, folder=folder)
    return path
