"""The lessons run from the first cell to the last, and the notebooks beside them are what they make."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

nbformat = pytest.importorskip("nbformat", reason="jupytext and nbclient are not installed")
jupytext = pytest.importorskip("jupytext", reason="jupytext is not installed")
pytest.importorskip("nbclient", reason="nbclient is not installed")

pytestmark = pytest.mark.xdist_group("lessons")  # few tests that take long

FOLDER = Path(__file__).parents[1] / "notebooks"
LESSONS = sorted(FOLDER.glob("[0-9]_*.py"))
each_lesson = pytest.mark.parametrize("lesson", LESSONS, ids=lambda path: path.stem)


def run(lesson: Path, out: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(FOLDER / "execute.py"), "--out", str(out), str(lesson)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@each_lesson
@pytest.mark.timeout(600)  # half a minute each; the first time on a busy machine everything is compiled
def test_a_lesson_runs_without_a_warning(lesson: Path, tmp_path: Path) -> None:
    ran = run(lesson, tmp_path)
    assert ran.returncode == 0, ran.stderr[-4000:]
    cells = nbformat.read(tmp_path / f"{lesson.stem}.ipynb", 4).cells
    outputs = [output for cell in cells for output in cell.get("outputs", ())]
    assert sum("image/png" in output.get("data", {}) for output in outputs) >= 3, "a lesson has something to see"


@each_lesson
def test_the_notebook_is_the_lesson_with_small_outputs(lesson: Path) -> None:
    path = lesson.with_suffix(".ipynb")
    assert f"({path.name})" in (FOLDER / "README.md").read_text()
    made, source = nbformat.read(path, 4), jupytext.read(lesson)
    nbformat.validate(made)
    run = f"run python notebooks/execute.py notebooks/{lesson.name}"
    assert [(c.cell_type, c.source) for c in made.cells] == [(c.cell_type, c.source) for c in source.cells], run
    assert path.stat().st_size < 700_000, "too large for a repository"
    for output in (output for cell in made.cells for output in cell.get("outputs", ())):
        assert output.output_type in ("stream", "execute_result", "display_data")
        assert set(output.get("data", {})) <= {"text/plain", "image/png"}
        text = output.get("text") or output.data.get("text/plain", "")
        assert not re.search(r"/(?:home|root|tmp|work|usr|Users)/", text), "a path of the machine it was made on"


@each_lesson
def test_a_lesson_reads_as_one(lesson: Path) -> None:
    cells = jupytext.read(lesson).cells
    assert cells[0].source.startswith(f"# {lesson.name[0]} · ")
    assert cells[-1].source.startswith("## Exercises")
    for cell in cells:
        if cell.cell_type == "code":
            assert len(cell.source.splitlines()) <= 30, "one idea a cell"
            assert max(map(len, cell.source.splitlines())) <= 96, "a longer line is cut at a page's right edge"
        else:
            assert len(cell.source) < 900, "short text"
            assert not re.search(r"\d\s?(?:µs|ms)\b", cell.source), "a cell prints what it computes"


def test_a_warning_or_a_complaint_fails_a_lesson(tmp_path: Path) -> None:
    lesson = tmp_path / "1_bad.py"
    warn = "import sys, warnings\nsaid = ''\ntry:\n    warnings.warn('careful')\nexcept UserWarning as e:\n    said = e"
    lesson.write_text(f"# %%\n{warn}\n\n# %%\nsys.stderr.write(f'a warning raised {{said}}')\n")
    ran = run(lesson, tmp_path)
    assert ran.returncode == 1
    assert "a warning raised careful" in ran.stderr
    assert not lesson.with_suffix(".ipynb").exists()
