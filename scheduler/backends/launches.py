"""Programs ready to be launched: their handles, their loaded model, and the entries for the core's tables."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from paellapy.scheduler.core.codes import CHOICES
from paellapy.scheduler.core.state import State
from paellapy.scheduler.models.lane_memory import Lane, Reservation
from paellapy.scheduler.models.model import Model
from paellapy.scheduler.models.profile import ProgramProfile
from paellapy.scheduler.models.program import Program
from paellapy.scheduler.models.tensors import Arrays
from paellapy.scheduler.models.weight_range import WeightRange
from paellapy.scheduler.models.weight_steps import Steps

Bounds = Sequence[tuple[int, int]]  # segments as (first node, past the last)


@dataclass(slots=True)
class Launches:
    """One program ready to be launched: each segment, and the whole. `handles` are meaningful to the backend only."""

    program: Program
    bounds: Bounds
    handles: list[int]
    whole: int
    keep: list[Any] = field(default_factory=list)
    notified: frozenset[int] = frozenset()  # segments that report when all blocks of their last kernel are on the SMs
    # the same launches in each of the lane's windows
    confined: list[tuple[list[int], int]] = field(default_factory=list)


@dataclass(slots=True)
class LoadedModel:
    """A model with its memory and launches, as the engine keeps it."""

    model: Model
    weights: Arrays
    reservation: Reservation
    lanes: list[Lane]
    profiles: list[ProgramProfile]  # one per captured batch size, ascending
    launches: list[list[Launches]] = field(default_factory=list)  # [lane][captured batch size]
    row: int = -1
    generation: int = 0  # generation of the row
    lane_of: dict[int, Lane] = field(default_factory=dict)  # lanes by their numbers in the core
    load_s: dict[str, float] = field(default_factory=dict)  # seconds spent loading it, by phase
    range: WeightRange | None = None  # of weights that come and go
    # by batch size: lower bounds, where `needs` has upper bounds
    least_needs: list[list[tuple[int, ...]]] = field(default_factory=list)
    steps: dict[int, Steps] = field(default_factory=dict)  # by batch size whose needs were tried out
    later: dict[int, str] = field(default_factory=dict)  # batch sizes not captured yet; the error of a failed capture
    spare: Lane | None = None  # memory to capture and measure these sizes in, because the lanes are in service
    stays: bool = False  # the model changes its weights, so they cannot leave the GPU

    @property
    def lane_rows(self) -> list[int]:
        return list(self.lane_of)


def write_handles(state: State, row: int, size: int, launches: Launches) -> None:
    """Writes the handles that the core launches. They are aligned words, each read at the next launch: they may change
    while a lane runs, if both variants use the same buffers and completion words.
    """
    for k, handle in enumerate(launches.handles):
        state.launch["handle"][row, size, k] = handle
    state.whole["handle"][row, size] = launches.whole
    none = [([0] * len(launches.handles), 0)] * (CHOICES - len(launches.confined))
    for choice, (handles, whole) in enumerate([*launches.confined, *none]):
        for k, handle in enumerate(handles):
            state.confined[row, size, k, choice] = handle
        state.confined[row, size, -1, choice] = whole
