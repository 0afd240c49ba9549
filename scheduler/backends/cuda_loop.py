"""The core's loop on a real GPU, entirely compiled: it spins while work is in flight, sleeps and wakes without Python.

A loop that slept in Python would need the GIL to wake up, and would have to wait for the server's own thread.
"""

from __future__ import annotations

import ctypes
import os
import threading
import time
from collections import deque
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from paellapy.instrument.device.cuda import CudaDevice
from paellapy.instrument.device.driver import NOT_READY, CudaStream, driver, fail, library
from paellapy.instrument.errors import LaunchError
from paellapy.instrument.numba_ext.link import call_with, compiled, part
from paellapy.scheduler.backends.base import RETRY_S, broken_loop
from paellapy.scheduler.core import codes
from paellapy.scheduler.core.atomics import call_write, load_at, store_at
from paellapy.scheduler.core.codes import FAIL_MODE
from paellapy.scheduler.core.copier import Copier
from paellapy.scheduler.core.instances import awaits_reads
from paellapy.scheduler.core.rings import Bell, arm
from paellapy.scheduler.core.state import State, read_clock
from paellapy.scheduler.core.step import run, wake_producers
from paellapy.scheduler.core.tables import Words

# The loop spins for this long after its last work, so that at some hundred requests a second the next one finds it
# awake: waking up takes longer than many kernels. Then it sleeps, unless the latest requests came at a short gap: it
# then stays awake for twice the gap. A core is busy while four requests come a second, and half a second longer.
_LINGER_NS = 10_000_000
_LONGEST_GAP_NS = 250_000_000
_WATCH_S = 0.1  # how often the driver is asked whether a GPU without progress is still alive
_ZERO = np.uint64(0)
INTERRUPTED, BROKEN = 1, 2


@part
def next_linger(gap_ns: int, shortest_ns: int) -> int:
    """How long to stay awake after the latest request, which came `gap_ns` after the one before."""
    return shortest_ns if gap_ns > _LONGEST_GAP_NS else max(2 * gap_ns, shortest_ns)


@compiled
def serve(
    s: State, stop: Words, linger_ns: int, scratch: NDArray[np.int64], armed: Words, bell: int, read: int,
    reported: bool,
) -> int:  # fmt: skip
    """Runs the core until `stop[0]` is set (INTERRUPTED), or a launch fails that was not `reported` yet (BROKEN).

    After `linger_ns` without work, or longer (`next_linger`), it sleeps by reading the eventfd `bell`; `read` is the
    address of the C function. Before that, it arms the bell and looks once more: messages posted before are seen, later
    ones ring the bell.
    """
    core = s.core[0]
    requests, worked_ns, awake_ns = core.sequence, read_clock(s, scratch), linger_ns
    while True:
        if run(s, stop, linger_ns, scratch) != 0:
            return INTERRUPTED
        if core.mode == FAIL_MODE and core.error != 0 and not reported:
            return BROKEN
        now = read_clock(s, scratch)
        if core.sequence != requests:  # other messages, such as a watchdog's, keep no loop awake
            awake_ns = next_linger(now - linger_ns - worked_ns, linger_ns)
            requests, worked_ns = core.sequence, now - linger_ns
        if now - worked_ns < awake_ns:
            continue
        arm(armed.ctypes.data, awaits_reads(s))
        happened = call_with(s.call[0].step, s, read_clock(s, scratch))
        wake_producers(s, scratch)
        # A live request may expire, so the loop sleeps only if there is none.
        if happened == 0 and core.live == 0 and core.flight == 0 and load_at(stop.ctypes.data) == _ZERO:
            # read() has the same signature
            call_write(np.uint64(read), np.int32(bell), scratch[3:].ctypes.data, np.uint64(8))
        store_at(armed.ctypes.data, _ZERO)


class CudaLoop:
    """Two threads: one runs the loop; the other asks the driver whether a GPU without progress is still alive."""

    def __init__(self, device: CudaDevice) -> None:
        self._device = device
        self._probe_stream = CudaStream(device, 0)
        self._calls: deque[Callable[[], None]] = deque()
        self._stop_word = np.zeros(8, np.uint64)
        self._scratch = np.zeros(8, np.int64)
        self._stopping = False
        self._ended = threading.Event()
        self._threads: list[threading.Thread] = []

    def start(self, state: State, bell: Bell, failed: Callable[[BaseException], None]) -> None:
        self._state, self._bell, self._failed = state, bell, failed
        state.call["graph_launch"][0] = ctypes.cast(library().cuGraphLaunch, ctypes.c_void_p).value or 0
        state.core["backend"][0] = codes.CUDA
        self._copier = Copier(state, bell)
        for name, target in (("paellapy-core", self._loop), ("paellapy-watch", self._watch)):
            thread = threading.Thread(target=target, name=name, daemon=True)
            thread.start()
            self._threads.append(thread)

    def _loop(self) -> None:
        self._device.activate()
        while not self._stopping:
            try:
                self._serve()
            except BaseException as e:
                self._failed(broken_loop(e))
                time.sleep(RETRY_S)

    def _serve(self) -> None:
        read = ctypes.cast(ctypes.CDLL(None).read, ctypes.c_void_p).value or 0
        reported = False
        while not self._stopping:
            why = serve(
                self._state, self._stop_word, _LINGER_NS, self._scratch, self._bell.word, self._bell.fd, read, reported
            )
            if why == BROKEN:
                reported = True
                self._failed(failure(int(self._state.core["error"][0])))
                continue
            self._stop_word[0] = 0
            while self._calls:
                self._calls.popleft()()

    def _watch(self) -> None:
        """Asks the driver when nothing makes progress: a fault leaves completion words unwritten."""
        self._device.activate()
        core = self._state.core[0]
        before = -1
        while not self._ended.wait(_WATCH_S):
            stuck, before = int(core["segments_done"]) == before, int(core["segments_done"])
            if core["flight"] and stuck:
                status = int(driver().cuStreamQuery(self._probe_stream.handle)[0])
                if status not in (0, NOT_READY):
                    self._failed(failure(status))
                    return

    def call(self, function: Callable[[], None]) -> None:
        """Runs a function in the loop's thread, between two steps."""
        self._calls.append(function)
        self._interrupt()

    def _interrupt(self) -> None:
        self._stop_word[0] = 1
        os.eventfd_write(self._bell.fd, 1)

    def stop(self) -> None:
        self._stopping = True
        self._ended.set()
        self._interrupt()
        for thread in self._threads:
            thread.join()
        self._copier.close()


def failure(status: int) -> LaunchError:
    """The error for a status of the driver."""
    try:
        fail(status, "running a model")
    except LaunchError as e:
        return e
    return LaunchError(f"running a model failed with CUDA status {status}; start a new process")
