"""Rewrites the lists of rooms and modules in architecture.md from the first lines of the packages and modules."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "architecture.md"
PACKAGES = ("paellapy", "serving", "scheduler", "instrument")
# Said in place of the first line, which is for users.
HOLDS = {"paellapy": "What users import (`import paellapy as pp`), and the command line."}
# From the top of the imports down; rooms that are not named here come after these, by name.
ORDER = ("sim", "engine", "backends", "models", "policies", "core", "traces", "kernels", "device", "ttir", "ptx")


def first_line(path: Path) -> str:
    return (ast.get_docstring(ast.parse(path.read_text())) or "").split("\n\n")[0].replace("\n", " ")


def rooms(package: Path) -> list[Path]:
    """The package's folders of code: its own first, then those inside, from the top of the imports down."""
    inside = [path.parent for path in package.glob("*/__init__.py") if not path.parent.is_symlink()]
    rank = {name: k for k, name in enumerate(ORDER)}
    return [package, *sorted(inside, key=lambda folder: (rank.get(folder.name, len(ORDER)), folder.name))]


def room_list() -> str:
    lines = ["| room | holds |", "|---|---|"]
    for package in PACKAGES:
        for room in rooms(ROOT / package):
            name = str(room.relative_to(ROOT))
            lines.append(f"| `{name}/` | {HOLDS.get(name) or first_line(room / '__init__.py')} |")
    return "\n".join(lines) + "\n"


def _modules(room: Path) -> Iterator[str]:
    for path in sorted(room.glob("*.py")):
        first = first_line(path)
        if first and path.name != "__init__.py":
            yield f"- `{path.name}` — {first}"


def module_list() -> str:
    """One line per module, room after room; a room of folders or of data alone has none."""
    lines: list[str] = []
    for package in PACKAGES:
        for room in rooms(ROOT / package):
            if modules := list(_modules(room)):
                lines += [f"\n### {room.relative_to(ROOT)}/\n", *modules]
    return "\n".join(lines) + "\n\n"


LISTS = {"rooms": room_list, "modules": module_list}


def updated(page: str) -> str:
    for name, text in LISTS.items():
        begin, end = f"<!-- {name}: begin -->\n", f"<!-- {name}: end -->\n"
        head, _, rest = page.partition(begin)
        _, _, tail = rest.partition(end)
        page = head + begin + text() + end + tail
    return page


if __name__ == "__main__":
    PAGE.write_text(updated(PAGE.read_text()))
