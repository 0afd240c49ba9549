"""Counters of every model, from the engine's completions and from the front ends' own answers.

They are one table that several processes may share. Each process writes its own row, and a reader adds the rows up. A
restarted process continues the row of its predecessor.
"""

from __future__ import annotations

import mmap
import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paellapy.instrument.numba_ext.link import compiled
from paellapy.scheduler.core.codes import OK
from paellapy.scheduler.core.tables import Table
from paellapy.scheduler.engine.pipelines import Served
from paellapy.serving.registry import MOST_MODELS, Catalogue

# Seconds, from 50 µs on: small models take less than a millisecond, where Prometheus' default buckets are too coarse.
TIME_BUCKETS = (
    50e-6, 100e-6, 200e-6, 300e-6, 500e-6, 750e-6, 1e-3, 1.5e-3, 2e-3, 3e-3, 5e-3, 7.5e-3,
    10e-3, 15e-3, 20e-3, 30e-3, 50e-3, 75e-3, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0,
)  # fmt: skip
BATCH_BUCKETS = (1, 2, 4, 8, 16, 32, 64)
# Why a request is refused; a reason that is not listed counts as "other".
REASONS = (
    "predicted_deadline", "predicted_target", "overloaded", "deadline", "queue_full", "client_full", "closing",
    "device_failed", "engine_away", "loading", "other",
)  # fmt: skip
LARGEST_BATCH = 512

_BOUNDS_NS = np.array([round(bound * 1e9) for bound in TIME_BUCKETS])
_BOUNDS_LIST = _BOUNDS_NS.tolist()

# Columns of a model. An item is one input that the engine ran; a request of a client has one or more.
(ITEMS, BATCHES, QUEUE_NS, COMPUTE_NS, MISSES, ANSWERED, FAILED, LEFT, ANSWERED_NS, FAILED_NS, LAST_MS) = range(11)
REFUSED = 11
REQUEST_S = REFUSED + len(REASONS)
QUEUE_S = REQUEST_S + len(TIME_BUCKETS) + 1
COMPUTE_S = QUEUE_S + len(TIME_BUCKETS) + 1
BY_BATCH = COMPUTE_S + len(TIME_BUCKETS) + 1  # number of batches of each size
BY_BATCH_NS = BY_BATCH + LARGEST_BATCH + 1
COLUMNS = BY_BATCH_NS + LARGEST_BATCH + 1

# The row of the process itself: requests in flight, viewers, gauges, answers by status, refusals by reason and client.
_ITSELF = MOST_MODELS
GAUGES = ("connections", "held_bytes", "unsent_bytes", "descriptors", "loop_lag_ns")
_IN_FLIGHT, _VIEWERS, _GAUGES = 0, 1, 2
_STATUS = 100  # the column of status 100
# Besides REASONS, by status
CAUSES = {401: "unauthorized", 403: "forbidden", 408: "late", 413: "too_large", 429: "client_full",
          431: "long_header"}  # fmt: skip
_CAUSES = tuple(dict.fromkeys((*CAUSES.values(), *REASONS)))
MOST_CLIENTS = 24  # that are counted by name; all others together are OTHERS
OTHERS = ""
_REFUSED = 600
assert _REFUSED + len(_CAUSES) * (MOST_CLIENTS + 1) <= COLUMNS

Numbers = NDArray[np.int64]


def counter_table(writers: int = 1) -> Numbers:
    """A table [writers, models + 1, columns] in memory that forked processes share."""
    shape = (writers, MOST_MODELS + 1, COLUMNS)
    memory = mmap.mmap(-1, int(np.prod(shape)) * 8)  # a page takes memory once it is written
    return np.frombuffer(memory, np.int64).reshape(shape)


@compiled
def note_items(own: Numbers, index: Numbers, target_ns: Numbers, bounds_ns: Numbers, entries: Table) -> None:
    """Counts items that the engine has completed (tables.COMPLETION)."""
    for i in range(entries.shape[0]):
        e = entries[i]
        if e.request < 0 or e.status != OK or index[e.model] < 0:
            continue
        row = own[index[e.model]]
        queue_ns = max(0, e.started_ns - e.arrival_ns)
        compute_ns = e.finish_ns - e.started_ns
        row[ITEMS] += 1
        row[QUEUE_NS] += queue_ns
        row[COMPUTE_NS] += compute_ns
        k = 0
        while k < bounds_ns.shape[0] and bounds_ns[k] < queue_ns:
            k += 1
        row[QUEUE_S + k] += 1
        k = 0
        while k < bounds_ns.shape[0] and bounds_ns[k] < compute_ns:
            k += 1
        row[COMPUTE_S + k] += 1
        if target_ns[e.model] > 0 and e.finish_ns - e.arrival_ns > target_ns[e.model]:
            row[MISSES] += 1
        if e.first:
            size = min(e.batch, LARGEST_BATCH)
            row[BATCHES] += 1
            row[BY_BATCH + size] += 1
            row[BY_BATCH_NS + size] += compute_ns


class Histogram:
    """Counts by upper bound."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: tuple[float, ...], counts: list[int], total: float) -> None:
        self.bounds, self.counts, self.total = bounds, counts, total

    def buckets(self) -> list[tuple[str, float]]:
        """Cumulative counts, as Prometheus expects.

        >>> Histogram((1, 2), [0, 1, 0], 1.5).buckets()
        [('1.0', 0), ('2.0', 1), ('+Inf', 1)]
        """
        found: list[tuple[str, float]] = []
        seen = 0
        for bound, count in zip((*map(float, self.bounds), "+Inf"), self.counts, strict=True):
            seen += count
            found.append((str(bound), seen))
        return found


class _Sum:
    """A column of a model's counters, summed over all processes."""

    def __init__(self, column: int) -> None:
        self._column = column

    def __get__(self, counters: ModelCounters, kind: type) -> int:
        return int(counters.rows[:, self._column].sum())


class ModelCounters:
    """Counters of one model since the server started: `note_…` writes this process's row, reading sums all rows."""

    def __init__(self, table: Numbers, writer: int, model: int) -> None:
        self.rows = table[:, model]
        self._own: Any = table[writer, model].data  # reading a memoryview costs a fraction of indexing an array

    def note_answer(self, elapsed_ns: int) -> None:
        own = self._own
        own[ANSWERED] += 1
        own[ANSWERED_NS] += elapsed_ns
        own[REQUEST_S + bisect_left(_BOUNDS_LIST, elapsed_ns)] += 1
        own[LAST_MS] = time.time_ns() // 1_000_000

    def note_failure(self, elapsed_ns: int, reason: str | None) -> None:
        """`reason` is given for a refusal; None: a wrong request, or an internal error."""
        self._own[FAILED] += 1
        self._own[FAILED_NS] += elapsed_ns
        if reason is not None:
            self._own[REFUSED + REASONS.index(reason if reason in REASONS else "other")] += 1

    def note_left(self) -> None:
        """Counts a client that left before its answer."""
        self._own[LEFT] += 1

    items, batches = _Sum(ITEMS), _Sum(BATCHES)
    queue_ns, compute_ns = _Sum(QUEUE_NS), _Sum(COMPUTE_NS)
    target_misses = _Sum(MISSES)
    answered, failed, left = _Sum(ANSWERED), _Sum(FAILED), _Sum(LEFT)
    answered_ns, failed_ns = _Sum(ANSWERED_NS), _Sum(FAILED_NS)

    @property
    def last_ms(self) -> int:
        return int(self.rows[:, LAST_MS].max())

    @property
    def refused(self) -> Counter[str]:
        """Refused requests by reason."""
        counts = self.rows[:, REFUSED : REFUSED + len(REASONS)].sum(axis=0).tolist()
        return Counter({reason: n for reason, n in zip(REASONS, counts, strict=True) if n})

    @property
    def by_batch(self) -> dict[int, tuple[int, int]]:
        """Batch size: number of batches, and their time in ns."""
        counts = self.rows[:, BY_BATCH : BY_BATCH + LARGEST_BATCH + 1].sum(axis=0)
        times = self.rows[:, BY_BATCH_NS : BY_BATCH_NS + LARGEST_BATCH + 1].sum(axis=0)
        return {int(size): (int(counts[size]), int(times[size])) for size in np.flatnonzero(counts)}

    def _times(self, column: int, total_ns: int) -> Histogram:
        counts = self.rows[:, column : column + len(TIME_BUCKETS) + 1].sum(axis=0).tolist()
        return Histogram(TIME_BUCKETS, counts, total_ns * 1e-9)

    @property
    def request_s(self) -> Histogram:
        return self._times(REQUEST_S, self.answered_ns)

    @property
    def queue_s(self) -> Histogram:
        return self._times(QUEUE_S, self.queue_ns)

    @property
    def compute_s(self) -> Histogram:
        return self._times(COMPUTE_S, self.compute_ns)

    @property
    def batch_size(self) -> Histogram:
        counts = [0] * (len(BATCH_BUCKETS) + 1)
        sizes = self.by_batch
        for size, (n, _) in sizes.items():
            counts[bisect_left(BATCH_BUCKETS, size)] += n
        return Histogram(BATCH_BUCKETS, counts, float(sum(size * n for size, (n, _) in sizes.items())))


class Counters:
    """Counters of all models by name. They survive unloading a model and the processes that write them."""

    def __init__(
        self, registry: Catalogue, table: Numbers | None = None, writer: int = 0, clients: Iterable[str] = ()
    ) -> None:
        """`clients`: names that refusals are counted by; the same in all processes of a server."""
        self._registry, self._writer = registry, writer
        self._clients = {name: k for k, name in enumerate(sorted(set(clients))[:MOST_CLIENTS], 1)}
        self._table = counter_table() if table is None else table
        self._found: dict[str, ModelCounters] = {}
        self._itself: Any = self._table[writer, _ITSELF].data
        for column in range(_GAUGES + len(GAUGES)):  # requests of a predecessor ended with it
            self._itself[column] = 0
        self._index: Numbers = np.zeros(0, np.int64)
        self._target_ns: Numbers = np.zeros(0, np.int64)
        self._known: dict[int, Served] | None = None
        self._loaded = -1  # how many models were, when rows were learnt
        self.close = registry.engine.count(self._note)

    def of(self, name: str) -> ModelCounters:
        found = self._found.get(name)
        if found is None:
            number = self._registry.entries[name].number
            found = self._found[name] = ModelCounters(self._table, self._writer, number)
        return found

    @property
    def models(self) -> dict[str, ModelCounters]:
        """Counters of the models that were loaded or asked for since the start."""
        used: Any = self._table[:, :MOST_MODELS].any(axis=(0, 2))
        return {name: self.of(name) for name, e in self._registry.entries.items() if used[e.number] or e.loaded}

    @property
    def in_flight(self) -> int:
        return int(self._table[:, _ITSELF, _IN_FLIGHT].sum())

    def enter(self) -> None:
        """Counts an inference request that is being handled."""
        self._itself[_IN_FLIGHT] += 1

    def leave(self) -> None:
        self._itself[_IN_FLIGHT] -= 1

    def note_status(self, status: int) -> None:
        """Counts an answer."""
        self._itself[_STATUS + status - 100] += 1

    @property
    def statuses(self) -> dict[int, int]:
        """Answers by HTTP status."""
        counts = self._table[:, _ITSELF, _STATUS : _STATUS + 500].sum(axis=0)
        return {int(k) + 100: int(counts[k]) for k in np.flatnonzero(counts)}

    def note_refusal(self, reason: str, client: str) -> None:
        cause = _CAUSES.index(reason if reason in _CAUSES else "other")
        self._itself[_REFUSED + cause * (MOST_CLIENTS + 1) + self._clients.get(client, 0)] += 1

    def label_of(self, client: str) -> str:
        """The name by which the client is counted."""
        return client if client in self._clients else OTHERS

    @property
    def refusals(self) -> dict[tuple[str, str], int]:
        """Refused requests by reason and client, whichever address they went to."""
        width = MOST_CLIENTS + 1
        counts = self._table[:, _ITSELF, _REFUSED : _REFUSED + len(_CAUSES) * width].sum(axis=0)
        names = [OTHERS, *self._clients]
        return {(_CAUSES[k // width], names[k % width]): int(counts[k]) for k in np.flatnonzero(counts)}

    def set_gauges(self, **values: int) -> None:
        for name, value in values.items():
            self._itself[_GAUGES + GAUGES.index(name)] = value

    def gauge(self, name: str) -> int:
        """The sum over all processes; of times the largest."""
        column = self._table[:, _ITSELF, _GAUGES + GAUGES.index(name)]
        return int(column.max() if name.endswith("_ns") else column.sum())

    def add_viewers(self, more: int) -> int:
        """Counts viewers of the dashboard; returns their number in all processes together."""
        self._itself[_VIEWERS] += more
        return int(self._table[:, _ITSELF, _VIEWERS].sum())

    def _note(self, entries: Any) -> None:
        """Runs where completions are read, usually in the event loop's thread."""
        known, loaded = self._registry.by_row, self._registry.engine.core.models.by_row
        if known is not self._known or len(loaded) != self._loaded:
            self._learn(known)
            self._loaded = len(loaded)
        note_items(self._table[self._writer], self._index, self._target_ns, _BOUNDS_NS, entries)

    def _learn(self, by_row: dict[int, Served]) -> None:
        rows, core = len(self._registry.engine.state.model), self._registry.engine.core.models
        index, target_ns = np.full(rows, -1), np.zeros(rows, np.int64)
        for row, model in by_row.items():
            index[row] = self._registry.entries[model.name].number
            target_ns[row] = 0 if model.target_ms is None else int(model.target_ms * 1e6)
            for shorter in core.by_name[model.name].by_length.values() if model.name in core.by_name else ():
                index[shorter.row], target_ns[shorter.row] = index[row], target_ns[row]
        self._index, self._target_ns, self._known = index, target_ns, by_row
