"""Exact means over time: of the items present on each SM, or in each row of a picture."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray


def time_means(
    rows: NDArray[Any],
    start_ns: NDArray[np.int64],
    end_ns: NDArray[np.int64],
    weights: NDArray[np.int64],
    n_rows: int,
    first: int,
    last: int,
    bins: int,
) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """The mean over time of the weights present.

    The means are for each row and each of `bins` equal parts of [first, last], and are exact, not sampled. Returns rows
    x bins, and the edges of the bins.
    """
    # Relative to the first edge: ns since 1970 do not fit the 53 bits of a float.
    edges = np.array([(last - first) * i // bins for i in range(bins + 1)], np.int64)
    width = np.diff(edges)
    row = rows.astype(np.int64) * bins
    area = np.zeros((n_rows, bins))
    for sign, times in ((1, start_ns), (-1, end_ns)):
        # Present from here on: for part of this bin and for all later ones.
        at = np.clip(times, first, last) - first
        bin_ = np.minimum(np.searchsorted(edges, at, side="right") - 1, bins - 1)
        part = np.bincount(row + bin_, weights * (edges[bin_ + 1] - at), area.size).reshape(area.shape)
        whole = np.bincount(row + bin_, weights, area.size).reshape(area.shape)
        area += sign * (part + (np.cumsum(whole, axis=1) - whole) * width)
    return area / np.maximum(width, 1), edges + first
