"""Kernels the tests run everywhere: in Triton and in CUDA C, each with inputs and a NumPy reference."""

from . import (
    arguments,
    atomics,
    attention,
    control_flow,
    convolution,
    cuda_exits,
    cuda_kernels,
    elementwise,
    integers,
    matmul,
    memory,
    rows,
)
from .case import Call, Case, CudaCall, CudaCase, assert_right, assert_same, ast_source, relative_error, upload

_TRITON = (elementwise, integers, rows, matmul, convolution, attention, control_flow, arguments, memory, atomics)
TRITON_CASES: tuple[Case, ...] = tuple(case for module in _TRITON for case in module.CASES)
CUDA_CASES: tuple[CudaCase, ...] = (*cuda_exits.CASES, *cuda_kernels.CASES)

__all__ = [
    "CUDA_CASES", "TRITON_CASES", "Call", "Case", "CudaCall", "CudaCase", "assert_right", "assert_same", "ast_source",
    "relative_error", "upload",
]  # fmt: skip
