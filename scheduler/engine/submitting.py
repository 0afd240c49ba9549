"""Submitting requests: each gets a row and a slot, or staged memory for its inputs, and is posted to the core."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from paellapy.scheduler.core.errors import QueueFullError
from paellapy.scheduler.engine.front_end import Entry, FrontEnd, Loaded, Pending

Place = tuple[int, int]  # lane and slot


class Terms(NamedTuple):
    """What a message to the core says of a request besides its place."""

    client: int
    priority: int
    arrival_ns: int
    deadline_ns: int


def submit(
    front: FrontEnd,
    loaded: Loaded,
    items: Sequence[Mapping[str, NDArray[Any]]],
    terms: Terms,
    finishes: Sequence[Callable[[Entry], None]],
) -> list[Pending]:
    """Submits the items of one request. All claim a slot before the first is posted: otherwise an idle core would start
    with the first item alone, and the others would be a second batch. On an error, no item runs.
    """
    pending: list[Pending] = []
    try:
        for finish in finishes:
            pending.append(Pending(loaded, finish))
            front.take_row(pending[-1])
    except QueueFullError:
        for each in pending[:-1]:
            front.give_back(each)
        raise
    claims = [front.claim(loaded) for _ in pending]
    k = 0
    try:
        for k, each in enumerate(pending):
            write(front, each, claims[k], items[k], terms)
    except Exception:
        _withdraw(front, pending, claims, k, terms)
        raise
    return pending


def _withdraw(
    front: FrontEnd, pending: Sequence[Pending], claims: Sequence[Place | None], posted: int, terms: Terms
) -> None:
    """Withdraws items; `posted` of them are posted. A claimed slot is posted too, because its lane waits for it."""
    for k, (each, claimed) in enumerate(zip(pending, claims, strict=True)):
        if k >= posted and claimed is None:
            front.give_back(each)
            continue
        if k >= posted and claimed is not None:
            front.post_written(each, *claimed, *terms)
        front.cancel(each)


def write(
    front: FrontEnd, pending: Pending, claimed: Place | None, inputs: Mapping[str, NDArray[Any]], terms: Terms
) -> None:
    """Writes the inputs to the claimed slot, or stages them, and posts the request."""
    if claimed is None:
        staged, source, keep = front.stage.take(sum(array.nbytes for array in inputs.values()))
        at = 0
        for array in inputs.values():
            staged[at : at + array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
            at += array.nbytes
        front.post_staged(pending, source, keep, *terms)
        return
    lane = pending.loaded.lane_of.get(claimed[0])
    if lane is not None:
        # If the lane is not this model's, its row holds another model by now, and the core refuses the request.
        slots = lane.inputs
        for key, array in inputs.items():
            slots[key][claimed[1]] = array
    front.post_written(pending, *claimed, *terms)
