"""Demo models with real weights: `load("mlp")`, `load("cnn")`, `load("transformer")`; two rivals to schedule; and
`AUSTEN`, the folder of a small language model.
"""

from __future__ import annotations

from paellapy.demo.models import AUSTEN, TARGETS_MS, held_out, load, load_weights, names, rivals, rush

__all__ = ["AUSTEN", "TARGETS_MS", "held_out", "load", "load_weights", "names", "rivals", "rush"]
