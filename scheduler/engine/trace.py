"""`EngineTrace`: the requests, segments and blocks that ran during a trace of an engine, on one clock."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from paellapy.instrument.env import versions
from paellapy.instrument.errors import TraceError
from paellapy.instrument.records import BLOCK, LAUNCH, Records
from paellapy.instrument.traces import trace
from paellapy.instrument.traces.summary import counted
from paellapy.instrument.traces.trace import DeviceFacts, Trace
from paellapy.scheduler.backends.base import TracedBlocks, TracedPiece
from paellapy.scheduler.core import codes
from paellapy.scheduler.core import state as st
from paellapy.scheduler.engine.core_loop import CoreLoop
from paellapy.scheduler.engine.stats import CompletionLog

# One request that ended during the trace. Times are ns on the clock of the trace's blocks.
JOB_RECORD = np.dtype(
    [
        ("request", "<u8"),
        ("model", "<u2"),  # index into `models`
        ("instance", "<i2"),  # -1: it never had one
        ("slot", "<i2"),
        ("batch", "<u2"),  # requests that ran together
        ("status", "<u2"),  # paellapy.scheduler.core.codes.STATUS
        ("client", "<i4"),
        ("priority", "<i4"),
        ("arrival_ns", "<i8"),
        ("start_ns", "<i8"),  # start of its first launch; -1: it was not launched
        ("end_ns", "<i8"),
        ("deadline_ns", "<i8"),  # the request's own, or its arrival + its model's target; -1: neither
    ]
)

# One segment that ran: from the first start to the last end of its blocks.
SEGMENT_RECORD = np.dtype(
    [
        ("model", "<u2"),
        ("instance", "<i2"),
        ("batch", "<u2"),  # captured size it ran at
        ("segment", "<i2"),  # -1: the whole program as one launch
        ("blocks", "<u4"),
        ("start_ns", "<i8"),
        ("end_ns", "<i8"),
    ]
)

# The model of a launch: one row for each of `launches` that a model made.
OWNER = np.dtype([("launch", "<u4"), ("model", "<u2"), ("instance", "<i2")])


class EngineTrace(Trace, kind="engine"):
    """A `Trace` with `jobs` (requests) and `segments` beside its blocks; `models` names the model numbers in both."""

    jobs: Records = np.zeros(0, JOB_RECORD)
    segments: Records = np.zeros(0, SEGMENT_RECORD)
    owners: Records = np.zeros(0, OWNER)
    models: tuple[str, ...] = ()
    policy: str = ""  # the policy when the trace ended
    simulated: bool = False  # made by `simulate`: times are computed from models of the GPU and of the host

    def know(
        self, jobs: Records, segments: Records, owners: Records, models: Sequence[str], policy: str, simulated: bool
    ) -> None:
        """Adds the tables that only an engine has; `TraceError` if they contradict each other."""
        self.jobs = _frozen(jobs[np.argsort(jobs["arrival_ns"], kind="stable")])
        self.segments = _frozen(segments[np.argsort(segments["start_ns"], kind="stable")])
        self.owners = _frozen(owners[np.argsort(owners["launch"], kind="stable")])
        self.models, self.policy, self.simulated = tuple(models), policy, simulated
        if any((table["model"] >= len(self.models)).any() for table in (jobs, segments, owners)):
            raise TraceError(
                f"the tables have a model number beyond the {len(self.models)} names given: pass a name for every model"
            )
        if not np.isin(owners["launch"], self.launches["launch"]).all():
            raise TraceError("a model owns a launch that is not listed: pass every launch of the trace")

    def model_of_launch(self) -> NDArray[np.int64]:
        """For each of `launches`, the number of its model; -1: no model's."""
        found = np.full(len(self.launches), -1)
        found[np.searchsorted(self.launches["launch"], self.owners["launch"])] = self.owners["model"]
        return found

    def lateness_ns(self) -> NDArray[np.int64]:
        """For each of `jobs`, how long after its deadline it ended; 0 or less: in time, or without a deadline."""
        due = np.where(self.jobs["deadline_ns"] < 0, self.jobs["end_ns"], self.jobs["deadline_ns"])
        late: NDArray[np.int64] = self.jobs["end_ns"] - due
        return late

    def select(
        self,
        kernel: str | int | None = None,
        launch: int | None = None,
        start_ns: int | None = None,
        end_ns: int | None = None,
    ) -> EngineTrace:
        """As `Trace.select`; also keeps only the requests and segments that overlap the two times."""
        part = super().select(kernel, launch, start_ns, end_ns)
        found = EngineTrace(part.blocks, part.launches, part.kernels, part.device, part.dropped, part.unfinished)
        found.unseen, found.ranges, found.count_work = part.unseen, part.ranges, part.count_work
        low, high = -_FAR if start_ns is None else start_ns, _FAR if end_ns is None else end_ns
        jobs, segments = self.jobs, self.segments
        found.know(
            jobs[(jobs["end_ns"] >= low) & (jobs["arrival_ns"] < high)],
            segments[(segments["end_ns"] >= low) & (segments["start_ns"] < high)],
            self.owners[np.isin(self.owners["launch"], part.launches["launch"])],
            self.models, self.policy, self.simulated,
        )  # fmt: skip
        return found

    def __repr__(self) -> str:
        under = f" under {self.policy}" if self.policy else ""
        requests = counted(len(self.jobs), "request")
        return f"{super().__repr__()[:-1]}, {requests}{under}{', simulated time' * self.simulated}>"

    def own_tables(self) -> tuple[trace.Tables, dict[str, Any]]:
        tables = {"jobs": self.jobs, "segments": self.segments, "owners": self.owners}
        about = {"models": self.models, "policy": self.policy, "simulated": self.simulated}
        return tables, {"kind": "engine", **about}

    def take_tables(self, more: trace.Tables, facts: Mapping[str, Any]) -> None:
        jobs, segments, owners = (more[name] for name in ("jobs", "segments", "owners"))
        if (jobs.dtype, segments.dtype, owners.dtype) != (JOB_RECORD, SEGMENT_RECORD, OWNER):
            raise TraceError(
                "the file's requests have a layout that this version of paellapy cannot read: record the trace again"
            )
        models = [str(name) for name in facts["models"]]
        self.know(jobs, segments, owners, models, str(facts["policy"]), bool(facts["simulated"]))


_FAR = 1 << 62
_MOST_TEXTS = 32_000  # that have numbers of their own


def _frozen(rows: Records) -> Records:
    rows.flags.writeable = False
    return rows


# `engine.trace()`: records requests while they run, and fills a trace from them and from a backend's blocks.


class TracedText(NamedTuple):
    """A text that a language model wrote, or a pipeline's request: shown as a request whose segments end with its
    tokens, or with the pipeline's stages.
    """

    model: str
    arrival_ns: int
    token_ns: Sequence[int]
    priority: int


class HostRun(NamedTuple):
    """One batch as the host saw it: the start of each segment (its launch, or its predecessor's end), and its end."""

    instance: int
    size: int
    whole: bool
    times: NDArray[np.int64]  # [segments, 2], ns on the host's monotonic clock


def segment_times(state: st.State, instance: int) -> tuple[NDArray[np.int64], bool]:
    """Start and end of each segment of the instance's latest run, and whether the program was launched as one piece.

    A segment launched behind another starts when that one ends. Call this before the instance may be reused.
    """
    row = state.instance[instance]
    times = state.segment_ns[instance, : int(row["segments"])].copy()
    times[1:, 0] = np.maximum(times[1:, 0], times[:-1, 1])
    return times, bool(row["whole"])


class trace_engine:
    """The context manager of `engine.trace()`: `with engine.trace() as t:` fills `t` when the block is left."""

    def __init__(
        self, core: CoreLoop, loading: threading.RLock, log: CompletionLog, records_per_sm: int,
        texts: Callable[[int], Sequence[TracedText]],
    ) -> None:  # fmt: skip
        """`loading`: the lock that loads and unloads hold. `texts` returns those that had tokens since a time."""
        self._core, self._loading, self._log, self._records_per_sm = core, loading, log, records_per_sm
        self._texts, self._began_ns = texts, 0
        self._entries: list[Any] = []
        self._runs: dict[tuple[int, int], HostRun] = {}

    def __enter__(self) -> EngineTrace:
        backend = self._core.backend
        device = backend.device
        facts = DeviceFacts(device.title, device.sm_ids, device.limits.warps, device.capability, versions())
        self.result = EngineTrace(np.zeros(0, BLOCK), np.zeros(0, LAUNCH), (), facts)
        with self._loading:
            backend.begin_trace(self._records_per_sm, list(self._core.models.by_row.values()))
            self._unwatch = self._log.watch(self._note)
        self._began_ns = time.monotonic_ns()
        self.result.recording = True
        return self.result

    def __exit__(self, *_: object) -> None:
        self.result.recording = False
        core = self._core
        with self._loading:
            recorded = core.backend.end_trace(list(core.models.by_row.values()))
            self._log.flush()
            self._unwatch()
        loaded = dict(sorted(core.models.by_row.items()))  # in the dashboard's order, so that colours are the same
        models = {row: each.model for row, each in loaded.items()}
        instances = {instance: row for row, each in loaded.items() for instance in each.instance_rows}
        whole = bool(core.state.core["whole_always"][0])
        engine = TracedEngine(models, instances, core.backend.to_trace_ns, core.policy.name, whole)
        texts = self._texts(self._began_ns)
        fill_engine_trace(self.result, recorded, self._entries, engine, list(self._runs.values()), texts)

    def _note(self, entry: Any) -> None:
        if entry["request"] < 0:
            return
        self._entries.append(entry.copy())
        if entry["status"] == codes.OK:
            instance, started = int(entry["instance"]), int(entry["started_ns"])
            if (instance, started) not in self._runs:
                times, whole = segment_times(self._core.state, instance)
                self._runs[instance, started] = HostRun(instance, int(entry["size"]), whole, times)


@dataclass(frozen=True, slots=True)
class TracedEngine:
    """The source of a trace: an engine or a simulation."""

    models: Mapping[int, Any]  # by the core's rows, with `name`, `batch` and `target_ms`
    instances: Mapping[int, int]  # the model's row of each instance
    to_trace_ns: Callable[[int], int]  # converts a time of the core to the clock of the blocks
    policy: str
    whole: bool  # the policy always launches programs in one piece
    simulated: bool = False


def fill_engine_trace(
    trace: EngineTrace,
    recorded: TracedBlocks,
    entries: Iterable[Any],
    engine: TracedEngine,
    runs: Sequence[HostRun] = (),
    texts: Sequence[TracedText] = (),
) -> None:
    """Fills a trace from a backend's recording and the core's completions."""
    models, instances, to_trace_ns = engine.models, engine.instances, engine.to_trace_ns
    trace.fill(recorded.blocks, recorded.launches, recorded.kernels, trace.device, recorded.dropped,
               recorded.unfinished)  # fmt: skip
    trace.ranges, trace.count_work = recorded.ranges, recorded.count_work
    number = {row: k for k, row in enumerate(models)}
    jobs = _jobs(entries, models, number, to_trace_ns)
    pieces = [p for p in recorded.pieces if p.instance in instances]
    segments = [
        (
            number[instances[p.instance]],
            p.instance,
            models[instances[p.instance]].batch[p.size],
            p.segment,
            n,
            start,
            end,
        )
        for p, n, start, end in _segments(trace.blocks, jobs, _launched(pieces, engine.whole))
    ]
    segments += [
        (
            number[instances[run.instance]],
            run.instance,
            models[instances[run.instance]].batch[run.size],
            k,
            0,
            *map(to_trace_ns, times),
        )
        for run in runs
        if run.instance in instances
        for k, times in _unseen(run, pieces)
    ]
    listed = set(trace.launches["launch"].tolist())
    owned = {i: (number[instances[p.instance]], p.instance) for p in pieces for i in p.launches if i in listed}
    owners = np.array([(launch, *who) for launch, who in owned.items()], OWNER)
    names = [model.name for model in models.values()]
    jobs_of_texts, tokens = _written(texts, names, to_trace_ns)
    jobs, segments = np.concatenate([jobs, jobs_of_texts]), segments + tokens
    trace.know(jobs, np.array(segments, SEGMENT_RECORD), owners, names, engine.policy, engine.simulated)


def _written(
    texts: Sequence[TracedText], names: list[str], to_trace_ns: Callable[[int], int]
) -> tuple[Records, list[Any]]:
    """Texts as requests and their tokens as segments; adds the names of their models. No instance has their numbers."""
    jobs, segments = [], []
    for k, text in enumerate(texts[-_MOST_TEXTS:]):
        if text.model not in names:
            names.append(text.model)
        model, instance = names.index(text.model), -2 - k
        arrival, ends = to_trace_ns(text.arrival_ns), [to_trace_ns(ns) for ns in text.token_ns]
        jobs.append((k, model, instance, 0, 1, codes.OK, 0, text.priority, arrival, arrival, ends[-1], -1))
        segments += [(model, instance, 1, n, 0, *span) for n, span in enumerate(pairwise([arrival, *ends]))]
    return np.array(jobs, JOB_RECORD), segments


def _unseen(run: HostRun, pieces: list[TracedPiece]) -> list[tuple[int, tuple[int, int]]]:
    """Segments of the run whose kernels report no blocks, such as those of cuDNN and cuBLAS."""
    seen = {p.segment for p in pieces if (p.instance, p.size) == (run.instance, run.size) and p.launches}
    if run.whole:
        return [] if seen else [(codes.WHOLE, (int(run.times[0, 0]), int(run.times[0, 1])))]
    return [(k, (int(start), int(end))) for k, (start, end) in enumerate(run.times) if k not in seen]


def _jobs(
    entries: Iterable[Any], models: Mapping[int, Any], number: dict[int, int], to_trace_ns: Callable[[int], int]
) -> Records:
    rows = []
    for e in entries:
        row = int(e["model"])
        if row not in number:
            continue
        started, arrival, due = int(e["started_ns"]), int(e["arrival_ns"]), int(e["deadline_ns"])
        target_ms = models[row].target_ms
        if due >= codes.NEVER and target_ms is not None:
            due = arrival + int(target_ms * 1e6)
        rows.append(
            (e["serial"], number[row], e["instance"], e["slot"], e["batch"], e["status"], e["client"], e["priority"],
             to_trace_ns(arrival), -1 if started >= codes.NEVER else to_trace_ns(started),
             to_trace_ns(int(e["finish_ns"])), -1 if due >= codes.NEVER else to_trace_ns(due))
        )  # fmt: skip
    return np.array(rows, JOB_RECORD)


def _launched(pieces: list[TracedPiece], whole: bool) -> list[TracedPiece]:
    """The pieces that were launched. Where every replay has the same launch ids, a whole program and its segments
    cannot be told apart, so the pieces that the policy launches are taken. A program that ran in one piece because it
    was alone is shown as its segments.
    """
    cut = {(p.instance, p.size) for p in pieces if p.segment != codes.WHOLE}
    return [
        p for p in pieces
        if not p.replayed or (p.instance, p.size) not in cut or (p.segment == codes.WHOLE) == whole
    ]  # fmt: skip


def _segments(blocks: Records, jobs: Records, pieces: list[TracedPiece]) -> list[tuple[TracedPiece, int, int, int]]:
    """When each piece ran. Replays share launch ids; the requests that ran in the instance tell them apart."""
    order = np.argsort(blocks["launch"], kind="stable")
    ids = blocks["launch"][order]
    runs = {int(instance): _run_spans(jobs[jobs["instance"] == instance]) for instance in np.unique(jobs["instance"])}
    found = []
    for piece in pieces:
        parts = [order[slice(*np.searchsorted(ids, (i, i + 1)))] for i in piece.launches]
        mine = blocks[np.concatenate(parts)] if parts else blocks[:0]
        if not len(mine):
            continue
        windows = runs.get(piece.instance, []) if piece.replayed else [(int(mine["start_ns"].min()), 1 << 62)]
        for low, high in windows:
            inside = mine[(mine["start_ns"] >= low) & (mine["start_ns"] <= high)]
            if len(inside):
                found.append((piece, len(inside), int(inside["start_ns"].min()), int(inside["end_ns"].max())))
    return sorted(found, key=lambda row: row[2])


def _run_spans(jobs: Records) -> list[tuple[int, int]]:
    """When an instance ran which requests. Host and GPU clocks differ by some µs, so spans reach half way to the next.
    """
    launched = jobs[jobs["start_ns"] >= 0]
    spans = sorted({(int(job["start_ns"]), int(job["end_ns"])) for job in launched})
    middles = [(end + start) // 2 for (_, end), (start, _) in pairwise(spans)]
    return list(pairwise([-(1 << 62), *middles, 1 << 62])) if spans else []
