"""Traces to look at before making one's own: `pp.examples.load("virtual-h200-gemm-tail").plot()`.

They are recorded by benchmarks/record_examples.py.
"""

from __future__ import annotations

from importlib.resources import as_file, files

from instrument.errors import TraceError
from instrument.trace import Trace

__all__ = ["load", "names"]

_ENDING = ".pptrace"


def names() -> list[str]:
    """The recorded examples, each named after the GPU and what can be seen on it.

    >>> "virtual-h200-gemm-tail" in names()
    True
    """
    found = (each.name for each in files(__name__).iterdir())
    return sorted(name.removesuffix(_ENDING) for name in found if name.endswith(_ENDING))


def load(name: str) -> Trace:
    """A recorded example.

    >>> load("virtual-h200-gemm-tail").device.n_sm
    132
    """
    if name not in names():
        raise TraceError(f"there is no example {name!r}, only {', '.join(names()) or 'none'}")
    with as_file(files(__name__) / f"{name}{_ENDING}") as path:
        return Trace.load(path)
