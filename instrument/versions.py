"""The versions of installed packages: for traces, benchmark results and `paellapy doctor`."""

from __future__ import annotations

import functools
import platform
from importlib import metadata

_PACKAGES = ("paellapy", "triton", "cupy-cuda12x", "cupy-cuda13x", "cuda-bindings", "numba", "numpy", "torch")


@functools.cache
def _installed() -> tuple[tuple[str, str], ...]:
    found = [("python", platform.python_version())]
    for package in _PACKAGES:
        try:
            found.append((package, metadata.version(package)))
        except metadata.PackageNotFoundError:
            if package == "paellapy":  # run from its source tree without being installed
                found.append((package, "0+source"))
    return tuple(found)


def versions() -> dict[str, str]:
    """Package → version, for installed packages; paellapy itself is always included."""
    return dict(_installed())
