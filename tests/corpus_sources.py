"""The corpus compiled to plain PTX, without a GPU."""

from __future__ import annotations

import functools

import numpy as np
from corpus import Case, CudaCase

from paellapy.instrument.compiled import Source
from paellapy.instrument.cuda_source import CudaSource
from paellapy.instrument.triton_source import TritonSource, TypeHandlers


@functools.cache
def source_of(case: Case | CudaCase, target: str | None = None) -> Source:
    """The kernel before our passes; by default for the oldest target it has."""
    target = target or f"sm_{max(80, case.min_sm)}"
    if isinstance(case, CudaCase):
        return CudaSource(case.source, case.name_expression or case.entry, case.options).source(target)
    call = case.make(np.random.default_rng(0), 1.0)
    kernel = TritonSource(case.kernel)
    values, key, options = kernel.bind(TypeHandlers(), **call.args, **call.constexprs, **call.options)
    return kernel.source(values, (*key, *sorted(options.items())), options, target)
