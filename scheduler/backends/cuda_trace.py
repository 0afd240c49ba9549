"""Blocks of an engine's trace on a real GPU: the lanes' graphs captured once more, from kernels that record."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paellapy.instrument.tracing import trace
from paellapy.scheduler.backends.base import Launches
from paellapy.scheduler.core import codes
from paellapy.scheduler.engine.install import write_handles
from paellapy.scheduler.engine.loader import LoadedModel
from paellapy.scheduler.engine.trace import TracedBlocks, TracedPiece
from paellapy.scheduler.models.lane_memory import Lane

if TYPE_CHECKING:
    from paellapy.scheduler.backends.cuda import CudaBackend


class CudaTrace:
    """Every lane's graphs captured once more, from kernels that record; in place of the others while the trace runs.

    Lanes are in service, so these cannot be launched beforehand: in a trace the first launch of each takes longer.
    """

    def __init__(self, backend: CudaBackend, records_per_sm: int, models: list[LoadedModel]) -> None:
        self._backend = backend
        self._inner = trace(records_per_sm, backend.device)
        self._result = self._inner.__enter__()
        self._pieces: list[TracedPiece] = []
        self._traced: list[Launches] = []
        self._plain: list[tuple[int, int, Launches]] = []
        try:
            for loaded in models:
                for lane, row, sizes in zip(loaded.lanes, loaded.lane_rows, loaded.launches, strict=True):
                    for size, launches in enumerate(sizes):
                        self._swap_in(loaded, lane, row, size, launches)
        except BaseException:
            self._swap_out({row for loaded in models for row in loaded.lane_rows})
            self._inner.__exit__(None)
            self._release()
            raise

    def _swap_in(self, loaded: LoadedModel, lane: Lane, row: int, size: int, plain: Launches) -> None:
        backend = self._backend
        cuts = loaded.profiles[size].cuts
        program, ids = backend.capture_traced(lane, loaded.weights, loaded.model.batch[size], cuts)
        try:
            traced = backend.cut(program, plain.bounds, lane, confine=bool(plain.confined))
        finally:
            backend.discard(program)
        self._traced.append(traced)
        self._plain.append((row, size, plain))
        write_handles(backend._state, row, size, traced)
        for k, (first, end) in [*enumerate(plain.bounds), (codes.WHOLE, (0, len(ids)))]:
            launches = tuple(i for i in ids[first:end] if i)
            self._pieces.append(TracedPiece(row, size, k, launches, replayed=True))

    def _swap_out(self, rows: set[int]) -> None:
        """`rows`: lanes that are still there."""
        for row, size, plain in self._plain:
            if row in rows:
                write_handles(self._backend._state, row, size, plain)

    def _release(self) -> None:
        for launches in self._traced:
            self._backend.release(launches)

    def finish(self, rows: set[int]) -> TracedBlocks:
        self._swap_out(rows)
        # Leaving waits for the GPU, so nothing that records is in flight afterwards.
        self._inner.__exit__(None)
        self._release()
        t = self._result
        return TracedBlocks(t.blocks.copy(), t.launches.copy(), t.kernels, self._pieces, t.dropped, t.unfinished)
