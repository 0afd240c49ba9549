"""The layouts shared by device code, host code, simulator and plots. Each exists once, here.

Sizes and offsets are what the PTX passes, the launcher and the virtual GPU are generated from.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

# One block, as the device writes it into the ring of its own SM: 16 bytes, one store. The slot is reserved when the
# block starts and filled when it ends, so slots are in order of start. Times are the low 32 bits of %globaltimer (ns).
RING_RECORD = np.dtype([("start_lo", "<u4"), ("end_lo", "<u4"), ("block", "<u4"), ("launch", "<u4")])

# One SM's counters. Each packs blocks in its low bits and warps from WARP_SHIFT on, so one `red` keeps both. They lie
# on cache lines of their own and 256 bytes from the next SM's: on an H200 that costs a softmax 1.7 %, 64 bytes 2.2 %.
SM_LINE = np.dtype(
    {
        "names": ["started", "tail", "ended"],
        "formats": ["<u8", "<u4", "<u8"],
        "offsets": [0, 64, 128],
        "itemsize": 256,
    }
)

WARP_SHIFT = 32

# What a launch tells the kernel: passed by value as the last kernel parameter, or by pointer where a foreign launcher
# packs the parameters. `magic` tells a descriptor of ours from a scratch buffer of somebody else's.
DESCRIPTOR = np.dtype(
    [
        ("lines", "<u8"),  # SM_LINE[n_sm]
        ("rings", "<u8"),  # RING_RECORD[n_sm, ring_mask + 1]
        ("notify", "<u8"),  # a word in pinned memory
        ("magic", "<u8"),
        ("launch", "<u4"),
        ("ring_mask", "<u4"),
        ("first", "<u4"),  # slice: linear index of this launch's first block in the logical grid
        ("grid_x", "<u4"),
        ("grid_y", "<u4"),
        ("grid_z", "<u4"),
        ("epoch", "<u4"),  # preempt: this launch's number; its blocks do not run while the flag is not below it
        ("pad", "<u4"),
        ("flag", "<u8"),  # preempt: a word of the device's memory
        ("left", "<u8"),  # preempt: how many blocks did not run, and which: a counter, then one word a block
        ("todo", "<u8"),  # slice and preempt: the blocks to run, one word each; null: those from `first` on
    ]
)
LEFT_HEAD_BYTES = 128  # the counter has a cache line of its own
MAGIC = 0x5041454C4C415059  # "PAELLAPY"

# One block of a finished trace. Times are nanoseconds on the device's clock.
BLOCK = np.dtype(
    [
        ("launch", "<u4"),
        ("kernel", "<u2"),
        ("sm", "<u2"),
        ("block", "<u4"),
        ("pad", "<u4"),
        ("start_ns", "<i8"),
        ("end_ns", "<i8"),
    ]
)

# One launch of a finished trace: what ran, with which resources, and when the host asked for it (device clock).
LAUNCH = np.dtype(
    [
        ("launch", "<u4"),
        ("kernel", "<u2"),
        ("warps", "<u2"),  # per block
        ("registers", "<u2"),  # per thread
        ("level", "<u2"),
        ("shared_bytes", "<u4"),  # per block, static and dynamic
        ("grid", "<u4", (3,)),  # logical grid, in blocks
        ("first", "<u4"),  # slice: first block and number of blocks of this launch
        ("blocks", "<u4"),
        ("submit_ns", "<i8"),
        ("stream", "<u8"),
    ]
)

Records = NDArray[Any]


def field_offset(dtype: np.dtype[Any], name: str) -> int:
    """Byte offset of a field, for code generators.

    >>> field_offset(SM_LINE, "tail")
    64
    """
    fields = dtype.fields
    assert fields is not None
    return int(fields[name][1])
