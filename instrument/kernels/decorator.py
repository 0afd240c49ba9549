"""`pp.kernel`: makes a kernel of a `@triton.jit` function, of CUDA source, or of a CuPy kernel."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, overload

from paellapy.instrument.errors import ArgumentError
from paellapy.instrument.kernels.cuda import CudaKernel, CudaSource
from paellapy.instrument.kernels.kernel import Kernel
from paellapy.instrument.kernels.triton_kernel import TritonKernel
from paellapy.instrument.ptx.descriptor import Exits, Report


@overload
def kernel(fn: None = None, *, report: Report | None = "count", exits: Exits = "auto") -> Callable[[Any], Kernel]: ...
@overload
def kernel(fn: Any, *, name: str | None = None, report: Report | None = "count", exits: Exits = "auto") -> Kernel: ...
@overload
def kernel(
    *, source: str, name: str, options: Sequence[str] = (), report: Report | None = "count", exits: Exits = "auto"
) -> CudaKernel: ...
def kernel(
    fn: Any = None,
    *,
    source: str | None = None,
    name: str | None = None,
    options: Sequence[str] = (),
    report: Report | None = "count",
    exits: Exits = "auto",
) -> Any:
    """Makes a kernel report which block runs on which SM, and when.

    Use it as a decorator over `@triton.jit` (also over `@triton.autotune`), with or without options; with CUDA source
    in `source=` and `name=`; or with a `cupy.RawKernel` or `cupy.RawModule`. `report` is its level outside a trace:
    "count" (live occupancy), "notify" (its last block has started), or None (nothing). "trace" records need a trace.
    """
    if report == "trace":
        report = None  # records need a trace to go to; inside a trace every kernel reports them
    if source is not None:
        if fn is not None:
            raise ArgumentError("pp.kernel takes a function or source=…, not both", field="fn")
        if name is None:
            raise ArgumentError("pp.kernel needs the name of a kernel in the source: name=…", field="name")
        return CudaKernel(CudaSource(source, name, options), report, exits)
    if options:
        raise ArgumentError("options= are for the compiler of CUDA source: give source=… too", field="source")
    if fn is None:
        if name is not None:
            raise ArgumentError(
                f"name={name!r} picks a kernel from CUDA source: give source=… too", field="source", given=name
            )
        return functools.partial(kernel, report=report, exits=exits)
    if isinstance(fn, Kernel):
        raise ArgumentError(f"kernel {fn.name!r} is already a pp.kernel: apply pp.kernel once", kernel=fn.name)
    if type(fn).__module__.partition(".")[0] == "cupy" and hasattr(fn, "code"):
        return CudaKernel(CudaSource.from_cupy(fn, name), report, exits)
    return TritonKernel(fn, report, exits)
