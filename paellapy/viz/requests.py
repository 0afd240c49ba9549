"""Requests of an engine's trace: queued, each segment that ran, done; one lane for each that is in flight at a time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from instrument.records import Records
from instrument.summary import readable_time
from instrument.trace import Trace
from paellapy.viz import data
from paellapy.viz.data import Picture, lanes
from paellapy.viz.needs import need
from paellapy.viz.palette import OKABE_ITO, rgba
from paellapy.viz.views import Place

MOST = 1500  # requests drawn: each is a bar for its wait, one for its run, and one for each segment


@dataclass(frozen=True, slots=True, eq=False)
class Requests:
    jobs: Records  # of scheduler.engine_trace.JOB_RECORD, in order of arrival
    segments: Records  # of SEGMENT_RECORD
    models: tuple[str, ...]
    lane: NDArray[np.int64]  # of each job
    job_of: NDArray[np.int64]  # pairs: this job …
    segment_of: NDArray[np.int64]  # … ran in this segment, with the others of its batch
    left_out: int  # the quickest, where there are too many


def requests(trace: Trace, most: int | None = None) -> Requests | None:
    """What an `EngineTrace` knows about requests, the slowest `most` of them; None of other traces."""
    jobs: Records | None = getattr(trace, "jobs", None)
    if jobs is None or not len(jobs):
        return None
    whole = len(jobs)
    if most is not None and whole > most:
        slowest = np.argsort(jobs["arrival_ns"] - jobs["end_ns"], kind="stable")[:most]
        jobs = jobs[np.sort(slowest)]
    jobs = jobs[np.argsort(jobs["arrival_ns"], kind="stable")]
    segments: Records = getattr(trace, "segments", jobs[:0])
    pairs: list[tuple[int, int]] = []
    for i, job in enumerate(jobs):
        if job["start_ns"] >= 0:
            inside = (segments["start_ns"] >= job["start_ns"]) & (segments["start_ns"] <= job["end_ns"])
            pairs += [(i, int(s)) for s in np.flatnonzero(inside & (segments["lane"] == job["lane"]))]
    job_of, segment_of = np.array(pairs, np.int64).reshape(-1, 2).T
    lane = lanes(np.zeros(len(jobs), np.int64), jobs["arrival_ns"], jobs["end_ns"])
    return Requests(jobs, segments, getattr(trace, "models", ()), lane, job_of, segment_of, whole - len(jobs))


def requests_view(picture: Picture, place: Place) -> None:
    """Pale: queued. Medium: launched. Full: its segments. Colours stand for models, in a legend of their own."""
    seen = requests(picture.whole, MOST)
    if seen is None:
        return
    jobs = seen.jobs
    names = list(seen.models)
    # From the middle of the palette on: in this figure its first colours are kernels.
    colour = {name: OKABE_ITO[(i + 3) % len(OKABE_ITO)] for i, name in enumerate(names)}
    ran = jobs["start_ns"] >= 0
    # The core stamps a launch with the time its step began: a request may have arrived since.
    until = np.maximum(np.where(ran, jobs["start_ns"], jobs["end_ns"]), jobs["arrival_ns"])
    for m, name in enumerate(names):
        of = jobs["model"] == m
        if not of.any():
            continue
        facts = [_facts(job, name) for job in jobs[of]]
        _bars(picture, place, seen.lane[of], jobs["arrival_ns"][of], until[of], rgba(colour[name], 0.25), name, facts,
              "queued")  # fmt: skip
        both = of & ran
        facts = [_facts(job, name) for job in jobs[both]]
        _bars(picture, place, seen.lane[both], until[both], jobs["end_ns"][both], rgba(colour[name], 0.6),
              name, facts, "launched")  # fmt: skip
        mine = of[seen.job_of]
        s = seen.segments[seen.segment_of[mine]]
        facts = [_segment_facts(job, each, name) for job, each in zip(jobs[seen.job_of[mine]], s, strict=True)]
        _bars(picture, place, seen.lane[seen.job_of[mine]], s["start_ns"], s["end_ns"], colour[name], name, facts,
              "segments", legend=True)  # fmt: skip
    title = "requests" if not seen.left_out else f"requests<br>(slowest {len(jobs):,} of {len(jobs) + seen.left_out:,})"
    place.axes(title, range=[int(seen.lane.max()) + 0.5, -0.5], showticklabels=False)


def _bars(
    picture: Picture,
    place: Place,
    lane: NDArray[np.int64],
    start_ns: NDArray[np.int64],
    end_ns: NDArray[np.int64],
    colour: str,
    model: str,
    facts: list[str],
    what: str,
    legend: bool = False,
) -> None:
    go = need("plotly.graph_objects", "request lanes")
    shown = legend and f"model {model}" not in place.legend
    if shown:
        place.legend.add(f"model {model}")
    place.add(
        go.Bar(
            orientation="h",
            base=picture.axis.of(start_ns),
            x=(end_ns - start_ns) / picture.axis.ns_per_unit,
            y=lane,
            width=0.8,
            marker={"color": colour, "line": {"width": 0}},
            text=facts,
            textposition="none",
            hovertemplate=f"%{{text}}<br>{what} from %{{base:.6~g}} {picture.axis.unit}<extra></extra>",
            name=data.short(model).replace("<", "&lt;"),
            legend="legend2",
            legendgroup=f"model {model}",
            showlegend=shown,
            meta=what,
        )
    )


def _facts(job: Any, model: str) -> str:
    from scheduler.state import STATUS  # the engine's names: only engine traces come here

    waited = max(int((job["start_ns"] if job["start_ns"] >= 0 else job["end_ns"]) - job["arrival_ns"]), 0)
    lasted = int(job["end_ns"] - job["arrival_ns"])
    return (
        f"{model}, request {job['request']}: {STATUS[job['status']]}<br>{readable_time(lasted)} in all, "
        f"{readable_time(waited)} queued, batch of {job['batch']}<br>client {job['client']}, priority {job['priority']}"
    )


def _segment_facts(job: Any, segment: Any, model: str) -> str:
    which = "the whole program" if segment["segment"] < 0 else f"segment {segment['segment']}"
    lasted = readable_time(int(segment["end_ns"] - segment["start_ns"]))
    return f"{model}, request {job['request']}<br>{which}: {segment['blocks']} blocks, {lasted}"
