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
        ("range_mask", "<u4"),  # bytes of a lane's ring of events, less one
        ("flag", "<u8"),  # preempt: a word of the device's memory
        ("left", "<u8"),  # preempt: how many blocks did not run, and which: a counter, then one word a block
        ("todo", "<u8"),  # slice and preempt: the blocks to run, one word each; null: those from `first` on
        ("ranges", "<u8"),  # events of ranges: per block and lane RANGE_HEAD, then RANGE_EVENT[…]; null: none wanted
    ]
)
LEFT_HEAD_BYTES = 128  # the counter has a cache line of its own
# A flag has copies, a cache line each, and every block reads one of them: all blocks of a short kernel start at once,
# and the part of L2 that holds a line answers them one after the other.
FLAG_COPIES = 16  # a power of two
FLAG_COPY_BYTES = 128
MAGIC = 0x5041454C4C415059  # "PAELLAPY"

# An event: a range begins or ends. The clock is the SM's (32 bits), the tag the range's number in its kernel.
RANGE_EVENT = np.dtype([("clock", "<u4"), ("tag", "<u4")])
RANGE_END = 1 << 31
# What lies before a lane's events. `used` counts bytes, those overwritten too. The other fields are of the block, and
# its first lane alone has them; `start_lo` is that of the block's RING_RECORD.
RANGE_HEAD = np.dtype([("used", "<u4"), ("clock_end", "<u4"), ("clock_start", "<u4"), ("start_lo", "<u4")])

# One range of a finished trace, on the time line of its block.
RANGE = np.dtype(
    [
        ("launch", "<u4"),
        ("block", "<u4"),
        ("kernel", "<u2"),
        ("sm", "<u2"),
        ("range", "<u2"),  # which of the trace's names
        ("warp", "<u2"),  # WHOLE_BLOCK, or the warp that noted it
        ("depth", "<u2"),  # ranges around it
        ("pad", "<u2"),
        ("start_ns", "<i8"),
        ("end_ns", "<i8"),
    ]
)
WHOLE_BLOCK = 0xFFFF

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

# What is known of a launch beyond its record: of its machine code, and, where blocks are evaluated, of its work.
WORK = np.dtype(
    [
        ("launch", "<u4"),
        ("spill_bytes", "<u4"),  # per thread, stores and loads
        ("plain_registers", "<u4"),  # per thread, of the kernel before the passes; 0: unknown
        ("pad", "<u4"),
        ("bytes", "<i8"),  # loaded and stored
        ("flops", "<i8"),
        ("tensor_flops", "<i8"),
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
