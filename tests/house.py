"""The structure of the code for the tests: modules and rooms, their imports, and the sizes of functions."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parent.parent
LAYERS = ("paellapy", "serving", "scheduler", "instrument")  # each imports those behind it only
ROOMS = {  # each imports those before it only; "" stands for the modules at the top of the folder
    "scheduler": ("", "core", "policies", "models", "backends", "engine", "sim"),
    "instrument": ("", "ptx", "ttir", "device", "kernels", "traces"),
}

Graph = Mapping[str, set[str]]


@dataclass(frozen=True, slots=True)
class Function:
    where: str  # file:name, with the class it is in
    parameters: int  # without self and cls
    lines: int  # without its docstring


def sources(folder: str) -> Iterator[Path]:
    """Python files of a top-level folder by their real paths, since paellapy/ also links to the other folders."""
    for path in sorted((ROOT / folder).rglob("*.py")):
        if path == path.resolve() and "__pycache__" not in path.parts:
            yield path


@cache
def modules() -> dict[str, Path]:
    """Modules of the four packages, by import name."""
    found = {}
    for folder in LAYERS:
        for path in sources(folder):
            parts = path.relative_to(ROOT).with_suffix("").parts
            names = parts if folder == "paellapy" else ("paellapy", *parts)
            found[".".join(names[:-1] if names[-1] == "__init__" else names)] = path
    return found


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@cache
def imports() -> dict[str, set[str]]:
    """For each module, our modules that it imports, including imports in functions and for type checks."""
    found: dict[str, set[str]] = {}
    for name, path in modules().items():
        found[name] = set()
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.Import):
                found[name] |= {each.name for each in node.names if each.name in modules()}
            elif isinstance(node, ast.ImportFrom):
                assert node.level == 0, f"{path}:{node.lineno}: a relative import; name the module in full"
                for each in node.names:
                    full = f"{node.module}.{each.name}"
                    found[name] |= {full if full in modules() else str(node.module)} & set(modules())
        found[name].discard(name)
    return found


def layer(module: str) -> str:
    """The top-level folder that a module lies in."""
    return modules()[module].relative_to(ROOT).parts[0]


def room(module: str) -> str:
    """The folder of a module; at the top of paellapy/ and serving/ every module is a room of its own."""
    path = modules()[module].relative_to(ROOT)
    return str(path) if len(path.parts) == 2 and path.parts[0] not in ROOMS else str(path.parent)


def rooms() -> Graph:
    """For each room, the rooms that it imports."""
    found: dict[str, set[str]] = {}
    for name, others in imports().items():
        found.setdefault(room(name), set()).update(room(other) for other in others)
    return {name: others - {name} for name, others in found.items()}


def circles(graph: Graph) -> list[frozenset[str]]:
    """Groups of rooms that import each other: strongly connected components of two or more (Tarjan)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    path: list[str] = []
    found: list[frozenset[str]] = []

    def visit(name: str) -> None:
        index[name] = low[name] = len(index)
        path.append(name)
        for other in graph.get(name, ()):
            if other not in index:
                visit(other)
                low[name] = min(low[name], low[other])
            elif other in path:
                low[name] = min(low[name], index[other])
        if low[name] == index[name]:
            group = path[path.index(name) :]
            del path[path.index(name) :]
            if len(group) > 1:
                found.append(frozenset(group))

    for name in graph:
        if name not in index:
            visit(name)
    return found


@cache
def functions() -> list[Function]:
    """Every function and method of the four packages."""
    prefixes = {path: f"{path.relative_to(ROOT)}:" for path in modules().values()}
    return [each for path, prefix in prefixes.items() for each in _functions(tree(path), prefix)]


def _functions(tree: ast.AST, prefix: str) -> Iterator[Function]:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            names = [each.arg for each in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
            first, last = node.body[0], node.end_lineno or 0
            said = (first.end_lineno or 0) - first.lineno + 1 if ast.get_docstring(node) is not None else 0
            own = names[1:] if names[:1] in (["self"], ["cls"]) else names
            yield Function(prefix + node.name, len(own), last - node.lineno + 1 - said)
            yield from _functions(node, f"{prefix}{node.name}.")
        elif isinstance(node, ast.ClassDef):
            yield from _functions(node, f"{prefix}{node.name}.")
        else:
            yield from _functions(node, prefix)


def loaded_twice() -> list[tuple[str, ...]]:
    """Names in this process that refer to the same file: `scheduler.x` and `paellapy.scheduler.x`."""
    names: dict[Path, list[str]] = {}
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if name != "__main__" and isinstance(file, str) and (path := Path(file).resolve()).is_relative_to(ROOT):
            names.setdefault(path, []).append(name)
    ours = {ROOT / folder for folder in LAYERS}
    return [tuple(each) for path, each in names.items() if len(each) > 1 and ours & set(path.parents)]
