"""A program: the nodes that one instance's captured function launches, in a form that is the same for every device."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from paellapy.instrument import cache
from paellapy.instrument.gpu_model.parts import SmLimits, occupancy
from paellapy.scheduler.core.errors import CaptureError
from paellapy.scheduler.models.tensors import Capturable

NodeKind = Literal["kernel", "h2d", "d2h", "d2d", "memset", "other"]
Part = tuple[int, int]  # first block and number of blocks of a slice
Cuts = dict[int, tuple[Part, ...]]  # number of our launch → the slices in which it is launched
Marks = dict[tuple[int, Part | None], int]  # our launch, or a slice of it → the segment whose last kernel it is


@dataclass(frozen=True, slots=True)
class Node:
    """One kernel or copy of a program, with the resources it takes on the GPU."""

    kind: NodeKind
    name: str = ""
    blocks: int = 0
    threads: int = 0  # per block
    registers: int = 0  # per thread
    shared_bytes: int = 0  # per block
    nbytes: int = 0  # size of a copy
    launch: int = -1  # number of our launch in the program; -1: a copy, or a kernel of another library
    part: Part | None = None
    cluster: int = 1
    divisible: bool = False  # whether it may be cut into slices of blocks
    digest: str = ""  # digest of the kernel's code, where it is known

    def wave_blocks(self, limits: SmLimits, sms: int) -> int:
        """Blocks of this kernel that the whole GPU holds at once."""
        return occupancy(limits, self.threads, self.registers, self.shared_bytes).blocks_per_sm * sms


@dataclass(slots=True)
class Program:
    """One instance's captured work at one batch size. `body` is device-specific: a CUDA graph or a list of launches."""

    model: Capturable
    instance: int
    batch: int
    nodes: list[Node]  # in an order that respects every dependency
    chain: bool  # whether each node depends on the node before it and on no other
    body: Any
    keep: list[Any] = field(default_factory=list)
    marks: Marks = field(default_factory=dict)  # kernels that report when all their blocks are on the SMs
    _content: str = field(default="", init=False, repr=False)

    def content(self) -> str:
        """A digest of the program's work, equal for all instances."""
        if not self._content:
            self._content = cache.digest(*map(repr, self.nodes))
        return self._content

    def for_instance(self, instance: int, body: Any, marks: Marks) -> Program:
        """The same nodes in another instance's memory."""
        made = Program(self.model, instance, self.batch, self.nodes, self.chain, body, marks=marks)
        made._content = self.content()
        return made


def last_kernels(nodes: Sequence[Node], bounds: Sequence[tuple[int, int]]) -> Marks:
    """Our launches that end a segment which is not the last one; only copies may follow them in the segment."""
    marks: Marks = {}
    for k, (first, end) in enumerate(bounds[:-1]):
        for node in reversed(nodes[first:end]):
            if node.kind == "kernel":
                if node.launch >= 0:
                    marks[node.launch, node.part] = k
                break
            if node.kind not in ("h2d", "d2h", "d2d"):
                break
    return marks


# Where to cut a program: into segments of about one quantum, and long kernels into slices of whole waves.
#
# These are pure functions over measured times. A segment boundary costs a graph launch (2–5 % at 24 nodes a segment on
# an H200), and a slice of less than a wave costs more (26 %), so neither is made smaller than necessary.


def cut(times_ns: Sequence[float], quantum_ns: float) -> list[tuple[int, int]]:
    """Runs of consecutive nodes, each as close to one quantum as possible, as pairs (first, past the last).

    >>> cut([10, 10, 10, 10, 90, 10], 20)
    [(0, 2), (2, 4), (4, 5), (5, 6)]
    """
    if not times_ns:
        return []
    segments, first, length = [], 0, float(times_ns[0])
    for i in range(1, len(times_ns)):
        grown = length + times_ns[i]
        # Stop here or take one more node, whichever ends closer to the quantum.
        if grown > quantum_ns and grown - quantum_ns > quantum_ns - length:
            segments.append((first, i))
            first, length = i, float(times_ns[i])
        else:
            length = grown
    segments.append((first, len(times_ns)))
    return _without_crumbs(segments, times_ns, quantum_ns)


def _without_crumbs(
    segments: list[tuple[int, int]], times_ns: Sequence[float], quantum_ns: float
) -> list[tuple[int, int]]:
    """Joins each piece of less than a quarter quantum, such as a small copy at the end, to its shorter neighbour."""

    def length(segment: tuple[int, int]) -> float:
        return float(sum(times_ns[segment[0] : segment[1]]))

    i = 0
    while len(segments) > 1 and i < len(segments):
        if length(segments[i]) >= quantum_ns / 4:
            i += 1
            continue
        before = length(segments[i - 1]) if i else float("inf")
        after = length(segments[i + 1]) if i + 1 < len(segments) else float("inf")
        left = i - 1 if before <= after else i
        segments[left : left + 2] = [(segments[left][0], segments[left + 1][1])]
        i = max(0, left)
    return segments


def slices(blocks: int, wave: int, time_ns: float, quantum_ns: float, slice_quanta: float) -> tuple[Part, ...]:
    """Slices of whole waves, of about one quantum each; a kernel of up to `slice_quanta` quanta stays in one piece.

    >>> slices(blocks=1024, wave=264, time_ns=200_000, quantum_ns=50_000, slice_quanta=2)
    ((0, 264), (264, 264), (528, 264), (792, 232))
    """
    waves = -(-blocks // max(1, wave))
    if time_ns <= slice_quanta * quantum_ns or waves < 2:
        return ((0, blocks),)
    pieces = min(waves, max(2, round(time_ns / quantum_ns)))
    per_piece = -(-waves // pieces) * wave
    return tuple((first, min(per_piece, blocks - first)) for first in range(0, blocks, per_piece))


def plan_slices(
    nodes: Sequence[Node], times_ns: Sequence[float], waves: Sequence[int], quantum_ns: float, slice_quanta: float
) -> Cuts:
    """The slices of each of our kernels that is worth cutting."""
    cuts: Cuts = {}
    for node, time_ns, wave in zip(nodes, times_ns, waves, strict=True):
        if node.divisible and node.part is None:
            parts = slices(node.blocks, wave, time_ns, quantum_ns, slice_quanta)
            if len(parts) > 1:
                cuts[node.launch] = parts
    return cuts


def topological(n: int, edges: Sequence[tuple[int, int]]) -> tuple[list[int], bool]:
    """An order that respects every edge, preferring the earliest node, and whether the graph is a chain.

    >>> topological(3, [(2, 1), (1, 0)])
    ([2, 1, 0], True)
    """
    if len(edges) == n - 1 and all(pair == (k, k + 1) for k, pair in enumerate(sorted(edges))):
        return list(range(n)), True  # a capture of one stream, which lists its nodes in order
    followers: list[list[int]] = [[] for _ in range(n)]
    waiting = [0] * n
    for a, b in edges:
        followers[a].append(b)
        waiting[b] += 1
    chain = len(edges) == n - 1 and max(waiting, default=0) <= 1 and max(map(len, followers), default=0) <= 1
    ready = [i for i in range(n) if not waiting[i]]
    heapq.heapify(ready)
    order = []
    while ready:
        node = heapq.heappop(ready)
        order.append(node)
        for follower in followers[node]:
            waiting[follower] -= 1
            if not waiting[follower]:
                heapq.heappush(ready, follower)
    if len(order) != n:
        raise CaptureError(
            "the captured graph has a cycle, which no capture can produce: please report this as a bug of paellapy"
        )
    return order, chain
