"""Ranges on the virtual GPU: an event is placed in its block in proportion to the cost up to that point."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from paellapy.instrument.device.range_events import RECORDS, Events
from paellapy.instrument.markers import Ranges
from paellapy.instrument.records import RANGE_END, RANGE_RECORD, WHOLE_BLOCK, Records
from paellapy.instrument.ttir.machine import Mark

_KEPT = RECORDS * RANGE_RECORD["clocks"].shape[0]  # events per block
Price = Callable[[Records], NDArray[np.float64]]


def events_of(
    launch: int, ranges: Ranges, marks: Sequence[Mark], ids: NDArray[np.int64], cost: Records, price: Price
) -> Events:
    """`ids` are the blocks that ran, `cost` is the total cost of each, and `price` converts costs to times.

    Warps are not distinguished: an event recorded per warp is recorded for its block. As on a GPU, a block keeps only
    its last events: as many as fill its records if each has a clock of its own.
    """
    whole = price(cost)
    order = np.argsort(ids)
    columns: list[tuple[NDArray[np.int64], NDArray[np.uint32], NDArray[np.float64]]] = []
    for mark in marks:
        tag = ranges.names.index(mark.marker.name) | (0 if mark.marker.begins else RANGE_END)
        passed = price(np.ascontiguousarray(mark.cost).view(cost.dtype).reshape(-1))
        row = order[np.searchsorted(ids[order], mark.ids)]
        columns.append((mark.ids, np.full(len(passed), tag, np.uint32), passed / np.maximum(whole[row], 1e-9)))
    if not columns:
        nothing = np.zeros(0, np.uint32)
        return Events(launch, ranges.names, nothing, nothing.astype(np.uint16), nothing, np.zeros(0))
    block, tags, part = (np.concatenate(column) for column in zip(*columns, strict=True))
    by = np.argsort(block, kind="stable")
    last = np.searchsorted(block[by], block[by], side="right") - 1  # the last event of each event's block
    kept = by[last - np.arange(len(by)) < _KEPT]
    warp = np.full(len(kept), WHOLE_BLOCK, np.uint16)
    lost = len(by) - len(kept)
    return Events(
        launch, ranges.names, block[kept].astype(np.uint32), warp, tags[kept], np.clip(part[kept], 0, 1), None, lost
    )
