"""Simulated time with the models' own kernels: every block of a simulation on its SM, as in an engine's trace."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from paellapy.instrument.device.parts import Part
from paellapy.instrument.device.sm_program import Program
from paellapy.instrument.device.virtual import VirtualDevice
from paellapy.instrument.records import BLOCK, LAUNCH
from paellapy.instrument.traces.trace import DeviceFacts
from paellapy.instrument.versions import versions
from paellapy.scheduler.backends.virtual import VirtualBackend
from paellapy.scheduler.backends.virtual_pieces import Piece, PieceTracer
from paellapy.scheduler.core import codes
from paellapy.scheduler.core import state as st
from paellapy.scheduler.core.profiles import ModelProfile
from paellapy.scheduler.engine.engine import Engine
from paellapy.scheduler.engine.trace import EngineTrace
from paellapy.scheduler.engine.tracing import TracedEngine, fill_engine_trace
from paellapy.scheduler.sim import fluid_state as fluid
from paellapy.scheduler.sim.blocks import BlocksGpu


@dataclass(frozen=True, slots=True, eq=False)
class OwnKernels:
    """The kernels of loaded models, for a simulation of their profiles in the same order."""

    device: VirtualDevice
    pieces: dict[tuple[int, int, int], Piece]  # by model, size, and segment or WHOLE

    @classmethod
    def of(cls, engine: Engine, names: Sequence[str]) -> OwnKernels:
        backend = engine._backend
        assert isinstance(backend, VirtualBackend)
        loaded = {each.model.name: each for each in engine.loaded_rows().values()}
        pieces = {}
        for m, name in enumerate(names):
            for k, launches in enumerate(loaded[name].launches[0]):  # as in `engine.model_profile`
                for i, handle in [*enumerate(launches.handles), (codes.WHOLE, launches.whole)]:
                    pieces[m, k, i] = _copied(backend.launches.pieces[handle])
        return cls(backend.device, pieces)


def _copied(piece: Piece) -> Piece:
    """A copy for another SM model: a program stores where its costs are in the tables of one model."""
    return Piece(
        piece.items,
        [replace(s, commands=s.commands.copy(), epoch=-1) if isinstance(s, Program) else s for s in piece.steps],
    )


class TracedGpu(BlocksGpu):
    """The SM model in a simulation that launches the models' own kernels and records every block."""

    def __init__(
        self,
        part: Part,
        models: Sequence[ModelProfile],
        f: fluid.Fluid,
        state: st.State,
        seed: int,
        own: OwnKernels,
    ) -> None:
        super().__init__(part, (), f, state, seed)
        self._own, self._models = own, models
        self._tracer = PieceTracer(own.device)
        self._entries: list[Any] = []

    def _start(self, lane: int, out: Any) -> int:
        piece = self._own.pieces[int(self.s.lane["model"][lane]), int(out["size"]), int(out["segment"])]
        now = self.sim.now_ns
        order = (lane, int(out["size"]), int(out["segment"]))
        first_id = self._tracer.note(order, piece, int(now), self.stream_of(lane))
        return piece.place(self.sim, self.stream_of(lane), now, first_id).last

    def _ended(self, entry: Any) -> None:
        self._entries.append(entry.copy())

    def trace(self, policy: str) -> EngineTrace:
        """The trace of the run, once `run` is done."""
        device = self._own.device
        facts = DeviceFacts(device.title, device.sm_ids, device.limits.warps, device.capability, versions())
        found = EngineTrace(np.zeros(0, BLOCK), np.zeros(0, LAUNCH), (), facts)
        recorded = self._tracer.finish(self.sim.blocks())
        models = dict(enumerate(self._models))
        lanes = {lane: int(row) for lane, row in enumerate(self.s.lane["model"]) if row != codes.NONE}
        whole = bool(self.s.core["whole_always"][0])
        simulation = TracedEngine(models, lanes, int, policy, whole, simulated=True)
        fill_engine_trace(found, recorded, self._entries, simulation)
        return found
