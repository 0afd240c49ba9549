"""A model that fails on the values of one request on the virtual GPU; the other requests of the batch are not affected.

The host computes the data, so an index out of range is an ordinary exception. Each request of the batch is then
computed separately; the failing ones are marked in the core's tables, and the others are answered.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from paellapy.scheduler.core.state import State
from paellapy.scheduler.models.lane_memory import Lane
from paellapy.scheduler.models.recording import Recorded

OnFault = Callable[[int, int, BaseException], None]  # lane, slot, cause


class Faults:
    """Lanes in which a segment has failed. Only the loop's thread uses this object."""

    def __init__(self, state: State, told: OnFault) -> None:
        self._state, self._told = state, told
        self._settled: set[int] = set()  # lanes whose answers are computed: their other segments compute nothing

    def skips(self, lane: int, segment: int) -> bool:
        """Whether a segment (WHOLE or 0: the first of a run) should not be computed."""
        if not self._settled:
            return False
        if segment <= 0:
            self._settled.discard(lane)
        return lane in self._settled

    def isolate(self, k: int, size: int, lane: Lane, program: Sequence[Recorded], cause: Exception) -> None:
        """Computes every request of lane `k` separately, and marks those that fail.

        Every slot is given the inputs of the one request, because the contents of another slot may have caused the
        failure. A model that overwrites its inputs is computed from the overwritten ones.
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
        for key, array in lane.inputs.items():  # the next batch may not fill every slot
            array[:batch] = 0 if good is None else inputs[key][good]
        for key, array in lane.outputs.items():
            array[:batch] = outputs[key]
        state.lane_fault[k] = 0
        for slot, error in found.items():
            state.lane_fault[k, slot >> 6] |= np.uint64(1) << np.uint64(slot & 63)
            self._told(k, slot, error)
        state.lane["faulty"][k] = 1
        self._settled.add(k)
