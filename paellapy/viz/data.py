"""The data of the pictures as arrays: both drawing libraries, the exporter and the tests read only these."""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypedDict, Unpack

import numpy as np
from numpy.typing import NDArray

from paellapy.instrument.errors import TraceError
from paellapy.instrument.records import WHOLE_BLOCK, Records
from paellapy.instrument.traces.summary import allowed_by, block_rows, readable_time, time_means, times_launched
from paellapy.instrument.traces.trace import Occupancy2D, Trace
from paellapy.scheduler.core.codes import OK
from paellapy.scheduler.engine.trace import EngineTrace
from paellapy.viz.palette import OKABE_ITO, OTHERS, further_colours

By = Literal["kernel", "launch", "stream", "model"] | Mapping[str, str]
Moment = int | Sequence[int | None] | None  # a time on the clock of all traces, or one for each

BINS = 600  # about one for every two pixels of a screen
EXACT_BLOCKS = 5000  # up to this number every block is drawn; more rectangles make a browser slow
# Lanes of a binned Gantt chart: two for each SM of an H200; more lanes than pixels would give a moiré pattern
ROWS = 264
CELLS = 1_200_000  # of all groups of a binned Gantt chart: 5 MB in a page
LANES_PER_SM = 1 << 8  # more than the blocks that any SM holds

# A Gantt chart's two axis titles
OF_BLOCKS, OF_SHARES = "SM, one lane per block", "SM, faint: few blocks"

MOST_REQUESTS = 1500  # drawn: each has a bar for its wait, one for its run, and one for each segment
REQUEST_LANES = 24  # lanes are reserved up to the deadlines unless that takes more lanes than this
APART_NS = 100_000  # largest difference between the host's clock (jobs) and the GPU's (segments)
_FAR = 1 << 62
QUEUED, LAUNCHED, SEGMENTS, LATE = "queued", "launched", "segments", "late"
STRENGTH = {QUEUED: 0.25, LAUNCHED: 0.55, SEGMENTS: 1.0}  # opacity of a model's colour
# Parts of a lane; lateness is drawn along its lower edge
HEIGHT = {QUEUED: 0.8, LAUNCHED: 0.8, SEGMENTS: 0.8, LATE: 0.4}

_FEW_RANGE_SMS = 2


@dataclass(frozen=True, slots=True)
class TimeAxis:
    """Times for the reader: counted from the first start, in the unit that suits the length."""

    origin_ns: int
    length_ns: int
    unit: str
    ns_per_unit: int

    def of(self, ns: NDArray[np.int64]) -> NDArray[np.float64]:
        # Subtract first: ns since 1970 do not fit the 53 bits of a float.
        return (ns - self.origin_ns) / self.ns_per_unit

    @property
    def length(self) -> float:
        return max(self.length_ns, 1) / self.ns_per_unit


def time_axis(origin_ns: int, length_ns: int) -> TimeAxis:
    for unit, size in (("s", 10**9), ("ms", 10**6), ("µs", 10**3)):
        if length_ns >= 2 * size:
            return TimeAxis(origin_ns, length_ns, unit, size)
    return TimeAxis(origin_ns, length_ns, "ns", 1)


@dataclass(frozen=True, slots=True, eq=False)
class Groups:
    """The groups with a colour of their own: kernels, models in the trace of an engine, or groups that the caller
    chose.
    """

    names: tuple[str, ...]
    of_block: NDArray[np.int64]
    theoretical: tuple[float | None, ...]  # occupancy that one block's resources allow; the best of its launches


@dataclass(frozen=True, slots=True, eq=False)
class Picture:
    """A trace, the part of it that is drawn, and the meaning of the colours."""

    trace: Trace  # the part that is drawn
    whole: Trace
    axis: TimeAxis
    window: tuple[int, int]  # first and last ns drawn
    groups: Groups
    bins: int
    by: By
    # The least value at which the heat map's colours may end: a picture beside this one needs it.
    least_heat: float = 0.0

    @property
    def by_model(self) -> bool:
        """Whether the groups are models, so that requests have the same colours."""
        return self.by == "model"

    @property
    def names(self) -> list[str]:
        """Names with a colour, in a fixed order: a model's colour depends only on its place among the engine's models,
        as on the dashboard.
        """
        models = list(self.whole.models) if self.by_model and isinstance(self.whole, EngineTrace) else []
        return [*models, *(g for g in self.groups.names if g not in models)]

    @property
    def title(self) -> str:
        t = self.trace
        times, distinct = times_launched(t.blocks), len(np.unique(t.blocks["launch"]))
        # Replays of a launch share its id, and so its colour.
        whose = "its" if distinct == 1 else "their"
        replayed = f" ({distinct:,} and {whose} replays)" if self.by == "launch" and times > distinct else ""
        first, last = np.clip(t.span_ns, *self.window).tolist()  # blocks may extend beyond the part drawn
        return (
            f"{t.device.name}{self._how}: {_plural(len(t.blocks), 'block')} of {_plural(times, 'launch')}{replayed} "
            f"in {readable_time(last - first)}"
        )

    @property
    def _how(self) -> str:
        """The policy, and whether the time is simulated."""
        if not isinstance(self.whole, EngineTrace):
            return ""
        how = [self.whole.policy] * bool(self.whole.policy) + ["simulated time"] * self.whole.simulated
        return "".join(f", {each}" for each in how)

    @property
    def warning(self) -> str:
        """What is missing from the picture; empty when nothing is."""
        lost = [(self.trace.dropped, "dropped: the rings were full"), (self.trace.unfinished, "without an end")]
        return "; ".join(f"{_plural(n, 'block record')} {why}" for n, why in lost if n)


class Chosen(TypedDict, total=False):
    """Options that choose what a picture shows: see `plot_heatmap`."""

    by: By | None
    kernel: str | int | None
    bins: int


class Part(Chosen, total=False):
    """The same with the part of one trace's time."""

    start_ns: int | None
    end_ns: int | None


class Parts(Chosen, total=False):
    """The same for several traces, whose clocks differ: times may be given for each trace."""

    start_ns: Moment
    end_ns: Moment


def prepare(
    trace: Trace,
    by: By | None = None,
    kernel: str | int | None = None,
    start_ns: int | None = None,
    end_ns: int | None = None,
    bins: int = BINS,
    axis: TimeAxis | None = None,
) -> Picture:
    """The chosen part of a trace. `start_ns` and `end_ns` are times on the trace's own clock.

    The time axis begins with the part, unless another `axis` is given. Colours stand for models in the trace of an
    engine and for kernels in others, unless `by` says otherwise.
    """
    by = by or ("model" if isinstance(trace, EngineTrace) and trace.models else "kernel")
    if bins < 1:
        raise TraceError(f"bins is {bins}: give 1 or more", field="bins", given=bins)
    whole = trace
    if kernel is not None or start_ns is not None or end_ns is not None:
        trace = trace.select(kernel, start_ns=start_ns, end_ns=end_ns)
    first, last = trace.span_ns
    if isinstance(whole, EngineTrace) and len(whole.jobs):
        # Requests arrive before their first block starts, and end after their last block.
        came, went = int(whole.jobs["arrival_ns"].min()), int(whole.jobs["end_ns"].max())
        first, last = (min(first, came), max(last, went)) if len(trace.blocks) else (came, went)
    first = first if start_ns is None else start_ns
    last = max(first, last) if end_ns is None else end_ns
    if last < first:
        said = f"start_ns is {first} and end_ns is {last}: end_ns must not be before start_ns"
        raise TraceError(said, field="end_ns", given=last, limit=first)
    # A bin is at least one nanosecond wide.
    bins = max(1, min(bins, last - first))
    axis = axis or time_axis(first, last - first)
    return Picture(trace, whole, axis, (first, last), group(trace, by), bins, by)


def prepare_all(
    traces: Sequence[Trace],
    start_ns: Moment = None,
    end_ns: Moment = None,
    axis: TimeAxis | None = None,
    **chosen: Unpack[Chosen],
) -> list[Picture]:
    """The same part of each trace, on one scale. Clocks differ, so times may be given for each trace."""
    starts, ends = (_for_each(ns, len(traces)) for ns in (start_ns, end_ns))
    parts = zip(traces, starts, ends, strict=True)
    pictures = [prepare(t, start_ns=start, end_ns=end, axis=axis, **chosen) for t, start, end in parts]
    return on_one_scale(pictures) if len(pictures) > 1 else pictures


def _for_each(ns: Moment, n: int) -> Sequence[int | None]:
    if not isinstance(ns, Sequence):
        return [ns] * n
    if len(ns) != n:
        said = f"give start_ns and end_ns as one time, or one per trace: {len(ns)} for {_plural(n, 'trace')}"
        raise TraceError(said, field="start_ns", given=len(ns), limit=n)
    return ns


def check_labels(labels: object) -> None:
    """Checks the labels of two traces before anything is drawn."""
    if isinstance(labels, str) or not isinstance(labels, Sequence) or len(labels) != 2:
        said = f'labels is {labels!r}: give two texts, as in labels=("before", "after")'
        raise TraceError(said, field="labels", given=labels)


def group(trace: Trace, by: By = "kernel") -> Groups:
    """Names for the launches of a trace, in order of launch; the smallest of many groups share one name."""
    labels = _labels(trace, by)
    names = list(dict.fromkeys(labels))
    number = {name: i for i, name in enumerate(names)}
    of_launch = np.array([number[label] for label in labels], np.int64)
    of_block = of_launch[np.searchsorted(trace.launches["launch"], trace.blocks["launch"])]
    duration = trace.blocks["end_ns"] - trace.blocks["start_ns"]
    warp_ns = np.bincount(of_block, duration * trace.warps, len(names))
    ran = np.flatnonzero(np.bincount(of_block, minlength=len(names)))
    largest = ran[np.argsort(-warp_ns[ran], kind="stable")]
    kept = ran if len(ran) <= len(OKABE_ITO) + 1 else np.sort(largest[: len(OKABE_ITO)])
    place = np.full(len(names), len(kept), np.int64)
    place[kept] = np.arange(len(kept))
    shown = [names[i] for i in kept]
    if len(ran) > len(kept):
        shown.append(f"{len(ran) - len(kept)} others")
    best: list[float | None] = [None] * len(shown)
    for launch, g in zip(trace.launches, of_launch, strict=True):
        if by == "model":
            break  # its kernels differ, so the model has no single occupancy
        at = int(place[g])
        if at < len(kept) and (allowed := allowed_by(trace, launch)) is not None:
            best[at] = max(allowed.fraction, best[at] or 0.0)
    return Groups(tuple(shown), place[of_block], tuple(best))


def _labels(trace: Trace, by: By) -> list[str]:
    launches = trace.launches
    kernels = [trace.kernels[k] for k in launches["kernel"]]
    if isinstance(by, Mapping):
        return [by.get(name, name) for name in kernels]
    if by == "kernel":
        return kernels
    if by == "launch":
        return [f"{name} #{launch}" for name, launch in zip(kernels, launches["launch"], strict=True)]
    if by == "model":
        if not isinstance(trace, EngineTrace) or not trace.models:
            said = "by='model' needs the trace of an engine, recorded by `with engine.trace() as t:`"
            raise TraceError(said, field="by", given=by)
        return [trace.models[m] if m >= 0 else "no model's" for m in trace.model_of_launch()]
    if by == "stream":
        _, number = np.unique(launches["stream"], return_inverse=True)
        return [f"stream {n}" for n in number]
    said = f"by is {by!r}: give 'kernel', 'launch', 'stream', 'model' or a mapping of kernel names"
    raise TraceError(said, field="by", given=by)


# -- heat maps and residency


def heat(picture: Picture) -> Occupancy2D:
    """SM x time: resident warps / maximum."""
    return picture.trace.occupancy(picture.bins, *picture.window)


def heat_ends(seen: Occupancy2D, least: float = 0.0) -> float:
    """Where the colours of a heat map end: the next tenth above its values.

    >>> heat_ends(Occupancy2D(np.array([[0.0, 0.31]]), np.arange(3)))
    0.4
    """
    return max(least, min(1.0, math.ceil(round(10 * float(seen.resident.max(initial=0.01)), 6)) / 10))


def residency(picture: Picture) -> Occupancy2D:
    """Group x time: warps of the group resident on the whole GPU / all it can hold."""
    t = picture.trace
    b, n = t.blocks, len(picture.groups.names)
    of_block = picture.groups.of_block
    means, edges = time_means(of_block, b["start_ns"], b["end_ns"], t.warps, n, *picture.window, picture.bins)
    return Occupancy2D(means / (t.device.n_sm * t.device.max_warps_per_sm), edges)


def residency_title(picture: Picture, new_line: str) -> str:
    limits = any(each is not None for each in picture.groups.theoretical)
    return f"warps of the GPU{new_line}(dashed: theoretical)" if limits else "warps of the GPU"


def ran(picture: Picture, g: int) -> NDArray[np.float64]:
    """The time spans in which a group had blocks, on the axis."""
    mine = picture.trace.blocks[picture.groups.of_block == g]
    return picture.axis.of(np.clip([mine["start_ns"].min(), mine["end_ns"].max()], *picture.window))


def on_one_scale(pictures: Sequence[Picture]) -> list[Picture]:
    """Each picture from its own start on, all as long as the longest."""
    longest = max(pictures, key=lambda p: p.axis.length_ns)
    length, bins = longest.axis.length_ns, longest.bins
    alike = [
        replace(p, axis=time_axis(start, length), window=(start, start + length), bins=bins)
        for p, start in ((p, p.axis.origin_ns) for p in pictures)
    ]
    least_heat = max(heat_ends(heat(p)) for p in alike)
    return [replace(p, least_heat=least_heat) for p in alike]


def short(name: str, most: int = 34) -> str:
    """Shortens a name: template names can be very long.

    >>> short("gemm")
    'gemm'
    """
    return name if len(name) <= most else f"{name[: most // 2]}…{name[-(most // 2 - 1) :]}"


def _plural(n: int, noun: str) -> str:
    return f"{n:,} {noun}" if n == 1 else f"{n:,} {noun}{'es' if noun.endswith('ch') else 's'}"


# -- Gantt charts: each block in a lane on its SM, or shares of groups where there are too many blocks


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


# -- requests of an engine's trace: their wait, their segments, their end, deadlines and missed deadlines


@dataclass(frozen=True, slots=True, eq=False)
class Requests:
    """Requests of an engine's trace. Each request in flight at a time has a lane of its own."""

    jobs: Records  # of paellapy.scheduler.engine.trace.JOB_RECORD, in order of arrival
    segments: Records  # of SEGMENT_RECORD
    models: tuple[str, ...]
    lane: NDArray[np.int64]  # of each job
    job_of: NDArray[np.int64]  # pairs: this job …
    segment_of: NDArray[np.int64]  # … ran in this segment, with the others of its batch
    due: NDArray[np.int64]  # jobs whose deadline is marked: no other job is in their lane by then
    left_out: int  # number of the quickest requests, omitted if there are too many

    @property
    def launch_ns(self) -> NDArray[np.int64]:
        """When each request stopped waiting. A launch has the time at which the core's step began, so a request may
        have arrived after it; a request that was never launched waited to its end.
        """
        ran = self.jobs["start_ns"] >= 0
        until = np.where(ran, self.jobs["start_ns"], self.jobs["end_ns"])
        launched: NDArray[np.int64] = np.maximum(until, self.jobs["arrival_ns"])
        return launched

    @property
    def asked(self) -> set[str]:
        """Models of the requests."""
        return {self.models[m] for m in np.unique(self.jobs["model"])}

    @property
    def late(self) -> NDArray[np.bool_]:
        found: NDArray[np.bool_] = (self.jobs["deadline_ns"] >= 0) & (self.jobs["end_ns"] > self.jobs["deadline_ns"])
        return found

    @property
    def unanswered(self) -> NDArray[np.bool_]:
        """Requests that expired, were cancelled, refused, …"""
        found: NDArray[np.bool_] = self.jobs["status"] != OK
        return found


@dataclass(frozen=True, slots=True, eq=False)
class RequestBars:
    """The bars of one kind: `what` is QUEUED, LAUNCHED, SEGMENTS or LATE."""

    what: str
    job: NDArray[np.int64]
    start_ns: NDArray[np.int64]
    end_ns: NDArray[np.int64]
    segment: NDArray[np.int64] | None = None

    def of(self, chosen: NDArray[np.bool_]) -> RequestBars:
        segment = None if self.segment is None else self.segment[chosen]
        return RequestBars(self.what, self.job[chosen], self.start_ns[chosen], self.end_ns[chosen], segment)

    def middle(self, seen: Requests) -> NDArray[np.float64]:
        """Vertical centres. Lateness lies at the lower edge of a lane."""
        lane = seen.lane[self.job].astype(np.float64)
        return lane + (0.4 - HEIGHT[LATE] / 2) if self.what == LATE else lane


def has_requests(trace: Trace) -> bool:
    return isinstance(trace, EngineTrace) and len(trace.jobs) > 0


def check_requests(*traces: Trace) -> None:
    if not all(map(has_requests, traces)):
        raise TraceError("this trace has no requests: record them with `with engine.trace() as t:`", field="requests")


def requests_of(trace: Trace, most: int | None = None) -> Requests | None:
    """The requests of an `EngineTrace`, at most the slowest `most`; None for other traces."""
    if not isinstance(trace, EngineTrace) or not len(trace.jobs):
        return None
    jobs, segments = trace.jobs, trace.segments
    if most is not None and len(jobs) > most:
        slowest = np.argsort(jobs["arrival_ns"] - jobs["end_ns"], kind="stable")[:most]
        jobs = jobs[np.sort(slowest)]
    job_of, segment_of = _segments_of(jobs, segments)
    lane, due = _request_lanes(jobs)
    return Requests(jobs, segments, trace.models, lane, job_of, segment_of, due, len(trace.jobs) - len(jobs))


def _segments_of(jobs: Records, segments: Records) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Pairs of a job and a segment of its instance that started while it ran, within the error of the two clocks."""
    column = segments["instance"]
    of_instance = {int(k): np.flatnonzero(column == k) for k in np.unique(column)}
    first_ns, last_ns = _windows(jobs)
    found: list[tuple[int, int]] = []
    for i in np.flatnonzero(jobs["start_ns"] >= 0).tolist():
        mine = of_instance.get(int(jobs["instance"][i]))
        if mine is not None:
            first, last = np.searchsorted(segments["start_ns"][mine], (first_ns[i], last_ns[i]))
            found += [(i, int(s)) for s in mine[first:last]]
    job_of, segment_of = np.array(found, np.int64).reshape(-1, 2).T
    return job_of, segment_of


def _windows(jobs: Records) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The period in which a segment that starts in a job's instance belongs to the job: `APART_NS` longer than its run
    on both sides, but at most half of the way to the instance's next job.
    """
    first, last = jobs["start_ns"] - APART_NS, jobs["end_ns"] + 1 + APART_NS
    for instance in np.unique(jobs["instance"]):
        mine = np.flatnonzero((jobs["instance"] == instance) & (jobs["start_ns"] >= 0))
        starts, run = np.unique(jobs["start_ns"][mine], return_inverse=True)  # a batch is one run
        ends = starts.copy()
        np.maximum.at(ends, run, jobs["end_ns"][mine])
        middles = (starts[1:] + ends[:-1] + 1) // 2
        edges = np.concatenate([[-_FAR], middles, [_FAR]])
        first[mine] = np.maximum(first[mine], edges[run])
        last[mine] = np.minimum(last[mine], edges[run + 1])
    return first, last


def _request_lanes(jobs: Records) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Each job's lane, and the jobs whose deadline can be marked there without covering another job's bar."""
    everybody = np.zeros(len(jobs), np.int64)
    with_deadline = jobs["deadline_ns"] >= 0
    until = np.where(with_deadline, np.maximum(jobs["end_ns"], jobs["deadline_ns"]), jobs["end_ns"])
    roomy = lanes(everybody, jobs["arrival_ns"], until)
    if roomy.max() < REQUEST_LANES:
        return roomy, np.flatnonzero(with_deadline)
    tight = lanes(everybody, jobs["arrival_ns"], jobs["end_ns"])
    order = np.lexsort((jobs["arrival_ns"], tight))
    following = np.full(len(jobs), np.iinfo(np.int64).max)
    same = tight[order[1:]] == tight[order[:-1]]
    following[order[:-1][same]] = jobs["arrival_ns"][order[1:][same]]
    return tight, np.flatnonzero(with_deadline & (jobs["deadline_ns"] <= following))


def request_bars(seen: Requests) -> Iterator[RequestBars]:
    """The bars of requests; later ones are drawn over earlier ones."""
    jobs, launch = seen.jobs, seen.launch_ns
    everybody = np.arange(len(jobs))
    yield RequestBars(QUEUED, everybody, jobs["arrival_ns"], launch)
    ran = np.flatnonzero(jobs["start_ns"] >= 0)
    yield RequestBars(LAUNCHED, ran, launch[ran], jobs["end_ns"][ran])
    s = seen.segments[seen.segment_of]
    yield RequestBars(SEGMENTS, seen.job_of, s["start_ns"], s["end_ns"], seen.segment_of)
    late = np.flatnonzero(seen.late)
    since = np.maximum(jobs["deadline_ns"][late], jobs["arrival_ns"][late])
    yield RequestBars(LATE, late, since, jobs["end_ns"][late])


def ends_early(seen: Requests) -> NDArray[np.int64]:
    """Jobs that end before their marked deadline: a line connects the two."""
    found: NDArray[np.int64] = seen.due[seen.jobs["deadline_ns"][seen.due] > seen.jobs["end_ns"][seen.due]]
    return found


def colour_of_models(seen: Requests, colour: Mapping[str, str], by_model: bool) -> dict[str, str]:
    """The blocks' colours if these stand for models; else colours that no block has."""
    if by_model:
        return {name: colour.get(name, OTHERS) for name in seen.models}
    return further_colours(seen.models, colour.values())


def requests_title(seen: Requests, new_line: str) -> str:
    if not seen.left_out:
        return "requests"
    return f"requests{new_line}(slowest {len(seen.jobs):,} of {len(seen.jobs) + seen.left_out:,})"


# -- ranges of kernels


def block_lanes(trace: Trace) -> NDArray[np.int64]:
    """For each of `trace.blocks`, its lane on its SM."""
    return lanes(trace.blocks["sm"], trace.blocks["start_ns"], trace.blocks["end_ns"])


def placed_ranges(trace: Trace) -> tuple[Records, NDArray[np.int64]]:
    """Ranges in order of start, outer ones before those inside them; and for each its place: SM and lane in one number,
    as other tools' files need it.
    """
    records = trace.ranges.records
    records = records[np.lexsort((records["depth"], records["start_ns"]))]
    if not len(records):
        return records, np.zeros(0, np.int64)
    lane = block_lanes(trace)[block_rows(records, trace.blocks)]
    return records, records["sm"] * np.int64(LANES_PER_SM) + lane


def shown_ranges(trace: Trace, sms: Sequence[int] | None) -> tuple[Records, NDArray[np.int64], list[str]]:
    """The ranges on these SMs, or on the first two that have any; the row of each in a picture; the rows' names.

    A row is a block's lane or, below it, a single warp of the lane.
    """
    records, place = placed_ranges(trace)
    if not len(records):
        said = 'this trace has no ranges: mark some in the kernel with `with pp.range("load"):`'
        raise TraceError(said, field="ranges")
    if sms is None:
        sms = np.unique(records["sm"])[:_FEW_RANGE_SMS].tolist()
    chosen = np.isin(records["sm"], sms)
    if not chosen.any():
        said = f"this trace has no ranges on SMs {list(sms)}: choose others, or leave out sms"
        raise TraceError(said, field="sms", given=list(sms))
    records, place = records[chosen], place[chosen]
    warp = np.where(records["warp"] == WHOLE_BLOCK, -1, records["warp"].astype(np.int64))
    rows, row = np.unique(np.stack((place, warp), axis=1), axis=0, return_inverse=True)
    return records, row.reshape(-1), [_row_name(*each) for each in rows.tolist()]


def _row_name(place: int, warp: int) -> str:
    sm, lane = divmod(place, LANES_PER_SM)
    return f"SM {sm}, lane {lane}" + ("" if warp < 0 else f", warp {warp}")


def depth_of(trace: Trace, number: int) -> int:
    depth = trace.ranges.records["depth"][trace.ranges.records["range"] == number]
    return int(depth.min(initial=3)) if len(depth) else 0
