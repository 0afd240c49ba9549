"""A model that fails on the values of one request on the virtual GPU: its neighbours in the batch do not notice.

The host computes the data there, so a stray index is an ordinary exception. Each request of the batch is computed by
itself then; those that fail are marked in the core's tables, and the others are answered.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from paellapy.scheduler.core.state import State
from paellapy.scheduler.models.capture import Recorded
from paellapy.scheduler.models.lane_memory import Lane

OnFault = Callable[[int, int, BaseException], None]  # lane, slot, why


class Faults:
    """Lanes of which a segment has failed. Used by the loop's thread alone."""

    def __init__(self, state: State, told: OnFault) -> None:
        self._state, self._told = state, told
        self._settled: set[int] = set()  # their answers are there: their other segments compute nothing

    def skips(self, lane: int, segment: int) -> bool:
        """Whether a segment (WHOLE or 0: the first of a run) is not to be computed."""
        if not self._settled:
            return False
        if segment <= 0:
            self._settled.discard(lane)
        return lane in self._settled

    def isolate(self, k: int, size: int, lane: Lane, program: Sequence[Recorded], cause: Exception) -> None:
        """Computes every request of lane `k` by itself, and marks those that fail.

        Every slot is given the one request's inputs: what another slot holds may be what made it fail. A model that
        overwrites its inputs is computed from what it made of them.
        """
        state = self._state
        taken = int(state.lane["taken"][k])
        batch = int(state.size["batch"][state.lane["model"][k], size])
        live = [slot for slot in range(taken) if state.slot[k, slot] >= 0]
        inputs = {key: array[:batch].copy() for key, array in lane.inputs.items()}
        outputs = {key: array[:batch].copy() for key, array in lane.outputs.items()}
        found: dict[int, Exception] = {live[0]: cause} if len(live) == batch == 1 else {}
        for slot in live:
            if slot in found:
                continue
            for key, array in lane.inputs.items():
                array[:batch] = inputs[key][slot]
            try:
                for item in program:
                    item.run()
            except Exception as e:
                found[slot] = e
            else:
                for key, array in lane.outputs.items():
                    outputs[key][slot] = array[slot]
        good = next((slot for slot in live if slot not in found), None)
        for key, array in lane.inputs.items():  # whoever comes next does not fill every slot
            array[:batch] = 0 if good is None else inputs[key][good]
        for key, array in lane.outputs.items():
            array[:batch] = outputs[key]
        state.lane_fault[k] = 0
        for slot, error in found.items():
            state.lane_fault[k, slot >> 6] |= np.uint64(1) << np.uint64(slot & 63)
            self._told(k, slot, error)
        state.lane["faulty"][k] = 1
        self._settled.add(k)
