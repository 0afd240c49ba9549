"""Examples in docstrings do what they say."""

from __future__ import annotations

import doctest
import importlib
import warnings
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
MODULES = sorted(
    ".".join(("paellapy", *path.relative_to(ROOT).with_suffix("").parts)).removesuffix(".__init__").replace(
        "paellapy.paellapy", "paellapy"
    )
    for package in ("paellapy", "serving", "scheduler", "instrument")
    for path in (ROOT / package).rglob("*.py")
    if ">>> " in path.read_text()
)


@pytest.mark.parametrize("name", MODULES)
def test_every_example_is_true(name: str) -> None:
    with warnings.catch_warnings(action="ignore"):  # of the packages that it imports
        module = importlib.import_module(name)
    found = doctest.testmod(module)
    assert found.attempted
    assert not found.failed
