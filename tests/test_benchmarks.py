"""Every benchmark says what it does. This file is also the program that asks them, in one process for all."""

from __future__ import annotations

import contextlib
import io
import json
import runpy
import subprocess
import sys
import traceback
from importlib.util import find_spec
from pathlib import Path

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"


def test_every_script_says_what_it_does() -> None:
    """In a process of its own, since the scripts import all kinds of libraries."""
    done = subprocess.run([sys.executable, __file__], capture_output=True, text=True, timeout=300, check=True)
    said = json.loads(done.stdout)
    failed = {name: text for name, text in said.items() if not text.startswith(("usage:", "imported"))}
    if find_spec("litserve") is None:
        failed.pop("serving_litserve", None)
    assert not failed


def usage(script: Path) -> str:
    """Output of `--help`; "imported" for a script without options."""
    name = "__main__" if "__main__" in script.read_text() else "imported"
    sys.argv = [str(script), "--help"]
    try:
        with contextlib.redirect_stdout(io.StringIO()) as said:
            runpy.run_path(str(script), run_name=name)
    except SystemExit as left:
        return said.getvalue() if left.code == 0 else f"failed: {left.code}"
    except Exception:
        return f"failed: {traceback.format_exc()}"
    return "imported" if name == "imported" else f"failed: --help did not end it\n{said.getvalue()}"


if __name__ == "__main__":
    sys.path.insert(0, str(BENCHMARKS))
    print(json.dumps({script.stem: usage(script) for script in sorted(BENCHMARKS.glob("*.py"))}))
