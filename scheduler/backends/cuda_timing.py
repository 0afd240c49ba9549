"""Times on a real GPU: of a graph's nodes, of a program's segments, and of programs that run at once."""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paellapy.instrument.device.driver import check, driver
from paellapy.scheduler.backends.base import Launches
from paellapy.scheduler.backends.cuda_graphs import CapturedGraph, add_edges, clones_of, handles_of, instantiate

_RUNS = 3  # runs before the spread is checked, where nothing else runs on the GPU
_RUNS_BESIDE = 5  # the same, beside other work
_NODE_RUNS, _MOST_NODE_RUNS = 2, 6  # runs of a graph with an event between all nodes, before and after the check
_SPREAD = 0.02  # largest spread of agreeing runs, relative to the median
_LEAST_NS = 100.0  # lower bound for the time of a node; event clocks are coarser than this
_STRAY = 4.0  # cap on the time of a copy, as a multiple of the median, in case it was delayed
_CROWDED_RUNS = 3
_GATED_NODES = 128  # most nodes queued behind a closed gate: the driver's queues hold about a thousand


def node_times_ns(graph: CapturedGraph, kernels: Sequence[bool], stream: int) -> list[float]:
    """The time of each node when nodes run one after the other, measured by events between them in a clone.

    `kernels` tells which nodes are kernels. The cost of the events is the difference to a run without them, and is
    subtracted.
    """
    cu = driver()
    n = len(graph.nodes)
    clone = check(cu.cuGraphClone(graph.handle), "cloning a graph")
    events = [check(cu.cuEventCreate(0), "creating an event") for _ in range(n + 1)]
    executables = []
    try:
        found = clones_of(graph.handle, clone, handles_of(graph))
        nodes = [cu.CUgraphNode(found[k]) for k in range(n)]
        plain = instantiate(clone)
        executables.append(plain)
        records = []
        for i, event in enumerate(events):
            before = [nodes[i - 1]] if i else []
            records.append(check(cu.cuGraphAddEventRecordNode(clone, before, len(before), event), "adding an event"))
        add_edges(cu, clone, records[:n], nodes)
        timed = instantiate(clone)
        executables.append(timed)
        runs: list[list[float]] = []
        while len(runs) <= _MOST_NODE_RUNS:
            check(cu.cuGraphLaunch(timed, stream), "timing a graph")
            check(cu.cuStreamSynchronize(stream), "timing a graph")
            runs.append([_elapsed_ns(cu, a, b) for a, b in pairwise(events)])
            if len(runs) > _NODE_RUNS and settled([sum(run) for run in runs[1:]]):
                break
        times = np.min(runs[1:], axis=0)  # work of other processes can only lengthen a measured time
        whole_ns = float(settled_times_ns([plain], _MOST_NODE_RUNS, stream, None).min())
    finally:
        for executable in executables:
            cu.cuGraphExecDestroy(executable)
        for event in events:
            cu.cuEventDestroy(event)
        check(cu.cuGraphDestroy(clone), "freeing a graph")
    return without_events(times, kernels, whole_ns)


def without_events(times_ns: NDArray[np.float64], kernels: Sequence[bool], whole_ns: float) -> list[float]:
    """Times between events without the cost of the events, which is the excess of their sum over a run without events.

    Beside other processes, a copy may be late in every run and inflate that excess. So at most a few times the median
    of a copy counts. If an event then costs more than some kernel took, the nodes share the time of the whole program
    in proportion to their measured times.

    >>> without_events(np.array([4_000.0, 12_000.0, 6_000.0]), [True, True, False], 16_000.0)
    [2000.0, 10000.0, 4000.0]
    """
    usual = np.where(kernels, times_ns, np.minimum(times_ns, _STRAY * np.median(times_ns)))
    spread = max(0.0, (float(usual.sum()) - whole_ns) / len(usual))
    if spread < min((t for t, kernel in zip(times_ns, kernels, strict=True) if kernel), default=np.inf):
        found = np.minimum(times_ns - spread, whole_ns)
    else:
        found = usual * whole_ns / usual.sum()
    return [float(t) for t in np.maximum(found, _LEAST_NS)]


def _elapsed_ns(cu: Any, start: Any, end: Any) -> float:
    return float(check(cu.cuEventElapsedTime(start, end), "reading events")) * 1e6


def launch_times_ns(runs: Sequence[Sequence[int]], stream: int, gate: Gate | None) -> list[list[float]]:
    """GPU time of each graph of each run, launched one behind the other.

    The host's launch rate must not be measured. With a gate, a run is queued completely before its first graph starts.
    This is for short runs only, since a queue that fills up while nothing runs would block the host for ever. Without a
    gate, the first graph is launched once more in front, and the host gets ahead while it runs.
    """
    cu = driver()
    longest = max(len(run) for run in runs)
    events = [check(cu.cuEventCreate(0), "creating an event") for _ in range(longest + 1)]
    found = []
    try:
        for run in runs:
            if gate is not None:
                gate.close(stream)
            else:
                check(cu.cuGraphLaunch(run[0], stream), "timing a graph")
            try:
                check(cu.cuEventRecord(events[0], stream), "recording an event")
                for executable, event in zip(run, events[1:], strict=False):
                    check(cu.cuGraphLaunch(executable, stream), "timing a graph")
                    check(cu.cuEventRecord(event, stream), "recording an event")
            finally:
                if gate is not None:
                    gate.open()
            check(cu.cuStreamSynchronize(stream), "timing a graph")
            found.append([_elapsed_ns(cu, a, b) for a, b in pairwise(events[: len(run) + 1])])
    finally:
        for event in events:
            cu.cuEventDestroy(event)
    return found


def settled_times_ns(
    run: Sequence[int], most: int, stream: int, gate: Gate | None, least: int = _RUNS
) -> NDArray[np.float64]:
    """GPU times of the graphs of a run [runs, graphs], repeated until runs agree, at least and at most this often."""
    found = _times_ns(run, least + 1, stream, gate)[1:]  # the first run warms up
    while len(found) < most and not settled([sum(each) for each in found]):
        found += _times_ns(run, least, stream, gate)
    return np.array(found)


def _times_ns(run: Sequence[int], count: int, stream: int, gate: Gate | None) -> list[list[float]]:
    """The times of a run, repeated. Runs of one graph without a gate follow each other, behind one graph in front."""
    if gate is None and len(run) == 1:
        return [[t] for t in launch_times_ns([[*run] * count], stream, None)[0]]
    return launch_times_ns([run] * count, stream, gate)


def settled(times_ns: Sequence[float]) -> bool:
    """Whether times agree so well that more of them would not change the median.

    >>> settled([100.0, 101.0, 100.5]), settled([100.0, 101.0, 130.0])
    (True, False)
    """
    return max(times_ns) - min(times_ns) <= _SPREAD * float(np.median(times_ns))


def segment_times_ns(
    launches: Launches, repeats: int, alone: bool, stream: int, gate: Gate
) -> tuple[list[float], float, float]:
    """The time of each segment, of the whole program, and of the whole program inside a partition (0: not confined)."""
    behind = gate if len(launches.program.nodes) <= _GATED_NODES else None
    least = _RUNS if alone else _RUNS_BESIDE
    cut = settled_times_ns(launches.handles, repeats, stream, behind, least)
    wholes = [launches.whole, *(whole for _, whole in launches.confined[:1])]
    whole = [settled_times_ns([each], repeats, stream, behind, least) for each in wholes]
    # Other work can only lengthen a measured time, so the shortest is the closest to the time alone.
    pick = np.median if alone else np.min
    times: NDArray[np.float64] = np.asarray(pick(cut, axis=0))
    wide, *narrow = (float(pick(each[:, 0])) for each in whole)
    return [float(t) for t in times], wide, narrow[0] if narrow else 0.0


def saturated_ns(instances: Sequence[Launches], rounds: int, streams: Sequence[int]) -> float:
    """Time per run when all instances launch their whole programs repeatedly and at once, each on its stream."""
    _crowd_ns(instances, 1, streams)  # warms up
    times: list[float] = []
    while len(times) < _CROWDED_RUNS and not (len(times) > 1 and settled(times)):
        times.append(_crowd_ns(instances, rounds, streams))
    return min(times) / (rounds * len(instances))  # a run whose launch the host delayed took too long


def _crowd_ns(instances: Sequence[Launches], rounds: int, streams: Sequence[int]) -> float:
    cu = driver()
    began = time.perf_counter_ns()
    for _ in range(rounds):
        for each, stream in zip(instances, streams, strict=False):
            check(cu.cuGraphLaunch(each.whole, stream), "timing a graph")
    for stream in streams:
        check(cu.cuStreamSynchronize(stream), "timing graphs that run at once")
    return time.perf_counter_ns() - began


class Gate:
    """A word in pinned memory for which a stream waits."""

    def __init__(self, word: Any) -> None:
        self._word = word  # one u64 of pinned memory, as an array

    def close(self, stream: int) -> None:
        cu = driver()
        self._word[0] = 0
        equal = cu.CUstreamWaitValue_flags.CU_STREAM_WAIT_VALUE_EQ
        check(cu.cuStreamWaitValue64(stream, self._word.ctypes.data, 1, int(equal)), "holding a stream")

    def open(self) -> None:
        self._word[0] = 1
