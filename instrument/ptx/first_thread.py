"""The first thread of a block, which reports for all: a number that is 0 in it alone."""

from __future__ import annotations

from collections.abc import Sequence


def thread_index_bits(
    threads: Sequence[int] | None, result: str = "%paellapy_t", scratch: str = "%paellapy_u"
) -> str:
    """Computes a number that is 0 exactly in the block's first thread."""
    code = f"mov.u32 {result}, %tid.x;"
    for axis, extent in zip("yz", threads[1:] if threads else (0, 0), strict=True):
        if extent != 1:
            code += f"""
	mov.u32 {scratch}, %tid.{axis};
	or.b32 {result}, {result}, {scratch};"""
    return code
