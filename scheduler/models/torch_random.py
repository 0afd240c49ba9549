"""Random numbers in captured graphs: the preparation that PyTorch does before it replays a graph of its own.

Kernels of a captured graph read the generator's seed and offset from two words of GPU memory that belong to the
generator while a graph is registered with it. Before a step of a background job is replayed, the host writes these
words, as PyTorch does. The graph of a served model runs without the host, and advances the offset itself.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from typing import Any

from paellapy.scheduler.core.errors import CaptureError
from paellapy.scheduler.models.torch_graphs import begin_capture

_GOLDEN = 0x9E3779B97F4A7C15  # multiplier that keeps the seeds of lanes far apart
_MARK = 1 << 20  # a distinctive offset by which its word is found

WordsOf = Callable[[Any], list[int]]  # the 8-byte numbers in the launch arguments of a graph's kernels, in order


class _Words:
    """The two words of a generator. A graph with one draw keeps them allocated, and writes them when it is replayed."""

    def __init__(self, torch: Any, index: int, generator: Any) -> None:
        self._torch, self._index, self.generator = torch, index, generator
        self._graph = torch.cuda.CUDAGraph(keep_graph=True)
        self._offset: Any = None
        before = generator.get_state()
        self._graph.register_generator_state(generator)
        with torch.cuda.device(index):
            torch.rand(4, device="cuda", generator=generator)  # lets PyTorch load its kernels outside the capture
            torch.cuda.synchronize(index)
        # Only the capture uses a second stream: kernels there would slow all graphs of the process.
        with torch.cuda.device(index), torch.cuda.stream(torch.cuda.Stream(index)):
            begin_capture(self._graph)
            try:
                torch.rand(4, device="cuda", generator=generator)
            finally:
                self._graph.capture_end()
        self._graph.instantiate()
        generator.set_state(before)

    def write(self) -> None:
        """Lets replays from now on draw the numbers that the generator would draw next."""
        offset = self.generator.get_offset()
        with self._torch.cuda.device(self._index):
            self._graph.replay()
        self.generator.set_offset(offset)

    def wait(self) -> None:
        self._torch.cuda.current_stream(self._index).synchronize()

    def offset(self, words_of: WordsOf) -> Any:
        """The word of the offset as a tensor; None if it cannot be found. It is the second of two addresses that the
        kernel of a draw is given; the first is the seed's.
        """
        if self._offset is None:
            before = self.generator.get_state()
            self.generator.set_offset(_MARK)
            self.write()
            self.wait()
            self.generator.set_state(before)
            words = [word for word in words_of(self._graph) if word % 8 == 0 and word > _MARK]
            for pair in itertools.pairwise(words):
                found = [_word(self._torch, self._index, each) for each in pair]
                if [each and each[1] for each in found] == [self.generator.initial_seed() % (1 << 64), _MARK]:
                    self._offset = found[1][0]  # type: ignore[index]
                    break
        return self._offset


class _Own:
    """A state of PyTorch's default generator that belongs to one job or lane. Two that run at once use different words,
    and captures by other code do not write to them.
    """

    def __init__(self, torch: Any, index: int) -> None:
        self.default = torch.cuda.default_generators[index]
        self.generator = torch.Generator(f"cuda:{index}")
        self.generator.set_state(self.default.get_state())
        self._state = self.generator.graphsafe_get_state()
        with self.drawing():
            self.words = _Words(torch, index, self.generator)

    @contextlib.contextmanager
    def drawing(self) -> Iterator[None]:
        """Makes draws without a named generator use this one."""
        before = self.default.graphsafe_get_state()
        self.default.graphsafe_set_state(self._state)
        try:
            yield
        finally:
            self.default.graphsafe_set_state(before)


class Draws:
    """Random numbers of a step, from PyTorch's default generator of one GPU and from generators that the step names."""

    def __init__(self, torch: Any, named: list[Any], index: int) -> None:
        self._own = _Own(torch, index)
        self._named = named
        self._generators = [self._own.default, *named]
        with self._own.drawing():
            self._words = [self._own.words, *(_Words(torch, index, each) for each in named)]
        self.drawn = [0] * len(self._words)  # numbers drawn by one step, per generator
        self.recording = self._own.drawing  # the context for a capture of the step

    def register(self, graph: Any) -> None:
        """Registers generators before a step is captured. Captures always know the default generator."""
        for generator in self._named:
            graph.register_generator_state(generator)

    def offsets(self) -> list[int]:
        return [each.get_offset() for each in self._generators]

    def note(self, before: list[int]) -> None:
        """Records how much one step drew, given the offsets before it."""
        self.drawn = [now - then for now, then in zip(self.offsets(), before, strict=True)]

    def next_step(self) -> None:
        """Makes the next replay draw the numbers that PyTorch would draw now."""
        if not any(self.drawn):
            return
        self._own.generator.set_state(self._own.default.get_state())
        # The graphs of named generators also refer to the job's own state, which is therefore written last.
        for words, drawn in reversed([*zip(self._words, self.drawn, strict=True)]):
            if drawn:
                words.write()
                words.wait()
        for generator, drawn in zip(self._generators, self.drawn, strict=True):
            if drawn:
                generator.set_offset(generator.get_offset() + drawn)


class LaneDraws:
    """The random numbers of one lane of a served model, from a seed of its own."""

    def __init__(self, torch: Any, index: int, number: int, words_of: WordsOf) -> None:
        self._own = _Own(torch, index)
        generator = self._own.generator
        generator.manual_seed((self._own.default.initial_seed() + _GOLDEN * (number + 1)) % (1 << 62))
        self._offset = self._own.words.offset(words_of)
        if self._offset is None:
            raise CaptureError(
                f"draws random numbers, but paellapy cannot find where PyTorch {torch.__version__} keeps the generator "
                "state of a captured draw: draw the numbers beforehand and pass them as an input"
            )
        self._own.words.write()
        self._own.words.wait()
        self.drawing = self._own.drawing

    def move_on(self, drawn: int) -> None:
        """Advances the offset; captured behind the draws, so that the next replay draws other numbers."""
        self._offset.add_(drawn)


class _Word:
    def __init__(self, address: int) -> None:
        self.__cuda_array_interface__ = {"shape": (1,), "typestr": "<i8", "data": (address, False), "version": 3}


def _word(torch: Any, index: int, address: int) -> tuple[Any, int] | None:
    """A word of GPU memory as a tensor, and its value; None if the address is not valid."""
    try:
        tensor = torch.as_tensor(_Word(address), device=f"cuda:{index}")
    except (RuntimeError, ValueError):
        return None
    return tensor, int(tensor.item()) % (1 << 64)
