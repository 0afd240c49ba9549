"""The virtual GPU behind the engine: recorded launches, computed data, and an SM model whose time follows real time.

A segment's data are computed when it is launched, in the order of launches. Its blocks enter the SM model, and its
completion word is set once the model's clock, which follows the host's, has passed their end. Where computing takes
longer than the modelled GPU would, time goes on meanwhile, as with a slow host.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from threadpoolctl import threadpool_limits

from paellapy.instrument.device.jit import compile_for
from paellapy.instrument.device.sm_core import address_of_run, next_event, submit_again
from paellapy.instrument.device.sm_model import SmModel
from paellapy.instrument.device.sm_program import Commands
from paellapy.instrument.device.virtual import VirtualDevice
from paellapy.instrument.errors import TraceError
from paellapy.scheduler.backends.base import Backend
from paellapy.scheduler.backends.launches import Bounds, Launches, LoadedModel
from paellapy.scheduler.backends.recorded import TracedBlocks
from paellapy.scheduler.backends.virtual_capture import moved, record
from paellapy.scheduler.backends.virtual_costs import ProgramCosts, segment_shares
from paellapy.scheduler.backends.virtual_faults import Faults
from paellapy.scheduler.backends.virtual_launches import VirtualLaunches
from paellapy.scheduler.backends.virtual_loop import new_loop, serve
from paellapy.scheduler.backends.virtual_memory import VirtualMemory
from paellapy.scheduler.backends.virtual_pieces import PieceTracer
from paellapy.scheduler.backends.virtual_timing import node_times_ns, saturated_ns, segment_times_ns
from paellapy.scheduler.backends.virtual_weights import COPY_BYTES, VirtualWeights, needed_end
from paellapy.scheduler.core import codes
from paellapy.scheduler.core.cpus import usable_cpus
from paellapy.scheduler.core.loop import Bell
from paellapy.scheduler.core.state import State
from paellapy.scheduler.models.lane_memory import Lane, LanePlan
from paellapy.scheduler.models.model import Model
from paellapy.scheduler.models.program import Cuts, Marks, Program
from paellapy.scheduler.models.tensors import Arrays
from paellapy.scheduler.models.weight_range import Layout, WeightRange

_LINGER_NS = 200_000  # the loop stays awake for this long after its last work, so that the next request finds it awake
_FEW_CORES = 4
_SET_TIMERSLACK = 29  # PR_SET_TIMERSLACK
_LEVELS = 5  # stream priorities above the default; there are none below
_HISTORY = 1 << 12  # finished commands that the SM model keeps: none is read here, and each takes 240 bytes


class VirtualBackend(Backend):
    device: VirtualDevice
    computes_in_python = True
    shares_are_free = True

    def __init__(self, device: VirtualDevice) -> None:
        self.device = device
        self.sm = SmModel(device.part, timing=device.model.timing, history=_HISTORY)
        self._costs = ProgramCosts()
        self.launches = VirtualLaunches(self.sm, self._costs)
        self._ranges: list[tuple[int, int]] = []  # first SM and number of SMs of each window
        self._windows: list[int] = []  # their numbers in the SM model
        self._pools: dict[int, int] = {}  # rows of streams, by priority
        self._lock = threading.Lock()  # guards the SM model, which the loop and loads use
        self._turns, self._waiting, self._nobody_waits = threading.Lock(), 0, threading.Event()
        self._nobody_waits.set()
        self._compiled = threading.Event()  # set once the loop's functions are compiled; nothing runs before
        self._stop_word = np.zeros(8, np.uint64)
        # With few cores, spinning would take a core from other threads.
        self._linger_ns = _LINGER_NS if usable_cpus() > _FEW_CORES else 0
        self._calls: deque[Callable[[], None]] = deque()
        self._stopping = False
        self._thread: threading.Thread | None = None
        self._tracer: PieceTracer | None = None
        self._weight_stream: int | None = None

    def default_memory_bytes(self) -> int:
        return int(self.device.part.memory_bytes * 0.9)

    def fingerprint(self) -> str:
        how = f"windows {self.windows} of {self.window_share}"
        return f"{self.device.title} {self.device.part!r} {self.sm.timing!r} {self.device.costs.factors!r} {how}"

    def open_windows(self, count: int, share: float) -> list[set[int]]:
        self.windows, self.window_share, sms = count, share, self.device.sm_count
        self._ranges = [(round(k * sms / count), math.ceil(share * sms)) for k in range(count)]
        self._windows = self._add_windows(self.sm)
        return [{(first + k) % sms for k in range(n)} for first, n in self._ranges]

    def _add_windows(self, model: SmModel) -> list[int]:
        return [model.window(first, n) for first, n in self._ranges]

    def _new_model(self) -> SmModel:
        """A separate SM model for measurements."""
        model = SmModel(self.device.part, timing=self.sm.timing)
        self._add_windows(model)
        return model

    def lane_memory(self, plan: LanePlan, berth: Any = None) -> VirtualMemory:
        return VirtualMemory(plan.device_bytes, plan.host_bytes, self.shared_slots, berth)

    def berth(self, nbytes: int) -> VirtualMemory:
        return VirtualMemory(nbytes, 0)

    def upload(self, model: Model) -> Arrays:
        return model.place(self.device)

    def weight_range(self, layout: Layout, chunk_bytes: int) -> VirtualWeights:
        return VirtualWeights(layout, chunk_bytes, self)

    def host_block(self, nbytes: int) -> VirtualMemory:
        return VirtualMemory(0, max(1, nbytes))

    def weight_ends(self, program: Program, weights: WeightRange) -> list[tuple[int, int]]:
        return [(end, end) for end in (needed_end(item, weights) for item in program.body)]

    def run_segment(self, launches: Launches, k: int) -> None:
        with self._sm_model(), np.errstate(all="ignore"):
            self.launches.pieces[launches.handles[k]].run()

    def queue(self, nbytes: int, word: int) -> None:
        """Copies weights to the GPU on their own stream, in small pieces, and then sets the word."""
        with self._sm_model() as sm:
            if self._weight_stream is None:
                self._weight_stream = sm.stream()
            at = max(sm.now_ns, time.monotonic_ns() - self._offset_ns)
            for first in range(0, nbytes, COPY_BYTES):
                n = min(COPY_BYTES, nbytes - first)
                last = sm.copy(self._weight_stream, n, "h2d", report=first + n == nbytes, submit_ns=at)
            self._await("flight", last, word)

    # -- programs

    def capture(self, lane: Lane, weights: Arrays, batch: int, cuts: Cuts, marks: Marks | None = None) -> Program:
        return record(self.device, lane, weights, batch, cuts, marks or {})

    def captured_again(self, program: Program, of: Lane, lane: Lane, marks: Marks) -> Program | None:
        return moved(program, of, lane, marks)

    def rehearse_all(self, model: Model, weights: Arrays, sizes: Sequence[int]) -> tuple[int, int]:
        self._costs.rehearsed.clear()
        return super().rehearse_all(model, weights, sizes)

    def rehearse(self, model: Model, weights: Arrays, batch: int) -> int:
        self.device.noted = []
        try:
            return super().rehearse(model, weights, batch)
        finally:
            self._costs.rehearsed[batch], self.device.noted = self.device.noted, None

    def node_times_ns(self, program: Program) -> list[float]:
        model = SmModel(self.device.part, timing=self.sm.timing)
        return node_times_ns(model, program, self._costs.of(program))

    def wave_blocks(self, program: Program) -> list[int]:
        device = self.device
        return [n.wave_blocks(device.limits, device.sm_count) if n.kind == "kernel" else 0 for n in program.nodes]

    def cut(self, program: Program, bounds: Bounds, lane: Lane, confine: bool = False) -> Launches:
        windows = [self._windows[k] for k in lane.windows] if confine else []
        with self._sm_model():
            return self.launches.cut(program, bounds, lane, windows)

    def segment_times_ns(self, launches: Launches, repeats: int, alone: bool) -> tuple[list[float], float, float]:
        # The model is exact, so one run on a separate SM model is enough.
        window = self._windows[0] if launches.confined else 0
        return segment_times_ns(self._new_model(), launches, self.launches.steps, window)

    def saturated_ns(self, lanes: Sequence[Launches], rounds: int) -> float:
        return saturated_ns(self._new_model(), lanes, rounds, self.launches.steps)

    def grant(self, word: int) -> int:
        with self._sm_model():
            return self.launches.grant(word)

    def segment_shares(self, launches: Launches, alone_ns: Sequence[float]) -> list[tuple[float, float]]:
        costs = self._costs.of(launches.program)
        return segment_shares(self.device.part, self.sm.timing, launches, costs, alone_ns)

    def release(self, launches: Launches) -> None:
        with self._sm_model():
            self.launches.release(launches)

    def pool(self, state: State, priority: int) -> int:
        # As many levels as an H200's driver offers; CUDA clamps priorities to this range.
        level = max(0, min(priority, _LEVELS))
        if level not in self._pools:
            row = len(self._pools)
            with self._sm_model():
                n = codes.OF_WINDOWS + codes.QUEUES * int(state.core["windows"][0])
                state.stream[row, :n] = [self.sm.stream(level) for _ in range(n)]
            self._pools[level] = row
        return self._pools[level]

    # -- the loop

    def start(self, state: State, bell: Bell, failed: Callable[[BaseException], None]) -> None:
        self._state, self._bell, self._failed = state, bell, failed
        self._faults = Faults(state, self.on_fault)
        self._offset_ns = time.monotonic_ns() - self.sm.now_ns
        self._shared = new_loop(len(state.out))._replace(stop=self._stop_word)
        self._thread = threading.Thread(target=self._loop, name="paellapy-virtual", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._stopping = True
        self._interrupt()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        self._bell.close()

    def to_trace_ns(self, host_ns: int) -> int:
        return int(host_ns - self._offset_ns)

    def call(self, function: Callable[[], None]) -> None:
        self._calls.append(function)
        self._interrupt()

    def _loop(self) -> None:
        # The loop computes many small products beside the front ends. With one BLAS thread it served 2300 to 3800
        # requests a second; with several BLAS threads, 400 (32 clients of mlp and cnn, two cores).
        with threadpool_limits(1, "blas"), np.errstate(all="ignore"):
            self._serve()

    def _serve(self) -> None:
        state = self._state
        libc = ctypes.CDLL(None)
        libc.prctl(_SET_TIMERSLACK, 1)  # by default the kernel lets a thread oversleep by 50 µs
        ppoll, read = (ctypes.cast(f, ctypes.c_void_p).value or 0 for f in (libc.ppoll, libc.read))
        launch = ctypes.CFUNCTYPE(ctypes.c_int32)(self._launch)
        address = ctypes.cast(launch, ctypes.c_void_p).value or 0
        shared = self._shared
        loop = shared.loop[0]
        loop["offset_ns"], loop["linger_ns"], loop["bell_fd"] = self._offset_ns, self._linger_ns, self._bell.fd
        loop["launch"], loop["ppoll"], loop["read"] = address, ppoll, read
        # Before the lock is taken: without a cache on disk, compiling takes seconds, and no thread should wait for it.
        sm = self.sm.state
        compile_for(serve, state, sm, shared)
        loop["run"] = address_of_run()
        compile_for(next_event, sm)
        compile_for(submit_again, sm.command, Commands(sm.command, sm.todo, sm.todo), 0, 0.0, 0)
        self._compiled.set()
        while not self._stopping:
            with self._lock:
                self._serving = self.sm.state
                serve(state, self._serving, shared)
            if self._stop_word[0]:
                self._stop_word[0] = 0
                while self._calls:
                    self._calls.popleft()()
                self._nobody_waits.wait()

    @contextlib.contextmanager
    def _sm_model(self) -> Iterator[SmModel]:
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
        granted = self.launches.grants.get(handle)
        if granted is not None:
            granted.value = 1
            return
        piece, tracer = self.launches.pieces[handle], self._tracer
        # Taken first, because the GPU's time passes while the data are computed.
        submit = max(self.sm.now_ns, time.monotonic_ns() - self._offset_ns)
        if tracer is None:
            placed = piece.place_again(self.sm, stream, submit)
        else:
            first = tracer.note((lane, size, segment), piece, int(submit), stream)
            placed = piece.place(self.sm, stream, submit, first)
        self._await("flight", placed.last, word)
        if draining:
            self._await("drain", placed.kernel, draining)
        faults = self._faults
        if faults.skips(lane, segment):
            return
        try:
            piece.run()
        except Exception as e:
            whole = self.launches.pieces[int(self._state.whole["handle"][lane, size])]
            faults.isolate(lane, size, self.launches.lanes[handle], whole.items, e)

    def _await(self, table: str, handle: int, word: int) -> None:
        """Makes the loop set the word once the launch is done, or the kernel has started all its blocks."""
        count = self._shared.loop[table]
        row = getattr(self._shared, table)[count[0]]
        row["handle"], row["word"] = handle, word
        count[0] += 1

    def sm_totals(self) -> tuple[float, Any, Any]:
        if not self._compiled.is_set():
            return 0.0, np.zeros(self.device.sm_count), np.zeros(self.device.sm_count)
        with self._sm_model():
            return self.sm.use_until(time.monotonic_ns() - self._offset_ns)

    # -- traces

    def begin_trace(self, records_per_sm: int, models: list[LoadedModel]) -> None:
        with self._sm_model():
            if self._tracer is not None:
                raise TraceError("the engine is being traced already; traces cannot be nested")
            self.sm.clear_blocks()
            self._tracer, self.tracing = PieceTracer(self.device), True

    def end_trace(self, models: list[LoadedModel]) -> TracedBlocks:
        with self._sm_model():
            tracer, self._tracer, self.tracing = self._tracer, None, False
            assert tracer is not None
            blocks = self.sm.blocks()
            self.sm.clear_blocks()
        return tracer.finish(blocks)
