"""The summary of a trace: one row per kernel, and one per range."""

from __future__ import annotations

import functools
import html
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from paellapy.instrument.device.base import Events
from paellapy.instrument.errors import PaellaError
from paellapy.instrument.gpu_model.parts import WARP, Occupancy, limits_for_capability, occupancy
from paellapy.instrument.records import RANGE, RANGE_END, Records

if TYPE_CHECKING:
    from rich.console import Group


# --- numbers of a trace as readable text: counts with their nouns, and times with fitting units -----------------------


def counted(n: int, one: str, several: str | None = None) -> str:
    """A number with its noun.

    >>> counted(1, "launch", "launches"), counted(4096, "block")
    ('1 launch', '4,096 blocks')
    """
    return f"{n:,} {one if n == 1 else several or one + 's'}"


def readable_time(ns: float) -> str:
    """A time with a fitting unit.

    >>> readable_time(1234)
    '1.23 µs'
    """
    for unit, size in (("s", 1e9), ("ms", 1e6), ("µs", 1e3)):
        if ns >= size:
            value = ns / size
            return f"{value:.{0 if value >= 100 else 1 if value >= 10 else 2}f} {unit}"
    return f"{ns:.0f} ns"


# --- replays of a launch in a CUDA graph: they share its id, and their blocks tell them apart -------------------------


def runs(blocks: Records) -> NDArray[np.int64]:
    """The run of its launch that each block belongs to: replays of one launch have the same id, but never overlap."""
    n = len(blocks)
    order = np.lexsort((blocks["start_ns"], blocks["launch"]))
    ordered = blocks[order]
    launch, start, end = ordered["launch"], ordered["start_ns"], ordered["end_ns"]
    by = np.lexsort((ordered["block"], launch))
    same = (launch[by][1:] == launch[by][:-1]) & (ordered["block"][by][1:] == ordered["block"][by][:-1])
    last_seen = np.full(n, -1)
    last_seen[by[1:][same]] = by[:-1][same]
    heads = np.flatnonzero(launch[1:] != launch[:-1]) + 1
    last_seen[heads] = heads - 1
    reach = np.maximum.accumulate(last_seen)
    cuts = [0]
    while (again := int(np.searchsorted(reach, cuts[-1]))) < n:
        # This block already ran since the last cut, so a run begins between then and now: where the launch was quiet
        # longest, because either end of a run may be missing from the trace.
        cut, seen = cuts[-1], int(last_seen[again])
        quiet = start[seen + 1 : again + 1] - np.maximum.accumulate(end[cut:again])[seen - cut :]
        cuts.append(seen + 1 + int(np.argmax(quiet)))
    run = np.empty(n, np.int64)
    run[order] = np.searchsorted(cuts, np.arange(n), side="right")
    return run


def times_launched(blocks: Records) -> int:
    """The number of launches of these blocks, counting every replay."""
    return int(runs(blocks).max(initial=0))


# --- resident blocks of each SM: the most at a time, the mean, and the time with any ----------------------------------


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


# --- ranges of a trace: converts events that blocks recorded, or that the virtual GPU computed, to spans of time ------


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


@dataclass(frozen=True, slots=True)
class KernelComparison:
    """One kernel in two traces; None in one where it did not run. Bytes are 0 where they are not known."""

    kernel: str
    first: KernelSummary | None
    second: KernelSummary | None
    first_bytes: int = 0
    second_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Comparison:
    """Two traces side by side, as of two configurations of a kernel. `print` it."""

    kernels: tuple[KernelComparison, ...]

    COLUMNS = ("kernel", "", "this", "other", "other ÷ this")

    def cells(self) -> Iterator[tuple[str, ...]]:
        for k in self.kernels:
            for n, (name, shown) in enumerate(_COMPARED.items()):
                pair = [getattr(each, name, None) for each in (k.first, k.second)]
                yield (k.kernel if n == 0 else "", name.removesuffix("_ns"), *_side_by_side(shown, *pair))
            if k.first_bytes or k.second_bytes:
                yield "", "bytes", *_side_by_side("{:,}".format, k.first_bytes or None, k.second_bytes or None)

    def __str__(self) -> str:
        return "\n".join(_aligned([self.COLUMNS, *self.cells()]))


_COMPARED: dict[str, Callable[[Any], str]] = {
    "launches": "{:,}".format, "blocks": "{:,}".format, "span_ns": readable_time, "mean_ns": readable_time,
    "occupancy": "{:.1%}".format, "waves": "{:.2f}".format, "tail_share": "{:.1%}".format,
}  # fmt: skip


def _side_by_side(shown: Callable[[Any], str], first: Any, second: Any) -> tuple[str, str, str]:
    cells = ["–" if each is None else shown(each) for each in (first, second)]
    return cells[0], cells[1], f"{second / first:.2f}" if first and second is not None else "–"


def compare(first: Any, second: Any) -> Comparison:
    """Kernels of the same name side by side; of two traces with one kernel each, these two."""
    found = [({k.kernel: k for k in t.summary().kernels}, _bytes_of(t)) for t in (first, second)]
    (here, bytes_here), (there, bytes_there) = found
    names = [(name, name) for name in dict.fromkeys((*here, *there))]
    if len(here) == len(there) == 1:
        names = [(next(iter(here)), next(iter(there)))]
    return Comparison(
        tuple(
            KernelComparison(
                a if a == b else f"{a} / {b}", here.get(a), there.get(b), bytes_here.get(a, 0), bytes_there.get(b, 0)
            )
            for a, b in names
        )
    )


def _bytes_of(trace: Any) -> dict[str, int]:
    """Bytes loaded and stored by each kernel, as far as the work of its launches is known."""
    kernels = dict(zip(trace.launches["launch"].tolist(), trace.launches["kernel"].tolist(), strict=True))
    found: dict[str, int] = {}
    for launch, moved, wasted in trace.work[["launch", "bytes", "wasted_bytes"]].tolist():
        name = trace.kernels[kernels[launch]]
        found[name] = found.get(name, 0) + moved + wasted
    return found


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


# --- exact means over time: of the items present on each SM, or in each row of a picture ------------------------------


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
