"""Quarantine: a request that made the GPU fail is not run again. Requests are known by a digest of their content.

On a real GPU, one invalid address ends the engine for all clients, and the driver does not say which request used it.
A request that was alone on the GPU is to blame. If there were several, each is suspected: one that was there at two
failures is blamed, and one that is answered later is cleared. Requests with the same content count once per failure.
A request of several items is blamed as a whole, since most of its items are innocent; an item is blamed if it was there
at two failures in different requests. All workers share the table, which outlives the engine's process.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from paellapy.scheduler.core.errors import RequestFailedError, SuspectError
from paellapy.scheduler.engine.pipelines import Served
from paellapy.scheduler.engine.request_values import digest_of, digest_of_all
from paellapy.serving.logs import log

MOST_REQUESTS = 1024  # remembered; the oldest give way
_ALONE = -1  # in place of a second failure: it was alone at the first
# Columns. Workers write them without a lock: at one failure all of them write the same numbers.
_KEY, _FIRST, _SECOND = range(3)
_SAID = "the GPU failed on the values of this request and would fail again"


def quarantine_table() -> Any:
    """A table in memory that forked processes share. Its last row counts the rows written."""
    memory = mmap.mmap(-1, (MOST_REQUESTS + 1) * 24)
    return np.frombuffer(memory, np.int64).reshape(MOST_REQUESTS + 1, 3)


class Quarantine:
    """The suspected and blamed requests of a server."""

    def __init__(self, table: Any = None) -> None:
        self._table = quarantine_table() if table is None else table
        self._written = self._table[MOST_REQUESTS].data  # read at every request; ten times as fast as an array

    def __bool__(self) -> bool:
        return bool(self._written[0])

    def check(self, model: Served, inputs: dict[str, Any], items: int) -> list[int]:
        """Digests under which the request or its items are suspected. RequestFailedError: it is known to make the GPU
        fail, or one of its items is.
        """
        found = []
        for digest in _with_whole(list(_digests(model, inputs, items))):
            first, second = self._failures(digest)
            if second:
                raise RequestFailedError(_SAID)
            if first:
                found.append(digest)
        return found

    def blame(self, error: SuspectError, model: Served, inputs: dict[str, Any], items: int) -> Exception:
        """Notes a failure. Returns the error for the client: its request made the GPU fail, or it should try again."""
        whole = digest_of_all(list(_digests(model, inputs, items)))
        to_blame = self._note(whole, error.failure, alone=not error.others)
        if not to_blame and items > 1:
            twice = [self._note(each, error.failure) for each in error.digests]  # all of them are noted
            to_blame = any(twice)
        said = "a request made the GPU fail" if to_blame else "a request was one of several on the GPU when it failed"
        fields = {"model": model.name, "content": f"{whole:016x}", "beside": error.others}
        log.error(said, extra={"fields": fields})
        return RequestFailedError(_SAID) if to_blame else error

    def _note(self, digest: int, failure: int, alone: bool = False) -> bool:
        """Notes the failure for this content; returns whether it is to blame."""
        row = self._row(digest)
        if alone:
            row[_SECOND] = _ALONE
        elif row[_FIRST] not in (0, failure):
            row[_SECOND] = failure
        row[_FIRST] = row[_FIRST] or failure
        return bool(row[_SECOND])

    def clear(self, digests: Sequence[int]) -> None:
        """Clears items that were answered."""
        for digest in digests:
            self._row(digest)[_FIRST:] = 0

    def _failures(self, digest: int) -> tuple[int, int]:
        """The failures at which a request with this content was on the GPU; 0: none."""
        at = np.flatnonzero(self._table[:MOST_REQUESTS, _KEY] == _signed(digest))
        return (int(self._table[at[0], _FIRST]), int(self._table[at[0], _SECOND])) if len(at) else (0, 0)

    def _row(self, digest: int) -> Any:
        known = np.flatnonzero(self._table[:MOST_REQUESTS, _KEY] == _signed(digest))
        if len(known):
            return self._table[known[0]]
        number = int(self._table[MOST_REQUESTS, 0])
        self._table[MOST_REQUESTS, 0] = number + 1
        row = self._table[number % MOST_REQUESTS]
        row[:] = _signed(digest), 0, 0
        return row


def _signed(digest: int) -> int:
    return digest - (1 << 64) if digest >= 1 << 63 else digest


def _with_whole(digests: Sequence[int]) -> Sequence[int]:
    """The digest of a request before those of its items, if it has several."""
    return digests if len(digests) == 1 else [digest_of_all(digests), *digests]


def _digests(model: Served, inputs: dict[str, Any], items: int) -> Iterator[int]:
    names = model.takes if model.takes.keys() == inputs.keys() else model.inputs
    for k in range(items):
        yield digest_of(model.name, {key: inputs[key][k] for key in names})
