"""Blocks of an engine's trace on a real GPU: the lanes' graphs are captured again, with kernels that record."""

from __future__ import annotations

from collections.abc import Callable

from paellapy.instrument.device.cuda import CudaDevice
from paellapy.instrument.traces.tracing import Session, trace
from paellapy.scheduler.backends.base import Backend
from paellapy.scheduler.backends.launches import Launches, LoadedModel, write_handles
from paellapy.scheduler.backends.recorded import TracedBlocks, TracedPiece
from paellapy.scheduler.core import codes
from paellapy.scheduler.core.state import State
from paellapy.scheduler.models.lane_memory import Lane
from paellapy.scheduler.models.profile import ProgramProfile
from paellapy.scheduler.models.program import Cuts, Program
from paellapy.scheduler.models.tensors import Arrays

# also returns the trace ids of the nodes
CaptureTraced = Callable[[Lane, Arrays, int, Cuts], tuple[Program, list[int]]]


class CudaTrace:
    """Every lane's graphs, captured again with kernels that record. They replace the others while the trace runs.

    Lanes are in service, so these graphs cannot be launched beforehand: the first launch of each in a trace takes
    longer.
    """

    def __init__(
        self,
        backend: Backend,
        capture_traced: CaptureTraced,
        state: State,
        records_per_sm: int,
        models: list[LoadedModel],
    ) -> None:
        self._backend, self._capture_traced, self._state = backend, capture_traced, state
        self._inner = trace(records_per_sm, backend.device)
        self._result = self._inner.__enter__()
        self._pieces: list[TracedPiece] = []
        self._traced: list[Launches] = []
        self._plain: list[tuple[int, int, Launches]] = []
        try:
            for loaded in models:
                for lane, row, sizes in zip(loaded.lanes, loaded.lane_rows, loaded.launches, strict=True):
                    for profile, launches in zip(loaded.profiles, sizes, strict=True):
                        self._swap_in(loaded, lane, row, profile, launches)
        except BaseException:
            self._swap_out({row for loaded in models for row in loaded.lane_rows})
            self._inner.__exit__(None)
            self._release()
            raise

    def _swap_in(self, loaded: LoadedModel, lane: Lane, row: int, profile: ProgramProfile, plain: Launches) -> None:
        backend, size = self._backend, loaded.model.batch.index(profile.batch)
        program, ids = self._capture_traced(lane, loaded.weights, profile.batch, profile.cuts)
        # First of all the pieces: their events are forgotten with them, also where a graph cannot be made.
        for k, (first, end) in [*enumerate(plain.bounds), (codes.WHOLE, (0, len(ids)))]:
            launches = tuple(i for i in ids[first:end] if i)
            self._pieces.append(TracedPiece(row, size, k, launches, replayed=True))
        try:
            traced = backend.cut(program, plain.bounds, lane, confine=bool(plain.confined))
        finally:
            backend.discard(program)
        self._traced.append(traced)
        self._plain.append((row, size, plain))
        write_handles(self._state, row, size, traced)

    def _swap_out(self, rows: set[int]) -> None:
        """Restores the original graphs. `rows`: lanes that still exist."""
        for row, size, plain in self._plain:
            if row in rows:
                write_handles(self._state, row, size, plain)

    def _release(self) -> None:
        for launches in self._traced:
            self._backend.release(launches)
        replayed = {launch for piece in self._pieces for launch in piece.launches}
        Session.forget(replayed)
        if isinstance(self._backend.device, CudaDevice):
            self._backend.device.forget_events(replayed)

    def finish(self, rows: set[int]) -> TracedBlocks:
        self._swap_out(rows)
        # Leaving waits for the GPU, so no recording kernel is in flight afterwards.
        self._inner.__exit__(None)
        self._release()
        t = self._result
        return TracedBlocks(t.blocks.copy(), t.launches.copy(), t.kernels, self._pieces, t.dropped, t.unfinished,
                            t.ranges, t.count_work)  # fmt: skip
