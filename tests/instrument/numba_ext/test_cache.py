"""Compiled code on disk: anew after an edit of anything that is in it, and only then."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import numba
import pytest

from paellapy.instrument.gpu_model import model
from paellapy.instrument.numba_ext.cache import fingerprint
from paellapy.instrument.numba_ext.link import compiled, loop, reachable
from paellapy.scheduler.core.step import step
from paellapy.scheduler.sim.segment_model import run_segments

pytestmark = pytest.mark.versions

ENTRY = """
from {root}.constants import FACTOR
from paellapy.instrument.numba_ext.link import compiled, part
{comment}
@part
def scaled(x: int) -> int:
    '''{comment}'''
    return x * FACTOR

@compiled
def entry(x: int) -> int:
    return scaled(x) + {plus}
"""


@pytest.mark.parametrize(
    ("module", "name"), [("core.submit", "SUBMISSIONS_PER_STEP"), ("core.codes", "NONE"), ("core.choose", "AGAIN")]
)
def test_a_step_knows_the_constants_of_its_parts(module: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    function = step.py_func  # type: ignore[attr-defined]
    before = fingerprint(function)
    assert before == fingerprint(function)
    where = importlib.import_module(f"paellapy.scheduler.{module}")
    monkeypatch.setattr(where, name, type(getattr(where, name))(12345))
    assert before != fingerprint(function)


@pytest.mark.parametrize(
    ("module", "name"), [("sim.segment_model", "share"), ("core.rings", "publish"), ("core.admission", "predict")]
)
def test_a_simulation_knows_the_code_of_its_parts(module: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    function = run_segments.py_func  # type: ignore[attr-defined]
    before = fingerprint(function)
    part = getattr(importlib.import_module(f"paellapy.scheduler.{module}"), name).py_func
    text = part.__code__.replace(co_consts=(*part.__code__.co_consts, 1), co_code=part.__code__.co_code)
    monkeypatch.setattr(part, "__code__", text)
    assert before == fingerprint(function), "a constant that no instruction uses"
    monkeypatch.setattr(part, "__code__", (lambda s: s).__code__)
    assert before != fingerprint(function)


@pytest.mark.parametrize(
    ("module", "name"), [("blocks", "WARP_SHIFT"), ("tables", "W_HELD"), ("tables", "REACHED")]
)
def test_the_sm_model_knows_the_constants_of_its_parts(
    module: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = fingerprint(model.run.py_func)
    monkeypatch.setattr(importlib.import_module(f"paellapy.instrument.gpu_model.{module}"), name, 12345)
    assert before != fingerprint(model.run.py_func)


def test_the_disk_has_what_is_unchanged_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "some_package"
    package.mkdir()
    (package / "__init__.py").touch()
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.syspath_prepend(tmp_path)

    def run(factor: int, plus: int, comment: str) -> list[int]:
        """The result of an entry point that is imported anew, and how often the disk had it."""
        (package / "constants.py").write_text(f"FACTOR = {factor}\n")
        (package / "entry.py").write_text(ENTRY.format(root=package.name, plus=plus, comment=comment))
        for name in [name for name in sys.modules if name.startswith(package.name)]:
            del sys.modules[name]
        entry = importlib.import_module(f"{package.name}.entry").entry
        return [entry(10), sum(entry.stats.cache_hits.values())]

    assert run(2, 1, "# first") == [21, 0]
    assert run(2, 1, "# other words") == [21, 1]
    assert run(3, 1, "# other words") == [31, 0], "a constant of another file"
    assert run(3, 2, "# other words") == [32, 0], "the entry point itself"
    index = next((tmp_path / "cache").rglob("*.nbi"))
    index.write_bytes(index.read_bytes()[:40] + b"c__main__\nGone\n.")
    assert run(3, 2, "# other words") == [32, 0], "an index that cannot be read"
    assert run(3, 2, "# other words") == [32, 1]


def test_an_entry_point_that_is_compiled_another_way_is_not_taken_from_the_disk() -> None:
    def twice(x: int) -> int:
        return 2 * x

    ways: list[Any] = [compiled(twice), loop(twice), reachable(twice)]
    for each in ways:
        each._cache._stamp()
    assert len({each._cache._cache_file._source_stamp for each in ways}) == 3
