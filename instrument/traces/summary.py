"""The summary of a trace: one row per kernel, and one per range."""

from __future__ import annotations

import functools
import html
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from paellapy.instrument.device.occupancy import Occupancy, occupancy
from paellapy.instrument.device.parts import WARP, limits_for_capability
from paellapy.instrument.errors import PaellaError
from paellapy.instrument.records import Records
from paellapy.instrument.traces.ranges import TracedRanges, block_rows
from paellapy.instrument.traces.readable import readable_time
from paellapy.instrument.traces.replays import runs
from paellapy.instrument.traces.residency import residency_of

if TYPE_CHECKING:
    from rich.console import Group


class Facts(Protocol):
    """The part a trace was taken on."""

    @property
    def n_sm(self) -> int: ...
    @property
    def max_warps_per_sm(self) -> int: ...
    @property
    def compute_capability(self) -> tuple[int, int]: ...


class Traced(Protocol):
    """The parts of a trace that its figures need."""

    blocks: Records
    launches: Records
    kernels: tuple[str, ...]
    warps: NDArray[np.int64]  # of each block
    ranges: TracedRanges

    @property
    def device(self) -> Facts: ...


@dataclass(frozen=True, slots=True)
class KernelSummary:
    kernel: str
    launches: int  # counting every replay
    blocks: int
    mean_ns: float
    median_ns: float
    max_ns: int
    span_ns: int  # from the first start to the last end
    occupancy: float  # mean resident warps / maximum, over the SMs and times with a block of the kernel
    # blocks of a launch / blocks that all SMs hold at once; for a part with unknown limits, the most that were held
    waves: float
    tail_share: float  # fraction of a launch's time after the first of its SMs has run out of blocks


@dataclass(frozen=True, slots=True)
class RangeSummary:
    """A range of a kernel, over all blocks and warps that recorded it."""

    kernel: str
    name: str
    count: int
    mean_ns: float
    median_ns: float
    max_ns: int
    share: float  # of the time of the blocks (or warps) that recorded it

    COLUMNS = ("kernel", "range", "times", "mean", "median", "max", "share of block")

    def cells(self) -> tuple[str, ...]:
        times = (readable_time(ns) for ns in (self.mean_ns, self.median_ns, self.max_ns))
        return self.kernel, self.name, f"{self.count:,}", *times, f"{self.share:.1%}"


@dataclass(frozen=True, slots=True)
class Summary:
    """One row per kernel that ran, and one per range. `print` it, or pass it to rich."""

    title: str
    kernels: tuple[KernelSummary, ...]
    ranges: tuple[RangeSummary, ...] = ()
    lost: int = 0  # events of ranges

    COLUMNS = ("kernel", "launches", "blocks", "mean", "median", "max", "span", "occupancy", "waves", "tail")

    def cells(self) -> Iterator[tuple[str, ...]]:
        for k in self.kernels:
            times = (readable_time(ns) for ns in (k.mean_ns, k.median_ns, k.max_ns, k.span_ns))
            shares = f"{k.occupancy:.1%}", f"{k.waves:.2f}", f"{k.tail_share:.1%}"
            yield k.kernel, f"{k.launches:,}", f"{k.blocks:,}", *times, *shares

    def __str__(self) -> str:
        lines = _aligned([self.COLUMNS, *self.cells()])
        if self.ranges:
            lines += _aligned([RangeSummary.COLUMNS, *(r.cells() for r in self.ranges)])
        return "\n".join([self.title, *lines, *self._notes()])

    def _notes(self) -> list[str]:
        """A warning for a table of ranges that lacks some of them."""
        if not self.lost:
            return []
        return [
            f"{self.lost:,} events of ranges were lost or have no partner: times and shares are of the last ranges of "
            "each block only. Use fewer ranges in long loops, and end every range that begins."
        ]

    def _repr_html_(self) -> str:
        head = "".join(f"<th>{name}</th>" for name in self.COLUMNS)
        rows = ("".join(f"<td>{html.escape(cell)}</td>" for cell in row) for row in self.cells())
        body = "".join(f"<tr>{row}</tr>" for row in rows)
        found = f"<table><caption>{html.escape(self.title)}</caption><tr>{head}</tr>{body}</table>"
        if self.ranges:
            head = "".join(f"<th>{name}</th>" for name in RangeSummary.COLUMNS)
            rows = ("".join(f"<td>{html.escape(cell)}</td>" for cell in r.cells()) for r in self.ranges)
            found += f"<table><tr>{head}</tr>" + "".join(f"<tr>{row}</tr>" for row in rows) + "</table>"
        return found + "".join(f"<p>{html.escape(note)}</p>" for note in self._notes())

    def __rich__(self) -> Group:
        from rich import box
        from rich.console import Group
        from rich.table import Table
        from rich.text import Text

        tables = []
        both = ((self.COLUMNS, list(self.cells())), (RangeSummary.COLUMNS, [r.cells() for r in self.ranges]))
        for columns, rows in both:
            table = Table(box=box.SIMPLE_HEAD, padding=0, show_edge=False)
            for name in columns:
                if name in ("kernel", "range"):
                    table.add_column(name, overflow="fold", min_width=8)
                else:
                    table.add_column(name, justify="right", no_wrap=True)
            for row in rows:
                table.add_row(*map(Text, row))  # Text, so that a name such as `f[int]` is not read as markup
            if rows or columns is self.COLUMNS:
                tables.append(table)
        return Group(Text(self.title), *tables)  # the title of a rich table is no wider than the table


def summarize(trace: Traced) -> Summary:
    """One row per kernel that ran, in the order of their names in `trace.kernels`."""
    run = runs(trace.blocks)
    ran = np.unique(trace.blocks["kernel"]).tolist()
    return Summary(repr(trace)[1:-1], tuple(_kernel_summary(trace, k, run) for k in ran), tuple(_ranges(trace)),
                   trace.ranges.lost)  # fmt: skip


def _ranges(trace: Traced) -> Iterator[RangeSummary]:
    records = trace.ranges.records
    row = block_rows(records, trace.blocks) if len(records) else np.zeros(0, np.int64)
    lasted = trace.blocks["end_ns"] - trace.blocks["start_ns"]
    which = records["kernel"].astype(np.int64) << 32 | records["range"]
    for key in np.unique(which).tolist():
        mine = which == key
        ns = (records["end_ns"] - records["start_ns"])[mine]
        lane = np.unique(row[mine] << 16 | records["warp"][mine])  # blocks, or warps of blocks
        share = float(ns.sum()) / max(float(lasted[lane >> 16].sum()), 1.0)
        names = trace.kernels[key >> 32], trace.ranges.names[key & 0xFFFFFFFF]
        yield RangeSummary(*names, int(mine.sum()), float(ns.mean()), float(np.median(ns)), int(ns.max()), share)


def _aligned(rows: list[tuple[str, ...]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join([r[0].ljust(widths[0]), *map(str.rjust, r[1:], widths[1:])]) for r in rows]


def _kernel_summary(trace: Traced, kernel: int, run: NDArray[np.int64]) -> KernelSummary:
    chosen = trace.blocks["kernel"] == kernel
    b, replays = trace.blocks[chosen], np.unique(run[chosen])
    duration = b["end_ns"] - b["start_ns"]
    seen = residency_of(b, trace.device.n_sm)
    listed = trace.launches[np.isin(trace.launches["launch"], b["launch"])]
    warp_ns = float((duration * trace.warps[chosen]).sum())
    return KernelSummary(
        kernel=trace.kernels[kernel],
        launches=len(replays),
        blocks=len(b),
        mean_ns=float(duration.mean()),
        median_ns=float(np.median(duration)),
        max_ns=int(duration.max()),
        span_ns=int(b["end_ns"].max() - b["start_ns"].min()),
        occupancy=warp_ns / max(int(seen.busy_ns.sum()) * trace.device.max_warps_per_sm, 1),
        waves=float(np.mean([_waves(trace, launch, int(seen.max_blocks.max())) for launch in listed])),
        tail_share=_tail_share(b, run[chosen]),
    )


def _waves(trace: Traced, launch: Any, most_seen: int) -> float:
    allowed = allowed_by(trace, launch)
    per_sm = most_seen if allowed is None else allowed.blocks_per_sm
    return int(launch["blocks"]) / (trace.device.n_sm * per_sm)


def allowed_by(trace: Traced, launch: Any) -> Occupancy | None:
    """The occupancy that a launch's registers, shared memory and threads allow; None for a part with unknown limits."""
    needs = (int(launch[name]) for name in ("warps", "registers", "shared_bytes"))
    return _allowed(trace.device.compute_capability, *needs)


@functools.cache
def _allowed(capability: tuple[int, int], warps: int, registers: int, shared_bytes: int) -> Occupancy | None:
    try:
        return occupancy(limits_for_capability(capability), warps * WARP, registers, shared_bytes)
    except PaellaError:
        return None


def _tail_share(blocks: Records, run: NDArray[np.int64]) -> float:
    _, run = np.unique(run, return_inverse=True)
    n = int(run.max()) + 1
    far = np.iinfo(np.int64).max
    first, last, dry = np.full(n, far), np.full(n, -far), np.full(n, far)
    np.minimum.at(first, run, blocks["start_ns"])
    np.maximum.at(last, run, blocks["end_ns"])
    place, at = np.unique((run << 16) | blocks["sm"], return_inverse=True)
    ends = np.full(len(place), -far)
    np.maximum.at(ends, at, blocks["end_ns"])
    np.minimum.at(dry, place >> 16, ends)
    return float((last - dry).sum() / max((last - first).sum(), 1))
