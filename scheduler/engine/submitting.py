"""Submitting requests: each gets a row and a slot, or staged memory for its inputs, and is posted to the core."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paellapy.scheduler.core.errors import EngineClosedError, QueueFullError
from paellapy.scheduler.engine.front_end import Entry, FrontEnd, Loaded, Pending, Staged
from paellapy.scheduler.engine.messages import Terms

Place = tuple[int, int]  # lane and slot
_SHORT_BYTES = 4096  # of shorter arrays, one more copy takes less time than two views


def submit(
    front: FrontEnd,
    loaded: Loaded,
    items: Sequence[Mapping[str, NDArray[Any]]],
    terms: Terms,
    finishes: Sequence[Callable[[Entry], None]],
) -> list[Pending]:
    """Submits the items of one request, which run as one batch if the engine is idle and they fit into one: all claim a
    slot before the first is posted, and those without a slot are posted together. On an error, no item runs.
    """
    if len(finishes) == 1:
        return [submit_one(front, loaded, items[0], terms, finishes[0])]
    pending: list[Pending] = []
    try:
        for finish in finishes:
            pending.append(Pending(loaded, finish))
            front.take_row(pending[-1], terms[0])
    except (QueueFullError, EngineClosedError):
        for each in pending[:-1]:
            front.give_back(each)
        raise
    claims = [front.claim(loaded, terms[0]) for _ in pending]
    staged: list[Staged] = []
    written, posted = 0, False
    try:
        for each, claimed, inputs in zip(pending, claims, items, strict=True):
            if claimed is None:
                staged.append(_stage(front, each, inputs))
        if staged:
            posted = True
            front.post_staged(staged, *terms)
        for written, (each, claimed, inputs) in enumerate(zip(pending, claims, items, strict=True)):  # noqa: B007
            if claimed is not None:
                write(front, each, claimed, inputs, terms)
    except Exception:
        _withdraw(front, pending, claims, [] if posted else staged, written, terms, posted)
        raise
    return pending


def submit_one(
    front: FrontEnd, loaded: Loaded, inputs: Mapping[str, NDArray[Any]], terms: Terms, finish: Callable[[Entry], None]
) -> Pending:
    """As `submit`, for one item: most requests have no more, and need no lists."""
    pending = Pending(loaded, finish)
    front.take_row(pending, terms[0])
    claimed = front.claim(loaded, terms[0])
    staged: list[Staged] = []
    try:
        if claimed is None:
            staged.append(_stage(front, pending, inputs))
            front.post_staged(staged, *terms)
        else:
            write(front, pending, claimed, inputs, terms)
    except Exception:
        _withdraw(front, [pending], [claimed], [], 0, terms, bool(staged))
        raise
    return pending


def submit_bytes(front: FrontEnd, pending: Pending, pieces: Sequence[memoryview], terms: Terms) -> None:
    """As `submit_one`, for inputs that are bytes, in the model's order and of its sizes."""
    front.take_row(pending, terms[0])
    claimed = front.claim(pending.loaded, terms[0])
    staged: list[Staged] = []
    try:
        if claimed is None:
            staged.append(_stage_bytes(front, pending, pieces))
            front.post_staged(staged, *terms)
            return
        lane = pending.loaded.lane_of.get(claimed[0])
        if lane is not None:  # as in `write`
            for slot, piece in zip(lane.slot_bytes(claimed[1])[0], pieces, strict=True):
                slot[:] = piece
        front.post_written(pending, *claimed, *terms)
    except Exception:
        _withdraw(front, [pending], [claimed], [], 0, terms, bool(staged))
        raise


def _withdraw(
    front: FrontEnd, pending: Sequence[Pending], claims: Sequence[Place | None], staged: Sequence[Staged],
    written: int, terms: Terms, posted: bool,
) -> None:  # fmt: skip
    """Withdraws items. Before the item `written`, claimed slots are posted; the others are posted now, because their
    lane waits for them. If items without a slot were `posted`, their completions free rows and staged memory.
    """
    for _, _, keep in staged:
        front.stage.give(keep)
    for k, (each, claimed) in enumerate(zip(pending, claims, strict=True)):
        if claimed is None and not posted:
            front.give_back(each)
            continue
        if claimed is not None and k >= written:
            front.post_written(each, *claimed, *terms)
        front.cancel(each)


def _stage(front: FrontEnd, pending: Pending, inputs: Mapping[str, NDArray[Any]]) -> Staged:
    """Copies the inputs to memory from which the core takes them later."""
    size = 0
    for array in inputs.values():
        size += array.nbytes
    staged, source, keep = front.stage.take(size)
    memory, at = staged.data, 0
    for array in inputs.values():
        end = at + array.nbytes
        if array.nbytes <= _SHORT_BYTES:
            memory[at:end] = array.tobytes()
        else:
            staged[at:end] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        at = end
    return pending, source, keep


def _stage_bytes(front: FrontEnd, pending: Pending, pieces: Sequence[memoryview]) -> Staged:
    staged, source, keep = front.stage.take(sum(map(len, pieces)))
    memory, at = staged.data, 0
    for piece in pieces:
        memory[at : at + len(piece)] = piece
        at += len(piece)
    return pending, source, keep


def write(
    front: FrontEnd, pending: Pending, claimed: Place, inputs: Mapping[str, NDArray[Any]], terms: Terms
) -> None:
    """Writes the inputs to the claimed slot, and posts the request."""
    lane = pending.loaded.lane_of.get(claimed[0])
    if lane is not None:
        # If the lane is not this model's, its row holds another model by now, and the core refuses the request.
        slots = lane.inputs
        for key, array in inputs.items():
            slots[key][claimed[1]] = array
    front.post_written(pending, *claimed, *terms)
