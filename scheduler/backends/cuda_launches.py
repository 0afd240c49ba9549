"""Launches on a real GPU: executable graphs of a program's segments, made, launched once beforehand, and destroyed."""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Iterable

from paellapy.instrument.device.driver import driver
from paellapy.scheduler.backends.cuda_graphs import (
    SegmentGraph,
    ended_graph,
    instantiate,
    launch_once,
    segment_graph,
    segment_graphs,
)
from paellapy.scheduler.backends.cuda_windows import CudaWindows
from paellapy.scheduler.backends.launches import Bounds, Launches
from paellapy.scheduler.models.lane_memory import Lane
from paellapy.scheduler.models.program import Program


def cut(program: Program, bounds: Bounds, lane: Lane, sm_windows: CudaWindows | None) -> Launches:
    """Makes the segments launchable, on all SMs and inside the lane's windows if windows are given."""
    words = int(lane.words.ctypes.data)
    windows = lane.windows if sm_windows is not None else ()
    made: list[list[int]] = []  # for each segment and the whole program: on all SMs, then in each window
    try:
        with contextlib.closing(_graphs(program, bounds, words, lane.plan.n_words, bool(windows))) as graphs:
            for graph in graphs:
                made.append([instantiate(graph.handle)])
                if windows:
                    assert sm_windows is not None
                    # Inside the window if more of the program follows; outside if this is the whole program.
                    inside = len(graph.nodes) < len(program.nodes)
                    made[-1] += sm_windows.confined(graph, windows, end_inside=inside)
    except BaseException:
        _destroy(handle for each in made for handle in each)
        raise
    if len(made[-1]) == 1:  # the whole program cannot be confined, so its segments are not either
        _destroy(handle for each in made for handle in each[1:])
        made = [each[:1] for each in made]
    *handles, whole = (each[0] for each in made)
    # A segment without kernels that can be confined is launched on all SMs.
    confined = [
        ([each[1 + k] if len(each) > 1 else 0 for each in made[:-1]], made[-1][1 + k])
        for k in range(len(made[-1]) - 1)
    ]
    return Launches(program, bounds, handles, whole, [lane], frozenset(program.marks.values()), confined)


def _graphs(
    program: Program, bounds: Bounds, words: int, n_words: int, changed: bool
) -> Generator[SegmentGraph, None, None]:
    """Graphs of the segments and of the whole program, each with the address of its completion word.

    `changed`: the caller may change their nodes. Otherwise the whole program needs no clone, if the graph is ours.
    """
    yield from segment_graphs(program.body, bounds, [words + 8 * k for k in range(len(bounds))])
    last = words + 8 * (n_words - 1)
    if changed or program.body.owner is not None:
        with segment_graph(program.body, 0, len(program.nodes), last) as whole:
            yield whole
    else:
        with ended_graph(program.body, last) as whole:
            yield whole


def launch_first(launches: Launches, wholes: bool, stream: int, wait: bool) -> None:
    """Launches every segment once, and the whole program if `wholes`; waits for the end of each launch if `wait`."""
    for handles, whole in ((launches.handles, launches.whole), *launches.confined):
        # In order, as in service: a kernel may need results of a segment that cannot be confined.
        launch_once((own or wide for own, wide in zip(handles, launches.handles, strict=True)), stream, wait)
        if wholes:
            launch_once([whole], stream, wait)


def release(launches: Launches) -> None:
    for handles, whole in ((launches.handles, launches.whole), *launches.confined):
        _destroy(handle for handle in (*handles, whole) if handle)
    launches.keep.clear()
    launches.handles.clear()
    launches.confined.clear()
    launches.whole = 0


def _destroy(executables: Iterable[int]) -> None:
    for each in executables:
        driver().cuGraphExecDestroy(each)
