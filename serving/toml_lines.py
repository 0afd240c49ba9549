"""The line of a value in a TOML file, which the standard library's parser does not report."""

from __future__ import annotations

import re

_HEADER = re.compile(r"\s*(\[\[?)\s*([^\[\]]+?)\s*\]\]?\s*(#.*)?$")
_KEY = re.compile(r"\s*((?:[\w-]+|\"[^\"]*\"|'[^']*')(?:\s*\.\s*(?:[\w-]+|\"[^\"]*\"|'[^']*'))*)\s*=")
_PART = re.compile(r"[\w-]+|\"[^\"]*\"|'[^']*'")


def line_of(text: str, path: tuple[str | int, ...]) -> int:
    """The line, from 1, of the value at a path, or of the nearest part of the path that exists.

    >>> line_of("a = 1\\n[[m]]\\nx = 2\\n[[m]]\\nx = 3", ("m", 1, "x"))
    5
    """
    best, best_length = 1, -1
    counts: dict[tuple[str, ...], int] = {}
    table: tuple[str | int, ...] = ()
    for number, line in enumerate(text.splitlines(), 1):
        if header := _HEADER.match(line):
            names = _names(header[2])
            if header[1] == "[[":
                counts[names] = counts.get(names, -1) + 1
                for inner in [each for each in counts if len(each) > len(names) and each[: len(names)] == names]:
                    del counts[inner]  # counts start again in every element
            table = _with_indices(names, counts)
            here = table
        elif key := _KEY.match(line):
            here = (*table, *_names(key[1]))
        else:
            continue
        if here == path[: len(here)] and len(here) > best_length:
            best, best_length = number, len(here)
    return best


def _names(dotted: str) -> tuple[str, ...]:
    return tuple(part.strip("\"'") for part in _PART.findall(dotted))


def _with_indices(names: tuple[str, ...], counts: dict[tuple[str, ...], int]) -> tuple[str | int, ...]:
    """Adds to each array of tables in the path the index of its latest element."""
    path: list[str | int] = []
    for k, name in enumerate(names):
        path.append(name)
        if names[: k + 1] in counts:
            path.append(counts[names[: k + 1]])
    return tuple(path)
