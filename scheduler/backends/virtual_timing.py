"""Times on the virtual GPU: of nodes, of segments, and of programs that run at once, each on an SM model of its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from paellapy.instrument.device.sm_costs import BlockCost
from paellapy.instrument.device.sm_model import SmModel
from paellapy.instrument.device.sm_program import Kernel
from paellapy.scheduler.backends.launches import Launches
from paellapy.scheduler.backends.virtual_pieces import Piece, Step
from paellapy.scheduler.models.program import Program

StepsOf = Callable[[Program, int, int, int], list[Step]]  # of a program's nodes from one to before another, in a window


def node_times_ns(model: SmModel, program: Program, costs: Sequence[BlockCost | None]) -> list[float]:
    """The time of each node, when nodes run one after the other."""
    stream, graph = model.stream(), model.graph()
    handles = []
    for item, cost in zip(program.body, costs, strict=True):
        node = item.node
        if cost is None:
            handles.append(model.copy(stream, node.nbytes, node.kind))
        else:
            takes = (node.blocks, node.threads, node.registers, node.shared_bytes)
            kernel = Kernel(*takes, cost=cost, cluster=node.cluster)
            handles.append(model.launch(stream, kernel, graph=graph, trace=False))
    model.run()
    ends = np.array([model.start_ns(handles[0]), *(model.finish_ns(h) for h in handles)])
    return [float(t) for t in np.diff(ends)]


def segment_times_ns(
    model: SmModel, launches: Launches, steps: StepsOf, window: int
) -> tuple[list[float], float, float]:
    """The time of each segment, of the whole program, and of the whole program inside a window (0: not confined)."""
    times = []
    whole = (0, len(launches.program.nodes))
    confined = [(*whole, window)] if window else []
    for first, end, number in [*((a, b, 0) for a, b in (*launches.bounds, whole)), *confined]:
        piece = Piece(launches.program.body[first:end], steps(launches.program, first, end, number))
        stream = model.stream()
        before = piece.place(model, stream, model.now_ns).last
        last = piece.place(model, stream, model.now_ns).last
        model.run()
        # Queued behind another launch, as in a busy engine: the gap between two launches is included.
        times.append(model.finish_ns(last) - model.finish_ns(before))
    n = len(launches.bounds)
    return times[:n], times[n], times[n + 1] if confined else 0.0


def saturated_ns(model: SmModel, lanes: Sequence[Launches], rounds: int, steps: StepsOf) -> float:
    """Time per run when all lanes launch their whole programs repeatedly and at once, each on all SMs."""
    program = lanes[0].program
    piece = Piece(program.body, steps(program, 0, len(program.nodes), 0))
    streams = [model.stream() for _ in lanes]
    for _ in range(rounds):
        for stream in streams:
            piece.place(model, stream, 0.0)
    model.run()
    return float(model.now_ns) / (rounds * len(lanes))
