"""Prints the usage of every benchmark script, in one process, since each would import the same libraries again.

python tests/script_usage.py FOLDER prints {script: its output, or its failure} as JSON.
"""

from __future__ import annotations

import contextlib
import io
import json
import runpy
import sys
import traceback
from pathlib import Path


def usage(script: Path) -> str:
    """Output of `--help`; "imported" for a script without options."""
    said = io.StringIO()
    takes_options = "__main__" in script.read_text()
    sys.argv = [str(script), "--help"]
    try:
        with contextlib.redirect_stdout(said):
            runpy.run_path(str(script), run_name="__main__" if takes_options else "imported")
    except SystemExit as left:
        return said.getvalue() if left.code == 0 else f"failed: {left.code}"
    except Exception:
        return f"failed: {traceback.format_exc()}"
    return "imported" if not takes_options else f"failed: --help did not end it\n{said.getvalue()}"


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    sys.path.insert(0, str(folder))
    print(json.dumps({script.stem: usage(script) for script in sorted(folder.glob("*.py"))}))
