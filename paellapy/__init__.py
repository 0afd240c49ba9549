"""See and control which block of which kernel runs on which SM, from Python.

    import paellapy as pp

    @pp.kernel
    @triton.jit
    def add(x, y, out, n, B: tl.constexpr): ...

    with pp.trace() as t:
        add[(grid,)](x, y, out, n, B=1024)
    print(t.summary())
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from paellapy import examples, viz
from paellapy.instrument.device import Array, Device, Stream, devices
from paellapy.instrument.errors import (
    ArgumentError,
    CompileError,
    InstrumentError,
    LaunchError,
    NoDeviceError,
    OutOfBoundsError,
    PaellaError,
    PtxError,
    TraceError,
    UnsupportedOpError,
)
from paellapy.instrument.kernel import CudaKernel, Kernel, TritonKernel, kernel
from paellapy.instrument.live import Counts, counts
from paellapy.instrument.torch_hook import instrument_torch
from paellapy.instrument.trace import Trace
from paellapy.instrument.tracing import trace
from paellapy.scheduler.core.models import ModelProfile, load_profiles, save_profiles
from paellapy.scheduler.engine.engine import Engine
from paellapy.scheduler.models.model import Model, TensorSpec
from paellapy.scheduler.policies.policy import Policy, policy, policy_names
from paellapy.scheduler.sim.workload import ClosedLoop, Lognormal, Poisson
from paellapy.scheduler.sim.workload import Trace as TraceWorkload
from paellapy.serving.api import serve
from paellapy.simulation import simulate
from paellapy.viz import MissingExtraError, compare, live

__all__ = [
    "ArgumentError",
    "Array",
    "ClosedLoop",
    "CompileError",
    "Counts",
    "CudaKernel",
    "Device",
    "Engine",
    "InstrumentError",
    "Kernel",
    "LaunchError",
    "Lognormal",
    "MissingExtraError",
    "Model",
    "ModelProfile",
    "NoDeviceError",
    "OutOfBoundsError",
    "PaellaError",
    "Poisson",
    "Policy",
    "PtxError",
    "Stream",
    "TensorSpec",
    "Trace",
    "TraceError",
    "TraceWorkload",
    "TritonKernel",
    "UnsupportedOpError",
    "array",
    "compare",
    "counts",
    "devices",
    "empty",
    "examples",
    "instrument_torch",
    "kernel",
    "live",
    "load_profiles",
    "policy",
    "policy_names",
    "save_profiles",
    "serve",
    "simulate",
    "stream",
    "trace",
    "viz",
]


def array(data: NDArray[Any]) -> Array:
    """A copy of `data` in the current device's memory."""
    return Device.current().array(np.asarray(data))


def empty(shape: int | tuple[int, ...], dtype: DTypeLike = np.float32) -> Array:
    """Uninitialised memory on the current device."""
    return Device.current().empty(shape, dtype)


def stream(priority: int = 0) -> Stream:
    """A new stream of the current device; `with stream:` makes it current. Larger priorities go first."""
    return Device.current().stream(priority)
