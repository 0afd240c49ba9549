"""Weights that come and go, switched on: what the core is told from outside, and what it says of itself."""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from paellapy.scheduler.core.codes import AUTO, FILLING, GOES, OUT, STAYS
from paellapy.scheduler.core.state import State

KEEP: dict[Any, int] = {"auto": AUTO, True: STAYS, False: GOES}  # by what users say
STAGES = ("host", "loading", "resident", "leaving")  # weights.stage, in words


def manage(state: State, budget_bytes: int) -> None:
    """From the next step on, no more than these bytes of weights are on the GPU."""
    r = state.residency[0]
    r["managed"], r["budget_bytes"] = 1, budget_bytes
    r["ns_per_byte"] = 1.0 / float(state.tuning["link_gbps"][0])


def weights_state(state: State, row: int) -> str:
    """Where a model's weights are: `resident`, `loading 43 %`, `leaving`, `host` or `disk`."""
    w = state.weights[row]
    said = STAGES[int(w["stage"])] if state.residency["managed"][0] else "resident"
    if said == "loading":
        return f"loading {100 * int(w['arrived']) // max(1, int(w['chunks']))} %"
    return "disk" if said == "host" and w["ns_per_byte"] > 0 else said


def want_weights(state: State, row: int) -> bool:
    """Has a model's weights brought when there is room, although no request waits for them; whether they were out.

    From any thread; the core's loop may have to be woken.
    """
    if not state.residency["managed"][0] or state.weights["stage"][row] != OUT:
        return False
    if not state.weights["asked"][row]:
        state.weights["ordered_ns"][row], state.weights["asked"][row] = time.monotonic_ns(), 1
    state.residency["look"][0] = 1
    return True


def hit_rate(state: State) -> float:
    """Part of the requests that found their model's weights on the GPU; 1 before the first."""
    hits, misses = (int(state.weights[name].sum()) for name in ("hits", "misses"))
    return hits / (hits + misses) if hits + misses else 1.0


def keep_berth(state: State, berth: int) -> None:
    """Between two steps: no lane gets the berth from now on; one may still have it (`State.berth`)."""
    state.berth_kept[berth] = 1
    _touch_lanes(state, berth)


def open_berth(state: State, berth: int) -> None:
    """Between two steps: lanes compete for it again."""
    state.berth_kept[berth] = 0
    _touch_lanes(state, berth)


def _touch_lanes(state: State, berth: int) -> None:
    """Those that wait for the berth are settled before the next decision."""
    lane, core = state.lane, state.core
    waits = (lane["berth"] == berth) & (lane["state"] == FILLING) & (lane["live"] > 0) & (lane["touched"] == 0)
    for row in np.flatnonzero(waits):
        lane["touched"][row] = 1
        state.touched[core["touched"][0]] = row
        core["touched"][0] += 1
    core["changed"][0] = 1
