"""Live counts: the numbers of blocks and warps on each SM now, from kernels that report at level `count`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paellapy.instrument.device.base import Device
from paellapy.instrument.records import WARP_SHIFT

_MASK, _HALF = (1 << WARP_SHIFT) - 1, 1 << (WARP_SHIFT - 1)


@dataclass(frozen=True, slots=True, eq=False)
class Counts:
    """Counters of every SM, read while kernels run. Resident = started - ended."""

    started: NDArray[np.int64]  # blocks, since the device was opened or the last trace
    ended: NDArray[np.int64]
    resident_blocks: NDArray[np.int64]
    resident_warps: NDArray[np.int64]
    occupancy: NDArray[np.float64]  # resident warps / the maximum of an SM


def counts(device: Device | None = None) -> Counts:
    """The counters of each SM now. Reading does not wait for running kernels."""
    device = device or Device.current()
    lines = device.counts()
    started, ended = lines["started"], lines["ended"]
    blocks, warps = _resident(started, ended)
    return Counts(
        started=(started & _MASK).astype(np.int64),
        ended=(ended & _MASK).astype(np.int64),
        resident_blocks=blocks,
        resident_warps=warps,
        occupancy=warps / device.limits.warps,
    )


def _resident(started: NDArray[Any], ended: NDArray[Any]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Blocks and warps that started and did not end."""
    # The counters wrap, and the block counts carry into the warp counts above them; the difference of the packed words
    # is not affected. A line may be read between the two counters of a block: then the count is 0, not -1.
    difference = (started - ended).view(np.int64)
    blocks = (difference + _HALF & _MASK) - _HALF
    return np.maximum(blocks, 0), np.maximum((difference - blocks) >> WARP_SHIFT, 0)
