"""Registers and the number of blocks that an SM has room for: passes must not reduce a kernel's resident blocks.

All parts from sm_70 on have 65,536 registers per SM in four partitions, allocated to warps in units of 256.
"""

from __future__ import annotations

_PARTITION, _PARTITIONS, _UNIT, _WARP = 16384, 4, 256, 32
_MOST_THREADS = 2048
_SHARED_BYTES, _RESERVED_BYTES = 228 << 10, 1 << 10  # of the largest part, which bounds the others
REGISTER_STEP = 8  # registers per thread, in ptxas's steps


def blocks_by_registers(registers: int, threads: int) -> int:
    """The number of blocks for which an SM's registers suffice.

    >>> blocks_by_registers(40, 128), blocks_by_registers(48, 128)
    (12, 10)
    """
    per_warp = -(-max(registers, 1) * _WARP // _UNIT) * _UNIT
    return _PARTITION // per_warp * _PARTITIONS // -(-threads // _WARP)


def room_for_all(registers: int, threads: int) -> bool:
    """Whether registers cannot be the limit of a kernel's resident blocks."""
    return blocks_by_registers(registers, threads) * threads >= _MOST_THREADS


def most_registers(blocks: int, threads: int, shared_bytes: int) -> int:
    """The most registers per thread with which an SM holds this many blocks, as far as shared memory allows it."""
    blocks = min(blocks, _SHARED_BYTES // (shared_bytes + _RESERVED_BYTES))
    return max(
        (r for r in range(REGISTER_STEP, 256, REGISTER_STEP) if blocks_by_registers(r, threads) >= blocks),
        default=REGISTER_STEP,
    )
