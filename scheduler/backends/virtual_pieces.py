"""Pieces of recorded programs on the virtual GPU: computation, commands for the SM model, and traces."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from paellapy.instrument.device.sm_model import SmModel
from paellapy.instrument.device.sm_program import Placed
from paellapy.instrument.device.sm_program import Program as SmProgram
from paellapy.instrument.device.virtual import VirtualDevice
from paellapy.instrument.records import Records
from paellapy.instrument.traces.tracing import Session
from paellapy.scheduler.backends.recorded import TracedBlocks, TracedPiece
from paellapy.scheduler.models.recording import Recorded

Step = SmProgram | tuple[str, int]  # kernels, or the kind and bytes of a copy

_PREPARE_AFTER = 3  # runs, after which the evaluator has recorded as much as it can


class Handles(NamedTuple):
    """Handles in the SM model: of a piece's last command, and of its last kernel (-1: it has none)."""

    last: int
    kernel: int


class Piece:
    """A run of recorded items that is launched at once: its computation, and its commands for the SM model."""

    def __init__(self, items: Sequence[Recorded], steps: Sequence[Step]) -> None:
        self.items, self.steps = items, steps
        self.kernels = [item for item in items if item.node.kind == "kernel"]
        self._runs = 0
        self._prepared: list[Callable[[], Any]] = []
        self._placed: Placed | None = None
        self._commands = sum(len(step.commands) if isinstance(step, SmProgram) else 1 for step in steps)
        self._behind_kernel = 0

    def run(self) -> None:
        """Computes the data, with floating-point warnings off.

        The arrays belong to the lane and do not change, so preparations are made only once.
        """
        if self._runs < _PREPARE_AFTER:
            for item in self.items:
                item.run()
            self._runs += 1  # counted at the end: a run that fails has not recorded everything
            if self._runs == _PREPARE_AFTER:
                self._prepared = [call for item in self.items if (call := item.prepare()) is not None]
            return
        for call in self._prepared:
            call()

    def place_again(self, model: SmModel, stream: int, submit_ns: float) -> Handles:
        """As `place`, without a trace: from the second time on, it submits a copy of the first submission."""
        if self._placed is not None and (last := model.again(self._placed, stream, submit_ns)) >= 0:
            return Handles(last, last - self._behind_kernel)
        made = self.place(model, stream, submit_ns)
        self._behind_kernel = made.last - made.kernel
        self._placed = model.placed(made.last - self._commands + 1, made.last)
        return made

    def place(self, model: SmModel, stream: int, submit_ns: float, first_id: int = 0) -> Handles:
        """Puts the piece on a stream. `first_id` 0 leaves no trace."""
        last = kernel = -1
        launch = first_id
        for n, step in enumerate(self.steps):
            if isinstance(step, SmProgram):
                last = model.launch_program(stream, step, launch_id=launch, trace=first_id > 0, submit_ns=submit_ns)
                launch += len(step.commands)
                kernel = last
            else:
                kind, nbytes = step
                ends = n == len(self.steps) - 1
                last = model.copy(stream, nbytes, kind, report=ends, submit_ns=submit_ns)  # type: ignore[arg-type]
        return Handles(last, kernel)


class PieceTracer:
    """Launch ids of the work during a trace. The SM model keeps every block, even more than a ring would hold."""

    def __init__(self, device: VirtualDevice) -> None:
        self.session = Session(device)
        self.pieces: list[TracedPiece] = []

    def note(self, order: tuple[int, int, int], piece: Piece, submit_ns: int, stream: int) -> int:
        """Ids for one launch of a piece; returns the first of them."""
        ids = self.session.reserve(max(1, len(piece.kernels)))
        for launch, item in zip(ids, piece.kernels, strict=False):
            node = item.node
            gx, gy, gz = item.grid
            warps = -(-node.threads // 32)
            self.session.note(
                node.name,
                (int(launch), 0, warps, node.registers, 0, node.shared_bytes, (gx * node.cluster, gy, gz),
                 item.first * node.cluster, node.blocks, submit_ns, stream),
            )  # fmt: skip
        lane, size, segment = order
        self.pieces.append(TracedPiece(lane, size, segment, tuple(int(i) for i in ids), replayed=False))
        return int(ids[0])

    def finish(self, blocks: Records) -> TracedBlocks:
        launches, kernels = self.session.launches()
        number = dict(zip(launches["launch"].tolist(), launches["kernel"].tolist(), strict=True))
        blocks = blocks[np.isin(blocks["launch"], launches["launch"])]
        blocks["kernel"] = [number[launch] for launch in blocks["launch"].tolist()]
        return TracedBlocks(blocks, launches, kernels, self.pieces)
