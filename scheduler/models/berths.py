"""Berths: memory in which lanes of several models take turns.

A batch in flight needs memory beside the weights: inputs, outputs, scratch. That memory is free again when the batch is
done, so lanes of models that do not run at the same time share it. The memory in use is then bounded by the weights of
all models and the largest lanes. Berth sizes are powers of two; a lane takes the least used berth that is large enough.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any


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
    users: set[str] = field(default_factory=set)

    @property
    def total_bytes(self) -> int:
        return self.nbytes + self.foreign_bytes


class Berths:
    """`make(nbytes)` allocates device memory with a method `free()`; `claim(nbytes)` counts it, and may refuse."""

    def __init__(self, make: Callable[[int], Any], claim: Callable[[int], None], give: Callable[[int], None]) -> None:
        self._make, self._claim, self._give = make, claim, give
        self._all: dict[int, Berth] = {}

    @property
    def held_bytes(self) -> int:
        return sum(each.total_bytes for each in self._all.values())

    def choose(
        self, name: str, nbytes: int, foreign_bytes: int, count: int, most: int, spare: Callable[[int], bool]
    ) -> list[Berth]:
        """Berths for a model's lanes. New ones are made, up to `most` of this size, while their bytes can be spared."""
        found: list[Berth] = []
        try:
            for _ in range(count):
                found.append(self._one(name, nbytes, foreign_bytes, most, spare))
        except BaseException:
            self.leave(name)
            raise
        return found

    def _one(
        self, name: str, nbytes: int, foreign_bytes: int, most: int, spare: Callable[[int], bool]
    ) -> Berth:
        size = rounded(nbytes)
        fitting = [each for each in self._all.values() if each.nbytes >= size and name not in each.users]
        large = [each for each in self._all.values() if each.nbytes >= size]
        wanted = len(large) < most and spare(size + foreign_bytes)
        if not fitting or (wanted and min(len(each.users) for each in fitting) > 0):
            self._claim(size + foreign_bytes)
            index = next(k for k in range(len(self._all) + 1) if k not in self._all)
            chosen = self._all[index] = Berth(index, size, self._make(size), foreign_bytes)
        else:
            chosen = min(fitting, key=lambda each: (len(each.users), each.nbytes))
            if foreign_bytes > chosen.foreign_bytes:
                self._claim(foreign_bytes - chosen.foreign_bytes)
                chosen.foreign_bytes = foreign_bytes
        chosen.users.add(name)
        return chosen

    def leave(self, name: str) -> None:
        """Removes a model that has no lanes any more, and frees berths that no model uses."""
        for berth in list(self._all.values()):
            berth.users.discard(name)
            if not berth.users:
                del self._all[berth.index]
                berth.memory.free()
                self._give(berth.total_bytes)
