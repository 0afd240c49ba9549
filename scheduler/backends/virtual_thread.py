"""The thread of an engine on the virtual GPU: it runs the core's loop, computes its launches, and pauses for others."""

from __future__ import annotations

import contextlib
import ctypes
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator

import numpy as np
from threadpoolctl import threadpool_limits

from paellapy.instrument.device.sm_core import address_of_run, submit_again
from paellapy.instrument.device.sm_model import SmModel
from paellapy.instrument.device.sm_program import Commands
from paellapy.instrument.jit import compile_for
from paellapy.scheduler.backends.broken_loop import RETRY_S, broken_loop
from paellapy.scheduler.backends.virtual_faults import Faults, OnFault
from paellapy.scheduler.backends.virtual_launches import VirtualLaunches
from paellapy.scheduler.backends.virtual_loop import new_loop, serve
from paellapy.scheduler.backends.virtual_pieces import PieceTracer
from paellapy.scheduler.core.cpus import usable_cpus
from paellapy.scheduler.core.loop import Bell
from paellapy.scheduler.core.state import State

_LINGER_NS = 200_000  # the loop stays awake for this long after its last work, so that the next request finds it awake
_FEW_CORES = 4
_SET_TIMERSLACK = 29  # PR_SET_TIMERSLACK


class VirtualThread:
    """The SM model's clock follows the host's: `offset_ns` is the difference. With a `tracer`, launches are traced."""

    def __init__(self, sm: SmModel, launches: VirtualLaunches) -> None:
        self.sm, self._launches = sm, launches
        self.tracer: PieceTracer | None = None
        self._lock = threading.Lock()  # guards the SM model, which the loop and loads use
        self._turns, self._waiting, self._nobody_waits = threading.Lock(), 0, threading.Event()
        self._nobody_waits.set()
        self.compiled = threading.Event()  # set once the loop's functions are compiled; nothing runs before
        self._stop_word = np.zeros(8, np.uint64)
        # With few cores, spinning would take a core from other threads.
        self._linger_ns = _LINGER_NS if usable_cpus() > _FEW_CORES else 0
        self._calls: deque[Callable[[], None]] = deque()
        self._stopping = False
        self._thread: threading.Thread | None = None

    def start(
        self, state: State, bell: Bell, failed: Callable[[BaseException], None], on_fault: OnFault
    ) -> None:
        self._state, self._bell, self._failed = state, bell, failed
        # Windows of SMs are for jobs that run at once, so an engine with windows launches as on a real GPU.
        state.core["one_by_one"][0] = state.core["windows"][0] == 0
        self._faults = Faults(state, on_fault)
        self.offset_ns = time.monotonic_ns() - self.sm.now_ns
        self._shared = new_loop(len(state.out))._replace(stop=self._stop_word)
        self._thread = threading.Thread(target=self._loop, name="paellapy-virtual", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._stopping = True
        self._interrupt()
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    @contextlib.contextmanager
    def pause(self) -> Iterator[SmModel]:
        """The SM model for a thread other than the loop's; the loop pauses."""
        with self._turns:
            self._waiting += 1
            self._nobody_waits.clear()
        if self._thread is not None:
            self._interrupt()
        try:
            with self._lock:
                yield self.sm
        finally:
            with self._turns:
                self._waiting -= 1
                if not self._waiting:
                    self._nobody_waits.set()

    def host_ns(self) -> float:
        """The host's time on the SM model's clock."""
        return time.monotonic_ns() - self.offset_ns

    def call(self, function: Callable[[], None]) -> None:
        """Runs a function in the loop's thread, between two steps."""
        self._calls.append(function)
        self._interrupt()

    def _loop(self) -> None:
        while not self._stopping:
            try:
                # The loop computes many small products beside the front ends. With one BLAS thread it served 2300 to
                # 3800 requests a second; with several BLAS threads, 400 (32 clients of mlp and cnn, two cores).
                with threadpool_limits(1, "blas"), np.errstate(all="ignore"):
                    self._serve()
            except BaseException as e:
                self._failed(broken_loop(e))
                time.sleep(RETRY_S)

    def _serve(self) -> None:
        state = self._state
        libc = ctypes.CDLL(None)
        libc.prctl(_SET_TIMERSLACK, 1)  # by default the kernel lets a thread oversleep by 50 µs
        ppoll, read = (ctypes.cast(f, ctypes.c_void_p).value or 0 for f in (libc.ppoll, libc.read))
        launch = ctypes.CFUNCTYPE(ctypes.c_int32)(self._launch)
        address = ctypes.cast(launch, ctypes.c_void_p).value or 0
        shared = self._shared
        loop = shared.loop[0]
        loop["offset_ns"], loop["linger_ns"], loop["bell_fd"] = self.offset_ns, self._linger_ns, self._bell.fd
        loop["launch"], loop["ppoll"], loop["read"] = address, ppoll, read
        # Before the lock is taken: without a cache on disk, compiling takes seconds, and no thread should wait for it.
        sm = self.sm.state
        compile_for(serve, state, sm, shared)
        loop["run"] = address_of_run()
        compile_for(submit_again, sm.command, Commands(sm.command, sm.todo, sm.todo), 0, 0.0, 0)
        self.compiled.set()
        while not self._stopping:
            with self._lock:
                self._serving = self.sm.state
                serve(state, self._serving, shared)
            if self._stop_word[0]:
                self._stop_word[0] = 0
                while self._calls:
                    self._calls.popleft()()
                self._nobody_waits.wait()

    def _interrupt(self) -> None:
        self._stop_word[0] = 1
        os.eventfd_write(self._bell.fd, 1)

    def _launch(self) -> int:
        """Carries out the loop's orders; not 0 if the loop must return because the SM model has new tables."""
        try:
            for order in self._shared.orders[: self._shared.loop["orders"][0]].tolist():
                self._carry_out(*order)
        except BaseException as e:  # called by compiled code, which could not pass the error on
            self._failed(e)
        return int(self.sm.state is not self._serving)

    def _carry_out(
        self, lane: int, size: int, segment: int, word: int, handle: int, stream: int, draining: int
    ) -> None:
        granted = self._launches.grants.get(handle)
        if granted is not None:
            granted.value = 1
            return
        piece, tracer = self._launches.pieces[handle], self.tracer
        # Taken first, because the GPU's time passes while the data are computed.
        submit = max(self.sm.now_ns, self.host_ns())
        if tracer is None:
            placed = piece.place_again(self.sm, stream, submit)
        else:
            first = tracer.note((lane, size, segment), piece, int(submit), stream)
            placed = piece.place(self.sm, stream, submit, first)
        if not self._faults.skips(lane, segment):
            try:
                piece.run()
            except Exception as e:
                whole = self._launches.pieces[int(self._state.whole["handle"][lane, size])]
                self._faults.isolate(lane, size, self._launches.lanes[handle], whole.items, e)
        # Not before: a launch that makes the GPU fail never ends.
        self.set_when("flight", placed.last, word)
        if draining:
            self.set_when("drain", placed.kernel, draining)

    def set_when(self, table: str, handle: int, word: int) -> None:
        """Makes the loop set the word once the launch is done, or the kernel has started all its blocks."""
        count = self._shared.loop[table]
        row = getattr(self._shared, table)[count[0]]
        row["handle"], row["word"] = handle, word
        count[0] += 1
