"""The layouts shared by device code, host code, simulator and plots. Each exists once, here.

The PTX passes, the launcher and the virtual GPU are generated from these sizes and offsets.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

# One block, as the device writes it into the ring of its own SM: 16 bytes, one store. The slot is reserved when the
# block starts and filled when it ends, so slots are in order of start. Times are the low 32 bits of %globaltimer (ns).
RING_RECORD = np.dtype([("start_lo", "<u4"), ("end_lo", "<u4"), ("block", "<u4"), ("launch", "<u4")])

# One SM's counters. Each packs blocks in its low bits and warps from WARP_SHIFT on, so that one `red` updates both.
# They lie on separate cache lines, 256 bytes from the next SM's: on an H200, reporting then costs a softmax 1.7 %; with
# 64 bytes, 2.2 %.
SM_LINE = np.dtype(
    {
        "names": ["started", "tail", "ended"],
        "formats": ["<u8", "<u4", "<u8"],
        "offsets": [0, 64, 128],
        "itemsize": 256,
    }
)

WARP_SHIFT = 32

MOST_EPOCHS = 2**32 - 1  # the word of a flag has 32 bits

# A launch's message to the kernel: passed by value as the last kernel parameter, or by pointer where a foreign launcher
# packs the parameters. `magic` distinguishes our descriptors from other scratch buffers.
DESCRIPTOR = np.dtype(
    [
        # The fields that blocks read first are in front, beside the kernel's own parameters: a line of constant memory
        # (64 bytes) that no block has read yet costs 70 ns.
        ("flag", "<u8"),  # preempt: a word of device memory
        ("epoch", "<u4"),  # preempt: this launch's number; its blocks run only while the flag is below it
        ("first", "<u4"),  # slice: linear index of this launch's first block in the logical grid
        ("grid_x", "<u4"),
        ("grid_y", "<u4"),
        ("grid_z", "<u4"),
        ("launch", "<u4"),
        ("todo", "<u8"),  # slice and preempt: the blocks to run, one word each; null: those from `first` on
        # preempt: the number of blocks that did not run, then their numbers: a counter, then one word per block
        ("left", "<u8"),
        ("lines", "<u8"),  # SM_LINE[n_sm]
        ("rings", "<u8"),  # RING_RECORD[n_sm, ring_mask + 1]
        ("ring_mask", "<u4"),
        ("range_mask", "<u4"),  # bytes of a lane's ring of RANGE_RECORD, minus one
        # The lanes' rings of RANGE_RECORD, aligned to the size of a ring; before them their RANGE_HEADs, in reverse.
        # Null: ranges are not recorded.
        ("ranges", "<u8"),
        ("notify", "<u8"),  # a word in pinned memory
        ("magic", "<u8"),
    ]
)
LEFT_HEAD_BYTES = 128  # the counter has its own cache line
# A flag has several copies, each on its own cache line, and every block reads one of them: all blocks of a short kernel
# start at once, and the part of L2 that holds a line answers them one after the other.
FLAG_COPIES = 16  # a power of two
FLAG_COPY_BYTES = 128
MAGIC = 0x5041454C4C415059  # "PAELLAPY"

# A record of ranges: one store of 16 bytes with the SM's clock (32 bits) at up to three moments. `site` is its place in
# the kernel's code, which says the ranges that begin and end at each moment (markers.Sites).
RANGE_RECORD = np.dtype([("site", "<u4"), ("clocks", "<u4", (3,))])
RANGE_END = 1 << 31  # in the tag of an event: the range of this number ends; otherwise it begins
# The header of a lane's records. `used` counts their bytes and `events` their events, including overwritten ones. The
# other fields concern the block, and only its first lane has them; `start_lo` is that of the block's RING_RECORD.
RANGE_HEAD = np.dtype(
    [
        ("used", "<u4"),
        ("events", "<u4"),
        ("clock_start", "<u4"),
        ("start_lo", "<u4"),
        ("clock_end", "<u4"),
        ("pad", "<u4"),
    ]
)

# One range of a finished trace, on the time line of its block.
RANGE = np.dtype(
    [
        ("launch", "<u4"),
        ("block", "<u4"),
        ("kernel", "<u2"),
        ("sm", "<u2"),
        ("range", "<u2"),  # index into the trace's names
        ("warp", "<u2"),  # WHOLE_BLOCK, or the warp that recorded it
        ("depth", "<u2"),  # number of ranges around it
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

# One launch of a finished trace: the kernel, its resources, and when the host submitted it (device clock).
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

# Further facts about a launch: of its machine code, and, where blocks are evaluated, of its work.
WORK = np.dtype(
    [
        ("launch", "<u4"),
        ("spill_bytes", "<u4"),  # per thread, stores and loads
        ("plain_registers", "<u4"),  # per thread, of the kernel before the passes; 0: unknown
        ("blocks", "<u4"),  # that this work is of, whether they ran or not; 0: unknown
        ("bytes", "<i8"),  # loaded and stored
        ("flops", "<i8"),
        ("tensor_flops", "<i8"),
        ("wasted_bytes", "<i8"),  # in sectors that were loaded or stored, and not used
        ("updates", "<i8"),  # atomic updates of elements
        ("hottest", "<i8"),  # updates of the address with the most
        ("queue_ns", "<i8"),  # the time that updates of one line of L2 take, one after the other
        ("plain_spill_bytes", "<u4"),  # of the kernel before the passes
        ("product", "<u4"),  # the operands of its products, in PRODUCTS; 0: none, or not known
    ]
)

# Types of tensor instructions in PTX. A product of fp32 may be made of several; "fma" runs on the ordinary units.
PRODUCTS = ("", "fma", "f16", "bf16", "tf32", "f64", "e4m3", "e5m2", "s8", "u8", "tf32x3", "bf16x3", "bf16x6")

Records = NDArray[Any]


def widened(found: Records, dtype: np.dtype[Any]) -> Records:
    """Records of an older file: fields that it does not have are 0.

    >>> widened(np.ones(1, [("a", "<i4")]), np.dtype([("a", "<i8"), ("b", "<i8")])).tolist()
    [(1, 0)]
    """
    made = np.zeros(len(found), dtype)
    for name in set(dtype.names or ()) & set(found.dtype.names or ()):
        made[name] = found[name]
    return made


def field_offset(dtype: np.dtype[Any], name: str) -> int:
    """Byte offset of a field, for code generators.

    >>> field_offset(SM_LINE, "tail")
    64
    """
    fields = dtype.fields
    assert fields is not None
    return int(fields[name][1])
