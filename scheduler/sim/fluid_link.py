"""The copy engine of the simulated GPU: weights arrive over one link, chunk after chunk, in the core's order.

Evicting takes no time of the link. Copies and kernels do not slow each other in this model.
"""

from __future__ import annotations

import numpy as np

from paellapy.instrument.jit import part
from paellapy.scheduler.core.atomics import load_at, store_at
from paellapy.scheduler.core.codes import EVICT, GONE, MOVE_TAIL
from paellapy.scheduler.core.rings import address
from paellapy.scheduler.core.state import State
from paellapy.scheduler.sim.fluid_state import Fluid

_WORD, _ONE = np.uint64(8), np.uint64(1)


@part
def begin_chunk(f: Fluid, s: State) -> None:
    """Computes when the next chunk of the first model in line arrives."""
    sim = f.sim[0]
    if sim.line == 0:
        sim.chunk_at_ns = np.inf
        return
    w = s.weights[f.line[0]]
    nbytes = min(w.chunk_bytes, w.bytes - sim.copied * w.chunk_bytes)
    mapping = s.tuning[0].map_ns if sim.copied == 0 else 0.0
    sim.chunk_at_ns = sim.now_ns + mapping + nbytes * s.residency[0].ns_per_byte


@part
def take_orders(f: Fluid, s: State) -> None:
    """Carries out the core's orders."""
    sim = f.sim[0]
    while sim.orders < load_at(address(s.move_ring, MOVE_TAIL)):
        cell = s.move[sim.orders & (s.move.shape[0] - 1)]
        sim.orders += 1
        if cell.kind == EVICT:
            store_at(address(s.moved, cell.model), np.uint64(GONE))
            sim.news = 1
            continue
        f.line[sim.line] = cell.model
        sim.line += 1
        if sim.line == 1:
            sim.copied = 0
            begin_chunk(f, s)


@part
def copy_chunks(f: Fluid, s: State) -> None:
    """Sets the words of chunks that have arrived."""
    sim = f.sim[0]
    while sim.chunk_at_ns <= sim.now_ns:
        w = s.weights[f.line[0]]
        store_at(w.word + _WORD * np.uint64(sim.copied), _ONE)
        sim.news = 1
        sim.copied += 1
        if sim.copied == w.chunks:
            sim.copied = 0
            sim.line -= 1
            for k in range(sim.line):
                f.line[k] = f.line[k + 1]
        begin_chunk(f, s)
