"""`engine.trace()`: requests, segments and blocks of what runs meanwhile, on one clock."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from instrument.records import BLOCK, LAUNCH, Records
from instrument.trace import DeviceFacts, Trace
from instrument.versions import versions
from scheduler import state as st

if TYPE_CHECKING:
    from scheduler.engine import Engine

# One request that ended during the trace. Times are ns on the clock of the trace's blocks.
JOB_RECORD = np.dtype(
    [
        ("request", "<u8"),
        ("model", "<u2"),  # index into `models`
        ("lane", "<i2"),  # -1: it never had one
        ("slot", "<i2"),
        ("batch", "<u2"),  # requests that ran together
        ("status", "<u2"),  # scheduler.state.STATUS
        ("client", "<i4"),
        ("priority", "<i4"),
        ("arrival_ns", "<i8"),
        ("start_ns", "<i8"),  # of its first launch; -1: it was not launched
        ("end_ns", "<i8"),
    ]
)

# One segment that ran: from the first start to the last end of its blocks.
SEGMENT_RECORD = np.dtype(
    [
        ("model", "<u2"),
        ("lane", "<i2"),
        ("batch", "<u2"),  # captured size it ran at
        ("segment", "<i2"),  # -1: the whole program as one launch
        ("blocks", "<u4"),
        ("start_ns", "<i8"),
        ("end_ns", "<i8"),
    ]
)


@dataclass(frozen=True, slots=True)
class TracedPiece:
    """A segment as the trace sees it: launch ids, and, where each replay has ids of its own, nothing else."""

    lane: int
    size: int
    segment: int
    launches: tuple[int, ...]
    replayed: bool  # the same ids come again with every run of the lane


@dataclass(frozen=True, slots=True)
class TracedBlocks:
    """What a backend recorded."""

    blocks: Records
    launches: Records
    kernels: tuple[str, ...]
    pieces: list[TracedPiece]
    dropped: int = 0
    unfinished: int = 0


class EngineTrace(Trace):
    """A `Trace` with `jobs` (requests) and `segments` beside its blocks; `models` names the numbers in both."""

    jobs: Records = np.zeros(0, JOB_RECORD)
    segments: Records = np.zeros(0, SEGMENT_RECORD)
    models: tuple[str, ...] = ()


class trace_engine:
    """What `engine.trace()` returns: `with engine.trace() as t:` fills `t` when the block is left."""

    def __init__(self, engine: Engine, records_per_sm: int) -> None:
        self._engine, self._records_per_sm = engine, records_per_sm
        self._entries: list[Any] = []

    def __enter__(self) -> EngineTrace:
        device = self._engine.device
        facts = DeviceFacts(device.title, device.sm_ids, device.limits.warps, device.capability, versions())
        self.result = EngineTrace(np.zeros(0, BLOCK), np.zeros(0, LAUNCH), (), facts)
        self._engine.begin_trace(self._records_per_sm, self._note)
        return self.result

    def __exit__(self, *_: object) -> None:
        recorded, to_trace_ns = self._engine.end_trace(self._note)
        loaded = self._engine.loaded_rows()
        names = tuple(each.model.name for each in loaded.values())
        number = {row: k for k, row in enumerate(loaded)}
        trace = self.result
        trace.fill(recorded.blocks, recorded.launches, recorded.kernels, trace.device, recorded.dropped,
                   recorded.unfinished)  # fmt: skip
        trace.models = names
        trace.jobs = _frozen(_jobs(self._entries, number, to_trace_ns))
        sizes = {row: each.model.batch for row, each in loaded.items()}
        lanes = {lane: row for row, each in loaded.items() for lane in each.lane_rows}
        rows = _segments(trace, recorded.pieces)
        trace.segments = _frozen(
            np.array(
                [
                    (number[lanes[p.lane]], p.lane, sizes[lanes[p.lane]][p.size], p.segment, n, start, end)
                    for p, n, start, end in rows
                    if p.lane in lanes
                ],
                SEGMENT_RECORD,
            )
        )

    def _note(self, entry: Any) -> None:
        if entry["request"] >= 0:
            self._entries.append(entry.copy())


def _jobs(entries: list[Any], number: dict[int, int], to_trace_ns: Any) -> Records:
    rows = []
    for e in entries:
        if int(e["model"]) not in number:
            continue
        started = int(e["started_ns"])
        rows.append(
            (e["serial"], number[int(e["model"])], e["lane"], e["slot"], e["batch"], e["status"], e["client"],
             e["priority"], to_trace_ns(int(e["arrival_ns"])), -1 if started == st.NEVER else to_trace_ns(started),
             to_trace_ns(int(e["finish_ns"])))
        )  # fmt: skip
    found = np.array(rows, JOB_RECORD)
    return found[np.argsort(found["arrival_ns"], kind="stable")]


def _segments(trace: EngineTrace, pieces: list[TracedPiece]) -> list[tuple[TracedPiece, int, int, int]]:
    """When each piece ran. Replays share launch ids: they are told apart by the requests that ran in the lane."""
    blocks = trace.blocks
    order = np.argsort(blocks["launch"], kind="stable")
    ids = blocks["launch"][order]
    runs = {int(lane): _windows(trace.jobs[trace.jobs["lane"] == lane]) for lane in np.unique(trace.jobs["lane"])}
    found = []
    for piece in pieces:
        parts = [order[slice(*np.searchsorted(ids, (i, i + 1)))] for i in piece.launches]
        mine = blocks[np.concatenate(parts)] if parts else blocks[:0]
        if not len(mine):
            continue
        windows = runs.get(piece.lane, []) if piece.replayed else [(int(mine["start_ns"].min()), 1 << 62)]
        for low, high in windows:
            inside = mine[(mine["start_ns"] >= low) & (mine["start_ns"] <= high)]
            if len(inside):
                found.append((piece, len(inside), int(inside["start_ns"].min()), int(inside["end_ns"].max())))
    return sorted(found, key=lambda row: row[2])


def _windows(jobs: Records) -> list[tuple[int, int]]:
    """When a lane ran what, from the requests in it. The host's clock and the GPU's are some microseconds apart, so
    each window reaches half way to the next."""
    launched = jobs[jobs["start_ns"] >= 0]
    spans = sorted({(int(job["start_ns"]), int(job["end_ns"])) for job in launched})
    middles = [(end + start) // 2 for (_, end), (start, _) in pairwise(spans)]
    return list(pairwise([-(1 << 62), *middles, 1 << 62])) if spans else []


def _frozen(rows: Records) -> Records:
    rows.flags.writeable = False
    return rows
