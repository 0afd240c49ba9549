"""Model factories by `package.module:name`, imported again when one of their files has changed.

A model that is loaded again is built by the present code. Python caches imported modules: so when one of the user's own
modules has changed, all of them are dropped and imported again; modules of installed packages stay.
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

# Errors of a user's module or factory. A script that parses its arguments at the import ends in SystemExit.
FACTORY_ERRORS = (Exception, SystemExit)

_INSTALLED = tuple({sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")})
_OURS = str(Path(__file__).resolve().parents[1])
_lock = threading.RLock()
_forgotten = [0]  # how often the modules were dropped
_stamps: dict[str, tuple[str, int, int]] = {}  # file, time and size of each module that a factory imported


def find_factory(dotted: str, folder: Path) -> Any:
    """Imports `package.module:name`, also from `folder`. Errors of the import are passed on."""
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
    """A number that changes whenever the factory is imported again; a model with another number is of older code."""
    return _forgotten[0] if dotted.partition(":")[0] in _stamps else 0


def changed_modules() -> list[str]:
    """Modules of factories whose file has changed since it was imported."""
    with _lock:
        return [name for name, stamp in _stamps.items() if _stamp(sys.modules.get(name), stamp[0]) != stamp]


def _forget() -> None:
    """Drops all modules of factories: one that imports a changed module would keep the old objects."""
    importlib.invalidate_caches()
    for name, (file, _, _) in _stamps.items():
        sys.modules.pop(name, None)
        # Python checks compiled files by whole seconds and size, which an edit may leave unchanged.
        with contextlib.suppress(OSError, NotImplementedError):
            Path(importlib.util.cache_from_source(file)).unlink(missing_ok=True)
    linecache.checkcache()
    _forgotten[0] += 1
    _stamps.clear()


def _stamp(module: ModuleType | None, file: str | None = None) -> tuple[str, int, int] | None:
    """File, time and size; None: the module belongs to an installed package, or has no file."""
    file = file or getattr(module, "__file__", None)
    if not file or (name := str(Path(file).resolve())).startswith(_INSTALLED) or name.startswith(_OURS):
        return None
    try:
        found = Path(file).stat()
    except OSError:
        return file, 0, 0
    return file, found.st_mtime_ns, found.st_size
