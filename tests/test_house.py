"""The house stays in order: imports point one way, functions stay small, and every module has one name."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import house
import pytest

pytestmark = pytest.mark.xdist_group("house")  # all modules are read once


PARAMETERS, LINES = 8, 50


# Functions of more than eight parameters, and why they have them.
MANY_PARAMETERS = {
    "paellapy/demo/kernels.py:linear": "a kernel: its arguments are what the GPU is given",
    "paellapy/demo/kernels.py:classify": "a kernel: its arguments are what the GPU is given",
    "paellapy/demo/kernels.py:conv3x3": "a kernel: its arguments are what the GPU is given",
    "paellapy/demo/kernels.py:patch_embed": "a kernel: its arguments are what the GPU is given",
    "paellapy/demo/kernels.py:layer_norm": "a kernel: its arguments are what the GPU is given",
    "paellapy/cli_bench.py:bench": "a command: its parameters are the options of the command line",
    "paellapy/cli_simulate.py:simulate": "a command: its parameters are the options of the command line",
    "scheduler/engine/engine.py:Hosting.background": "public: the keywords of a job are its options",
    "scheduler/engine/engine.py:Engine.__init__": "public: the keywords of an engine are its options",
    "scheduler/models/model.py:Model.__init__": "public: the keywords of a model are its options",
    "scheduler/models/model.py:Model.changed": "public: the keywords of a model are its options",
    "scheduler/models/model.py:Model.from_torch": "public: the keywords of a module are its options",
}
# Functions of more than fifty lines without their docstrings, and why.
MANY_LINES = {
    "paellapy/cli_bench.py:bench": "a command: most lines are the options of the command line",
    "paellapy/viz/widgets.py:_widget_class": "a class of short methods, made once its base class is there",
    "instrument/device/cuda_launch.py:CudaLauncher.__call__": "every launch takes this path, and every call costs time",
}


def test_no_rooms_import_each_other() -> None:
    assert house.circles(house.rooms()) == []


def test_rooms_import_those_before_them() -> None:
    for name, others in house.rooms().items():
        folder, _, own = name.partition("/")
        if order := house.ROOMS.get(folder):
            inside = {other.partition("/")[2] for other in others if other.partition("/")[0] == folder}
            assert inside <= set(order[: order.index(own)]), name


def test_no_modules_import_each_other() -> None:
    assert house.circles(house.imports()) == []


def test_layers_import_downwards() -> None:
    for name, others in house.imports().items():
        below = house.LAYERS[house.LAYERS.index(house.layer(name)) :]
        for other in others - {"paellapy"} if house.layer(name) == "paellapy" else others:
            assert house.layer(other) in below, f"{name} imports {other}"


@pytest.mark.parametrize(
    ("what", "limit", "known"), [("parameters", PARAMETERS, MANY_PARAMETERS), ("lines", LINES, MANY_LINES)]
)
def test_functions_stay_small(what: str, limit: int, known: Mapping[str, str]) -> None:
    large = {each.where: getattr(each, what) for each in house.functions() if getattr(each, what) > limit}
    assert {where: n for where, n in large.items() if where not in known} == {}


BARE = re.compile(
    r"""(?:^|["'`(>\[])[ \t]*(?:>>>[ \t]*)?(?:from|import)[ \t]+(?:instrument|scheduler|serving)(?:[.\s,]|\\n|$)"""
    r"|-m[ \t]+(?:instrument|scheduler|serving)\b"
    r"""|import_module\([ \t]*["'](?:instrument|scheduler|serving)(?:\.|["'])"""
    r"""|=[ \t]*["'](?:instrument|scheduler|serving)(?:\.\w+)*:\w""",  # factory = "module:name" in a configuration
    re.M,
)


def texts() -> list[Path]:
    """All our texts that may hold an import."""
    found: list[Path] = []
    for folder in (*house.LAYERS, "tests", "benchmarks", "docs", "notebooks", "examples", "deploy", ".ci", "."):
        pattern = "*" if folder == "." else "**/*"
        found += (house.ROOT / folder).glob(pattern)
    kinds = (".py", ".md", ".toml", ".ipynb", ".yaml", ".yml", ".sh")
    ours = {path for path in found if path.suffix in kinds and path.is_file()}
    return sorted(path for path in ours if path == path.resolve())


@pytest.mark.parametrize(
    ("line", "bare"),
    [
        ("from scheduler.core import state", True),
        ("    import serving", True),
        ('import_module("scheduler.core.state")', True),
        ('import_module("paellapy.scheduler")', False),
        ('factory = "serving.models:net"', True),
        ('factory = "paellapy.demo:load"', False),
        ('serving = "a word: with text"', False),
        ('    "from instrument import trace\\n",', True),
        (">>> from scheduler.sim import mix", True),
        ("python -m serving.app", True),
        ("from paellapy.scheduler.core import state", False),
        ("import paellapy.serving", False),
        ("import instrument_torch", False),
        ("apart from scheduler/core, nothing", False),
    ],
)
def test_bare_imports_are_recognised(line: str, bare: bool) -> None:
    assert bool(BARE.search(line)) is bare


# Texts that name the bare folders on purpose.
BARE_ON_PURPOSE = {
    "tests/test_house.py": "the examples above",
    "tests/test_package.py": "imports a user's own files of these names",
    "benchmarks/cold_start.py": "measures checkouts from before there was one root",
}


def test_nothing_imports_the_folders_by_their_bare_names() -> None:
    found = {}
    for path in texts():
        name = str(path.relative_to(house.ROOT))
        if name not in BARE_ON_PURPOSE and (hits := [hit[0].strip() for hit in BARE.finditer(path.read_text())]):
            found[name] = hits
    assert found == {}


def test_circles_are_found() -> None:
    graph = {"a": {"b"}, "b": {"c"}, "c": {"b", "d"}, "d": set(), "e": {"e2"}, "e2": {"a"}}
    assert house.circles(graph) == [frozenset({"b", "c"})]


def test_no_module_is_loaded_under_two_names() -> None:
    assert house.loaded_twice() == []
