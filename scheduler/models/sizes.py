"""Numbers of bytes as readable text."""

from __future__ import annotations


def readable_bytes(nbytes: int) -> str:
    """A number of bytes with a fitting unit.

    >>> readable_bytes(3 << 20), readable_bytes(12)
    ('3.0 MiB', '12 B')
    """
    for unit, scale in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if nbytes >= scale:
            return f"{nbytes / scale:.1f} {unit}"
    return f"{nbytes} B"
