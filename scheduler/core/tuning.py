"""`Tuning`: numbers of the scheduler that were chosen by measurement, stored for the GPU they were measured on.

    Tuning.for_part("h200").demand_limit
    pp.Engine(tuning={"demand_limit": 3.0})          # an experiment: one number differs from the part's own

Every number is listed with its source in `instrument/gpu_model/profiles/PART.tuning.toml`. A part without a file of its
own uses the H200's numbers and says so. The compiled core reads the numbers from `state.tuning`, one row of TUNING.
"""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cache
from typing import Any

import numpy as np

from paellapy.instrument.device.base import Device
from paellapy.instrument.errors import PaellaError
from paellapy.instrument.gpu_model.parts import PROFILES
from paellapy.scheduler.core.values import Rule, check_values, number, shortened

MEASURED_ON = "h200"  # the part whose numbers are used by parts without a file of their own


class TuningError(PaellaError, ValueError):
    """A tuning number is unknown or not valid."""


@dataclass(frozen=True, slots=True)
class Number:
    """One number with its meaning and its source."""

    name: str
    section: str
    value: float
    meaning: str
    source: str


_NUMBER = number(0)
_WHOLE = Rule(lambda value: _NUMBER.fits(value) and value == int(value) <= 1 << 62, "an integer from 0 to 2⁶²")


def _number(meaning: str, *, whole: bool = False) -> Any:
    return field(metadata={"meaning": meaning, "whole": whole})


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuning:
    """Tuning numbers for one part. `numbers()` lists each with its meaning and its source."""

    part: str  # the GPU that uses them
    measured_on: str  # the GPU on which they were chosen
    changed: tuple[str, ...] = ()  # names of numbers that were set for an experiment

    # -- how many jobs share the GPU
    demand_limit: float = _number("largest total demand, in GPUs, of the jobs that share the GPU")
    queue_memory_ns: float = _number("time over which the length of the queue is averaged")
    long_queue_jobs: float = _number("waiting jobs at which the limit may double")
    most_growth: float = _number("largest growth of the limit while a queue persists")
    most_demand: float = _number("largest total demand, in GPUs, for any length of the queue")
    most_confined_demand: float = _number("largest total demand, in GPUs, of jobs in SM partitions")
    confined_factor: float = _number("factor on the limit for full batches in SM partitions")
    steady_queue_jobs: float = _number("waiting jobs above which short jobs are launched in one piece")
    short_job_segments: int = _number("largest number of segments of a short job", whole=True)
    oversubscribed_factor: float = _number("multiple of demand_limit above which the GPU is oversubscribed")
    much_longer: float = _number("multiple of a short job's time above which a job yields to it")
    most_yielding_share: float = _number("fraction of time with a short job above which no job yields")
    default_active: int = _number("jobs at once if neither the policy nor demand limits them", whole=True)
    gain_window_ns: float = _number("time over which the gain of sharing is averaged before it counts")
    # -- SM partitions
    roomy_jobs: int = _number("largest number of jobs in flight that all have all SMs", whole=True)
    staying_jobs: float = _number("difference in jobs between partitions below which a job does not move")
    partition_share: float = _number("fraction of the SMs in a partition")
    most_partition_stretch: float = _number("slowdown in a partition above which a model keeps all SMs")
    partitions_quantum_us: float = _number("length of a segment in an engine with partitions")
    # -- segments
    quantum_us: float = _number("length of a segment")
    slice_quanta: float = _number("length of a kernel, in quanta, above which it is sliced")
    just_ahead_ns: float = _number("time before the end of a segment at which the next one is launched")
    most_stretch: float = _number("largest slowdown of a segment beside others that predictions use")
    long_copy_bytes: int = _number("size of inputs above which the copier copies them", whole=True)
    # -- admission
    late_share: float = _number(
        "latency, between the shortest (0) and the limit (1), above which an admission limit shrinks"
    )
    limit_decrease: float = _number("factor by which an admission limit shrinks")
    largest_limit: float = _number("largest number of a model's requests in flight")
    less_margin: float = _number("fraction of the margin that one late request removes")
    more_margin: float = _number("fraction of the margin that one request in time restores")
    first_margin: float = _number("margin before any prediction was compared with its outcome")
    first_more_margin: float = _number("growth of the margin with each request in time, until one is late")
    few_margin: float = _number("smallest margin until one is late, while there are few requests")
    few_requests: int = _number("requests in the engine that count as few", whole=True)
    least_margin: float = _number("smallest margin")
    stall_share: float = _number("fraction of the margin that remains after a series of late requests")
    margin_back_ns: float = _number("time without requests in which the margin grows from 0 to 1")
    quiet_ns: float = _number("time without requests before the margin grows")
    room_factor: float = _number("multiple of the shortest latency; outcomes below this limit do not change the margin")
    rate_ns: float = _number("time with requests in flight over which the completion rate is measured")
    rate_back: float = _number("fraction of the difference by which a lower measurement reduces the rate")
    # -- weights that come and go
    link_gbps: float = _number("rate of copying weights from pinned host memory")
    file_gbps: float = _number("rate of reading weights from a file")
    map_ns: float = _number("time until the copy of the first chunk of weights starts")
    cold_lead_ns: float = _number("time by which a model starts early while its weights still arrive")
    cold_stretch: float = _number("expected slowdown of its segments while its weights arrive")
    chunk_bytes: int = _number("size of the parts of weights that segments wait for", whole=True)
    map_bytes: int = _number("size of the parts in which memory of weights is mapped", whole=True)
    demand_memory_ns: float = _number("time after which a request counts for 1/e of a new one, where weights compete")
    patience: float = _number("wait, in reload times, after which a model also gets memory from busy models")
    # -- simulated time
    hand_over_ns: float = _number("time from an instance's end until its outputs are read and it is open again")
    copy_gbps: float = _number("rate of copying waiting inputs into an instance")
    host_launch_ns: float = _number("time that a graph launch takes on the host")
    segment_gap_ns: float = _number("time between two segments of a job")
    apart_share: float = _number("reduction of the mutual slowdown by partitions, for each job beyond roomy_jobs")
    deep_kernels: float = _number("number of kernels in a graph above which other graphs in its hardware queue wait")
    priority_share: float = _number("influence of stream priorities, from 0 (none) to 1 (they alone decide)")

    def __post_init__(self) -> None:
        rules = {each.name: _WHOLE if each.metadata["whole"] else _NUMBER for each in _fields()}
        check_values(self, rules, TuningError, "tuning ")

    @staticmethod
    def for_part(part: str, changes: Tuning | Mapping[str, float] | None = None) -> Tuning:
        """The numbers of a part, or of the H200 if the part has none; `changes` are for experiments.

        >>> Tuning.for_part("a100", {"demand_limit": 3.0}).measured_on
        'h200'
        """
        if isinstance(changes, Tuning):
            return changes
        check_values({"part": part}, {"part": Rule(lambda given: isinstance(given, str), "a GPU's name")}, TuningError)
        name = part.removeprefix("virtual:").lower()
        measured_on = name if _path(name).is_file() else MEASURED_ON
        numbers: dict[str, Any] = {each.name: each.value for each in _read(measured_on).values()}
        found = Tuning(part=name, measured_on=measured_on, **numbers)
        return found.with_changes(changes or {})

    @staticmethod
    def for_device(device: Device, changes: Tuning | Mapping[str, float] | None = None) -> Tuning:
        """The numbers for a device, by its name: "NVIDIA H200" is an h200, and so is its virtual twin."""
        part = getattr(device, "part", None)
        return Tuning.for_part(part.name if part else device.title.removeprefix("NVIDIA ").split()[0], changes)

    def with_changes(self, changes: Mapping[str, float]) -> Tuning:
        known = [each.name for each in _fields()]
        for name in changes:
            if name not in known:
                near = difflib.get_close_matches(str(name), known, 1)
                hint = f"did you mean {near[0]}? " if near else ""
                said = f"tuning has no number {shortened(name)}: {hint}`paellapy doctor --verbose` prints them"
                raise TuningError(said, field=name, limit=tuple(known))
        given: dict[str, Any] = dict(changes)
        return replace(self, **given, changed=tuple(sorted({*self.changed, *changes})))

    def numbers(self) -> list[Number]:
        """Every number with its meaning, its source and its current value."""
        read = _read(self.measured_on)
        return [
            replace(read[each.name], value=getattr(self, each.name), source="set for this run")
            if each.name in self.changed
            else read[each.name]
            for each in _fields()
        ]

    def segment_us(self, partitions: int) -> float:
        """The length of a segment in an engine with this many SM partitions."""
        return self.partitions_quantum_us if partitions else self.quantum_us

    @staticmethod
    def of_row(row: Any) -> Tuning:
        """The numbers of an engine, from its table, which another process may have written."""
        numbers: dict[str, Any] = {each.name: row[each.name].item() for each in _fields()}
        return Tuning(part=MEASURED_ON, measured_on=MEASURED_ON, **numbers)

    @property
    def note(self) -> str:
        """One sentence about the origin of the numbers."""
        said = f"tuned on {self.measured_on}"
        if self.part != self.measured_on:
            said = f"{self.part} has no tuning of its own and uses that of {self.measured_on}"
        return said + (f"; set for this run: {', '.join(self.changed)}" if self.changed else "")

    def row(self) -> np.ndarray[Any, Any]:
        """The numbers as a row for the compiled core."""
        return np.array([tuple(getattr(self, each.name) for each in _fields())], TUNING)


def _fields() -> tuple[Any, ...]:
    return tuple(each for each in fields(Tuning) if "meaning" in each.metadata)


TUNING = np.dtype([(each.name, "i8" if each.metadata["whole"] else "f8") for each in _fields()], align=True)


def _path(part: str) -> Any:
    return PROFILES / f"{part}.tuning.toml"


@cache
def _read(part: str) -> dict[str, Number]:
    """The numbers of a part's file."""
    path = _path(part)
    sections = tomllib.loads(path.read_text(encoding="utf-8"))
    meanings = {each.name: each.metadata["meaning"] for each in _fields()}
    found = {
        name: Number(name, section, entry["value"], meanings.get(name, ""), entry["source"])
        for section, entries in sections.items()
        for name, entry in entries.items()
    }
    if found.keys() != meanings.keys():
        wrong = ", ".join(sorted(found.keys() ^ meanings.keys()))
        raise TuningError(
            f"{path.name} and Tuning differ in {wrong}: the file must have each number once, with its source",
            field=wrong,
        )
    return found
