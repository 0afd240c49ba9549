"""Kernels without a GPU: Triton's TTIR evaluated with NumPy, a range of blocks at once."""

from instrument.ttir.program import COST_DTYPE, TtirProgram

__all__ = ["COST_DTYPE", "TtirProgram"]
