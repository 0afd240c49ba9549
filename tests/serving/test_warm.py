"""Imports before the fork: they save time, so a module that cannot be imported stops no server."""

from __future__ import annotations

import importlib

import pytest

from paellapy.serving import loading


@pytest.mark.parametrize("error", [ImportError, OSError])  # PyTorch raises OSError where a library of CUDA is missing
def test_a_module_that_cannot_be_imported_is_left_out(monkeypatch, error):
    tried = []

    def load(name):
        tried.append(name)
        if name in ("torch", "cuda.bindings.driver"):
            raise error(name)

    monkeypatch.setattr(importlib, "import_module", load)
    loading.import_device("cuda:1")
    assert tried[0] == "paellapy.scheduler.backends.cuda"
    assert tried[-1] == "torch"
