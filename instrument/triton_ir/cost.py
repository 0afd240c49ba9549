"""The waiting time of a block: counted for each straight line of code when it is translated.

Independent loads are in flight together, so the longest dependent chain matters. The chain is found with nominal
weights; its elements are then counted per block as the code runs, and the timing profile of a part gives the time of
each kind.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from paellapy.instrument.triton_ir import native
from paellapy.instrument.triton_ir.memory import Site, rows_of
from paellapy.instrument.triton_ir.parse import Op
from paellapy.instrument.triton_ir.types import Array, Element

# wasted: bytes of touched sectors that are not used; updates: atomic updates of elements
# pressure, hottest: turns at the busiest line and updates of the busiest address, in units of 1/SHARES
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


# --- sectors and lines of memory that an access touches: bytes moved beyond those used, and queues of atomic updates --
# L2 delivers sectors of 32 bytes. It serves the atomic updates of one line of 128 bytes one after the other: a warp's
# request takes one turn for each of its sectors in the line, and one more for each further lane at the same address. On
# the H200, `histogram_atomics`, `atomic_kinds` and `float_atomics` (benchmarks/results/calibration_h200.json) then all
# take 0.67 ns a turn, although they have 20, 4 and 4 addresses in a request.

SECTOR, LINE, WARP = 32, 128, 32
_MOST_BYTES = 16  # of one thread's access
_SAMPLED = 1 << 18  # elements that are looked at; of more blocks, some are
_SLACK = 2 * SECTOR  # a tile that begins and ends within a sector is no waste
_BEFORE_PATH = 4
WASTED, UPDATES, PRESSURE, HOTTEST = (
    _BEFORE_PATH + PATH_FIELDS.index(name) for name in ("wasted", "updates", "pressure", "hottest")
)


def count_waste(cost: Array, offset: Any, mask: Any, element: Element, site: Site) -> None:
    """Adds the bytes of the touched sectors that the access does not use, found for one or two blocks."""
    elements = int(np.prod(site.shape, dtype=np.int64))
    n = len(site.rows)
    chosen = sorted({n // 4, n // 2})
    at, keep = (_some(x, chosen, site) for x in (offset, mask))
    table = np.empty(1 << max(4, (2 * elements - 1).bit_length()), np.int64)
    wasted = 0
    for row in range(max(len(at), len(keep))):
        own = at[row if len(at) > 1 else 0]
        set_ = keep[row if len(keep) > 1 else 0]
        sectors, used = native.sectors(own, set_, len(set_) > 1, element.size, SECTOR, table)
        moved = sectors * SECTOR
        used *= element.size
        if moved > used + _SLACK:
            wasted += moved - used
    if wasted:
        cost[site.rows, WASTED] += wasted // max(len(at), len(keep))


def count_updates(cost: Array, offset: Any, mask: Any, element: Element, threads: int, site: Site) -> None:
    """Adds the atomic updates of the blocks, and their shares of the longest queue at one line."""
    elements = int(np.prod(site.shape, dtype=np.int64))
    n = len(site.rows)
    every = max(1, n * elements // _SAMPLED)
    chosen = range(every // 2, n, every)
    at, keep = (_some(x, chosen, site) for x in (offset, mask))
    vector = max(1, min(elements // threads, _MOST_BYTES // element.size))
    turns, most, updates = native.queues(at, keep, len(chosen), vector, WARP, SECTOR // element.size, LINE // SECTOR)
    # The queue is that of all blocks together: each has an equal share.
    share = SHARES / len(chosen)
    cost[site.rows, UPDATES] += round(updates / len(chosen))
    cost[site.rows, PRESSURE] += round(turns * share)
    cost[site.rows, HOTTEST] += round(most * share)


def _some(x: Any, chosen: Any, site: Site) -> Array:
    """The rows of some blocks, one if all are alike; for no mask, a row of one True."""
    if x is None:
        return np.ones((1, 1), np.bool_)
    found = np.asarray(x)
    if found.ndim == 0:
        found = found.reshape((1,) * (1 + len(site.shape)))
    if found.shape[0] > 1:
        found = found[list(chosen)]
    return rows_of(found, site.shape)
