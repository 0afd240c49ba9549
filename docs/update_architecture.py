"""Rewrites the module list of architecture.md from the modules' own first lines."""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "architecture.md"
BEGIN, END = "<!-- modules: begin -->\n", "<!-- modules: end -->\n"
PACKAGES = ("paellapy", "serving", "scheduler", "instrument")


def module_list() -> str:
    """One line per module, package after package, from the top of the imports down."""
    lines = []
    for package in PACKAGES:
        lines.append(f"\n### {package}/\n")
        for path in sorted((ROOT / package).rglob("*.py")):
            first = (ast.get_docstring(ast.parse(path.read_text())) or "").split("\n\n")[0].replace("\n", " ")
            if first and path.name != "__init__.py":
                lines.append(f"- `{path.relative_to(ROOT / package)}` — {first}")
    return "\n".join(lines) + "\n\n"


def updated(page: str) -> str:
    head, _, rest = page.partition(BEGIN)
    _, _, tail = rest.partition(END)
    return head + BEGIN + module_list() + END + tail


if __name__ == "__main__":
    PAGE.write_text(updated(PAGE.read_text()))
