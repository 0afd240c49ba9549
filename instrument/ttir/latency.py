"""The waiting time of a block: counted for each straight line of code when it is translated.

Independent loads are in flight together, so the longest dependent chain matters. The chain is found with nominal
weights; its elements are then counted per block as the code runs, and the timing profile of a part gives the time of
each kind.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from paellapy.instrument.ttir.parser import Op
from paellapy.instrument.ttir.types import Array

# wasted: bytes of touched sectors that are not used; updates: atomic updates of elements
# pressure, hottest: turns at the busiest line and updates of the busiest address, in units of 1/SHARES (sectors.py)
# loop0, loop1, …: iterations of the first loops of the source, in the order of its text
SHARES = 1_000_000  # each block of a launch has a share of a queue
LOOPS = ("loop0", "loop1", "loop2", "loop3")
PATH_FIELDS = (
    "loads", "atomics", "reductions", "dots", "elements", "instructions", "wasted", "updates", "pressure", "hottest",
    *LOOPS,
)  # fmt: skip
_LOADS, _ATOMICS, _REDUCTIONS, _DOTS = range(4)
# Results no larger than a small block take one instruction, for any number of threads. They are counted in loops, where
# one waits for the other; elsewhere they are hidden behind loads.
_FEW = 128
_NOMINAL_NS = (600, 700, 120, 150)

_KINDS = {
    "tt.load": _LOADS, "tt.descriptor_load": _LOADS, "tt.descriptor_gather": _LOADS,
    "tt.atomic_rmw": _ATOMICS, "tt.atomic_cas": _ATOMICS,
    "tt.reduce": _REDUCTIONS, "tt.scan": _REDUCTIONS, "tt.histogram": _REDUCTIONS, "tt.gather": _REDUCTIONS,
    # data move between threads through shared memory, with barriers
    "tt.trans": _REDUCTIONS, "tt.reshape": _REDUCTIONS,
    "tt.dot": _DOTS, "tt.dot_scaled": _DOTS,
}  # fmt: skip
_PRODUCTS = ("tt.dot", "tt.dot_scaled")
# Layout and address arithmetic that the compiler folds away: no instruction per element.
_FREE = ("tt.splat", "tt.broadcast", "tt.expand_dims", "tt.make_range", "tt.addptr", "tt.advance", "tt.store")


def critical_path(ops: Sequence[Op], upto: int | None = None) -> Array | None:
    """Counts (PATH_FIELDS) of one straight line: its longest chain, and its other computation.

    `upto`: counts only this many ops.
    """
    start: tuple[int, tuple[int, ...]] = (0, (0, 0, 0, 0))
    reach: dict[str, tuple[int, tuple[int, ...]]] = {}
    longest = start
    elements = instructions = 0
    # Triton prefetches for products in a loop: blocks there wait only for the products, not for memory.
    in_loop = bool(ops) and ops[-1].name in ("scf.yield", "scf.condition")
    pipelined = in_loop and any(op.name in _PRODUCTS for op in ops)
    for op in ops[:upto]:
        before = max((reach[name] for name in op.operands if name in reach), default=start)
        kind = _KINDS.get(op.name)
        at = before
        if kind is None:
            if op.name not in _FREE and op.out_types and not op.regions:
                size = op.out_types[0].size
                elements += size if size > _FEW else 0
                instructions += size <= _FEW and in_loop
        elif not (pipelined and kind == _LOADS):
            at = (before[0] + _NOMINAL_NS[kind], tuple(n + (i == kind) for i, n in enumerate(before[1])))
        for name in op.results:
            reach[name] = at
        longest = max(longest, at)
    if not elements and not instructions and not longest[0]:
        return None
    found = np.zeros(len(PATH_FIELDS), np.int64)
    found[:6] = *longest[1], elements, instructions
    return found


def once_through(loop: int) -> Array:
    """The counts for one iteration of a loop, as far as loops are counted."""
    return np.array([name == f"loop{loop}" for name in PATH_FIELDS], np.int64)
