"""Berths: memory in which lanes of several models take turns.

A batch in flight needs memory beside the weights: inputs, outputs, scratch. That memory is free again when the batch is
done, so lanes of models that do not run at the same time share it. The memory in use is then bounded by the weights of
all models and the largest lanes. Berth sizes are powers of two; a lane takes the least used berth that is large enough.

Models of different priority share a berth only if memory is short: a lane that has started keeps its berth while it
waits for weights, and nothing can take the berth from it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from paellapy.scheduler.core.errors import MemoryPlanError


def rounded(nbytes: int) -> int:
    """Rounds up to a power of two, at least 4096.

    >>> rounded(5000), rounded(1)
    (8192, 4096)
    """
    return max(4096, 1 << (nbytes - 1).bit_length())


@dataclass(slots=True, eq=False)
class Berth:
    """`memory` is the device's own. `foreign_bytes`: memory of other libraries' allocators for its lanes."""

    index: int
    nbytes: int
    memory: Any
    foreign_bytes: int = 0
    users: dict[str, int] = field(default_factory=dict)  # models, with their priorities

    @property
    def total_bytes(self) -> int:
        return self.nbytes + self.foreign_bytes


@dataclass(frozen=True, slots=True)
class Need:
    """A model's need for berths: `count` of them, each with this many bytes."""

    name: str
    nbytes: int
    foreign_bytes: int
    count: int
    priority: int = 0


class Berths:
    """`make(nbytes)` allocates device memory with a method `free()`; `claim(nbytes)` counts it, and may refuse."""

    def __init__(self, make: Callable[[int], Any], claim: Callable[[int], None], give: Callable[[int], None]) -> None:
        self._make, self._claim, self._give = make, claim, give
        self._all: dict[int, Berth] = {}
        self._apart: list[Berth] = []  # berths that no lane shares; they have no number

    @property
    def held_bytes(self) -> int:
        return sum(each.total_bytes for each in (*self._all.values(), *self._apart))

    def choose(self, need: Need, most: int, spare: Callable[[int, bool], bool]) -> list[Berth]:
        """Berths for a model's lanes. New ones are made, up to `most` of this size, while their bytes can be spared.

        `spare(nbytes, apart)`: whether they can; `apart`: to keep models of different priority apart.
        """
        try:
            return [self._one(need, most, spare) for _ in range(need.count)]
        except BaseException:
            self.leave(need.name)
            raise

    def _one(self, need: Need, most: int, spare: Callable[[int, bool], bool]) -> Berth:
        size = rounded(need.nbytes)
        more = size + need.foreign_bytes
        large = [each for each in self._all.values() if each.nbytes >= size]
        alike = [each for each in large if {*each.users.values()} <= {need.priority}]
        fitting = [each for each in alike if need.name not in each.users]
        if fitting:
            new = len(alike) < most and min(len(each.users) for each in fitting) > 0 and spare(more, False)
        else:
            fitting = [each for each in large if need.name not in each.users]
            new = not fitting or spare(more, True)
        if new and self._claimed(more, may_fail=bool(fitting)):
            index = next(k for k in range(len(self._all) + 1) if k not in self._all)
            chosen = self._all[index] = Berth(index, size, self._make(size), need.foreign_bytes)
        else:
            chosen = min(fitting, key=lambda each: (len(each.users), each.nbytes))
            if need.foreign_bytes > chosen.foreign_bytes:
                self._claim(need.foreign_bytes - chosen.foreign_bytes)
                chosen.foreign_bytes = need.foreign_bytes
        chosen.users[need.name] = need.priority
        return chosen

    def _claimed(self, nbytes: int, may_fail: bool) -> bool:
        try:
            self._claim(nbytes)
        except MemoryPlanError:  # there is a berth to share
            if not may_fail:
                raise
            return False
        return True

    def make_apart(self, nbytes: int, foreign_bytes: int) -> Berth | None:
        """A berth that no lane shares; None if the memory is refused."""
        more = nbytes + foreign_bytes
        if not self._claimed(more, may_fail=True):
            return None
        try:
            made = Berth(-1, nbytes, self._make(nbytes), foreign_bytes)
        except BaseException:
            self._give(more)
            raise
        self._apart.append(made)
        return made

    def free_apart(self, berth: Berth) -> None:
        self._apart.remove(berth)
        berth.memory.free()
        self._give(berth.total_bytes)

    def leave(self, name: str) -> None:
        """Removes a model that has no lanes any more, and frees berths that no model uses."""
        for berth in list(self._all.values()):
            berth.users.pop(name, None)
            if not berth.users:
                del self._all[berth.index]
                berth.memory.free()
                self._give(berth.total_bytes)
