"""Replays of a launch in a CUDA graph: they share its id, and their blocks tell them apart."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from paellapy.instrument.records import Records


def runs(blocks: Records) -> NDArray[np.int64]:
    """The run of its launch that each block belongs to: replays of one launch have the same id, but never overlap."""
    n = len(blocks)
    order = np.lexsort((blocks["start_ns"], blocks["launch"]))
    ordered = blocks[order]
    launch, start, end = ordered["launch"], ordered["start_ns"], ordered["end_ns"]
    by = np.lexsort((ordered["block"], launch))
    same = (launch[by][1:] == launch[by][:-1]) & (ordered["block"][by][1:] == ordered["block"][by][:-1])
    last_seen = np.full(n, -1)
    last_seen[by[1:][same]] = by[:-1][same]
    heads = np.flatnonzero(launch[1:] != launch[:-1]) + 1
    last_seen[heads] = heads - 1
    reach = np.maximum.accumulate(last_seen)
    cuts = [0]
    while (again := int(np.searchsorted(reach, cuts[-1]))) < n:
        # This block already ran since the last cut, so a run begins between then and now: where the launch was quiet
        # longest, because either end of a run may be missing from the trace.
        cut, seen = cuts[-1], int(last_seen[again])
        quiet = start[seen + 1 : again + 1] - np.maximum.accumulate(end[cut:again])[seen - cut :]
        cuts.append(seen + 1 + int(np.argmax(quiet)))
    run = np.empty(n, np.int64)
    run[order] = np.searchsorted(cuts, np.arange(n), side="right")
    return run


def times_launched(blocks: Records) -> int:
    """The number of launches of these blocks, counting every replay."""
    return int(runs(blocks).max(initial=0))
