"""The public surface of two checkouts compared, each difference on a line: for CHANGELOG.md.

    python benchmarks/surface.py --against CHECKOUT

Names with their members and parameters, commands with their options, fields of the settings files, addresses, metrics,
policies and environment variables. Each checkout lists its own in a process of its own. It fails if CHANGELOG.md
does not name what is gone.
"""

from __future__ import annotations

import importlib
import inspect
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from harness import PRODUCT, ROOT, arguments, commits, said_by, save, trees

SETTINGS = ("paellapy.serving.config", "paellapy.cluster.cluster_file")


def members(name: str, found: Any) -> Iterator[str]:
    yield name
    if inspect.ismodule(found):
        for each in getattr(found, "__all__", ()):
            yield from members(f"{name}.{each}", getattr(found, each))
        return
    yield from parameters(name, found)
    if inspect.isclass(found) and not issubclass(found, BaseException):
        for member in dir(found):
            value = inspect.getattr_static(found, member)
            if not member.startswith("_") and inspect.getdoc(value):
                yield f"{name}.{member}"
                yield from parameters(f"{name}.{member}", value)


def parameters(name: str, found: Any) -> Iterator[str]:
    try:
        shown = inspect.signature(getattr(found, "__func__", found)).parameters
    except (TypeError, ValueError):
        return
    yield from (f"{name}({each}=)" for each in shown if each not in ("self", "cls"))


def options(command: Any, path: str) -> Iterator[str]:
    yield path
    for each in command.params:
        yield from (f"{path} {option}" for option in each.opts)
    for name, inner in getattr(command, "commands", {}).items():
        yield from options(inner, f"{path} {name}")


def fields() -> Iterator[str]:
    import msgspec

    for module in map(importlib.import_module, SETTINGS):
        for name, kind in inspect.getmembers(module, inspect.isclass):
            if issubclass(kind, msgspec.Struct) and kind.__module__ == module.__name__ and "Task" not in name:
                yield from (f"{name}.{each.encode_name}" for each in msgspec.structs.fields(kind))


def named(folder: Path, pattern: str) -> set[str]:
    texts = [path.read_text() for top in PRODUCT for path in (folder / top).rglob("*.py") if not path.is_symlink()]
    return {found for text in texts for found in re.findall(pattern, text)}


def surface() -> dict[str, list[str]]:
    """Of the checkout that this process imports."""
    import typer

    import paellapy as pp
    from paellapy.cli import app
    from paellapy.serving import openapi

    here = Path(pp.__file__).parents[1]
    paths = openapi.document()["paths"].items()
    found = {
        "Python": {each for name in pp.__all__ for each in members(f"pp.{name}", getattr(pp, name))},
        "command line": set(options(typer.main.get_command(app), "paellapy")),
        "settings": set(fields()),
        "addresses": {f"{method.upper()} {path}" for path, methods in paths for method in methods},
        "metrics": named(here, r'"((?:paellapy|nv)_[a-z_]+)"'),
        "variables": named(here, r'"(PAELLAPY_[A-Z_]+)"'),
        "policies": set(pp.policy_names()),
    }
    return {kind: sorted(names) for kind, names in found.items()}


def main() -> None:
    parser = arguments(__doc__, against=True)
    parser.add_argument("--list", action="store_true", help="print the surface of this checkout as JSON")
    given = parser.parse_args()
    if given.list or given.against is None:
        print(json.dumps(surface()))
        return
    now, before = (said_by(__file__, "--list", checkout=tree) for tree in trees(given).values())
    found: dict[str, Any] = {"commits": commits(given)}
    for kind in now:
        gone, new = sorted({*before[kind]} - {*now[kind]}), sorted({*now[kind]} - {*before[kind]})
        found[kind] = {"names": len(now[kind]), "gone": gone, "new": new}
        print(f"{kind}: {len(now[kind])} names, {len(gone)} gone, {len(new)} new")
        print(*(f"  - {name}" for name in gone), *(f"  + {name}" for name in new), sep="\n")
    print(save("surface", found, folder=given.out))
    changes = (ROOT / "CHANGELOG.md").read_text()
    gone = [name for kind in now for name in found[kind]["gone"]]
    wholes = [name for name in gone if name.partition("(")[0] not in gone or "(" not in name]
    if unnamed := [name for name in wholes if re.findall(r"[\w-]+", name)[-1] not in changes]:
        sys.exit(f"CHANGELOG.md does not name: {', '.join(unnamed)}")


if __name__ == "__main__":
    main()
