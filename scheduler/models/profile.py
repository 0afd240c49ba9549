"""Profiles: a program's segments and their times, measured once alone on the GPU and kept on disk."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace

from paellapy.instrument import cache
from paellapy.instrument.env import versions
from paellapy.instrument.gpu_model.parts import SmLimits, footprint
from paellapy.scheduler.core.profiles import ModelProfile, SegmentProfile
from paellapy.scheduler.models.model import Model
from paellapy.scheduler.models.program import Cuts, Node

_FORMAT = "8"


@dataclass(frozen=True, slots=True)
class ProgramProfile:
    """The profile of one model at one batch size."""

    batch: int
    bounds: tuple[tuple[int, int], ...]
    segments: tuple[SegmentProfile, ...]
    whole_ns: float  # the whole program as one launch
    cuts: Cuts  # kernels that are launched in slices
    chain: bool
    demand: float = 0.0  # part of the GPU that the program keeps busy: time at saturation ÷ time alone; 0: not measured
    together: int = 0  # number of instances that ran at once for `demand`
    partition_ns: float = 0.0  # the whole program inside one SM partition; 0: it cannot be confined
    shares: bool = False  # whether the segments' `compute` and `memory` were measured
    # For each segment: how many bytes, from the start of the weights, it and the segments before it need. Not stored:
    # the number depends on where this model has its weights.
    needs: tuple[int, ...] = ()

    def with_needs(self, needs: Sequence[int]) -> ProgramProfile:
        return replace(self, needs=tuple(needs))

    @property
    def slowdown_in_partition(self) -> float:
        """Time inside an SM partition ÷ time on the whole GPU; infinite if the program cannot be confined."""
        return self.partition_ns / self.whole_ns if self.partition_ns > 0.0 else math.inf

    @property
    def segmented_ns(self) -> float:
        """Time of all segments, one after the other."""
        return sum(s.time_ns for s in self.segments)

    def tail_ns(self, done: int) -> float:
        """Remaining time after `done` segments."""
        return sum(s.time_ns for s in self.segments[done:])


def segment_profile(nodes: Sequence[Node], waves: Sequence[int], time_ns: float, limits: SmLimits) -> SegmentProfile:
    """The resources on the SMs of a segment's largest kernel; a segment of copies counts as the smallest kernel."""
    time_ns = max(time_ns, 1.0)
    kernels = [(node, min(node.blocks, wave)) for node, wave in zip(nodes, waves, strict=True) if node.kind == "kernel"]
    if not kernels:
        return SegmentProfile(time_ns, blocks=1, warps=1, registers=0)
    node, resident = max(kernels, key=lambda pair: pair[0].threads * pair[1])
    each = footprint(limits, node.threads, node.registers, node.shared_bytes)
    return SegmentProfile(
        time_ns, resident, resident * each.warps, resident * each.registers, resident * each.shared_bytes, len(kernels)
    )


def model_profile(model: Model, programs: Sequence[ProgramProfile], instances: int, queue_limit: int) -> ModelProfile:
    """The facts about a loaded model that the core and simulations need."""
    return ModelProfile(
        model.name,
        {each.batch: each.segments for each in programs},
        target_ms=model.target_ms,
        priority=model.priority,
        share=model.share,
        instances=instances,
        queue_limit=queue_limit,
        demand={each.batch: each.demand for each in programs if each.demand},
        together={each.batch: each.together for each in programs if each.together},
        input_bytes=sum(spec.nbytes for spec in model.inputs.values()),
        params=model.params,
        resident=model.resident,
        weight_bytes=model.weights_bytes,
        needs={each.batch: each.needs for each in programs if each.needs},
        length_of="" if model.lengths is None else model.base or model.name,
    )


def key(content: str, fingerprint: str, quantum_ns: float) -> str:
    """The key of a stored profile: the program, the GPU with its driver, our versions, and the quantum."""
    return cache.digest(
        "program profile", _FORMAT, content, fingerprint, json.dumps(versions(), sort_keys=True), repr(quantum_ns)
    )


def store(where: str, profile: ProgramProfile) -> None:
    cache.write(where, json.dumps(asdict(profile)).encode())


def load(where: str) -> ProgramProfile | None:
    """A stored profile; None if there is none or it cannot be read."""
    data = cache.read(where)
    if data is None:
        return None
    try:
        found = json.loads(data)
        found |= {
            "bounds": tuple((int(a), int(b)) for a, b in found["bounds"]),
            "segments": tuple(SegmentProfile(**s) for s in found["segments"]),
            "cuts": {int(k): tuple((int(a), int(b)) for a, b in parts) for k, parts in found["cuts"].items()},
            "needs": (),
        }
        return ProgramProfile(**found)
    except (ValueError, KeyError, TypeError):
        return None
