"""Numbers of a trace as readable text: counts with their nouns, and times with fitting units."""

from __future__ import annotations


def counted(n: int, one: str, several: str | None = None) -> str:
    """A number with its noun.

    >>> counted(1, "launch", "launches"), counted(4096, "block")
    ('1 launch', '4,096 blocks')
    """
    return f"{n:,} {one if n == 1 else several or one + 's'}"


def readable_time(ns: float) -> str:
    """A time with a fitting unit.

    >>> readable_time(1234)
    '1.23 µs'
    """
    for unit, size in (("s", 1e9), ("ms", 1e6), ("µs", 1e3)):
        if ns >= size:
            value = ns / size
            return f"{value:.{0 if value >= 100 else 1 if value >= 10 else 2}f} {unit}"
    return f"{ns:.0f} ns"
