"""Groups of tests that one worker runs, since they share something that is slow to start."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

_GROUP = re.compile(r'^pytestmark = .*?xdist_group\("([^"]+)"\)', re.M | re.S)


def scope_of(nodeid: str, root: Path) -> str:
    """The group of a test's file, if it names one; otherwise the test by itself."""
    return _group_of(root / nodeid.partition("::")[0]) or nodeid


@cache
def _group_of(path: Path) -> str | None:
    """A file names its group in its marks: `pytestmark = pytest.mark.xdist_group("ray")`."""
    found = _GROUP.search(path.read_text())
    return found[1] if found else None
