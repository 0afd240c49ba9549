"""State that engine processes hand on, and modules that they share."""

from __future__ import annotations

import subprocess
import sys
from functools import partial

import pytest
from engine_models import scale_model

import paellapy as pp
from paellapy.scheduler.core.errors import EngineFailedError
from paellapy.serving.registry import Registry, entry_of
from paellapy.serving.workers.engine_process import SavedState

pytestmark = pytest.mark.quick


def registry_with(engine, *names):
    return Registry(engine, [entry_of(scale_model(name, batch=(1,))) for name in names])


def test_the_next_engine_knows_how_long_batches_took(tmp_path):
    with pp.Engine("virtual:h200") as engine:
        registry = registry_with(engine, "a", "b")
        registry.changed.append(partial(SavedState(tmp_path / "kept").save, registry))
        registry.load("a")
        took = engine.tried_ns("a")
        assert took > 0
    with pp.Engine("virtual:h200") as engine:
        registry = registry_with(engine, "a", "b")
        SavedState(tmp_path / "kept").restore(registry)
        registry.load("a")
        registry.load("b")
        assert engine.tried_ns("a") == took
        assert engine.tried_ns("b") not in (0, took)
        ran = {name: model["completed"] for name, model in engine.stats()["models"].items()}
        assert ran["a"] < ran["b"], "only an unknown model runs full batches"
        registry.load("a")  # another version of it may take another time
        assert engine.tried_ns("a") not in (0, took)


def test_a_wish_is_kept_after_the_engine_has_failed(tmp_path):
    told = []
    with pp.Engine("virtual:h200") as engine:
        registry = registry_with(engine, "a", "b")
        registry.changed += [partial(SavedState(tmp_path / "kept").save, registry), lambda: told.append(1)]
        registry.load("a")
        registry.load("b")
        engine.core.fail(RuntimeError("on purpose"))
        told.clear()
        with pytest.raises(EngineFailedError):
            registry.unload("a")
        assert told
        assert engine.tried_ns("nobody") == 0
    with pp.Engine("virtual:h200") as engine:
        registry = registry_with(engine, "a", "b")
        SavedState(tmp_path / "kept").restore(registry)
        assert {name: entry.wanted for name, entry in registry.entries.items()} == {"a": False, "b": True}


SHARED = """
import os, sys
from paellapy.serving.loading import import_device
import_device("cuda")
before = set(sys.modules)
pid = os.fork()
if pid:
    sys.exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
import numpy as np, paellapy as pp
from paellapy import demo
with pp.Engine("cuda") as engine:
    engine.load(demo.load("mlp"))
    engine.infer_sync("mlp", {"image": np.zeros((8, 8), np.float32)})
late = {name.partition(".")[0] for name in set(sys.modules) - before}
assert not late & {"torch", "cuda"}, late
os._exit(0)
"""


@pytest.mark.gpu
def test_processes_forked_after_the_imports_open_the_gpu():
    done = subprocess.run([sys.executable, "-c", SHARED], capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stderr[-3000:]
