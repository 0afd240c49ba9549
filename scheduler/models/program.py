"""A program: the nodes that one lane's captured function launches, in a form that is the same for every device."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from paellapy.instrument import cache
from paellapy.instrument.device.occupancy import occupancy
from paellapy.instrument.device.parts import SmLimits
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
    """One lane's captured work at one batch size. `body` is device-specific: a CUDA graph or a list of launches."""

    model: Capturable
    lane: int
    batch: int
    nodes: list[Node]  # in an order that respects every dependency
    chain: bool  # whether each node depends on the node before it and on no other
    body: Any
    keep: list[Any] = field(default_factory=list)
    marks: Marks = field(default_factory=dict)  # kernels that report when all their blocks are on the SMs
    _content: str = field(default="", init=False, repr=False)

    def content(self) -> str:
        """A digest of the program's work, equal for all lanes."""
        if not self._content:
            self._content = content_digest(self.nodes)
        return self._content

    def for_lane(self, lane: int, body: Any, marks: Marks) -> Program:
        """The same nodes in another lane's memory."""
        made = Program(self.model, lane, self.batch, self.nodes, self.chain, body, marks=marks)
        made._content = self.content()
        return made


def content_digest(nodes: Iterable[Node]) -> str:
    return cache.digest(*(repr(node) for node in nodes))


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
