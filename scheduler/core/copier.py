"""A thread that copies long inputs into slots, so that the core's thread can keep deciding meanwhile.

A request that finds no open instance leaves its inputs in place, and the core gives it a slot later. Copying an image
then takes 40 µs, and a batch of images takes milliseconds; in the core's thread, no segment could be launched in that
time.
"""

from __future__ import annotations

import ctypes
import os
import threading
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paellapy.instrument.numba_ext.link import compiled, part
from paellapy.scheduler.core import codes
from paellapy.scheduler.core.atomics import ONE, ZERO, c_address, call_write, copy_bytes, load_at, or_at, store_at
from paellapy.scheduler.core.processes import usable_cpus
from paellapy.scheduler.core.rings import (
    ANYTHING,
    Bell,
    address,
    announce_sleep,
    bit_at,
    bit_of,
    must_ring,
    write_event,
)
from paellapy.scheduler.core.state import State, read_clock
from paellapy.scheduler.core.tables import Words

_LOOKS = 20_000  # reads of an empty ring before the copier sleeps: about 50 µs
_MANY_CPUS = 8  # with this many CPUs, one may spin while there are requests, since waking up takes time


@part
def copy_inputs(s: State, source: Any, instance: int, slot: int, m: int) -> None:
    for k in range(s.model[m].n_inputs):
        n = s.input_bytes[m, k]
        copy_bytes(s.input_address[instance, k] + np.uint64(slot * n), source, np.uint64(n))
        source += np.uint64(n)


@part
def hand_to_copier(s: State, source: int, instance: int, slot: int, m: int) -> None:
    """Lets the copier copy the inputs and mark the slot ready, as a producer would; the core continues meanwhile."""
    tail = load_at(address(s.copy_ring, codes.COPY_TAIL))
    cell = s.copy[np.int64(tail) & (s.copy.shape[0] - 1)]
    cell.source, cell.instance, cell.slot, cell.model = source, instance, slot, m
    cell.at_ns = read_clock(s, s.clock) if s.call[0].clock != ZERO else 0
    store_at(address(s.copy_ring, codes.COPY_TAIL), tail + ONE)
    if must_ring(address(s.copy_ring, codes.COPY_BELL), False):
        write_event(s, s.core[0].copier_fd, s.clock[2:])


@part
def wait_for_copy(s: State, row: int) -> None:
    """Waits for a copy in progress before a request is given up, because its inputs may disappear afterwards."""
    request = s.request[row]
    if request.instance >= 0 and request.source != ZERO and s.core[0].copier_fd >= 0:
        while load_at(bit_at(s.instance_ready, request.instance, request.slot)) & bit_of(request.slot) == ZERO:
            pass


@compiled
def copy_until(
    s: State, stop: Words, scratch: NDArray[np.int64], bell: int, read: int, core: int, awake: bool
) -> None:  # fmt: skip
    """Copies inputs from the ring until `stop[0]` is set. It sleeps by reading `bell`; `core` is the core's bell.

    `awake`: never sleep while there are requests. `scratch` is 4 int64.
    """
    looks = 0
    while load_at(stop.ctypes.data) == ZERO:
        head = load_at(address(s.copy_ring, codes.COPY_HEAD))
        if head != load_at(address(s.copy_ring, codes.COPY_TAIL)):
            cell = s.copy[np.int64(head) & (s.copy.shape[0] - 1)]
            copy_inputs(s, cell.source, cell.instance, cell.slot, cell.model)
            or_at(bit_at(s.instance_ready, cell.instance, cell.slot), bit_of(cell.slot))
            if cell.at_ns > 0:
                took = read_clock(s, scratch[2:]) - cell.at_ns
                s.core[0].longest_copy_ns = max(s.core[0].longest_copy_ns, float(took))
            store_at(address(s.copy_ring, codes.COPY_HEAD), head + ONE)
            if must_ring(s.bell.ctypes.data, True):
                write_event(s, core, scratch[1:])
            looks = 0
            continue
        looks += 1
        if looks < _LOOKS:
            continue
        if awake and looks == _LOOKS and load_at(s.core["live"].ctypes.data) != ZERO:
            looks = 0
            continue
        if looks == _LOOKS:  # announce the sleep, and look once more
            announce_sleep(address(s.copy_ring, codes.COPY_BELL), ANYTHING)
            continue
        call_write(np.uint64(read), np.int32(bell), scratch.ctypes.data, np.uint64(8))  # read() has the same signature
        store_at(address(s.copy_ring, codes.COPY_BELL), ZERO)
        looks = 0


class Copier:
    """The copier's thread. It belongs to the core's process, and ends after the core's loop."""

    def __init__(self, state: State, bell: Bell, awake: bool | None = None) -> None:
        """`bell` wakes the core's loop. `awake`: sleep only without requests; the default with many CPUs."""
        self._state, self._bell = state, bell
        self._awake = usable_cpus() >= _MANY_CPUS if awake is None else awake
        self._stop = np.zeros(8, np.uint64)
        self._fd = os.eventfd(0, os.EFD_CLOEXEC)
        self._thread = threading.Thread(target=self._run, name="paellapy-copier", daemon=True)
        self._thread.start()
        state.core["copier_fd"][0] = self._fd

    def _run(self) -> None:
        read = c_address(ctypes.CDLL(None).read)
        copy_until(self._state, self._stop, np.zeros(4, np.int64), self._fd, read, self._bell.fd, self._awake)

    def close(self) -> None:
        self._state.core["copier_fd"][0] = codes.NONE
        self._stop[0] = 1
        os.eventfd_write(self._fd, 1)
        self._thread.join()
        os.close(self._fd)
