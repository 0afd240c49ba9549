"""Profiles: the times and resources of a model's batch sizes and segments, for scheduling. Stored as JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from paellapy.instrument.errors import PaellaError
from paellapy.scheduler.core.codes import NEVER
from paellapy.scheduler.core.params import checked_params


class ProfileError(PaellaError, ValueError):
    """A model's profile is incomplete or contradicts itself."""


@dataclass(frozen=True, slots=True)
class SegmentProfile:
    """One segment alone on the GPU. Footprints are the resources resident at once: those of the largest kernel."""

    time_ns: float
    blocks: int = 1
    warps: int = 8
    registers: int = 8192
    shared_bytes: int = 0
    kernels: int = 1
    bytes: float = 0.0  # traffic to memory, all kernels together
    compute: float = 0.0  # fraction of the GPU's capacity, 0 … 1; 0: not known
    memory: float = 0.0  # the same; 0: computed from `bytes`

    def __post_init__(self) -> None:
        if not (math.isfinite(self.time_ns) and self.time_ns > 0):
            raise ProfileError(f"time_ns={self.time_ns}: a segment's time alone must be finite and above 0")
        if min(self.blocks, self.warps, self.kernels) < 1 or min(self.registers, self.shared_bytes, self.bytes) < 0:
            raise ProfileError(
                f"{self!r}: a segment needs at least one kernel, block and warp, and no negative resources"
            )
        if not (0.0 <= self.compute <= 1.0 and 0.0 <= self.memory <= 1.0):
            raise ProfileError(
                f"compute={self.compute} and memory={self.memory} are fractions of the GPU and must be from 0 to 1"
            )


@dataclass(frozen=True, slots=True)
class ModelProfile:
    """The scheduler's knowledge of a model: for each batch size, the segments of its program.

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
    # Part of the GPU that a batch of each size keeps busy, if it was measured; otherwise it is estimated from the
    # segments.
    demand: Mapping[int, float] = field(default_factory=dict)
    together: Mapping[int, int] = field(default_factory=dict)  # number of runs at once when that was measured
    about: str = field(default="", compare=False)
    input_bytes: int = 0  # of one request; 0: not known, and nothing to copy
    params: Mapping[str, float] = field(default_factory=dict)  # for policies, by name
    resident: bool | str = "auto"  # True: its weights stay on the GPU; False: only while requests wait or run
    weight_bytes: int = 0  # on the GPU; 0: not known, and nothing to bring
    # By batch size, for each segment: how many bytes, from the start of the weights, it and the segments before it
    # need. A size that is left out needs all weights from the start.
    needs: Mapping[int, Sequence[int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.sizes or any(batch < 1 or not segments for batch, segments in self.sizes.items()):
            raise ProfileError(
                f"{self.name}: `sizes` needs at least one batch size from 1 up, each with at least one segment"
            )
        if not (self.share > 0 and math.isfinite(self.share)) or self.lanes < 1 or self.queue_limit < 0:
            raise ProfileError(
                f"{self.name}: share={self.share} and lanes={self.lanes} must be above 0, "
                f"queue_limit={self.queue_limit} at least 0"
            )
        if self.input_bytes < 0:
            raise ProfileError(
                f"{self.name}: input_bytes={self.input_bytes}; it must be the bytes of one request, or 0"
            )
        if self.weight_bytes < 0 or any(len(self.needs[b]) != len(s) for b, s in self.sizes.items() if b in self.needs):
            raise ProfileError(
                f"{self.name}: weight_bytes must be at least 0, and `needs` must have a number for every segment"
            )
        if not all(0 < part < math.inf for part in self.demand.values()):
            raise ProfileError(f"{self.name}: demand={dict(self.demand)}; each must be a part of the GPU above 0")
        if self.target_ms is not None and not self.target_ms > 0:
            raise ProfileError(f"{self.name}: target_ms={self.target_ms}; the target must be above 0, or None")
        if self.resident not in ("auto", True, False):
            raise ProfileError(f"{self.name}: resident={self.resident!r}; it must be 'auto', True or False")
        try:
            object.__setattr__(self, "params", checked_params(self.params))
        except ValueError as e:
            raise ProfileError(f"{self.name}: {e}") from None
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
    """Writes profiles as JSON, for `load_profiles` and `paellapy simulate path`."""
    Path(path).write_text(json.dumps({"models": [asdict(each) for each in profiles]}, indent=1) + "\n")


def load_profiles(path: str | Path) -> list[ModelProfile]:
    """Reads profiles that `save_profiles` wrote; errors name the file."""
    try:
        return [
            ModelProfile(
                **{
                    **model,
                    "sizes": {int(b): [SegmentProfile(**each) for each in s] for b, s in model["sizes"].items()},
                    "demand": {int(b): float(part) for b, part in model.get("demand", {}).items()},
                    "together": {int(b): int(n) for b, n in model.get("together", {}).items()},
                    "needs": {int(b): [int(n) for n in needs] for b, needs in model.get("needs", {}).items()},
                }
            )
            for model in json.loads(Path(path).read_text())["models"]
        ]
    except (OSError, KeyError, TypeError, AttributeError, ValueError) as e:
        raise ProfileError(f"{path} is not a file of model profiles: {e}") from e
