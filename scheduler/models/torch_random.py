"""Random numbers in captured graphs: what PyTorch does before it replays a graph of its own.

Kernels of a captured graph read the generator's seed and offset from two words of GPU memory that belong to the
generator while a graph is registered with it. `Draws` has a graph of PyTorch's for each generator, with one draw in it.
To replay it writes the words, for all graphs of that generator; the offset then moves on by what a step draws.
"""

from __future__ import annotations

from typing import Any


class Draws:
    """Generators of one GPU that a step draws from."""

    def __init__(self, torch: Any, generators: list[Any], index: int) -> None:
        self._torch, self._index = torch, index
        self.generators = generators
        self._stream = torch.cuda.Stream(index)
        self._graphs = [self._registered(each) for each in generators]
        self.drawn = [0] * len(generators)  # by one step

    def _registered(self, generator: Any) -> Any:
        torch = self._torch
        before = generator.get_state()
        graph = torch.cuda.CUDAGraph()
        graph.register_generator_state(generator)
        with torch.cuda.device(self._index), torch.cuda.stream(self._stream):
            torch.rand(4, device="cuda", generator=generator)  # what it loads, it loads outside the capture
            self._stream.synchronize()
            graph.capture_begin(capture_error_mode="thread_local")
            try:
                torch.rand(4, device="cuda", generator=generator)
            finally:
                graph.capture_end()
        generator.set_state(before)
        return graph

    def register(self, graph: Any) -> None:
        """Before a step is captured into it."""
        for generator in self.generators:
            graph.register_generator_state(generator)

    def offsets(self) -> list[int]:
        return [each.get_offset() for each in self.generators]

    def note(self, before: list[int]) -> None:
        """What one step drew, from the offsets before it."""
        self.drawn = [now - then for now, then in zip(self.offsets(), before, strict=True)]

    def next_step(self) -> None:
        """The next replay draws what PyTorch would draw now."""
        if not any(self.drawn):
            return
        torch = self._torch
        with torch.cuda.device(self._index), torch.cuda.stream(self._stream):
            # The default one is the first, and every graph is registered with it too: its words are written last.
            for generator, graph, drawn in reversed([*zip(self.generators, self._graphs, self.drawn, strict=True)]):
                if drawn:
                    offset = generator.get_offset()
                    graph.replay()
                    generator.set_offset(offset + drawn)
            self._stream.synchronize()
