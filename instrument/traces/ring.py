"""From raw rings to blocks: reads the records that the device wrote and puts them on one 64-bit time line.

A record holds only the low 32 bits of the clock, which wrap every 4.29 s. Three facts, all lower bounds, put the high
bits back: slots are in order of start, a block starts after its launch was submitted, and a slot that was still free
at a mark was taken after that mark. The earliest time line that agrees with all three is the answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from paellapy.instrument.errors import TraceError
from paellapy.instrument.records import BLOCK, RING_RECORD, Records

WRAP_NS = 1 << 32

# The largest disagreement between host and device on a bound. The error of a clock estimate is about 1 ms, drift
# between the two clocks adds tens of ms over minutes, and the order within a ring is off by µs. Every ns here costs a
# ns of the 4.29 s.
SLACK_NS = 1 << 28


class Mark(NamedTuple):
    """The tails at the time `ns` (device clock): slots from `tails[sm]` on started later, the others earlier."""

    ns: int
    tails: NDArray[np.uint32]


class Decoded(NamedTuple):
    blocks: Records  # BLOCK, by SM and then by slot
    dropped: int  # overwritten by later records of the same ring
    unfinished: int  # started, but not ended when the rings were read


def decode(tails: NDArray[np.uint32], rings: Records, launches: Records, marks: Sequence[Mark] = ()) -> Decoded:
    """Reads the rings of all SMs: `tails` counts the records ever started in each ring of `rings[n_sm, capacity]`.

    A block that ran for more than 4.29 s keeps its start and loses whole multiples of 4.29 s of its duration. Where
    launches are replayed, `submit_ns` says little: give a mark from the beginning of the trace, one from its end and
    about one per second between. Without them an SM must not idle for 4 s, nor 2 s once its ring has overflowed.

    >>> from paellapy.instrument.records import LAUNCH
    >>> rings = np.zeros((1, 4), RING_RECORD)
    >>> rings[0, 0] = (100, 350, 7, 1)
    >>> launches = np.zeros(1, LAUNCH)
    >>> launches["launch"], launches["submit_ns"] = 1, (5 << 32) + 60
    >>> block = decode(np.array([2], np.uint32), rings, launches).blocks[0]
    >>> int(block["start_ns"]) - (5 << 32), int(block["end_ns"] - block["start_ns"])
    (100, 250)
    """
    n_sm, capacity = _check(tails, rings, marks)
    counts = np.asarray(tails).astype(np.int64)
    held = np.minimum(counts, capacity)
    ids, rows = _index(launches)
    ordered = sorted(marks, key=lambda mark: mark.ns)
    mark_ns = np.array([mark.ns for mark in ordered], np.int64)
    mark_tails = np.array([mark.tails for mark in ordered], np.int64).reshape(len(ordered), n_sm)

    blocks = np.zeros(int(held.sum()), BLOCK)
    filled = 0
    for sm in range(n_sm):
        slots = np.arange(counts[sm] - held[sm], counts[sm])
        records = rings[sm, slots & (capacity - 1)]
        done = records["launch"] != 0
        if not done.all():
            slots, records = slots[done], records[done]
        if not len(records):
            continue
        launch = rows[_find(ids, records["launch"])]
        start_ns = _unwrap(
            records["start_lo"].astype(np.int64),
            launches["submit_ns"][launch],
            _Marks(slots, mark_ns, mark_tails[:, sm]),
            overflow=capacity if counts[sm] > capacity else 0,
        )
        out = blocks[filled : filled + len(records)]
        out["launch"] = records["launch"]
        out["kernel"] = launches["kernel"][launch]
        out["sm"] = sm
        out["block"] = records["block"]
        out["start_ns"] = start_ns
        out["end_ns"] = start_ns + (records["end_lo"] - records["start_lo"])  # unsigned: correct across a wrap
        filled += len(records)
    return Decoded(blocks[:filled], int((counts - held).sum()), int(held.sum()) - filled)


class _Marks(NamedTuple):
    """Bounds from the marks for the records of one SM, given in order of their slots."""

    slots: NDArray[np.int64]
    ns: NDArray[np.int64]
    tails: NDArray[np.int64]

    def around(self, back: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The marks before and after the slot that was reserved `back` slots earlier; far away if there is none."""
        far = 1 << 62
        times = np.concatenate(([-far], self.ns, [far]))
        at = np.searchsorted(self.tails, self.slots - back, side="right")
        return times[at], times[at + 1]

    def pin(self, low: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """The time between the marks around each slot, and whether it is unique."""
        before, after = self.around(0)
        earliest = before - SLACK_NS
        start = earliest + ((low - earliest) & (WRAP_NS - 1))
        return start, (after - before <= WRAP_NS - 2 * SLACK_NS) & (start <= after + SLACK_NS)


def _unwrap(low: NDArray[np.int64], submit_ns: NDArray[np.int64], marks: _Marks, overflow: int) -> NDArray[np.int64]:
    """The start times of one SM's records. `overflow` is the ring's capacity where it has overflowed, else 0.

    Once a ring has overflowed, a slot can hold a record older than its place: its own block is still running, or an
    older, long block ended after it and wrote over it. Such a record must not shift the ones after it.
    """
    # In a ring without overflow, time only increases. In one with overflow, steps go the shorter way round the clock,
    # so that the step into an older record and the step out of it cancel.
    backwards = WRAP_NS // 2 if overflow else SLACK_NS
    step = ((np.diff(low) + backwards) & (WRAP_NS - 1)) - backwards
    line = low[0] + np.concatenate((np.zeros(1, np.int64), np.cumsum(step)))

    # Whole wraps that the steps could not show: the fewest that lift every record over its lower bounds. An older
    # record was reserved one round of the ring before its place.
    floor = np.maximum(submit_ns, marks.around(overflow)[0]) - SLACK_NS
    start: NDArray[np.int64] = line + (np.maximum.accumulate(-((line - floor) >> 32)) << 32)
    if overflow and len(marks.ns):
        pinned, sure = marks.pin(low)
        start = np.where(sure, pinned, start)
    return start


def _check(tails: NDArray[np.uint32], rings: Records, marks: Sequence[Mark]) -> tuple[int, int]:
    if rings.dtype != RING_RECORD or rings.ndim != 2:
        raise TraceError(
            f"rings must be RING_RECORD[n_sm, capacity], not {rings.dtype}{list(rings.shape)}",
            field="rings", given=rings.dtype,
        )
    n_sm, capacity = rings.shape
    if capacity < 1 or capacity & (capacity - 1):
        raise TraceError(
            f"a ring's capacity must be a power of two, not {capacity}: slots are taken with a mask",
            field="capacity", given=capacity,
        )
    if any(np.shape(each) != (n_sm,) for each in (tails, *(mark.tails for mark in marks))):
        raise TraceError(
            f"tails and every mark must have one tail for each of the {n_sm} rings", field="tails", limit=n_sm
        )
    return n_sm, capacity


def _index(launches: Records) -> tuple[NDArray[np.uint32], NDArray[np.int64]]:
    """The launch ids in ascending order and the row of each."""
    rows = np.argsort(launches["launch"], kind="stable")
    ids: NDArray[np.uint32] = launches["launch"][rows]
    repeated = ids[1:][ids[1:] == ids[:-1]]
    if len(repeated):
        raise TraceError(
            f"launch {repeated[0]} is listed twice: list a replayed launch once",
            field="launches", given=int(repeated[0]),
        )
    return ids, rows


def _find(ids: NDArray[np.uint32], wanted: NDArray[np.uint32]) -> NDArray[np.int64]:
    at = np.searchsorted(ids, wanted)
    known = ids[np.minimum(at, len(ids) - 1)] == wanted if len(ids) else np.zeros(len(wanted), bool)
    if not known.all():
        raise TraceError(
            f"a ring holds a record of launch {wanted[~known][0]}, which this trace does not list; "
            "rings must be zeroed when a trace starts, and launches captured earlier must stay listed",
            field="rings", given=int(wanted[~known][0]),
        )
    return at
