"""Events of ranges as a device records them: which range began or ended, in which block, and how far through it."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from paellapy.instrument.markers import Ranges, Sites
from paellapy.instrument.records import RANGE_HEAD, RANGE_RECORD, WHOLE_BLOCK

MOST_BYTES = 1 << 30  # most bytes of records in one trace; with more blocks than fit, each keeps fewer records
RECORDS = 256  # records kept per lane; a record has up to three moments, and a moment one or more events
_FEWEST = 16


@dataclass(frozen=True, slots=True, eq=False)
class Events:
    """Events of one launch, in order within each lane."""

    launch: int
    names: tuple[str, ...]
    block: NDArray[np.uint32]
    warp: NDArray[np.uint16]
    tag: NDArray[np.uint32]
    part: NDArray[np.float64]  # fraction of the block's time that had passed, 0 to 1
    start_lo: NDArray[np.uint32] | None = None  # from the block's record, where a launch may run several times
    overwritten: int = 0

    def at(self, chosen: NDArray[np.bool_]) -> Events:
        return replace(
            self,
            block=self.block[chosen],
            warp=self.warp[chosen],
            tag=self.tag[chosen],
            part=self.part[chosen],
            start_lo=None if self.start_lo is None else self.start_lo[chosen],
        )


@dataclass(frozen=True, slots=True)
class EventLayout:
    """The layout of one launch's records: heads, then `lanes` rings for each of `blocks`, with `records` each."""

    ranges: Ranges
    sites: Sites
    blocks: int
    lanes: int
    records: int

    @classmethod
    def of(cls, ranges: Ranges, sites: Sites, blocks: int, threads: int, records: int = RECORDS) -> EventLayout:
        lanes = ranges.lanes(threads)
        layout = cls(ranges, sites, blocks, lanes, records)
        while layout.nbytes > MOST_BYTES and records > _FEWEST:
            records //= 2
            layout = cls(ranges, sites, blocks, lanes, records)
        return layout

    @property
    def ring_bytes(self) -> int:
        """The size of a ring, and its alignment."""
        return self.records * RANGE_RECORD.itemsize

    @property
    def heads_bytes(self) -> int:
        return self.blocks * self.lanes * RANGE_HEAD.itemsize

    @property
    def nbytes(self) -> int:
        return self.heads_bytes + self.blocks * self.lanes * self.ring_bytes

    @property
    def mask(self) -> int:
        return self.ring_bytes - 1

    def read(self, launch: int, memory: NDArray[np.uint8]) -> Events:
        """The events that a launch's blocks recorded. Blocks that did not run are removed later, by their records."""
        clocks, tags, size = self._site_tables()
        heads = memory[: self.heads_bytes].view(RANGE_HEAD)[::-1]
        rings = memory[self.heads_bytes :].view(RANGE_RECORD).reshape(-1, self.records)
        used, events = heads["used"].astype(np.int64) // RANGE_RECORD.itemsize, heads["events"].astype(np.int64)
        # A block that did not run leaves what was there before.
        wrong = (events < used * min(size, default=0)) | (events > used * max(size, default=0))
        used[wrong] = events[wrong] = 0
        kept = np.minimum(used, self.records)
        lane, place = _expanded(kept)
        found = rings[lane, (used[lane] - kept[lane] + place) & (self.records - 1)]
        known = found["site"] < len(size)  # all, but in a block that did not run
        lane, found = lane[known], found[known]
        row, place = _expanded(size[found["site"]])
        lane, site = lane[row], found["site"][row]
        head = heads[lane // self.lanes * self.lanes]  # the clocks of the block
        clock = found["clocks"][row, clocks[site, place]]
        whole = (head["clock_end"] - head["clock_start"]).astype(float)
        passed = (clock - head["clock_start"]).view(np.int32).astype(float)  # negative before the start
        warp = lane % self.lanes if self.ranges.per_warp else np.full(len(lane), WHOLE_BLOCK)
        return Events(
            launch,
            self.ranges.names,
            (lane // self.lanes).astype(np.uint32),
            warp.astype(np.uint16),
            tags[site, place],
            np.clip(passed / np.maximum(whole, 1), 0, 1),
            head["start_lo"].copy(),
            max(0, int(events.sum()) - len(row)),
        )

    def _site_tables(self) -> tuple[NDArray[np.int64], NDArray[np.uint32], NDArray[np.int64]]:
        """For each site and event its clock and its tag; and the number of events of each site."""
        events = [[(clock, tag) for clock, tags in enumerate(site) for tag in tags] for site in self.sites.moments]
        size = np.array([len(each) for each in events], np.int64)
        table = np.zeros((len(events), max(size, default=0), 2), np.int64)
        for site, each in enumerate(events):
            table[site, : len(each)] = each
        return table[:, :, 0], table[:, :, 1].astype(np.uint32), size


def _expanded(counts: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The numbers of some groups, repeated for each of their members, and the members' numbers.

    >>> [each.tolist() for each in _expanded(np.array([2, 0, 1]))]
    [[0, 0, 2], [0, 1, 0]]
    """
    which = np.repeat(np.arange(len(counts)), counts)
    return which, np.arange(len(which)) - np.repeat(np.cumsum(counts) - counts, counts)
