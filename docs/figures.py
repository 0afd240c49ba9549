"""Figures and tables of README.md and the pages: benchmarks/results → docs/figures.toml → the pages.

    python docs/figures.py

A benchmark stores the tables and figures that pages quote beside its results. A page names a figure in a comment behind
it, 2.3<!--=load.hrrn-windows-->, and has a table between `<!-- table: name -->` and `<!-- end -->`.
"""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parent
ROOT, FILE = DOCS.parent, DOCS / "figures.toml"
RESULTS = ROOT / "benchmarks" / "results"
FIGURE = re.compile(r"\d[\d.,]*<!--=([\w.-]+)-->")
RANGE = re.compile(r"(?<=\d) to (?=\d)")
TABLE = re.compile(r"<!-- table: ([\w-]+) -->\n.*?<!-- end -->", re.S)


def collected() -> str:
    """The contents of figures.toml: everything that the result files offer to pages."""
    figures: dict[str, str] = {}
    tables: dict[str, str] = {}
    for path in sorted(RESULTS.glob("*.json")):
        found: dict[str, Any] = json.loads(path.read_text())
        figures |= found.get("figures", {})
        tables |= {name: as_text(rows) for name, rows in found.get("tables", {}).items()}
    lines = ["# Written by docs/figures.py from benchmarks/results.", "[figures]"]
    lines += [f'"{name}" = "{value}"' for name, value in figures.items()]
    lines += ["", "[tables]", *(f"{name} = '''\n{text}'''" for name, text in tables.items())]
    return "\n".join(lines) + "\n"


def as_text(rows: list[list[object]]) -> str:
    """A table in Markdown; the first row is its head. A range stays in one line."""
    lines = [RANGE.sub("\u00a0to\u00a0", "| " + " | ".join(map(str, row)) + " |") for row in rows]
    return "\n".join([lines[0], "|" + "---|" * len(rows[0]), *lines[1:]])


def filled(page: str, known: dict[str, Any]) -> str:
    """The page with every figure and table as in figures.toml."""
    page = FIGURE.sub(lambda found: f"{known['figures'][found[1]]}<!--={found[1]}-->", page)
    return TABLE.sub(lambda found: f"<!-- table: {found[1]} -->\n\n{known['tables'][found[1]]}\n\n<!-- end -->", page)


def pages() -> list[Path]:
    return [ROOT / "README.md", *sorted(DOCS.glob("*.md"))]


def main() -> None:
    FILE.write_text(collected())
    known = tomllib.loads(FILE.read_text())
    for page in pages():
        text = page.read_text()
        if (new := filled(text, known)) != text:
            page.write_text(new)
            print(page.relative_to(ROOT))


if __name__ == "__main__":
    main()
