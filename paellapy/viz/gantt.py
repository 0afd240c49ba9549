"""The data of Gantt charts: each block in a lane on its SM, or shares of groups where there are too many blocks."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paellapy.instrument.records import Records
from paellapy.instrument.traces.means import time_means
from paellapy.viz.data import Picture

EXACT_BLOCKS = 5000  # up to this number every block is drawn; more rectangles make a browser slow
OF_BLOCKS, OF_SHARES = "SM, one lane per block", "SM, faint: few blocks"  # a Gantt chart's two axis titles
# Lanes of a binned Gantt chart: two for each SM of an H200; more lanes than pixels would give a moiré pattern
ROWS = 264
CELLS = 1_200_000  # of all groups of a binned Gantt chart: 5 MB in a page


def lanes(rows: Sequence[int] | NDArray[Any], start_ns: NDArray[np.int64], end_ns: NDArray[np.int64]) -> NDArray[Any]:
    """For each interval, in order of start, the lowest free lane of its row, so that no two in a lane overlap.

    >>> lanes([0, 0, 1, 0], np.array([0, 5, 5, 10]), np.array([10, 20, 9, 15]))
    array([0, 1, 0, 0])
    """
    busy: dict[int, list[tuple[int, int]]] = {}
    free: dict[int, list[int]] = {}
    lane = []
    # An interval that starts and ends at one clock tick occupies that tick, so its lane is free only after it.
    until = np.where(end_ns > start_ns, end_ns, end_ns + 1)
    for row, start, end in zip(np.asarray(rows).tolist(), start_ns.tolist(), until.tolist(), strict=True):
        taken, open_ = busy.setdefault(row, []), free.setdefault(row, [])
        while taken and taken[0][0] <= start:
            heapq.heappush(open_, heapq.heappop(taken)[1])
        lane.append(heapq.heappop(open_) if open_ else len(taken))
        heapq.heappush(taken, (end, lane[-1]))
    return np.array(lane, np.int64)


@dataclass(frozen=True, slots=True, eq=False)
class Gantt:
    """Each block in its lane on its SM; `depth` is the largest number of lanes of any SM."""

    blocks: Records
    lane: NDArray[np.int64]
    depth: int

    def height(self) -> float:
        """Height of a lane, where an SM is 1 high."""
        return 1 / self.depth

    def middle(self) -> NDArray[np.float64]:
        """Vertical centre of each block's lane: SM s reaches from s - 0.5 to s + 0.5."""
        return self.blocks["sm"] - 0.5 + (self.lane + 0.5) / self.depth

    def second(self) -> NDArray[np.bool_]:
        """Every second block of a lane. It is drawn paler, so that neighbours stay distinct where outlines would cover
        them.
        """
        place = self.blocks["sm"].astype(np.int64) * self.depth + self.lane
        order = np.argsort(place, kind="stable")  # blocks are in order of start
        _, first, count = np.unique(place[order], return_index=True, return_counts=True)
        odd = np.empty(len(place), bool)
        odd[order] = (np.arange(len(place)) - np.repeat(first, count)) % 2 == 1
        return odd


def gantt(picture: Picture) -> Gantt:
    b = picture.trace.blocks
    lane = lanes(b["sm"], b["start_ns"], b["end_ns"])
    return Gantt(b, lane, int(lane.max()) + 1 if len(lane) else 1)


@dataclass(frozen=True, slots=True, eq=False)
class Cells:
    """A Gantt chart of too many blocks: for each row and bin, the group present longest and its share of the bin."""

    group: NDArray[np.int64]  # rows x bins; -1: none
    share: NDArray[np.float64]
    edges_ns: NDArray[np.int64]
    rows_per_sm: int


def cells(picture: Picture, chart: Gantt, most_rows: int | None = None) -> Cells:
    n_sm, n = picture.trace.device.n_sm, max(len(picture.groups.names), 1)
    depth = min(chart.depth, max(1, (most_rows or ROWS) // n_sm))
    pooled = chart.lane * depth // chart.depth
    width = np.bincount(np.arange(chart.depth) * depth // chart.depth, minlength=depth)  # lanes in each row
    rows = n_sm * depth
    bins = max(1, min(picture.bins, CELLS // (rows * n)))
    b = chart.blocks
    row = picture.groups.of_block * rows + b["sm"] * depth + pooled
    one = np.ones(len(b), np.int64)
    means, edges = time_means(row, b["start_ns"], b["end_ns"], one, rows * n, *picture.window, bins)
    shares = means.reshape(n, rows, bins) / np.tile(width, n_sm)[:, None]
    most = shares.argmax(axis=0)
    share = np.take_along_axis(shares, most[None], axis=0)[0]
    # Differences of large sums leave rounding errors where nothing ran.
    return Cells(np.where(share > 1e-9, most, -1), share, edges, depth)
