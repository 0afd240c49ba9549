"""Orders by hand: weights that come to the GPU or leave it although no request requires it."""

from __future__ import annotations

import time
from collections.abc import Callable

from paellapy.scheduler.core import codes
from paellapy.scheduler.core.errors import MemoryPlanError, ModelError
from paellapy.scheduler.core.state import State
from paellapy.scheduler.engine.budget import LOOK_S, ORDER_S
from paellapy.scheduler.engine.mover import Mover


def order_weights(
    state: State, mover: Mover, in_loop: Callable[[Callable[[], None]], None], check: Callable[[], None], row: int,
    wanted: bool,
) -> None:  # fmt: skip
    """Orders the weights of a model to come or to leave, and waits until they have. `check` raises if they cannot: the
    model or the engine is gone.
    """
    w, aim = state.weights[row], codes.HERE if wanted else codes.OUT

    def flag() -> None:
        w["asked"], w["unwanted"] = int(wanted), int(not wanted and w["stage"] != codes.OUT)
        if wanted and w["stage"] == codes.OUT:
            w["ordered_ns"] = time.monotonic_ns()
        mover.ordered[row] = wanted
        state.residency["look"][0] = 1

    if not wanted and w["keep"] == codes.STAYS:
        raise ModelError(
            "these weights cannot be evicted, because the model has resident=True, changes its weights, or has none: "
            "unload the model instead"
        )
    # counted, because the weights may move again before this thread looks
    counter = "brought" if wanted else "evicted"
    before, stuck = int(w[counter]), int(w["stuck"])
    mover.errors.pop(row, None)  # of an earlier order
    in_loop(flag)
    end = time.monotonic() + ORDER_S
    while w["stage"] != aim and w[counter] == before:
        check()
        if mover.ordered[row] != wanted and w["stage"] == (codes.OUT if wanted else codes.HERE):
            raise ModelError(f"the weights were ordered to {'leave' if wanted else 'come'} by another call meanwhile")
        if row in mover.errors and w["stage"] == codes.OUT:
            raise mover.errors[row]
        if not wanted and w["stuck"] != stuck:
            raise mover.stuck[row]
        if time.monotonic() > end:
            raise MemoryPlanError(
                f"the weights did not move within {ORDER_S:.0f} s: models in use or of higher priority hold all memory"
            )
        time.sleep(LOOK_S)
