"""Events of ranges as a device records them: which range began or ended, in which block, and how far through it."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from paellapy.instrument.markers import Ranges
from paellapy.instrument.records import RANGE_EVENT, RANGE_HEAD, WHOLE_BLOCK, Records

MOST_BYTES = 1 << 30  # most bytes of events in one trace; with more blocks than fit, each keeps fewer events
EVENTS = 256  # events kept per lane
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
    """The layout of one launch's events: `lanes` places for each of `blocks`, with `events` each."""

    ranges: Ranges
    blocks: int
    lanes: int
    events: int

    @classmethod
    def of(cls, ranges: Ranges, blocks: int, threads: int, events: int = EVENTS) -> EventLayout:
        lanes = ranges.lanes(threads)
        layout = cls(ranges, blocks, lanes, events)
        while layout.nbytes > MOST_BYTES and events > _FEWEST:
            events //= 2
            layout = cls(ranges, blocks, lanes, events)
        return layout

    @property
    def lane_bytes(self) -> int:
        return RANGE_HEAD.itemsize + self.events * RANGE_EVENT.itemsize

    @property
    def nbytes(self) -> int:
        return self.blocks * self.lanes * self.lane_bytes

    @property
    def mask(self) -> int:
        return self.events * RANGE_EVENT.itemsize - 1

    def read(self, launch: int, memory: NDArray[np.uint8]) -> Events:
        """The events that the blocks of a launch recorded. Blocks that did not run are removed later, by their records.
        """
        lanes = memory.reshape(self.blocks, self.lanes, self.lane_bytes)
        heads = np.ascontiguousarray(lanes[:, :, : RANGE_HEAD.itemsize]).view(RANGE_HEAD).reshape(lanes.shape[:2])
        rings = lanes[:, :, RANGE_HEAD.itemsize :]
        used = heads["used"].astype(np.int64) // RANGE_EVENT.itemsize
        used[used > 1 << 24] = 0  # never written: the block did not run
        kept = np.minimum(used, self.events)
        block, lane = (index.reshape(-1) for index in np.indices(kept.shape))
        count = kept.reshape(-1)
        which = np.repeat(np.arange(len(count)), count)
        place = np.arange(len(which)) - np.repeat(np.cumsum(count) - count, count)
        slot = (np.repeat((used - kept).reshape(-1), count) + place) & (self.events - 1)
        events: Records = _view(rings)[block[which], lane[which], slot]
        head = heads[block[which], 0]  # the clocks of the block
        whole = (head["clock_end"] - head["clock_start"]).astype(float)
        passed = (events["clock"] - head["clock_start"]).view(np.int32).astype(float)  # negative before the start
        part = np.clip(passed / np.maximum(whole, 1), 0, 1)
        warp = lane[which] if self.ranges.per_warp else np.full(len(which), WHOLE_BLOCK)
        return Events(
            launch,
            self.ranges.names,
            block[which].astype(np.uint32),
            warp.astype(np.uint16),
            events["tag"].copy(),
            part,
            head["start_lo"].copy(),
            int((used - kept).sum()),
        )


def _view(rings: NDArray[np.uint8]) -> Records:
    return np.ascontiguousarray(rings).view(RANGE_EVENT).reshape(*rings.shape[:2], -1)
