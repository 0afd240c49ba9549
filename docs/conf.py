"""Sphinx: `make docs` builds the pages of this folder into docs/_build/html. Warnings are errors there."""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

project = "paellapy"
release = tomllib.loads((HERE.parent / "pyproject.toml").read_text())["project"]["version"]
author = "the authors of paellapy"
copyright = author
extensions = ["myst_parser", "sphinx_copybutton"]
exclude_patterns = ["_build"]
source_suffix = {".md": "markdown"}
myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 4
# Pages link to files of the repository too; GitHub shows these, the site shows their names.
myst_all_links_external = False
suppress_warnings = ["myst.header"]  # pages may begin below a generated heading
python_maximum_signature_line_length = 80
copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True

html_theme = "furo"
html_title = "paellapy"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_theme_options = {"navigation_with_keys": True}
pygments_style, pygments_dark_style = "tango", "native"


def setup(app: Any) -> None:
    app.connect("builder-inited", lambda _: _write_reference())
    app.connect("source-read", _list_new_pages)


def _list_new_pages(app: Any, name: str, source: list[str]) -> None:
    """A page that nobody has sorted into the table of contents yet is listed under *How to*."""
    if name == "index":
        listed = set(re.findall(r"^[\w/-]+$", source[0], re.M)) | {"index"}
        new = sorted(path.stem for path in HERE.glob("*.md") if path.stem not in listed)
        source[0] = source[0].replace("\nmeasure\n", "\n".join(["", *new, "measure", ""]))


def _write_reference() -> None:
    import reference_api
    import reference_tables

    reference_api.write()
    reference_tables.write()
