"""Turns as a model of the core: its only segment signals that a turn is granted, and no work on the GPU ends it."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Protocol

import numpy as np

from paellapy.scheduler.backends.base import Backend
from paellapy.scheduler.backends.launches import Launches, LoadedModel
from paellapy.scheduler.core.profiles import SegmentProfile
from paellapy.scheduler.core.state import State
from paellapy.scheduler.models.lane_memory import Lane, MemoryPlan, plan_lane
from paellapy.scheduler.models.model import Model
from paellapy.scheduler.models.profile import ProgramProfile
from paellapy.scheduler.models.program import Program
from paellapy.scheduler.models.tensors import Arrays, TensorSpec

_USUAL_NS = 1e6  # assumed duration of a turn until one has been measured


class Host(Protocol):
    """The parts of the engine that turns use."""

    state: State
    memory: MemoryPlan

    @property
    def backend(self) -> Backend: ...
    def open_turns(self, loaded: LoadedModel) -> None: ...
    def outside(self, whose: str) -> AbstractContextManager[None]: ...
    def count_outside(self) -> None: ...


def _never(weights: Arrays, inputs: Arrays, outputs: Arrays) -> None:
    raise AssertionError("the core never runs the code of a turn; its owner does")


def load_turns(host: Host, name: str, priority: int, share: float) -> LoadedModel:
    """Loads a model whose only segment signals that a turn is granted; no work on the GPU ends it."""
    nothing = {"nothing": TensorSpec((1,), np.uint8)}
    model = Model(name, _never, inputs=nothing, outputs=nothing, batch=(1,), lanes=1, priority=priority, share=share)
    plan = plan_lane(model, 0, 1)
    reservation = host.memory.reserve(name, 0, plan.device_bytes, 1)
    lane = Lane(0, model, plan, host.backend.lane_memory(plan))
    handle = host.backend.grant(int(lane.draining.ctypes.data))
    segment = SegmentProfile(_USUAL_NS, blocks=1, warps=1, registers=0)
    profile = ProgramProfile(1, ((0, 1),), (segment,), _USUAL_NS, {}, True)
    launches = Launches(Program(model, 0, 1, [], True, None), ((0, 1),), [handle], 0, [lane])
    loaded = LoadedModel(model, {}, reservation, [lane], [profile], [[launches]])
    host.open_turns(loaded)
    row = loaded.lane_rows[0]
    host.state.whole["handle"][row, 0] = handle  # the program has one segment, so the whole program is the same launch
    host.state.whole["word"][row, 0] = host.state.launch["word"][row, 0, 0]
    return loaded
