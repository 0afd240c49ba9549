"""Weights that come and go: switching this on, giving the core orders from outside, and reading its account."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable
from typing import Any

import numba
import numpy as np

from paellapy.instrument.jit import address_of
from paellapy.scheduler.core.codes import AUTO, FILLING, GOES, OUT, STAYS
from paellapy.scheduler.core.moves import look_at_moves
from paellapy.scheduler.core.residency import STEPS, order_moves
from paellapy.scheduler.core.state import State

KEEP: dict[Any, int] = {"auto": AUTO, True: STAYS, False: GOES}  # by the users' values
STAGES = ("host", "loading", "resident", "leaving")  # weights.stage as text


def attach_moves(state: State) -> None:
    """Lets the core move weights. Most engines keep all weights on the GPU, and need not compile these functions."""
    for each in (look_at_moves, order_moves):
        state.residency[each.__name__][0] = address_of(each, State.numba_type, numba.types.int64)


def manage(state: State, budget_bytes: int) -> None:
    """Limits the weights on the GPU to this number of bytes, from the next step on."""
    attach_moves(state)
    r = state.residency[0]
    r["managed"], r["budget_bytes"] = 1, budget_bytes
    r["ns_per_byte"] = 1.0 / float(state.tuning["link_gbps"][0])


def needed_bytes(weights: Iterable[tuple[int, int, int]]) -> int:
    """The least memory with which every model can run, from each model's priority, bytes of weights, and `keep`.

    All weights that stay must fit. So must, for each priority, its largest model beside all weights of higher priority,
    which never leave for it; but weights that go leave by themselves.

    >>> needed_bytes([(0, 50, AUTO), (0, 40, AUTO)]), needed_bytes([(0, 50, AUTO), (1, 40, AUTO), (1, 9, STAYS)])
    (50, 99)
    """
    found = [each for each in weights if each[1] > 0]
    most = 0
    for own in {priority for priority, _, keep in found if keep != STAYS}:
        above = sum(nbytes for priority, nbytes, keep in found if priority > own and keep == AUTO)
        most = max(most, above + max(n for priority, n, keep in found if priority == own and keep != STAYS))
    return sum(nbytes for _, nbytes, keep in found if keep == STAYS) + most


def weights_state(state: State, row: int) -> str:
    """Where a model's weights are: `resident`, `loading 43 %`, `leaving`, `host` or `disk`."""
    w = state.weights[row]
    said = STAGES[int(w["stage"])] if state.residency["managed"][0] else "resident"
    if said == "loading":
        return f"loading {100 * int(w['arrived']) // max(1, int(w['chunks']))} %"
    return "disk" if said == "host" and w["ns_per_byte"] > 0 else said


def want_weights(state: State, row: int) -> bool:
    """Orders a model's weights to be brought although no request waits for them; returns whether they were out.

    May be called from any thread; the core's loop may have to be woken.
    """
    if not state.residency["managed"][0] or state.weights["stage"][row] != OUT:
        return False
    if not state.weights["asked"][row]:
        state.weights["ordered_ns"][row], state.weights["asked"][row] = time.monotonic_ns(), 1
    state.residency["look"][0] = 1
    return True


def demand_worth(state: State, row: int) -> float:
    """The value of a model's weights in host memory, per byte: recent requests, doubled for each step of priority."""
    w, past = state.weights[row], float(state.tuning["demand_memory_ns"][0])
    recent = float(w["demand"]) * math.exp(-max(0.0, time.monotonic_ns() - float(w["demand_ns"])) / past)
    return recent * 2.0 ** max(-STEPS, min(int(state.model["priority"][row]), STEPS))


def hit_rate(state: State) -> float:
    """The fraction of requests that found their model's weights on the GPU; 1 before the first request."""
    hits, misses = (int(state.weights[name].sum()) for name in ("hits", "misses"))
    return hits / (hits + misses) if hits + misses else 1.0


def keep_berth(state: State, berth: int) -> None:
    """Reserves the berth: no lane gets it from now on (`State.berth` may still name one). Call between two steps."""
    state.berth_kept[berth] = 1
    _touch_lanes(state, berth)


def open_berth(state: State, berth: int) -> None:
    """Opens the berth to lanes again. Call between two steps."""
    state.berth_kept[berth] = 0
    _touch_lanes(state, berth)


def _touch_lanes(state: State, berth: int) -> None:
    """Marks the lanes of the berth, to be settled before the next decision."""
    lane, core = state.lane, state.core
    waits = (lane["berth"] == berth) & (lane["state"] == FILLING) & (lane["live"] > 0) & (lane["touched"] == 0)
    for row in np.flatnonzero(waits):
        lane["touched"][row] = 1
        state.touched[core["touched"][0]] = row
        core["touched"][0] += 1
    core["changed"][0] = 1
