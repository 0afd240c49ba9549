"""Compiles the code that requests run, or reads it from the cache, before the first request."""

from __future__ import annotations

import contextlib
import importlib

import numpy as np

from paellapy.instrument.device.driver import library
from paellapy.scheduler.core import admission
from paellapy.scheduler.core.install import install
from paellapy.scheduler.core.profiles import ModelProfile, SegmentProfile
from paellapy.scheduler.core.state import Limits, new_state
from paellapy.scheduler.core.step import attach_loop
from paellapy.scheduler.core.tables import COMPLETION
from paellapy.scheduler.core.tuning import Tuning
from paellapy.scheduler.engine import front_calls
from paellapy.scheduler.policies.attach import attach_policy
from paellapy.scheduler.policies.policy import Policy
from paellapy.serving.counters import counter_table, note_items

_MODULES = {
    "virtual": ("paellapy.scheduler.backends.virtual", "triton.compiler.code_generator"),
    "cuda": ("paellapy.scheduler.backends.cuda", "cuda.bindings.driver", "triton.compiler.code_generator",
             "triton.backends.nvidia.compiler", "triton.backends.nvidia.driver", "torch"),
}  # fmt: skip


def warm_up(policy: Policy) -> None:
    """Compiles with tables of its own. Forked processes inherit the compiled code and answer at once."""
    state = new_state(Limits(models=1, lanes=1, requests=2, clients=2))
    attach_policy(state, policy)
    install(state, ModelProfile("warm-up", {1: [SegmentProfile(1.0)]}, lanes=1))
    admission.ask(state, admission.new_allowances([1], Tuning.of_row(state.tuning[0])), np.zeros(1, admission.ASKED))
    attach_loop(state)
    front_calls.warm_up(state)
    note_items(counter_table()[0], np.zeros(1, np.int64), np.zeros(1, np.int64), np.zeros(1, np.int64),
               np.zeros(0, COMPLETION))  # fmt: skip


def import_device(name: str) -> None:
    """Imports the modules of a device, so that engine processes forked later share them. Opens no device.

    Triton imports PyTorch on a real GPU, if it is installed: the longest part of an engine's start.
    """
    virtual = name.startswith("virtual") or (name == "auto" and not _has_driver())
    for module in _MODULES["virtual" if virtual else "cuda"]:
        with contextlib.suppress(ImportError, OSError):  # OSError: a library that PyTorch needs is missing
            importlib.import_module(module)


def _has_driver() -> bool:
    try:
        library()
    except OSError:
        return False
    return True
