"""A load generator that is never the bottleneck: a compiled front end that posts requests and reads completions.

It takes the place of the engine's own front end while it runs, so nobody else may use the engine meanwhile.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numba
import numpy as np
from numpy.typing import NDArray

from scheduler import core_rings as rings
from scheduler import state as st
from scheduler.atomics import call_clock, call_launch, copy_bytes, load_at, store_at
from scheduler.engine import Engine
from scheduler.loop import ring_bell

# Not kept on disk: what it calls changes more often than this file.
compiled = numba.njit(nogil=True, error_model="numpy")
CLOCK_MONOTONIC = 1
GIVE_UP_NS = 60_000_000_000


@compiled
def clock(fn: Any, scratch: Any) -> int:
    call_clock(fn[st.F_CLOCK], np.int32(CLOCK_MONOTONIC), scratch.ctypes.data)
    return int(scratch[0] * 1_000_000_000 + scratch[1])


@compiled
def drive(
    s: Any, at_ns: Any, model: Any, which: Any, rows: Any, source: Any, out_address: Any, out_bytes: Any,
    outstanding: int, owner: Any, free: Any, buffer: Any, results: Any, arrival: Any, finish: Any, size: Any,
    status: Any, word: Any, bell: int, scratch: Any,
) -> int:  # fmt: skip
    """Sends request i at at_ns[i], at most `outstanding` at a time, and waits for all; the time it took, or -1."""
    n = at_ns.shape[0]
    n_free = free.shape[0]
    start = clock(s.fn, scratch)
    sent = done = 0
    while done < n:
        now = clock(s.fn, scratch) - start
        if now > GIVE_UP_NS:
            return -1
        posted = False
        while sent < n and n_free > 0 and sent - done < outstanding and at_ns[sent] <= now:
            row = free[n_free - 1]
            # Latency counts from when the request was due, also when the generator comes late.
            arrival[sent] = start + (at_ns[sent] if at_ns[sent] > 0 else now)
            m = model[sent]
            answer = rings.post(
                s.ring, s.submit, s.filling, s.lane_word, st.SUBMIT, row, sent + 1, 0, rows[m], 0, 0, arrival[sent],
                st.NEVER, source[m, which[sent]], False,
            )  # fmt: skip
            if answer == rings.RING_FULL:
                break
            owner[row] = sent
            n_free -= 1
            sent += 1
            posted = True
        k = rings.take_done(s.ring, s.done, buffer)
        for j in range(k):
            entry = buffer[j]
            row = entry.request
            i = owner[row]
            finish[i], size[i], status[i] = entry.finish_ns, entry.batch, entry.status
            if entry.status == st.OK:
                n_bytes = out_bytes[model[i]]
                where = out_address[entry.lane] + np.uint64(entry.slot * n_bytes)
                copy_bytes(results[i : i + 1].ctypes.data, where, np.uint64(n_bytes))
                rings.release(s.lane_hold, entry.lane)
            free[n_free] = row
            n_free += 1
            done += 1
        if posted or k > 0:
            ring_bell(word, bell, s.fn[st.F_WRITE], scratch[4:])
    return clock(s.fn, scratch) - start


@compiled
def launch_alone(s: Any, lane: int, size: int, times: Any, scratch: Any) -> None:
    """One launch of a lane's whole graph, seen complete by spinning on its word: nothing can be quicker."""
    w = s.whole[lane, size]
    for k in range(times.shape[0]):
        begin = clock(s.fn, scratch)
        if call_launch(s.fn[st.F_GRAPH_LAUNCH], w.handle, w.stream) != 0:
            times[k] = -1
            return
        while load_at(w.word) == np.uint64(0):
            pass
        times[k] = clock(s.fn, scratch) - begin
        store_at(w.word, np.uint64(0))


@dataclass(frozen=True, slots=True)
class Run:
    """What became of the requests of one run."""

    model: NDArray[np.int64]
    which: NDArray[np.int64]
    latency_ns: NDArray[np.int64]
    batch: NDArray[np.int64]
    outputs: NDArray[np.float32]
    took_ns: int

    @property
    def throughput(self) -> float:
        return len(self.model) / self.took_ns * 1e9


class Generator:
    """Drives one engine. `inputs[m]` holds the inputs a request of model m may have, one per row."""

    def __init__(self, engine: Engine, names: list[str], inputs: list[NDArray[Any]], width: int) -> None:
        """`width` is the number of floats in a model's one output."""
        self.engine, self.names, self.inputs, self._width = engine, names, inputs, width
        state = engine.state
        if not state.fn[st.F_CLOCK]:  # loops in Python bring their own clock
            from scheduler.core import attach_libc

            attach_libc(state)
        by_name = {loaded.model.name: loaded for loaded in engine.loaded_rows().values()}
        self.loaded = [by_name[name] for name in names]
        self._rows = np.array([loaded.row for loaded in self.loaded], np.int64)
        self._source = np.array([[row.ctypes.data for row in each] for each in inputs], np.uint64)
        self._out_address = np.zeros(len(state.lane), np.uint64)
        for loaded in self.loaded:
            for lane, row in zip(loaded.lanes, loaded.lane_rows, strict=True):
                self._out_address[row] = next(iter(lane.outputs.values())).ctypes.data
        self._out_bytes = np.full(len(names), 4 * self._width, np.int64)
        self._scratch = np.zeros(8, np.int64)

    def run(
        self, at_ns: NDArray[np.int64], model: NDArray[np.int64], which: NDArray[np.int64], outstanding: int
    ) -> Run:
        """Sends what is due and waits for everything."""
        n, state = len(at_ns), self.engine.state
        arrival, finish, size, status = (np.zeros(n, np.int64) for _ in range(4))
        outputs = np.zeros((n, self._width), np.float32)
        rows = len(state.request)
        bell = self.engine._backend._bell  # type: ignore[attr-defined]
        took = drive(
            state, at_ns, model, which, self._rows, self._source, self._out_address, self._out_bytes, outstanding,
            np.zeros(rows, np.int64), np.arange(rows), np.zeros(256, st.COMPLETION), outputs, arrival, finish, size,
            status, bell.word, bell.fd, self._scratch,
        )  # fmt: skip
        if took < 0 or (status != st.OK).any():
            bad = {st.STATUS[k]: int((status == k).sum()) for k in np.unique(status)}
            raise RuntimeError(f"not every request was answered: {bad}")
        return Run(model, which, finish - arrival, size, outputs, took)

    def alone_ns(self, model: int, size: int, repeats: int) -> NDArray[np.int64]:
        """Times of single whole launches, without the engine."""
        times = np.zeros(repeats, np.int64)
        launch_alone(self.engine.state, self.loaded[model].lane_rows[0], size, times, self._scratch)
        return times


