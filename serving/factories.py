"""Factories of models by `package.module:name`, imported anew when a file of theirs has changed since.

A model that is loaded again is to be made by the code as it stands. Python keeps what it has imported: so the user's
own modules, all but those of installed packages, are forgotten when one of them has changed, and imported again.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import linecache
import sys
import sysconfig
import threading
from pathlib import Path
from types import ModuleType
from typing import Any

_INSTALLED = tuple({sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")})
_OURS = str(Path(__file__).resolve().parents[1])
_lock = threading.RLock()
_forgotten = [0]  # times
_stamps: dict[str, tuple[str, int, int]] = {}  # of modules that factories brought in: file, time, size


def find_factory(dotted: str, folder: Path) -> Any:
    """`package.module:name`, also from `folder`; whatever importing it raises."""
    module, _, name = dotted.partition(":")
    with _lock:
        if str(folder) not in sys.path:
            sys.path.append(str(folder))
        if changed_modules():
            _forget()
        before = set(sys.modules)
        found: Any = importlib.import_module(module)
        for each in {module, *(set(sys.modules) - before)}:
            if (stamp := _stamp(sys.modules.get(each))) is not None:
                _stamps.setdefault(each, stamp)
        for part in name.split("."):
            found = getattr(found, part)
    return found


def code_number(dotted: str) -> int:
    """Another one whenever the factory was imported anew: a model made under another is of older code."""
    return _forgotten[0] if dotted.partition(":")[0] in _stamps else 0


def changed_modules() -> list[str]:
    """Those of factories whose file is not what it was when it was imported."""
    with _lock:
        return [name for name, stamp in _stamps.items() if _stamp(sys.modules.get(name), stamp[0]) != stamp]


def _forget() -> None:
    """All of them: who imports a changed module holds on to what it had."""
    importlib.invalidate_caches()
    for name, (file, _, _) in _stamps.items():
        sys.modules.pop(name, None)
        # Python tells compiled files by whole seconds and by size: an edit may have neither.
        with contextlib.suppress(OSError, NotImplementedError):
            Path(importlib.util.cache_from_source(file)).unlink(missing_ok=True)
    linecache.checkcache()
    _forgotten[0] += 1
    _stamps.clear()


def _stamp(module: ModuleType | None, file: str | None = None) -> tuple[str, int, int] | None:
    """None: an installed package's, or not from a file."""
    file = file or getattr(module, "__file__", None)
    if not file or (name := str(Path(file).resolve())).startswith(_INSTALLED) or name.startswith(_OURS):
        return None
    try:
        found = Path(file).stat()
    except OSError:
        return file, 0, 0
    return file, found.st_mtime_ns, found.st_size
