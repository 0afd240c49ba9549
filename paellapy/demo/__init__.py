"""Demo models with real weights: `load("mlp")`, `load("cnn")`, `load("transformer")`; and two rivals to schedule."""

from __future__ import annotations

from paellapy.demo.models import TARGETS_MS, held_out, load, load_weights, names, rivals, rush

__all__ = ["TARGETS_MS", "held_out", "load", "load_weights", "names", "rivals", "rush"]
