"""Every benchmark says what it does."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

from places import ROOT

BENCHMARKS = ROOT / "benchmarks"


def test_every_script_says_what_it_does() -> None:
    command = [sys.executable, str(Path(__file__).parent / "script_usage.py"), str(BENCHMARKS)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
    said = json.loads(done.stdout)
    failed = {name: text for name, text in said.items() if not text.startswith(("usage:", "imported"))}
    if find_spec("litserve") is None:
        failed.pop("serving_litserve", None)
    assert not failed
