"""Models as the core knows them: profiles per batch size and segment, from JSON and into the state's tables."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np

from paellapy.instrument.device.parts import Part
from paellapy.instrument.device.timing import Timing
from paellapy.instrument.errors import PaellaError
from paellapy.scheduler.core.codes import ABSENT, NEVER, NONE, OPEN_MODEL
from paellapy.scheduler.core.demand import TOGETHER, usual_demand
from paellapy.scheduler.core.rings import RING_FULL, post
from paellapy.scheduler.core.state import State


class ProfileError(PaellaError, ValueError):
    """A model's profile is incomplete or contradicts itself."""


@dataclass(frozen=True, slots=True)
class SegmentProfile:
    """One segment alone on the GPU. Footprints are what is resident at once: the largest kernel's."""

    time_ns: float
    blocks: int = 1
    warps: int = 8
    registers: int = 8192
    shared_bytes: int = 0
    kernels: int = 1
    bytes: float = 0.0  # traffic to memory, all kernels together

    def __post_init__(self) -> None:
        if not (math.isfinite(self.time_ns) and self.time_ns > 0):
            raise ProfileError(f"a segment takes {self.time_ns} ns: give its time alone, above zero")
        if min(self.blocks, self.warps, self.kernels) < 1 or min(self.registers, self.shared_bytes, self.bytes) < 0:
            raise ProfileError("a segment has at least one kernel, one block and one warp, and no negative resources")


@dataclass(frozen=True, slots=True)
class ModelProfile:
    """What scheduling needs to know of a model: per batch size, the segments of its program.

    >>> m = ModelProfile("net", {1: [SegmentProfile(5e4)] * 4, 8: [SegmentProfile(8e4)] * 4}, target_ms=1.0)
    >>> m.alone_ns(3)
    320000.0
    """

    name: str
    sizes: Mapping[int, Sequence[SegmentProfile]]
    target_ms: float | None = None
    priority: int = 0
    share: float = 1.0
    lanes: int = 4
    queue_limit: int = 1 << 20
    # Part of the GPU that a batch of each size keeps busy, where it was measured; else estimated from the segments.
    demand: Mapping[int, float] = field(default_factory=dict)
    together: Mapping[int, int] = field(default_factory=dict)  # how many ran at once to measure that
    about: str = field(default="", compare=False)
    input_bytes: int = 0  # of one request; 0: not known, and nothing to copy

    def __post_init__(self) -> None:
        if not self.sizes or any(batch < 1 or not segments for batch, segments in self.sizes.items()):
            raise ProfileError(f"{self.name}: give at least one batch size, each with at least one segment")
        if not (self.share > 0 and math.isfinite(self.share)) or self.lanes < 1 or self.queue_limit < 0:
            raise ProfileError(f"{self.name}: share and lanes must be above zero, and queue_limit not below")
        if self.input_bytes < 0:
            raise ProfileError(f"{self.name}: input_bytes={self.input_bytes}: give the bytes of one request, or 0")
        if self.target_ms is not None and not self.target_ms > 0:
            raise ProfileError(f"{self.name}: a target of {self.target_ms} ms cannot be met: leave it out or raise it")
        object.__setattr__(self, "sizes", {batch: tuple(self.sizes[batch]) for batch in sorted(self.sizes)})

    @property
    def batch(self) -> tuple[int, ...]:
        return tuple(self.sizes)

    @property
    def target_ns(self) -> int:
        return NEVER if self.target_ms is None else int(self.target_ms * 1e6)

    def alone_ns(self, batch: int = 1) -> float:
        """Time of a batch with the GPU to itself, at the smallest size that holds it."""
        fitting = [size for size in self.sizes if size >= batch]
        if not fitting:
            raise ProfileError(f"{self.name} has no batch size for {batch} requests: the largest is {max(self.sizes)}")
        return math.fsum(segment.time_ns for segment in self.sizes[fitting[0]])


def save_profiles(path: str | Path, profiles: Iterable[ModelProfile]) -> None:
    """Keeps profiles as JSON, for `load_profiles` and `paellapy simulate path`."""
    Path(path).write_text(json.dumps({"models": [asdict(each) for each in profiles]}, indent=1) + "\n")


def load_profiles(path: str | Path) -> list[ModelProfile]:
    """What `save_profiles` wrote; errors name the file."""
    try:
        return [
            ModelProfile(
                **{
                    **model,
                    "sizes": {int(b): [SegmentProfile(**each) for each in s] for b, s in model["sizes"].items()},
                    "demand": {int(b): float(part) for b, part in model.get("demand", {}).items()},
                    "together": {int(b): int(n) for b, n in model.get("together", {}).items()},
                }
            )
            for model in json.loads(Path(path).read_text())["models"]
        ]
    except (OSError, KeyError, TypeError, AttributeError, ValueError) as e:
        raise ProfileError(f"{path} is not a file of model profiles: {e}") from e


def set_capacity(state: State, part: Part, timing: Timing | None = None) -> None:
    """What the GPU can hold, for the occupancy account."""
    t = timing or Timing.for_part(part)
    gpu = state.gpu[0]
    gpu["capacity_blocks"] = part.sms * part.sm.blocks
    gpu["capacity_warps"] = part.sms * part.sm.warps
    gpu["capacity_registers"] = part.sms * part.sm.registers
    gpu["capacity_shared_bytes"] = part.sms * part.sm.shared_bytes
    gpu["capacity_issue"] = 1e9 / max(t.grid_issue_ns, 1.0)


def estimate(state: State, program: Sequence[SegmentProfile]) -> float:
    """Part of the GPU that one run keeps busy: its fullest resource, segment by segment."""
    gpu = state.gpu[0]
    capacity = [gpu[f"capacity_{each}"] or np.inf for each in ("warps", "registers", "shared_bytes", "issue")]
    total = used = 0.0
    for each in program:
        needs = (each.warps, each.registers, each.shared_bytes, each.kernels / each.time_ns * 1e9)
        total += each.time_ns
        used += each.time_ns * max(need / most for need, most in zip(needs, capacity, strict=True))
    return min(max(used / total, 0.01), 1.0)


def install(state: State, profile: ModelProfile) -> tuple[int, list[int]]:
    """Fill a free model row and free lanes from a profile; their numbers. `open_model` lets requests in.

    Completion words are the state's own. A backend that writes others sets `launch` and `whole` of the lanes, inputs
    and `n_inputs` before it opens the model.
    """
    _, sizes, segments = state.segment.shape
    if len(profile.sizes) > sizes or max(profile.batch) > state.slot.shape[1]:
        raise ProfileError(f"{profile.name}: batch sizes {profile.batch} exceed the state's limits")
    longest = max(len(each) for each in profile.sizes.values())
    if longest > segments or profile.lanes > state.model_lane.shape[1]:
        raise ProfileError(f"{profile.name}: {longest} segments or {profile.lanes} lanes exceed the state's limits")
    rows = np.flatnonzero((state.model["state"] == ABSENT) & (state.model["n_lanes"] == 0))
    lanes = np.flatnonzero(state.lane["model"] == NONE)[: profile.lanes]
    if not len(rows) or len(lanes) < profile.lanes:
        raise ProfileError(f"{profile.name} needs a model row and {profile.lanes} lanes: the state has no more of them")
    m = int(rows[0])
    row = state.model[m]
    row["priority"], row["share"], row["target_ns"] = profile.priority, profile.share, profile.target_ns
    row["queue_limit"], row["n_sizes"], row["n_lanes"] = profile.queue_limit, len(profile.sizes), len(lanes)
    row["n_inputs"] = 0
    row["generation"] += 1
    state.outcome[m] = 0
    for k, (batch, program) in enumerate(profile.sizes.items()):
        times = np.array([each.time_ns for each in program])
        seen = profile.demand.get(batch)
        demand = usual_demand(seen, profile.together.get(batch, TOGETHER)) if seen else estimate(state, program)
        size, segment = state.size[m, k], state.segment[m, k, : len(program)]
        size["batch"], size["segments"], size["total_ns"], size["demand"] = batch, len(program), times.sum(), demand
        segment["tail_ns"] = times[::-1].cumsum()[::-1]
        for name in ("time_ns", "blocks", "warps", "registers", "shared_bytes", "kernels"):
            segment[name] = [getattr(each, name) for each in program]
    state.model_lane[m, : len(lanes)] = lanes
    state.lane["model"][lanes] = m
    words = state.word.ctypes.data + 8 * (np.arange(segments + 1) + (segments + 1) * lanes[:, None])
    state.launch["word"][lanes] = words[:, None, :-1]
    state.whole["word"][lanes] = words[:, -1:]
    state.lane_window[lanes] = NONE
    if state.core["windows"][0]:
        state.confined[lanes] = 0
    state.word[lanes] = 0
    return m, [int(lane) for lane in lanes]


def remove(state: State, model: int) -> None:
    """Give the rows of a model back. Only after its MODEL_CLOSED, or before it was opened."""
    if state.model["state"][model] != ABSENT:
        raise ProfileError(f"model row {model} is in use: post CLOSE_MODEL and wait for MODEL_CLOSED")
    state.lane["model"][state.model_lane[model, : state.model["n_lanes"][model]]] = NONE
    state.model["n_lanes"][model] = 0


def tell(state: State, kind: int, model: int = 0, *, request: int = 0, serial: int = 0, tag: int = 0) -> None:
    """Post what is not a submission: CANCEL, OPEN_MODEL, CLOSE_MODEL, DRAIN, FAIL (its error code as `tag`)."""
    answer = post(
        state.ring[0], state.submit[0], state.filling, state.lane_word, state.slot_front,
        kind, request, serial, tag, model, 0, 0, 0, NEVER, 0, False,
    )  # fmt: skip
    if answer == RING_FULL:
        raise ProfileError("the submission ring is full: step the core, then try again")


def open_model(state: State, model: int) -> None:
    tell(state, OPEN_MODEL, model)
