"""The documentation's pages, and the snippets on them."""

from __future__ import annotations

import re
from pathlib import Path

from places import ROOT

GENERATED = ("api", "cli.md", "http.md", "metrics.md")


def pages() -> list[Path]:
    """README.md and the pages of the site, except generated ones."""
    inside = [path for path in (ROOT / "docs").rglob("*.md") if "_build" not in path.parts]
    return [ROOT / "README.md", *sorted(p for p in inside if not ({p.parent.name, p.name} & set(GENERATED)))]


def blocks(page: Path, language: str) -> list[tuple[str, str]]:
    """The page's snippets in a language: the word after the language, if any, and the text."""
    return re.findall(rf"^```{language} ?(\w*)\n(.*?)^```$", page.read_text(), re.M | re.S)
