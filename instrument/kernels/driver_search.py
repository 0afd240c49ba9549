"""Lets Triton find the virtual GPU's driver where it finds no other, from the moment both packages are imported.

Scripts ask `triton.runtime.driver.active` for their device before they define a kernel. So `import paellapy` prepares
Triton's search for a driver, and imports neither Triton nor our driver for that.
"""

from __future__ import annotations

import importlib
import sys
from typing import Any

from paellapy.instrument.env import ImportHook

_MODULE = "triton.runtime.driver"


def prepare_search() -> None:
    """Extends Triton's search for a driver: now, or when Triton is imported."""
    if _MODULE in sys.modules:
        _extend(importlib.import_module(_MODULE))  # waits for a thread that is still importing it
    else:
        _importing.add()


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


_importing = ImportHook(_MODULE, _extend)
