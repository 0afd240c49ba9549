"""Requests of an engine's trace: their wait, their segments, their end, deadlines and missed deadlines.

Each request in flight at a time has a lane of its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paellapy.instrument.records import Records
from paellapy.instrument.traces.summary import readable_time
from paellapy.instrument.traces.trace import Trace
from paellapy.scheduler.core.codes import OK, STATUS
from paellapy.scheduler.engine.trace import EngineTrace
from paellapy.viz import data
from paellapy.viz.data import Picture, lanes
from paellapy.viz.palette import OTHERS, WARNING, further_colours, need, rgba
from paellapy.viz.views import Place

MOST = 1500  # most requests drawn: each has a bar for its wait, one for its run, and one for each segment
APART_NS = 100_000  # largest difference between the host's clock (jobs) and the GPU's (segments)
_FAR = 1 << 62
ROOM = 24  # lanes are reserved up to the deadlines unless that takes more lanes than this

QUEUED, LAUNCHED, SEGMENTS, LATE = "queued", "launched", "segments", "late"
STRENGTH = {QUEUED: 0.25, LAUNCHED: 0.55, SEGMENTS: 1.0}  # opacity of a model's colour
# Parts of a lane; lateness is drawn along its lower edge
HEIGHT = {QUEUED: 0.8, LAUNCHED: 0.8, SEGMENTS: 0.8, LATE: 0.4}


@dataclass(frozen=True, slots=True, eq=False)
class Requests:
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
class Bars:
    what: str
    job: NDArray[np.int64]
    start_ns: NDArray[np.int64]
    end_ns: NDArray[np.int64]
    segment: NDArray[np.int64] | None = None


def has_requests(trace: Trace) -> bool:
    return isinstance(trace, EngineTrace) and len(trace.jobs) > 0


def requests(trace: Trace, most: int | None = None) -> Requests | None:
    """The requests of an `EngineTrace`, at most the slowest `most`; None for other traces."""
    if not isinstance(trace, EngineTrace) or not len(trace.jobs):
        return None
    jobs, segments = trace.jobs, trace.segments
    if most is not None and len(jobs) > most:
        slowest = np.argsort(jobs["arrival_ns"] - jobs["end_ns"], kind="stable")[:most]
        jobs = jobs[np.sort(slowest)]
    job_of, segment_of = _segments_of(jobs, segments)
    lane, due = _lanes(jobs)
    return Requests(jobs, segments, trace.models, lane, job_of, segment_of, due, len(trace.jobs) - len(jobs))


def _segments_of(jobs: Records, segments: Records) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Pairs of a job and a segment of its lane that started while it ran, within the error of the two clocks."""
    of_lane = {int(lane): np.flatnonzero(segments["instance"] == lane) for lane in np.unique(segments["instance"])}
    first_ns, last_ns = _windows(jobs)
    found: list[tuple[int, int]] = []
    for i in np.flatnonzero(jobs["start_ns"] >= 0).tolist():
        mine = of_lane.get(int(jobs["instance"][i]))
        if mine is not None:
            first, last = np.searchsorted(segments["start_ns"][mine], (first_ns[i], last_ns[i]))
            found += [(i, int(s)) for s in mine[first:last]]
    job_of, segment_of = np.array(found, np.int64).reshape(-1, 2).T
    return job_of, segment_of


def _windows(jobs: Records) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The period in which a segment that starts in a job's lane belongs to the job: `APART_NS` longer than its run on
    both sides, but at most half of the way to the lane's next job.
    """
    first, last = jobs["start_ns"] - APART_NS, jobs["end_ns"] + 1 + APART_NS
    for lane in np.unique(jobs["instance"]):
        mine = np.flatnonzero((jobs["instance"] == lane) & (jobs["start_ns"] >= 0))
        starts, run = np.unique(jobs["start_ns"][mine], return_inverse=True)  # a batch is one run
        ends = starts.copy()
        np.maximum.at(ends, run, jobs["end_ns"][mine])
        middles = (starts[1:] + ends[:-1] + 1) // 2
        edges = np.concatenate([[-_FAR], middles, [_FAR]])
        first[mine] = np.maximum(first[mine], edges[run])
        last[mine] = np.minimum(last[mine], edges[run + 1])
    return first, last


def _lanes(jobs: Records) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Each job's lane, and the jobs whose deadline can be marked there without covering another job's bar."""
    everybody = np.zeros(len(jobs), np.int64)
    with_deadline = jobs["deadline_ns"] >= 0
    until = np.where(with_deadline, np.maximum(jobs["end_ns"], jobs["deadline_ns"]), jobs["end_ns"])
    roomy = lanes(everybody, jobs["arrival_ns"], until)
    if roomy.max() < ROOM:
        return roomy, np.flatnonzero(with_deadline)
    tight = lanes(everybody, jobs["arrival_ns"], jobs["end_ns"])
    order = np.lexsort((jobs["arrival_ns"], tight))
    following = np.full(len(jobs), np.iinfo(np.int64).max)
    same = tight[order[1:]] == tight[order[:-1]]
    following[order[:-1][same]] = jobs["arrival_ns"][order[1:][same]]
    return tight, np.flatnonzero(with_deadline & (jobs["deadline_ns"] <= following))


def bars(seen: Requests) -> Iterator[Bars]:
    """The bars of requests; later ones are drawn over earlier ones."""
    jobs, launch = seen.jobs, seen.launch_ns
    everybody = np.arange(len(jobs))
    yield Bars(QUEUED, everybody, jobs["arrival_ns"], launch)
    ran = np.flatnonzero(jobs["start_ns"] >= 0)
    yield Bars(LAUNCHED, ran, launch[ran], jobs["end_ns"][ran])
    s = seen.segments[seen.segment_of]
    yield Bars(SEGMENTS, seen.job_of, s["start_ns"], s["end_ns"], seen.segment_of)
    late = np.flatnonzero(seen.late)
    since = np.maximum(jobs["deadline_ns"][late], jobs["arrival_ns"][late])
    yield Bars(LATE, late, since, jobs["end_ns"][late])


def spare(seen: Requests) -> NDArray[np.int64]:
    """Jobs that end before their marked deadline: a line connects the two."""
    found: NDArray[np.int64] = seen.due[seen.jobs["deadline_ns"][seen.due] > seen.jobs["end_ns"][seen.due]]
    return found


def colour_of_models(seen: Requests, colour: Mapping[str, str], by_model: bool) -> dict[str, str]:
    """The blocks' colours if these stand for models; else colours that no block has."""
    if by_model:
        return {name: colour.get(name, OTHERS) for name in seen.models}
    return further_colours(seen.models, colour.values())


def axis_title(seen: Requests, new_line: str) -> str:
    if not seen.left_out:
        return "requests"
    return f"requests{new_line}(slowest {len(seen.jobs):,} of {len(seen.jobs) + seen.left_out:,})"


# -- plotly


def requests_view(picture: Picture, place: Place) -> None:
    """Pale: queued; medium: launched; full: segments. Colours stand for models; a stripe at the bottom means late."""
    seen = requests(picture.whole, MOST)
    if seen is None:
        return
    colour = colour_of_models(seen, place.colour, picture.by_model)
    shown: list[Bars] = list(bars(seen))
    for m, name in enumerate(seen.models):
        if (seen.jobs["model"] == m).any():
            # Plotly omits entries without data from the legend, so a model that never ran is listed by its queue.
            known_by = SEGMENTS if (seen.jobs["model"][seen.job_of] == m).any() else QUEUED
            for each in shown[:-1]:
                _bars(picture, place, seen, each, m, colour[name], each.what == known_by)
    _bars(picture, place, seen, shown[-1], None, WARNING, True)
    _marks(picture, place, seen)
    place.axes(axis_title(seen, "<br>"), range=[int(seen.lane.max()) + 0.5, -0.5], showticklabels=False)


def _bars(
    picture: Picture, place: Place, seen: Requests, which: Bars, model: int | None, colour: str, legend: bool
) -> None:
    """The bars of one model, or of all."""
    go = need("plotly.graph_objects", "request lanes")
    of = np.ones(len(which.job), bool) if model is None else seen.jobs["model"][which.job] == model
    if model is None and not of.any():
        return
    job, start, end = which.job[of], which.start_ns[of], which.end_ns[of]
    lane = seen.lane[job] + (0.4 - HEIGHT[LATE] / 2 if which.what == LATE else 0)
    if which.segment is None:
        facts = [job_facts(seen, j) for j in job.tolist()]
    else:
        pairs = zip(job.tolist(), which.segment[of].tolist(), strict=True)
        facts = [segment_facts(seen, j, s) for j, s in pairs]
    place.add(
        go.Bar(
            orientation="h",
            base=picture.axis.of(start),
            x=(end - start) / picture.axis.ns_per_unit,
            y=lane,
            width=HEIGHT[which.what],
            marker={"color": rgba(colour, STRENGTH.get(which.what, 1.0)), "line": {"width": 0}},
            text=facts,
            textposition="none",
            hovertemplate=f"%{{text}}<br>{which.what} from %{{base:.6~g}} {picture.axis.unit}<extra></extra>",
            meta=which.what,
            **_legend(picture, place, LATE if model is None else seen.models[model], legend),
        )
    )


def _marks(picture: Picture, place: Place, seen: Requests) -> None:
    """Deadlines, and a cross where a request ended without an answer."""
    go = need("plotly.graph_objects", "request lanes")
    early = spare(seen)
    if len(early):
        gap = np.full(len(early), np.nan)
        until = np.stack([picture.axis.of(seen.jobs[at][early]) for at in ("end_ns", "deadline_ns")] + [gap], axis=1)
        line = {"width": 1, "color": OTHERS}
        lane = np.repeat(seen.lane[early], 3)
        place.add(go.Scatter(mode="lines", x=until.ravel(), y=lane, line=line, hoverinfo="skip", showlegend=False,
                             meta="to spare"))  # fmt: skip
    lost = np.flatnonzero(seen.unanswered)
    kinds = (
        ("deadline", seen.due, seen.jobs["deadline_ns"], "line-ns-open", place.look.ink),
        ("not answered", lost, seen.jobs["end_ns"], "x-thin-open", WARNING),
    )
    for name, job, at_ns, symbol, colour in kinds:
        if len(job):
            mark = {"symbol": symbol, "size": 9, "color": colour, "line": {"width": 2, "color": colour}}
            place.add(
                go.Scatter(
                    mode="markers",
                    x=picture.axis.of(at_ns[job]),
                    y=seen.lane[job],
                    marker=mark,
                    text=[job_facts(seen, j) for j in job.tolist()],
                    hovertemplate=f"%{{text}}<br>{name} at %{{x:.6~g}} {picture.axis.unit}<extra></extra>",
                    meta=name,
                    **_legend(picture, place, name, True),
                )
            )


def _legend(picture: Picture, place: Place, name: str, wanted: bool) -> dict[str, Any]:
    """Legend beside the requests, unless the blocks above have the same names and colours."""
    group = name if picture.by_model else f"model {name}"
    shown = wanted and group not in place.legend
    if shown:
        place.legend.add(group)
    legend = "legend" if picture.by_model and len(picture.groups.names) else "legend2"
    return {"name": data.short(name).replace("<", "&lt;"), "legendgroup": group, "showlegend": shown, "legend": legend}


# -- texts


def job_facts(seen: Requests, j: int) -> str:
    job = seen.jobs[j]
    waited, lasted = int(seen.launch_ns[j] - job["arrival_ns"]), int(job["end_ns"] - job["arrival_ns"])
    due = ""
    if job["deadline_ns"] >= 0:
        left = int(job["deadline_ns"] - job["end_ns"])
        due = f"<br>{readable_time(abs(left))} {'after its deadline' if left < 0 else 'before its deadline'}"
    return (
        f"{seen.models[job['model']]}, request {job['request']}: {STATUS[job['status']]}<br>{readable_time(lasted)} in "
        f"all, {readable_time(waited)} queued, batch of {job['batch']}<br>client {job['client']}, priority "
        f"{job['priority']}{due}"
    )


def segment_facts(seen: Requests, j: int, s: int) -> str:
    job, segment = seen.jobs[j], seen.segments[s]
    which = "the whole program" if segment["segment"] < 0 else f"segment {segment['segment']}"
    lasted = readable_time(int(segment["end_ns"] - segment["start_ns"]))
    return f"{seen.models[job['model']]}, request {job['request']}<br>{which}: {segment['blocks']} blocks, {lasted}"
