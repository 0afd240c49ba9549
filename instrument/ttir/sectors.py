"""Sectors and lines of memory that an access touches: bytes moved beyond those used, and queues of atomic updates.

L2 delivers sectors of 32 bytes. It serves the atomic updates of one line of 128 bytes one after the other: a warp's
request takes one turn for each of its sectors in the line, and one more for each further lane at the same address. On
the H200, `histogram_atomics`, `atomic_kinds` and `float_atomics` (benchmarks/results/calibration_h200.json) then all
take 0.67 ns a turn, although they have 20, 4 and 4 addresses in a request.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from paellapy.instrument.ttir import native
from paellapy.instrument.ttir.latency import PATH_FIELDS, SHARES
from paellapy.instrument.ttir.memory import Site, rows_of
from paellapy.instrument.ttir.types import Array, Element

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
