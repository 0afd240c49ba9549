"""Demo models with real weights: `load("mlp")`, `load("cnn")`, `load("transformer")`."""

from __future__ import annotations

from paellapy.demo.models import held_out, load, load_weights, names

__all__ = ["held_out", "load", "load_weights", "names"]
