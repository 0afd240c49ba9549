"""Ranges of a trace: converts events that blocks recorded, or that the virtual GPU computed, to spans of time."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from paellapy.instrument.device.range_events import Events
from paellapy.instrument.records import RANGE, RANGE_END, Records


@dataclass(frozen=True, slots=True, eq=False)
class TracedRanges:
    """All ranges of a trace (records.RANGE), their names, and how many are incomplete."""

    records: Records = field(default_factory=lambda: np.zeros(0, RANGE))
    names: tuple[str, ...] = ()
    lost: int = 0  # events that were overwritten, or whose begin or end is missing

    def __len__(self) -> int:
        return len(self.records)

    def of_blocks(self, blocks: Records) -> TracedRanges:
        """The ranges of some blocks of the trace."""
        wanted = np.unique(_place(blocks))
        return TracedRanges(self.records[np.isin(_place(self.records), wanted)], self.names, self.lost)


def ranges_of(found: Iterable[Events], blocks: Records) -> TracedRanges:
    """Places the events of all launches on the time lines of their blocks."""
    names: dict[str, int] = {}
    tables, lost = [], 0
    for events in found:
        numbers = np.array([names.setdefault(n, len(names)) for n in events.names], np.int64)
        row = _rows(events, blocks)
        known = row >= 0
        events, row = events.at(known), row[known]
        begin, end, depth = pair(events)
        lost += events.overwritten + len(events.tag) - 2 * len(begin)
        table = np.zeros(len(begin), RANGE)
        block = blocks[row[begin]]
        for column in ("launch", "block", "kernel", "sm"):
            table[column] = block[column]
        table["range"] = numbers[events.tag[begin] & (RANGE_END - 1)] if len(numbers) else 0
        table["warp"] = events.warp[begin]
        table["depth"] = depth
        lasted = (block["end_ns"] - block["start_ns"]).astype(float)
        for column, which in (("start_ns", begin), ("end_ns", end)):
            table[column] = block["start_ns"] + np.rint(events.part[which] * lasted).astype(np.int64)
        tables.append(table)
    records = np.concatenate(tables) if tables else np.zeros(0, RANGE)
    return TracedRanges(records[np.argsort(records["start_ns"], kind="stable")], tuple(names), lost)


def _rows(events: Events, blocks: Records) -> NDArray[np.int64]:
    """The block of each event; -1 if the trace does not have it. Replays are distinguished by their start times."""
    mine = np.flatnonzero(blocks["launch"] == events.launch)
    if events.start_lo is None:
        key, wanted = blocks["block"][mine].astype(np.uint64), events.block.astype(np.uint64)
    else:
        low = (blocks["start_ns"][mine] & 0xFFFFFFFF).astype(np.uint64)
        key = blocks["block"][mine].astype(np.uint64) << np.uint64(32) | low
        wanted = events.block.astype(np.uint64) << np.uint64(32) | events.start_lo.astype(np.uint64)
    order = np.argsort(key, kind="stable")
    if not len(order):
        return np.full(len(wanted), -1)
    at = np.minimum(np.searchsorted(key[order], wanted), len(order) - 1)
    return np.where(key[order][at] == wanted, mine[order][at], -1)


def pair(events: Events) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """The events that begin ranges, the events that end them, and the number of ranges around each.

    Events are in order within a lane (block and warp). An end closes the last open begin of its name: neighbouring
    pairs are removed until none is left.
    """
    lane = events.block.astype(np.int64) << 16 | events.warp
    ends = events.tag & RANGE_END != 0
    name = events.tag & (RANGE_END - 1)
    left = np.lexsort((np.arange(len(lane)), name, lane))
    begins, closers = [], []
    while len(left) > 1:
        first, second = left[:-1], left[1:]
        same = (lane[first] == lane[second]) & (name[first] == name[second]) & ~ends[first] & ends[second]
        if not same.any():
            break
        begins.append(first[same])
        closers.append(second[same])
        keep = np.ones(len(left), bool)
        keep[:-1][same] = False
        keep[1:][same] = False
        left = left[keep]
    begin = np.concatenate(begins) if begins else np.zeros(0, np.int64)
    end = np.concatenate(closers) if closers else np.zeros(0, np.int64)
    return begin, end, _depths(lane, begin, end)


def _depths(lane: NDArray[np.int64], begin: NDArray[np.int64], end: NDArray[np.int64]) -> NDArray[np.int64]:
    """The number of paired ranges that are open in the same lane when each begins."""
    step = np.zeros(len(lane), np.int64)
    step[begin], step[end] = 1, -1
    order = np.argsort(lane, kind="stable")
    depth = np.zeros(len(lane), np.int64)
    depth[order] = np.cumsum(step[order])  # the steps of every lane add up to 0
    return depth[begin] - 1


def block_rows(records: Records, blocks: Records) -> NDArray[np.int64]:
    """The row of each range's block; if a launch ran several times, the block of the last run that had begun."""
    order = np.lexsort((blocks["start_ns"], blocks["block"], blocks["launch"]))
    ordered = blocks[order]
    first = np.concatenate(([0], np.flatnonzero(np.diff(_place(ordered))) + 1)) if len(ordered) else np.zeros(1, int)
    run = np.searchsorted(_place(ordered)[first], _place(records))  # the runs of each range's block
    row = first[run]
    last = np.append(first[1:], len(ordered))[run] - 1
    while (later := (row < last) & (ordered["start_ns"][np.minimum(row + 1, last)] <= records["start_ns"])).any():
        row = row + later
    return order[row]


def _place(records: Records) -> NDArray[np.int64]:
    place: NDArray[np.int64] = records["launch"].astype(np.int64) << 32 | records["block"]
    return place
