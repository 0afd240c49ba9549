"""`EngineTrace`: the requests, segments and blocks that ran during a trace of an engine, on one clock."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paellapy.instrument.errors import TraceError
from paellapy.instrument.records import Records
from paellapy.instrument.traces import trace_file
from paellapy.instrument.traces.readable import counted
from paellapy.instrument.traces.trace import Trace

# One request that ended during the trace. Times are ns on the clock of the trace's blocks.
JOB_RECORD = np.dtype(
    [
        ("request", "<u8"),
        ("model", "<u2"),  # index into `models`
        ("lane", "<i2"),  # -1: it never had one
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
        ("lane", "<i2"),
        ("batch", "<u2"),  # captured size it ran at
        ("segment", "<i2"),  # -1: the whole program as one launch
        ("blocks", "<u4"),
        ("start_ns", "<i8"),
        ("end_ns", "<i8"),
    ]
)

# The model of a launch: one row for each of `launches` that a model made.
OWNER = np.dtype([("launch", "<u4"), ("model", "<u2"), ("lane", "<i2")])


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

    def _more(self) -> tuple[trace_file.Tables, dict[str, Any]]:
        tables = {"jobs": self.jobs, "segments": self.segments, "owners": self.owners}
        about = {"models": self.models, "policy": self.policy, "simulated": self.simulated}
        return tables, {"kind": "engine", **about}

    def _take(self, more: trace_file.Tables, facts: Mapping[str, Any]) -> None:
        jobs, segments, owners = (more[name] for name in ("jobs", "segments", "owners"))
        if (jobs.dtype, segments.dtype, owners.dtype) != (JOB_RECORD, SEGMENT_RECORD, OWNER):
            raise TraceError(
                "the file's requests have a layout that this version of paellapy cannot read: record the trace again"
            )
        models = [str(name) for name in facts["models"]]
        self.know(jobs, segments, owners, models, str(facts["policy"]), bool(facts["simulated"]))


_FAR = 1 << 62


def _frozen(rows: Records) -> Records:
    rows.flags.writeable = False
    return rows
