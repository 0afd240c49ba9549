"""The stored results, for the tables and figures of the pages."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent.parent / "benchmarks" / "results"


@functools.cache
def stored(name: str) -> Any:
    """What a benchmark has measured."""
    return json.loads((RESULTS / f"{name}.json").read_text())["results"]
