"""More models than memory in simulated time: the models on the GPU at the start, and counters of a run."""

from __future__ import annotations

from collections.abc import Sequence

from paellapy.scheduler.core import codes
from paellapy.scheduler.core.manage import KEEP, manage, needed_bytes
from paellapy.scheduler.core.profiles import ModelProfile, ProfileError
from paellapy.scheduler.core.state import State


def manage_weights(state: State, models: Sequence[ModelProfile], memory_bytes: int) -> None:
    """Gives the core a memory budget. Models must be installed, and nothing may have run."""
    for each in models:
        if not 0 < each.weight_bytes <= memory_bytes:
            raise ProfileError(
                f"{each.name} has weight_bytes={each.weight_bytes:,}, which must be above 0 and at most "
                f"memory_bytes={memory_bytes:,}: set the model's weight_bytes, or raise memory_bytes"
            )
    needed = needed_bytes([(each.priority, each.weight_bytes, KEEP[each.resident]) for each in models])
    if needed > memory_bytes:
        raise ProfileError(
            f"{needed:,} bytes of weights must be on the GPU at once, more than memory_bytes={memory_bytes:,}: models "
            "with resident=True, models of higher priority than another one, and the largest of the others; raise it, "
            "or keep fewer models resident"
        )
    manage(state, memory_bytes)
    first = sorted(range(len(models)), key=lambda m: models[m].resident is not True)
    for m in first:
        nbytes = models[m].weight_bytes
        fits = int(state.residency["held_bytes"][0]) + nbytes <= memory_bytes and models[m].resident is not False
        state.weights["stage"][m] = codes.HERE if fits else codes.OUT
        state.residency["held_bytes"][0] += nbytes if fits else 0


def weight_counters(state: State) -> dict[str, int]:
    """Counts of weight movements in a run."""
    r = state.residency[0]
    return {
        "weight_hits": int(state.weights["hits"].sum()),
        "weight_misses": int(state.weights["misses"].sum()),
        "brought": int(r["brought"]),
        "brought_bytes": int(r["brought_bytes"]),
        "evicted": int(r["evicted"]),
        "reload_us": int(r["reload_ns"] / 1e3),
    }
