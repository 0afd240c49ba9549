"""Programs of two batch sizes compared: where they take the same steps, both need the same weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from paellapy.scheduler.models.program import Node
from paellapy.scheduler.models.weight_range import needs_of

Bounds = Sequence[tuple[int, int]]


@dataclass(frozen=True, slots=True)
class Steps:
    """Kernels and copies in order, each with its name and the weights that its arguments point to, lower and upper
    bound. The slices of a kernel are one step.
    """

    kinds: tuple[tuple[str, str, int, int], ...]
    of_node: tuple[int, ...]  # the step of each node


def steps_of(nodes: Sequence[Node], ends: Sequence[tuple[int, int]]) -> Steps:
    """`ends`: the leading bytes of the weights that each node needs, by its arguments."""
    kinds: list[tuple[str, str, int, int]] = []
    of_node: list[int] = []
    before = -1
    for node, (least, most) in zip(nodes, ends, strict=True):
        if node.launch < 0 or node.launch != before:
            kinds.append((node.kind, node.name, least, most))
        of_node.append(len(kinds) - 1)
        before = node.launch
    return Steps(tuple(kinds), tuple(of_node))


def needs_like(new: Steps, bounds: Bounds, tried: Steps, tried_bounds: Bounds, tried_needs: Sequence[int]) -> list[int]:
    """The needs of a program's segments, from the needs with which a program of the same steps was tried out; empty if
    the steps differ, since other kernels may hide other pointers.

    >>> steps = Steps((("kernel", "gemm", 256, 256), ("kernel", "gemm", 512, 512)), (0, 1))
    >>> needs_like(steps, [(0, 2)], steps, [(0, 1), (1, 2)], [256, 512])
    [512]
    """
    if new.kinds != tried.kinds:
        return []
    need = [0] * len(tried.kinds)
    for (first, end), nbytes in zip(tried_bounds, tried_needs, strict=True):
        for step in tried.of_node[first:end]:
            need[step] = max(need[step], nbytes)
    return needs_of([need[step] for step in new.of_node], bounds)
