"""Kernels without a GPU: Triton's TTIR evaluated with NumPy, a range of blocks at once.

text -> op tree      `parse` (MLIR's syntax, ops, source lines), `types`
op tree -> steps     `lower`, and the translations of ops: `elementwise_ops`, `memory_ops`, `shapes`, `reduction`
steps at run time    `program`, `machine` (direct or recording)
arithmetic           `elementwise`, `libdevice`, `ptx_asm` (PTX that kernels contain), `native` (compiled loops)
memory and cost      `memory` (checked; addresses known in advance), `cost` (waiting time, sectors, queues of updates)
recorded runs        `replay`
"""

from paellapy.instrument.triton_ir.program import COST_DTYPE, TtirProgram

__all__ = ["COST_DTYPE", "TtirProgram"]
