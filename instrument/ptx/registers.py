"""Registers and how many blocks an SM has room for: passes must not cost a kernel blocks that run at a time.

All parts from sm_70 on have 65,536 registers an SM in four partitions, given out to warps in units of 256.
"""

from __future__ import annotations

_PARTITION, _PARTITIONS, _UNIT, _WARP = 16384, 4, 256, 32
_MOST_THREADS = 2048
_SHARED_BYTES, _RESERVED_BYTES = 228 << 10, 1 << 10  # of the largest part: it bounds what others hold
REGISTER_STEP = 8  # registers of a thread, as ptxas gives them out


def blocks_by_registers(registers: int, threads: int) -> int:
    """Blocks an SM's registers suffice for.

    >>> blocks_by_registers(40, 128), blocks_by_registers(48, 128)
    (12, 10)
    """
    per_warp = -(-max(registers, 1) * _WARP // _UNIT) * _UNIT
    return _PARTITION // per_warp * _PARTITIONS // -(-threads // _WARP)


def room_for_all(registers: int, threads: int) -> bool:
    """Whether registers cannot be what limits a kernel."""
    return blocks_by_registers(registers, threads) * threads >= _MOST_THREADS


def most_registers(blocks: int, threads: int, shared_bytes: int) -> int:
    """The most registers of a thread with which an SM holds so many blocks, as far as shared memory lets it."""
    blocks = min(blocks, _SHARED_BYTES // (shared_bytes + _RESERVED_BYTES))
    return max(
        (r for r in range(REGISTER_STEP, 256, REGISTER_STEP) if blocks_by_registers(r, threads) >= blocks),
        default=REGISTER_STEP,
    )
