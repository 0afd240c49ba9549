"""Kernels the tests run everywhere: in Triton and in CUDA C, each with inputs and a NumPy reference."""

from . import elementwise, matmul, reductions
from .case import Call, Case, CudaCall, CudaCase, ast_source, relative_error

TRITON_CASES: tuple[Case, ...] = (*elementwise.CASES, *reductions.CASES, *matmul.CASES)

__all__ = ["TRITON_CASES", "Call", "Case", "CudaCall", "CudaCase", "ast_source", "relative_error"]
