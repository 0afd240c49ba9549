"""Launches on the virtual GPU: pieces of recorded programs, and grants of turns, by handle."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

from paellapy.instrument.device.sm_model import SmModel
from paellapy.instrument.device.sm_program import Kernel
from paellapy.scheduler.backends.launches import Bounds, Launches
from paellapy.scheduler.backends.virtual_costs import ProgramCosts
from paellapy.scheduler.backends.virtual_pieces import Piece, Step
from paellapy.scheduler.models.lane_memory import Lane
from paellapy.scheduler.models.program import Program


class VirtualLaunches:
    def __init__(self, sm: SmModel, costs: ProgramCosts) -> None:
        self._sm, self._costs = sm, costs
        self._programs: dict[tuple[str, int, int, int], list[Step]] = {}
        self._next = 1
        self.pieces: dict[int, Piece] = {}
        self.grants: dict[int, ctypes.c_uint64] = {}
        self.lanes: dict[int, Lane] = {}  # the lane of each piece

    def cut(self, program: Program, bounds: Bounds, lane: Lane, windows: Sequence[int]) -> Launches:
        """Makes the segments launchable, on all SMs and in each of these windows of the SM model."""
        (handles, whole), *confined = (self._made(program, bounds, window, lane) for window in (0, *windows))
        return Launches(program, bounds, handles, whole, [], frozenset(program.marks.values()), confined)

    def _made(self, program: Program, bounds: Bounds, window: int, lane: Lane) -> tuple[list[int], int]:
        handles = [self._piece(program, first, end, window, lane) for first, end in bounds]
        return handles, handles[0] if len(bounds) == 1 else self._piece(program, 0, len(program.nodes), window, lane)

    def _piece(self, program: Program, first: int, end: int, window: int, lane: Lane) -> int:
        if window and not any(node.kind == "kernel" for node in program.nodes[first:end]):
            return 0  # no kernel can be confined
        key = (program.content(), first, end, window)
        if key not in self._programs:
            self._programs[key] = self.steps(program, first, end, window)
        handle, self._next = self._next, self._next + 1
        self.pieces[handle] = Piece(program.body[first:end], self._programs[key])
        self.lanes[handle] = lane
        return handle

    def steps(self, program: Program, first: int, end: int, window: int) -> list[Step]:
        """The SM model's programs and copies for the nodes from `first` to before `end`."""
        steps: list[Step] = []
        kernels: list[Kernel] = []
        costs = self._costs.of(program)
        for item, cost in zip(program.body[first:end], costs[first:end], strict=True):
            node = item.node
            if cost is not None:
                kernels.append(
                    Kernel(node.blocks, node.threads, node.registers, node.shared_bytes, cost=cost,
                           cluster=node.cluster, first=item.first * node.cluster)
                )  # fmt: skip
                continue
            if kernels:
                steps.append(self._sm.program(kernels, window))
                kernels = []
            steps.append((node.kind, node.nbytes))
        if kernels:
            steps.append(self._sm.program(kernels, window))
        return steps

    def grant(self, word: int) -> int:
        """A handle whose launch only writes 1 to the word at an address."""
        handle, self._next = self._next, self._next + 1
        self.grants[handle] = ctypes.c_uint64.from_address(word)
        return handle

    def release(self, launches: Launches) -> None:
        for handles, whole in ((launches.handles, launches.whole), *launches.confined):
            for handle in (*handles, whole):
                self.pieces.pop(handle, None)
                self.grants.pop(handle, None)
                self.lanes.pop(handle, None)
