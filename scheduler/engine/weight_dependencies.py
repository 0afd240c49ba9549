"""Which weights each segment needs: guessed from the launch arguments of its kernels, and verified by test runs.

A kernel's pointer arguments show which weights it reads. Some kernels hide a pointer in a structure that cannot be
read; libraries also leave stale pointers in structures that they fill partly, to weights that the kernel never reads.
So there are several guesses: the most that a kernel's pointers ask for, the least, and the needs of as many kernels
as agree that weights are used in order. A guess is accepted if the program gives the same outputs when weights arrive
no sooner than the guess says, in memory that held other contents before. A larger guess that only some segments
require is then lowered for the other segments. Weights arrive in chunks, so all needs are whole chunks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paellapy.scheduler.backends.base import Backend, Launches
from paellapy.scheduler.models.memory import Instance
from paellapy.scheduler.models.tensors import TensorSpec
from paellapy.scheduler.models.weights import WeightRange

Needs = tuple[int, ...]
_LATER = (0, 1, 2, 4)  # guesses shift the needs by this many segments
# byte patterns; the second is a small positive number in every type, so a ReLU lets it through
_NO_NUMBERS, _NUMBERS = 0xFF, 0x3C
_NEAR = 1e-2
_MOST_TESTS = 48  # of lowered needs: each copies the weights to the GPU once or twice


class Trials:
    """Test runs of one program on an instance that is not in service yet."""

    def __init__(
        self, backend: Backend, weights: WeightRange, source: Any, instance: Instance, launches: Launches
    ) -> None:
        self._backend, self._weights, self._source, self._instance = backend, weights, source, instance
        self._launches = launches
        self._fill_inputs()
        self._expected = self._run(None)
        # Kernels that add in varying order give different bits in each run.
        self._exact = same(self._expected, self._run(None), exact=True)

    def tried(self, least: Sequence[Needs], most: Needs) -> Needs:
        """The smallest needs found with which the program runs correctly; at worst all weights from the start."""
        chunk, whole = self._weights.chunk_bytes, self._weights.layout.nbytes
        most, *least = (tuple(min(-(-n // chunk) * chunk, whole) for n in each) for each in (most, *least))
        every = guesses(least, most) if self._exact else guesses([most], most)
        try:
            found = next((each for each in every if self._runs_with(each)), (whole,) * len(most))
            smallest = tuple(map(min, zip(*every, strict=True)))
            return found if found == smallest or not self._exact else lowered(smallest, found, self._runs_with, chunk)
        finally:
            self._weights.write(self._source, 0, whole)

    def _runs_with(self, guess: Needs) -> bool:
        return all(same(self._expected, self._run(guess, old), self._exact) for old in (_NO_NUMBERS, _NUMBERS))

    def _fill_inputs(self) -> None:
        """Writes random values like a request's: with zeros as inputs, weights might make no difference."""
        draw = np.random.default_rng(0)
        for name, array in self._instance.inputs.items():
            values = _drawn(draw, self._instance.model.inputs[name], array.shape)
            if values is not None:
                array[...] = values.astype(array.dtype)

    def _run(self, needs: Needs | None, old: int = _NO_NUMBERS) -> list[Any]:
        """The outputs of one run. With `needs`, weights arrive just before the segment that needs them, and the last
        ones not at all.
        """
        if needs is not None:
            self._weights.fill(old)
        there = 0
        for k in range(len(self._launches.handles)):
            if needs is not None and needs[k] > there:
                self._weights.write(self._source, there, needs[k])
                there = needs[k]
            self._backend.run_segment(self._launches, k)
        return [array.copy() for array in self._instance.outputs.values()]


def _drawn(draw: np.random.Generator, spec: TensorSpec, shape: tuple[int, ...]) -> NDArray[Any] | None:
    """Values that an input may have: also masks and indices, so that all parts of tables count. None: not known."""
    if spec.low is not None and spec.high is not None and spec.dtype.kind in "iu":
        if {spec.low, spec.high} & {-math.inf, math.inf}:  # as good as no bound
            return None
        limits = np.iinfo(spec.dtype)
        low, high = max(math.ceil(spec.low), limits.min), min(math.floor(spec.high), limits.max)
        return draw.integers(low, high, shape, spec.dtype.newbyteorder("="), endpoint=True) if low <= high else None
    if spec.dtype.kind == "b":
        return draw.integers(0, 2, shape)
    return draw.standard_normal(shape) if spec.dtype.kind in "fV" and not spec.has_range else None


def guesses(least: Sequence[Needs], most: Needs) -> list[Needs]:
    """The guesses to test, smallest needs first: the needs that the pointers show, then the needs of a slightly later
    segment, for kernels that hide pointers.

    >>> guesses([(1, 2, 3)], (1, 3, 3))
    [(1, 2, 3), (1, 3, 3), (2, 3, 3), (3, 3, 3)]
    """
    last = len(most) - 1
    shifted = {tuple(needs[min(k + n, last)] for k in range(last + 1)) for needs in (*least, most) for n in _LATER}
    return sorted(shifted, key=lambda needs: (sum(needs), needs))


def lowered(
    smallest: Needs, found: Needs, runs_with: Callable[[Needs], bool], chunk: int, most: int = _MOST_TESTS
) -> Needs:
    """Needs between the smallest ones and those that were found to suffice, lowered segment by segment from the
    producer.

    More weights than needed never harm, so both the segments that can do with the smallest needs and the need of the
    first segment that cannot are found by bisection.

    >>> lowered((1, 2, 3, 4), (4, 4, 4, 4), lambda needs: all(map(int.__ge__, needs, (1, 3, 3, 4))), 1)
    (1, 3, 3, 4)
    """
    wanted, best, tests = list(smallest), found, 0

    def passes(ahead: Sequence[int]) -> bool:
        """Whether these needs of the first segments suffice, with the needs that were found behind them."""
        nonlocal best, tests
        tests += 1
        needs = tuple(accumulate([*ahead, *found[len(ahead) :]], max))
        if not runs_with(needs):
            return False
        best = min(best, needs, key=sum)
        return True

    first = 0
    while tests < most and not passes(wanted):
        last = len(found)  # segments before `first` are known to pass, and some before `last` not
        while last - first > 1 and tests < most:
            middle = (first + last) // 2
            first, last = (middle, last) if passes(wanted[:middle]) else (first, middle)
        steps = [*range(wanted[first] // chunk * chunk + chunk, found[first], chunk), found[first]]
        low, high = 0, len(steps) - 1
        while low < high and tests < most:
            middle = (low + high) // 2
            low, high = (low, middle) if passes([*wanted[:first], steps[middle]]) else (middle + 1, high)
        if tests == most:
            break
        wanted[first:] = [max(each, steps[high]) for each in wanted[first:]]
        first += 1
    return best


def same(expected: Sequence[Any], found: Sequence[Any], exact: bool) -> bool:
    """Whether outputs are equal: bit by bit if `exact`, else within the tolerance of sums in varying order."""
    for a, b in zip(expected, found, strict=True):
        if a.tobytes() == b.tobytes():
            continue
        if exact or a.dtype.kind not in "fV":  # kind V: the dtypes of ml_dtypes
            return False
        x, y = a.astype(np.float32), b.astype(np.float32)
        if not np.isfinite(y).all() or np.abs(x - y).max() > _NEAR * max(float(np.abs(x).max()), 1e-6):
            return False
    return True
