"""Runs the lessons and writes each `.py` with its outputs beside it, as a notebook.

    python notebooks/execute.py [--out FOLDER] [lesson.py …]

The `.py` files are the lessons; the notebooks are made from them and never edited. Of the outputs only text and PNG
pictures are kept: they show wherever notebooks are read, and stay small.
"""

from __future__ import annotations

import argparse
import re
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jupytext
import nbformat
from nbclient import NotebookClient
from traitlets.config import Config

FOLDER = Path(__file__).parent
PLOTLY = "application/vnd.plotly.v1+json"
INSTEAD = "(an interactive figure: run the notebook to see it)"
PATIENCE_S = 240  # for one cell, on a busy machine

# Run before a lesson and not kept. Warnings are errors there as in the tests, but for those of Jupyter's kernel. Where
# matplotlib makes its list of fonts, once on a machine, it says so on standard error: here, and not in a lesson.
PREPARE = """
import warnings
import matplotlib.pyplot
warnings.simplefilter("error")
warnings.filterwarnings("ignore", module="ipykernel")
"""


class LessonError(Exception):
    """A cell wrote to standard error, where warnings and complaints go."""


def lessons() -> list[Path]:
    return sorted(FOLDER.glob("[0-9]_*.py"))


def run(lesson: Path) -> Any:
    """The lesson as a notebook with its outputs."""
    notebook = jupytext.read(lesson)
    notebook.cells.insert(0, nbformat.v4.new_code_cell(PREPARE))
    with tempfile.TemporaryDirectory() as sockets:  # in the file system: no port is opened
        config = Config({"ConnectionFileMixin": {"transport": "ipc", "ip": f"{sockets}/kernel"}})
        where = {"metadata": {"path": str(FOLDER)}}
        patience = {"timeout": PATIENCE_S, "startup_timeout": PATIENCE_S, "coalesce_streams": True}
        NotebookClient(notebook, kernel_name="python3", config=config, resources=where, **patience).execute()
    del notebook.cells[0]
    _tidy(notebook)
    return notebook


def _tidy(notebook: Any) -> None:
    count = 0
    for i, cell in enumerate(notebook.cells):
        cell.id = f"cell-{i:02}"
        cell.metadata = {}
        if cell.cell_type == "code":
            count += 1
            cell.execution_count = count
            cell.outputs = [_kept(output, cell.source, count) for output in cell.outputs]
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    notebook.metadata = {"kernelspec": kernel, "jupytext": {"formats": "ipynb,py:percent"}}


def _kept(output: Any, source: str, count: int) -> Any:
    if output.output_type == "stream":
        if output.name == "stderr":
            raise LessonError(f"{source}\n\nwrote:\n{output.text}")
        return nbformat.v4.new_output("stream", name="stdout", text=_without_folders(output.text))
    data = output.data
    if "image/png" in data:
        kept = {"image/png": data["image/png"], "text/plain": "(a picture)"}
    elif PLOTLY in data:
        kept = {"text/plain": INSTEAD}
    else:
        kept = {"text/plain": _without_folders(data["text/plain"])}
    if output.output_type == "execute_result":
        return nbformat.v4.new_output("execute_result", kept, execution_count=count)
    return nbformat.v4.new_output("display_data", kept)


def _without_folders(text: str) -> str:
    """Cells are files in a folder of the kernel's while they run; which one says nothing to a reader."""
    return re.sub(r"/\S*ipykernel_\d+/\d+\.py", "this cell", text)


def write(notebook: Any, path: Path) -> None:
    nbformat.validate(notebook)
    path.write_text(nbformat.writes(notebook, indent=1) + "\n", encoding="utf-8")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=FOLDER, help="where the notebooks go")
    parser.add_argument("lesson", type=Path, nargs="*", help="all of them, by default")
    given = parser.parse_args(arguments)
    for lesson in given.lesson or lessons():
        began = time.monotonic()
        target = given.out / f"{lesson.stem}.ipynb"
        write(run(lesson), target)
        print(f"{target.name}: {time.monotonic() - began:.0f} s, {target.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
