"""Recorded traces to view before making your own: `pp.recordings.load("tail-effect").plot()`.

benchmarks/record_traces.py records them, on a real or a virtual GPU; each trace says which.
"""

from __future__ import annotations

from importlib.resources import as_file, files

from paellapy.instrument.errors import TraceError
from paellapy.instrument.traces.trace import Trace
from paellapy.scheduler.engine.trace import EngineTrace

__all__ = ["load", "names", "origin"]

_ENDING = ".pptrace"
_FIRST_CHOICE = ("h200-", "virtual-h200-")


def names() -> list[str]:
    """The recorded traces, each named after its GPU and the effect it shows.

    >>> len(names()) > 0
    True
    """
    found = (each.name for each in files(__name__).iterdir())
    return sorted(name.removesuffix(_ENDING) for name in found if name.endswith(_ENDING))


def load(name: str) -> Trace:
    """A recorded trace. A name without a GPU means the real H200's trace, or the virtual one's if that is not included.

    >>> load("tail-effect").device.n_sm
    132
    """
    shipped = names()
    for full in (name, *(gpu + name for gpu in _FIRST_CHOICE)):
        if full in shipped:
            with as_file(files(__name__) / f"{full}{_ENDING}") as path:
                return Trace.load(path)
    said = f"no recording is named {name!r}: choose one of {', '.join(shipped) or 'none'}"
    raise TraceError(said, field="name", given=name)


def origin(trace: Trace) -> str:
    """Where a trace was recorded, in words, from its own data.

    >>> "virtual" in origin(load("virtual-h200-tail-effect"))
    True
    """
    device = trace.device
    virtual = device.name.endswith("(virtual)")
    said = device.name.removesuffix("(virtual)").strip()
    if not virtual:
        driver = device.versions.get("driver")
        return f"Recorded on a real {said}" + (f", driver {driver}." if driver else ".")
    how = "in simulated time" if isinstance(trace, EngineTrace) and trace.simulated else "whose times are modelled"
    return f"Recorded on a virtual {said}, {how}: not a measurement."
