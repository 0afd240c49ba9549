"""How the package is put together: imports without circles, short argument lists."""

from __future__ import annotations

import ast
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import paellapy.instrument

ROOT = Path(paellapy.instrument.__file__).parent
MODULES = {
    "paellapy.instrument." + ".".join(path.relative_to(ROOT).with_suffix("").parts): ast.parse(path.read_text())
    for path in ROOT.rglob("*.py")
    if path.name != "__init__.py"
}


def imported(tree: ast.AST) -> set[str]:
    """Modules of the package that a module names in any import, also inside functions and for types alone."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {node.module or ""} | {f"{node.module}.{alias.name}" for alias in node.names}
    return found & set(MODULES)


def test_no_modules_import_each_other_in_a_circle():
    TopologicalSorter({name: imported(tree) for name, tree in MODULES.items()}).prepare()  # raises CycleError


def test_the_evaluator_knows_nothing_of_devices_and_compilers():
    outside = {
        module
        for name, tree in MODULES.items()
        if name.startswith("paellapy.instrument.triton_ir.")
        for module in imported(tree)
        if not module.startswith("paellapy.instrument.triton_ir.")
    }
    assert outside == {f"paellapy.instrument.{name}" for name in ("errors", "jit", "live_instances", "markers")}


@pytest.mark.parametrize("name", MODULES)
def test_functions_take_eight_arguments_at_most(name: str):
    for node in ast.walk(MODULES[name]):
        if isinstance(node, ast.FunctionDef):
            given = [a.arg for a in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
            assert len([a for a in given if a not in ("self", "cls")]) <= 8, node.name
