"""`Tuning`: the numbers of the scheduler that were chosen by measurement, as data of the GPU they were chosen on.

    Tuning.for_part("h200").demand_limit
    pp.Engine(tuning={"demand_limit": 3.0})          # an experiment: the part's own numbers but for this one

Every number lies with its source in `instrument/device/profiles/PART.tuning.toml`. A part without a file of its own
uses the H200's and says so. The compiled core reads the numbers from the table `state.tuning`, one row of TUNING.
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cache
from typing import Any

import numpy as np

from paellapy.instrument.device.base import Device
from paellapy.instrument.device.timing import PROFILES
from paellapy.instrument.errors import PaellaError

MEASURED_ON = "h200"  # whose numbers a part uses that has none of its own


class TuningError(PaellaError, ValueError):
    """A number for the scheduler is unknown or makes no sense."""


@dataclass(frozen=True, slots=True)
class Number:
    """One number: what it is, and where it comes from."""

    name: str
    section: str
    value: float
    meaning: str
    source: str


def _number(meaning: str, *, whole: bool = False) -> Any:
    return field(metadata={"meaning": meaning, "whole": whole})


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuning:
    """Numbers for one part. `numbers()` has each with its meaning and its source."""

    part: str  # the GPU that uses them
    measured_on: str  # the GPU they were chosen on
    changed: tuple[str, ...] = ()  # those that were set for an experiment

    # -- how many jobs share the GPU
    demand_limit: float = _number("GPUs' worth of work that jobs sharing the GPU may ask for together")
    queue_memory_ns: float = _number("how far back a queue is remembered")
    long_queue_jobs: float = _number("waiting jobs at which the limit may double")
    most_growth: float = _number("growth of the limit while a queue stays, at most")
    most_demand: float = _number("GPUs' worth of work that jobs may ask for together, however long the queue")
    most_confined_demand: float = _number("the same for jobs in windows of SMs")
    confined_factor: float = _number("times the limit, for full batches in windows of SMs")
    steady_queue_jobs: float = _number("waiting jobs from which short jobs are launched in one piece")
    short_job_segments: int = _number("segments of a short job, at most", whole=True)
    crowd_factor: float = _number("times the limit, from which jobs are a crowd")
    much_longer: float = _number("times as long as a short job, from which a job stands back for it")
    often_share: float = _number("share of the time with a short job, from which nobody stands back")
    default_active: int = _number("jobs at once where neither policy nor demand says how many", whole=True)
    gain_window_ns: float = _number("how long the gain of sharing is watched before it counts")
    # -- windows of SMs
    roomy_jobs: int = _number("jobs in flight up to which each has all SMs", whole=True)
    staying_jobs: float = _number("jobs fewer in another window that do not make up for moving there")
    window_share: float = _number("part of the SMs that a window has")
    most_window_stretch: float = _number("stretch in a window, above which a model keeps all SMs")
    windows_quantum_us: float = _number("length of a segment where there are windows")
    # -- segments
    quantum_us: float = _number("length of a segment")
    slice_quanta: float = _number("quanta from which a kernel is sliced")
    just_ahead_ns: float = _number("how long before a segment ends the next one is sent")
    most_stretch: float = _number("stretch of a segment beside others that is believed, at most")
    long_copy_bytes: int = _number("inputs from which the copier copies", whole=True)
    # -- admission
    late_share: float = _number("of the way from the shortest latency to the limit: a latency above shrinks the window")
    window_decrease: float = _number("factor by which an admission window shrinks")
    largest_window: float = _number("requests of a model in flight, at most")
    less_margin: float = _number("part of the margin that one late request takes")
    more_margin: float = _number("part of the margin that one request in time gives back")
    first_margin: float = _number("margin before any prediction was compared with its outcome")
    first_more_margin: float = _number("growth with each request in time, until one is late")
    few_margin: float = _number("least margin until then, for few requests")
    few_requests: int = _number("requests in the engine that count as few", whole=True)
    least_margin: float = _number("the margin never falls below")
    stall_share: float = _number("part of the margin that one row of late requests leaves")
    margin_back_ns: float = _number("time without requests in which the margin grows from nothing to all")
    quiet_ns: float = _number("time without requests before the margin grows")
    room_factor: float = _number("times the shortest latency: a limit below says nothing of predictions")
    rate_ns: float = _number("time with requests in flight over which the rate of completions is counted")
    rate_back: float = _number("part of a difference by which the rate falls when fewer were done")
    # -- weights that come and go
    link_gbps: float = _number("rate at which weights come from the host's pinned memory")
    file_gbps: float = _number("rate at which weights come from a file")
    map_ns: float = _number("time until the first chunk of weights is copied")
    cold_lead_ns: float = _number("a model whose weights come starts this much before it must, to be done with them")
    cold_stretch: float = _number("times alone that its segments are expected to take meanwhile")
    chunk_bytes: int = _number("weights that are mapped and copied at a time", whole=True)
    demand_memory_ns: float = _number("after this time a request counts for 1/e of a new one, where weights compete")
    patience: float = _number("times its reload: after this wait a model gets room from busy ones, too")
    # -- simulated time
    hand_over_ns: float = _number("time until a lane's outputs are read and it is open again")
    copy_gbps: float = _number("rate at which waiting inputs are copied into a lane")
    host_launch_ns: float = _number("time of a graph launch on the host")
    segment_gap_ns: float = _number("time between two segments of a job")
    apart_share: float = _number("how much less jobs in windows slow each other, for each job beyond roomy_jobs")
    deep_kernels: float = _number("kernels of a graph behind which others of its hardware queue wait")
    priority_share: float = _number("of the way to where only priorities of streams count, 0 to 1")

    def __post_init__(self) -> None:
        for each in _fields():
            value = getattr(self, each.name)
            if not isinstance(value, int | float) or not math.isfinite(value) or value < 0:
                raise TuningError(f"tuning {each.name}={value!r}: give a number that is not negative")
            if each.metadata["whole"] and value != int(value):
                raise TuningError(f"tuning {each.name}={value!r}: give a whole number")

    @staticmethod
    def for_part(part: str, changes: Tuning | Mapping[str, float] | None = None) -> Tuning:
        """The numbers of a part, or of the H200 where it has none; `changes` are for experiments.

        >>> Tuning.for_part("a100", {"demand_limit": 3.0}).measured_on
        'h200'
        """
        if isinstance(changes, Tuning):
            return changes
        name = part.removeprefix("virtual:").lower()
        measured_on = name if _path(name).is_file() else MEASURED_ON
        numbers: dict[str, Any] = {each.name: each.value for each in _read(measured_on).values()}
        found = Tuning(part=name, measured_on=measured_on, **numbers)
        return found.with_changes(changes or {})

    @staticmethod
    def for_device(device: Device, changes: Tuning | Mapping[str, float] | None = None) -> Tuning:
        """By the part's name: "NVIDIA H200" is an h200, and so is its virtual twin."""
        part = getattr(device, "part", None)
        return Tuning.for_part(part.name if part else device.title.removeprefix("NVIDIA ").split()[0], changes)

    def with_changes(self, changes: Mapping[str, float]) -> Tuning:
        known = [each.name for each in _fields()]
        for name in changes:
            if name not in known:
                raise TuningError(f"tuning has no {name!r}; it has {', '.join(known)}")
        given: dict[str, Any] = dict(changes)
        return replace(self, **given, changed=tuple(sorted({*self.changed, *changes})))

    def numbers(self) -> list[Number]:
        """Every number with its meaning and source, as it stands here."""
        read = _read(self.measured_on)
        return [
            replace(read[each.name], value=getattr(self, each.name), source="set for this run")
            if each.name in self.changed
            else read[each.name]
            for each in _fields()
        ]

    def segment_us(self, windows: int) -> float:
        """How long a segment takes in an engine with this many windows of SMs."""
        return self.windows_quantum_us if windows else self.quantum_us

    @staticmethod
    def of_row(row: Any) -> Tuning:
        """The numbers that an engine works with, from its table; another process may have written it."""
        numbers: dict[str, Any] = {each.name: row[each.name].item() for each in _fields()}
        return Tuning(part=MEASURED_ON, measured_on=MEASURED_ON, **numbers)

    @property
    def note(self) -> str:
        """One sentence: where the numbers come from."""
        said = f"tuned on {self.measured_on}"
        if self.part != self.measured_on:
            said = f"{self.part} has no tuning of its own and uses that of {self.measured_on}"
        return said + (f"; set for this run: {', '.join(self.changed)}" if self.changed else "")

    def row(self) -> np.ndarray[Any, Any]:
        """As the compiled core reads it."""
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
        raise TuningError(f"{path.name} and Tuning differ in {wrong}: give each number once, with its source")
    return found
