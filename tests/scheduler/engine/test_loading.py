"""Where loading spends its time: phases add up, and are kept with the model."""

from __future__ import annotations

import logging
import subprocess
import sys
import time

import pytest
from engine_models import mlp_model
from hypothesis import given
from hypothesis import strategies as some

import paellapy as pp
from paellapy.scheduler.engine import loading
from paellapy.scheduler.engine.loading import PHASES, LoadTimes


@given(some.recursive(some.sampled_from(PHASES).map(lambda name: (name, [])), lambda inner: some.tuples(
    some.sampled_from(PHASES), some.lists(inner, max_size=3)), max_leaves=8))  # fmt: skip
def test_phases_inside_others_count_once(tree):
    now = [0.0]
    times = LoadTimes("net")
    expected: dict[str, float] = {}

    def spend(name: str, s: float) -> None:
        now[0] += s
        expected[name] = expected.get(name, 0.0) + s

    def walk(node) -> None:
        name, inner = node
        with times.phase(name):
            assert times.doing == name
            spend(name, 1.0)
            for each in inner:
                walk(each)
                spend(name, 0.25)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loading.time, "perf_counter", lambda: now[0])
        walk(tree)
    assert times.seconds == expected
    assert times.total_s == now[0]
    assert times.doing == ""


def test_a_loaded_model_says_what_its_loading_took(caplog):
    with pp.Engine("virtual:h200") as engine, caplog.at_level(logging.INFO, "paellapy.load"):
        engine.load(mlp_model(batch=(1, 2), instances=2))
        took = engine.stats()["models"]["mlp"]["load_s"]
    assert {"upload", "warm up", "memory", "capture", "cut", "install"} <= set(took) <= set(PHASES)
    assert all(seconds >= 0 for seconds in took.values())
    lines = [record.getMessage() for record in caplog.records if record.name == "paellapy.load"]
    assert lines[-1].startswith("loaded mlp: ")


@pytest.mark.parametrize("logged", [False, True])
def test_a_long_load_says_so_also_without_a_terminal(capsys, caplog, monkeypatch, logged):
    monkeypatch.setattr(loading, "PATIENCE_S", 0.0)
    monkeypatch.delenv("PAELLAPY_QUIET", raising=False)
    times, said = LoadTimes("net"), ""
    end = time.monotonic() + 60
    caplog.set_level(logging.INFO if logged else logging.WARNING, "paellapy.load")
    with times.phase("capture"), loading.shown(times):
        while "loading net: capture" not in said:
            assert time.monotonic() < end
            said += caplog.text if logged else capsys.readouterr().err
    assert logged or said.count("\n") == 1


_FIRST_REQUEST = """
import asyncio, sys
import numpy as np
from numba.core.dispatcher import Dispatcher
import paellapy as pp
from paellapy import demo

with pp.Engine("virtual:h200") as engine:
    model = demo.load("mlp")
    engine.load(model)
    inputs = {name: np.zeros(spec.shape, spec.dtype) for name, spec in model.inputs.items()}
    compiled, imported, compile = [], set(sys.modules), Dispatcher.compile

    def noted(self, signature):
        compiled.append(self.py_func.__name__)
        return compile(self, signature)

    Dispatcher.compile = noted
    engine.infer_sync("mlp", inputs)
    asyncio.run(engine.infer("mlp", inputs))
    print((compiled, sorted(set(sys.modules) - imported), "torch" in sys.modules))
"""


def test_the_first_request_finds_everything_imported_and_compiled_and_without_pytorch():
    run = subprocess.run([sys.executable, "-c", _FIRST_REQUEST], capture_output=True, text=True, check=True)
    assert run.stdout.splitlines()[-1] == "([], [], False)"
