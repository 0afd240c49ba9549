"""Lets Triton find the virtual GPU's driver where it finds no other, from the moment both packages are imported.

Scripts ask `triton.runtime.driver.active` for their device before they define a kernel. So `import paellapy` prepares
Triton's search for a driver, and imports neither Triton nor our driver for that.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

_MODULE = "triton.runtime.driver"


def prepare_search() -> None:
    """Extends Triton's search for a driver: now, or when Triton is imported."""
    if _MODULE in sys.modules:
        _extend(importlib.import_module(_MODULE))  # waits for a thread that is still importing it
    elif not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


class _Finder:
    """Finds Triton's module as others do, and extends it once it is loaded."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != _MODULE:
            return None
        others = (finder for finder in sys.meta_path if finder is not self)
        spec = next(filter(None, (finder.find_spec(name, path, target) for finder in others)), None)
        if spec is None or spec.loader is None:
            return spec
        load = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            load(module)
            _extend(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def _extend(module: Any) -> None:
    search = module._create_driver  # noqa: SLF001  Triton's own
    if getattr(search, "finds_virtual", False):
        return

    def create_driver() -> Any:
        try:
            return search()
        except RuntimeError as error:
            if not str(error).startswith("0 active drivers"):
                raise
        from paellapy.instrument.kernels.triton_driver import VirtualDriver

        return VirtualDriver()

    create_driver.finds_virtual = True  # type: ignore[attr-defined]
    module._create_driver = create_driver  # noqa: SLF001  Triton's own
