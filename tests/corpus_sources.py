"""Kernels compiled without a GPU: the corpus to plain PTX, any kernel to a program of the evaluator."""

from __future__ import annotations

import functools
import warnings
from typing import Any

import numpy as np
from corpus import Case, CudaCase, ast_source
from corpus.case import Argument, Call, options

from paellapy.instrument.kernels.cuda import CudaSource
from paellapy.instrument.kernels.triton_source import TritonSource, TypeHandlers, translate
from paellapy.instrument.ptx.compiled import Source
from paellapy.instrument.triton_ir import TtirProgram


@functools.cache
def source_of(case: Case | CudaCase, target: str | None = None) -> Source:
    """The kernel before our passes; by default for the oldest target it has."""
    target = target or f"sm_{max(80, case.min_sm)}"
    if isinstance(case, CudaCase):
        return CudaSource(case.source, case.name_expression or case.entry, case.options).source(target)
    call = case.make(np.random.default_rng(0), 1.0)
    kernel = TritonSource(case.kernel)
    values, key, chosen = kernel.bind(TypeHandlers(), **call.args, **call.constexprs, **call.options)
    return kernel.source(values, (*key, *sorted(chosen.items())), chosen, target)


def ttir(kernel: Any, call: Call, sm: int = 80) -> str:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "tl.make_block_ptr is deprecated")  # Triton 3.7 and 3.8
        return translate(ast_source(kernel, call), sm, call.options, "ttir").ttir


def compiled(kernel: Any, args: dict[str, Argument], **constexprs: Any) -> TtirProgram:
    call = Call(args, constexprs, (1,), (), dict, 0.0, options())
    return TtirProgram.parse(ttir(kernel, call), kernel.__name__)
