"""Resident blocks of each SM: the most at a time, the mean, and the time with any."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from paellapy.instrument.records import Records


@dataclass(frozen=True, slots=True, eq=False)
class Residency:
    """Resident blocks of each SM; means are over the time from the first start to the last end on any SM."""

    max_blocks: NDArray[np.int64]
    mean_blocks: NDArray[np.float64]
    busy_ns: NDArray[np.int64]  # time with at least one block resident


def residency_of(blocks: Records, n_sm: int) -> Residency:
    """The maximum and the mean number of these blocks that each SM held at a time."""
    time = np.concatenate((blocks["start_ns"], blocks["end_ns"]))
    sm = np.concatenate((blocks["sm"], blocks["sm"]))
    step = np.repeat(np.array([1, -1]), len(blocks))
    # At one instant: first ends, then starts, then ends of blocks shorter than a tick of the clock, which did run.
    order = np.concatenate((np.ones(len(blocks)), np.where(blocks["start_ns"] == blocks["end_ns"], 2, 0)))
    by = np.lexsort((order, time, sm))
    time, sm, count = time[by], sm[by], np.cumsum(step[by])  # the steps of each SM add up to 0
    lasted = np.diff(time, append=time[-1:])
    lasted[:-1][sm[1:] != sm[:-1]] = 0
    most = np.zeros(n_sm, np.int64)
    np.maximum.at(most, sm, count)
    busy = np.zeros(n_sm, np.int64)
    np.add.at(busy, sm, np.where(count > 0, lasted, 0))
    total = np.zeros(n_sm, np.int64)
    np.add.at(total, blocks["sm"], blocks["end_ns"] - blocks["start_ns"])
    span = int(blocks["end_ns"].max() - blocks["start_ns"].min()) if len(blocks) else 0
    return Residency(most, total / max(span, 1), busy)
