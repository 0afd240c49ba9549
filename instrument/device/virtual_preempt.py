"""Preemption on the virtual GPU: the data of a block are computed once it is known that the block has run.

The costs of blocks are computed at the launch, as for any other launch; memory is restored afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from paellapy.instrument.device.preemption import Flag, Run
from paellapy.instrument.device.sm_model import SmModel
from paellapy.instrument.device.sm_program import Under
from paellapy.instrument.records import Records


class Host(Protocol):
    """The parts of the virtual GPU that flags and runs use."""

    runs: list[VirtualRun]

    @property
    def model(self) -> SmModel: ...
    def submit(self) -> float: ...
    def wait_until(self, ns: float) -> None: ...
    def settle(self) -> None: ...


class VirtualFlag(Flag):
    def __init__(self, device: Host) -> None:
        super().__init__()
        self._device, self.number = device, device.model.flag()

    def _write(self, word: int) -> None:
        """Writes the word: the host's call takes as long as a launch, and the word arrives after the latency of one."""
        model = self._device.model
        model.run(self._device.submit() + model.timing.launch_ns)
        model.set_flag(self.number, word)


class VirtualRun(Run):
    """A launch in the SM model whose data are computed once it is over."""

    def __init__(
        self,
        device: Host,
        under: Under,
        handle: int,
        stream: int,
        costs: Records,
        compute: Callable[[NDArray[np.int64]], object],
    ) -> None:
        self.epoch, self.handle, self.stream = under.epoch, handle, stream
        self._device, self._blocks, self._costs, self._compute = device, under.blocks, costs, compute
        self._left: NDArray[np.int64] | None = None
        device.runs.append(self)
        device.settle()

    def over(self) -> bool:
        model = self._device.model
        model.run(max(model.now_ns, self._device.submit()))  # the query itself takes some time on the host
        self._device.settle()
        return self._left is not None

    def wait(self) -> None:
        if self._left is None:
            self._device.wait_until(self._device.model.run_until_done(self.handle))

    def settle(self) -> None:
        """Computes the data of the blocks that ran, now that they are known."""
        self._left = self._device.model.take_left(self.handle)
        ran = np.setdiff1d(self._blocks, self._left, assume_unique=True)
        if len(ran):
            self._compute(ran)

    def count_left(self) -> int:
        return len(self.left())

    def left(self) -> NDArray[np.int64]:
        assert self._left is not None, "ask a run that is over"
        return self._left

    def costs_of(self, blocks: NDArray[np.int64]) -> Records:
        """The costs of some of its blocks."""
        order = np.argsort(self._blocks)
        return self._costs[order[np.searchsorted(self._blocks, blocks, sorter=order)]]

    def elapsed_ns(self) -> float:
        model = self._device.model
        return model.finish_ns(self.handle) - model.start_ns(self.handle)


def without_effects(arguments: Sequence[Any], run: Callable[[], Records]) -> Records:
    """The result of `run`, with the memory of its arguments restored afterwards."""
    arrays = [a for a in arguments if isinstance(a, np.ndarray) and a.flags.writeable]
    kept = [a.copy() for a in arrays]
    try:
        return run()
    finally:
        for array, before in zip(arrays, kept, strict=True):
            array[...] = before
