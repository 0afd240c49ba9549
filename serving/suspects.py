"""Requests that were on the GPU when it failed, by their content, so that a request that made it fail is not run again.

On a real GPU, one invalid address ends the engine for all clients, and the driver does not say which request used it. A
request that was alone on the GPU is to blame. If there were several, each is suspected: one that was there at two
failures is blamed, and one answered later is cleared. Several requests may have the same content; at one failure they
count once. All workers share the table, which outlives the engine's process.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from paellapy.scheduler.core.errors import RequestFailedError, SuspectError
from paellapy.scheduler.engine.request_checks import digest_of
from paellapy.scheduler.models.model import Model
from paellapy.serving.logs import log

MOST = 1024  # remembered requests; the oldest give way
_ALONE = -1  # in place of a second failure: it was alone at the first
# Columns. Workers write them without a lock: at one failure all of them write the same numbers.
_KEY, _FIRST, _SECOND = range(3)
_SAID = "the GPU failed on the values of this request and would fail again"


def suspect_table() -> Any:
    """A table in memory that forked processes share. Its last row counts the rows written."""
    memory = mmap.mmap(-1, (MOST + 1) * 24)
    return np.frombuffer(memory, np.int64).reshape(MOST + 1, 3)


class Suspects:
    def __init__(self, table: Any = None) -> None:
        self._table = suspect_table() if table is None else table
        self._written = self._table[MOST].data  # read at every request; ten times as fast as an array

    def __bool__(self) -> bool:
        return bool(self._written[0])

    def check(self, model: Model, inputs: dict[str, Any], items: int) -> list[int]:
        """Digests of the request's suspected items. RequestFailedError: one of its items is known to make the
        GPU fail.
        """
        found = []
        for digest in _digests(model, inputs, items):
            first, second = self._failures(digest)
            if second:
                raise RequestFailedError(_SAID)
            if first:
                found.append(digest)
        return found

    def judge(self, error: SuspectError, model: str) -> Exception:
        """The client's error: that its request made the GPU fail, or that it should try again."""
        row = self._row(error.digest)
        if not error.others:
            row[_SECOND] = _ALONE
        elif row[_FIRST] not in (0, error.failure):
            row[_SECOND] = error.failure
        row[_FIRST] = row[_FIRST] or error.failure
        guilty = bool(row[_SECOND])
        said = "a request made the GPU fail" if guilty else "a request was one of several on the GPU when it failed"
        fields = {"model": model, "content": f"{error.digest:016x}", "beside": error.others}
        log.error(said, extra={"fields": fields})
        return RequestFailedError(_SAID) if guilty else error

    def acquit(self, digests: Sequence[int]) -> None:
        """Clears items that were answered."""
        for digest in digests:
            self._row(digest)[_FIRST:] = 0

    def _failures(self, digest: int) -> tuple[int, int]:
        """The failures at which a request with this content was on the GPU; 0: none."""
        at = np.flatnonzero(self._table[:MOST, _KEY] == _signed(digest))
        return (int(self._table[at[0], _FIRST]), int(self._table[at[0], _SECOND])) if len(at) else (0, 0)

    def _row(self, digest: int) -> Any:
        known = np.flatnonzero(self._table[:MOST, _KEY] == _signed(digest))
        if len(known):
            return self._table[known[0]]
        number = int(self._table[MOST, 0])
        self._table[MOST, 0] = number + 1
        row = self._table[number % MOST]
        row[:] = _signed(digest), 0, 0
        return row


def _signed(digest: int) -> int:
    return digest - (1 << 64) if digest >= 1 << 63 else digest


def _digests(model: Model, inputs: dict[str, Any], items: int) -> Iterator[int]:
    for k in range(items):
        yield digest_of(model.name, {key: inputs[key][k] for key in model.inputs})
