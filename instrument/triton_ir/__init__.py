"""Kernels without a GPU: Triton's TTIR evaluated with NumPy, a range of blocks at once.

text -> op tree      `syntax`, `locations`, `types`, `constants`, `tree`, `parser`
op tree -> steps     `lower`, `steps`, `polling`, and the translations of ops: `elementwise_ops`, `shape_ops`,
                     `reduction_ops`, `memory_ops`, `windows`, `control`
steps at run time    `values`, `code` (control flow), `machine` (direct or recording), `turns` (blocks that wait)
arithmetic           `elementwise`, `casts`, `libdevice`, `shapes`, `reduction`, `conversion`, `native` (compiled loops)
memory               `arguments`, `access`, `memory` (checked), `plans` (addresses known in advance)
recorded runs        `tape`, `products` (tiles joined to matrices), `replay`
"""

from paellapy.instrument.triton_ir.program import COST_DTYPE, TtirProgram

__all__ = ["COST_DTYPE", "TtirProgram"]
