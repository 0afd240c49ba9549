"""Live counts: how many blocks and warps are on each SM right now, from kernels that report at level `count`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from instrument.device.base import Device


@dataclass(frozen=True, slots=True, eq=False)
class Counts:
    """Counters of every SM, read while kernels run. Resident = started - ended."""

    started: NDArray[np.int64]  # blocks, since the device was opened or the last trace
    ended: NDArray[np.int64]
    resident_blocks: NDArray[np.int64]
    resident_warps: NDArray[np.int64]
    occupancy: NDArray[np.float64]  # resident warps / the most an SM can hold


def counts(device: Device | None = None) -> Counts:
    """The counters of each SM now. Reading does not wait for running kernels."""
    device = device or Device.current()
    lines = device.counts()
    started, ended = lines["started"], lines["ended"]
    warps = _resident(started >> 32, ended >> 32)
    return Counts(
        started=(started & 0xFFFFFFFF).astype(np.int64),
        ended=(ended & 0xFFFFFFFF).astype(np.int64),
        resident_blocks=_resident(started, ended),
        resident_warps=warps,
        occupancy=warps / device.limits.warps,
    )


def _resident(started: NDArray[Any], ended: NDArray[Any]) -> NDArray[np.int64]:
    # 32-bit counters wrap; their difference does not. A line may be read between the two counters of a block.
    difference: NDArray[np.int32] = (started - ended).astype(np.uint32).view(np.int32)
    return np.maximum(difference, 0).astype(np.int64, copy=False)
