"""The core's loop on the virtual GPU, compiled: the SM model's time, the core's steps, sleeping and waking.

It calls Python only when there is data to compute, so that neither an idle nor a busy engine wastes time in the
interpreter, and other threads of the process need not wait. It calls instead of returning, because passing all these
tables again would take about half as long as computing a small kernel.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from threadpoolctl import threadpool_limits

from paellapy.instrument.gpu_model.commands import Commands
from paellapy.instrument.gpu_model.model import SmModel, address_of_run, submit_again
from paellapy.instrument.gpu_model.tables import INF, REPORTED, Ints
from paellapy.instrument.gpu_model.tables import State as SmState
from paellapy.instrument.numba_ext.link import call_with, compile_for, compiled, part
from paellapy.instrument.numba_ext.tables import TableSet, table, table_set
from paellapy.scheduler.backends.base import RETRY_S, broken_loop
from paellapy.scheduler.backends.virtual_launches import PieceTracer, VirtualLaunches
from paellapy.scheduler.core.atomics import call_back, call_ppoll, call_run, call_write, load_at, store_at
from paellapy.scheduler.core.codes import NEVER, WHOLE
from paellapy.scheduler.core.instances import awaits_reads
from paellapy.scheduler.core.processes import FEW_CORES, usable_cpus
from paellapy.scheduler.core.rings import Bell, arm
from paellapy.scheduler.core.state import State, read_clock
from paellapy.scheduler.core.step import wake_producers
from paellapy.scheduler.core.tables import Table, Words
from paellapy.scheduler.models.capture import Recorded
from paellapy.scheduler.models.memory import Instance

SPIN_NS = 40_000  # shorter waits are spent awake: waking up takes about as long
POLLIN = 1 << 32  # of a struct pollfd, behind the descriptor
_ZERO, _ONE = np.uint64(0), np.uint64(1)
_LINGER_NS = 200_000  # the loop stays awake for this long after its last work, so that the next request finds it awake
_SET_TIMERSLACK = 29  # PR_SET_TIMERSLACK

OnFault = Callable[[int, int, BaseException], None]  # instance, slot, cause

LOOP = np.dtype(  # [1]
    [
        ("orders", "i8"),  # number of rows in each of the tables below
        ("flight", "i8"),
        ("drain", "i8"),
        ("offset_ns", "f8"),  # the host's clock minus the GPU's
        ("linger_ns", "i8"),  # time without work after which it sleeps
        ("bell_fd", "i8"),
        ("run", "u8"),  # address of the SM model's `run`
        ("launch", "u8"),  # address of the function that carries out orders
        ("ppoll", "u8"),  # address of ppoll of the C library
        ("read", "u8"),
    ],
    align=True,
)
# A launch to carry out; `draining` is the address of a word, or 0.
ORDER = np.dtype([(name, "i8") for name in ("instance", "size", "segment", "word", "handle", "stream", "draining")])
AWAITED = np.dtype([("handle", "i8"), ("word", "u8")])  # a launch or a kernel, and the word to set for it


@table_set
class Loop(TableSet):
    """Tables that the loop shares with the backend."""

    loop: Table = table(LOOP, 1)
    orders: Table = table(ORDER, "launches")
    flight: Table = table(AWAITED, "launches")  # launches whose end is awaited
    drain: Table = table(AWAITED, "launches")  # kernels whose last block start is awaited
    stop: Words = table(np.uint64, 8)
    scratch: Ints = table(np.int64, 8)


@part
def note_orders(s: State, w: Loop) -> None:
    """Records the core's launches for the backend."""
    core = s.core[0]
    for k in range(core.out):
        out, order = s.out[k], w.orders[k]
        a = s.instance[out.instance]
        to = s.whole[out.instance, out.size] if out.segment == WHOLE else s.launch[out.instance, out.size, out.segment]
        order.instance, order.size, order.segment = out.instance, out.size, out.segment
        order.word, order.handle = np.int64(out.word), np.int64(out.handle)
        order.stream, order.draining = np.int64(s.stream[a.pool, a.stream_at]), np.int64(to.draining)
    w.loop[0].orders = core.out
    core.out = 0


@part
def forget(awaited: Any, k: int, last: int) -> None:
    """Removes a row: the last one takes its place."""
    awaited[k].handle, awaited[k].word = awaited[last].handle, awaited[last].word


@part
def tell_of_drained(sm: SmState, w: Loop) -> None:
    """Sets the words of kernels that have started all their blocks."""
    loop = w.loop[0]
    k = 0
    while k < loop.drain:
        if sm.command[w.drain[k].handle & (sm.command.shape[0] - 1)].notify_ns <= sm.gpu[0].now_ns:
            store_at(w.drain[k].word, _ONE)
            loop.drain -= 1
            forget(w.drain, k, loop.drain)
        else:  # also if it is not a number
            k += 1


@part
def tell_of_completed(sm: SmState, w: Loop) -> None:
    """Sets the completion words of launches that are done."""
    loop, gpu = w.loop[0], sm.gpu[0]
    handle = gpu.done_head
    for _ in range(gpu.unreported):
        command = sm.command[handle & (sm.command.shape[0] - 1)]
        command.status = REPORTED
        for k in range(loop.flight):
            if w.flight[k].handle == handle:
                store_at(w.flight[k].word, _ONE)
                loop.flight -= 1
                forget(w.flight, k, loop.flight)
                break
        handle = command.done_link
    gpu.unreported = 0


@part
def next_due(s: State, sm: SmState, w: Loop) -> float:
    """When there is something to do even without a message."""
    core, loop = s.core[0], w.loop[0]
    call_run(loop.run, sm, -INF, 0)  # finds the next event, and changes nothing
    soonest = min(sm.gpu[0].next_ns + loop.offset_ns, core.wake_at_ns, float(NEVER))
    if core.due > 0:
        soonest = min(soonest, float(s.request[s.due[0]].deadline_ns))
    return float(soonest)


@part
def sleep(w: Loop, soonest: float, now: int) -> None:
    """Sleeps until the bell rings, or something is due."""
    loop = w.loop[0]
    until = 0
    if soonest < NEVER:
        wait = np.int64(soonest - now)
        w.scratch[4], w.scratch[5] = wait // 1_000_000_000, wait % 1_000_000_000
        until = w.scratch[4:].ctypes.data
    w.scratch[6] = loop.bell_fd | np.int64(POLLIN)
    call_ppoll(loop.ppoll, w.scratch[6:].ctypes.data, _ONE, np.uint64(until), _ZERO)
    # read() has the same signature
    call_write(loop.read, np.int32(loop.bell_fd), w.scratch[7:].ctypes.data, np.uint64(8))


@compiled
def serve(s: State, sm: SmState, w: Loop) -> None:
    """Runs until `stop[0]` is set, or `launch` asks for it; `launch` is called when there are rows in `orders`.

    After `linger_ns` without work, with nothing due soon, the loop arms the bell, looks once more, and sleeps.
    """
    core, loop = s.core[0], w.loop[0]
    bell = s.bell.ctypes.data
    last = read_clock(s, w.scratch)
    armed = False
    while True:
        now = read_clock(s, w.scratch)
        call_run(loop.run, sm, max(sm.gpu[0].now_ns, now - loop.offset_ns), 0)
        tell_of_drained(sm, w)
        tell_of_completed(sm, w)
        happened = call_with(s.call[0].step, s, now)
        wake_producers(s, w.scratch)
        asked = load_at(w.stop.ctypes.data) != _ZERO
        if core.out > 0 or asked:
            store_at(bell, _ZERO)
            armed = False
            if core.out > 0:
                note_orders(s, w)
                if call_back(loop.launch) != 0:
                    return
            if asked:  # also under constant load, or the asking thread would wait for ever
                return
            last = now
            continue
        if happened > 0:
            if armed:  # the bell was armed for the state before this event
                store_at(bell, _ZERO)
                armed = False
            last = now
            continue
        soonest = next_due(s, sm, w)
        if soonest - now < SPIN_NS or now - last < loop.linger_ns:
            continue
        if not armed:
            arm(bell, awaits_reads(s))
            armed = True
            continue
        sleep(w, soonest, now)
        store_at(bell, _ZERO)
        armed = False


class VirtualLoop:
    """The engine's thread: it runs the core's loop, computes its launches, and pauses for other threads.

    The SM model's clock follows the host's: `offset_ns` is the difference. With a `tracer`, launches are traced.
    """

    def __init__(self, sm: SmModel, launches: VirtualLaunches) -> None:
        self.sm, self._launches = sm, launches
        self.tracer: PieceTracer | None = None
        self._lock = threading.Lock()  # guards the SM model, which the loop and loads use
        self._counting, self._waiting, self._none_waiting = threading.Lock(), 0, threading.Event()
        self._none_waiting.set()
        self.compiled = threading.Event()  # set once the loop's functions are compiled; nothing runs before
        self._stop_word = np.zeros(8, np.uint64)
        # With few cores, spinning would take a core from other threads.
        self._linger_ns = _LINGER_NS if usable_cpus() > FEW_CORES else 0
        self._calls: deque[Callable[[], None]] = deque()
        self._stopping = False
        self._thread: threading.Thread | None = None

    def start(self, state: State, bell: Bell, failed: Callable[[BaseException], None], on_fault: OnFault) -> None:
        self._state, self._bell, self._failed = state, bell, failed
        # SM partitions are for jobs that run at once, so an engine with partitions launches as on a real GPU.
        state.core["one_by_one"][0] = state.core["partitions"][0] == 0
        self._faults = Faults(state, on_fault)
        self.offset_ns = time.monotonic_ns() - self.sm.now_ns
        self._shared = Loop.zeros({"launches": len(state.out)}, stop=self._stop_word)
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
        with self._counting:
            self._waiting += 1
            self._none_waiting.clear()
        if self._thread is not None:
            self._interrupt()
        try:
            with self._lock:
                yield self.sm
        finally:
            with self._counting:
                self._waiting -= 1
                if not self._waiting:
                    self._none_waiting.set()

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
                # The loop computes many small products beside the producers. With one BLAS thread it served 2300 to
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
                self._none_waiting.wait()

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
        self, instance: int, size: int, segment: int, word: int, handle: int, stream: int, draining: int
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
            first = tracer.note((instance, size, segment), piece, int(submit), stream)
            placed = piece.place(self.sm, stream, submit, first)
        if not self._faults.skips(instance, segment):
            try:
                piece.run()
            except Exception as e:
                whole = self._launches.pieces[int(self._state.whole["handle"][instance, size])]
                assert piece.instance is not None
                self._faults.isolate(instance, size, piece.instance, whole.items, e)
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


class Faults:
    """Models that fail on the values of one request, whose batch is then computed request by request.

    The host computes the data, so an index out of range is an ordinary exception. The failing requests are marked in
    the core's tables, and the others are answered. Only the loop's thread uses this object.
    """

    def __init__(self, state: State, on_fault: OnFault) -> None:
        self._state, self._on_fault = state, on_fault
        self._settled: set[int] = set()  # instances whose answers are computed: their other segments compute nothing

    def skips(self, instance: int, segment: int) -> bool:
        """Whether a segment (WHOLE or 0: the first of a run) should not be computed."""
        if not self._settled:
            return False
        if segment <= 0:
            self._settled.discard(instance)
        return instance in self._settled

    def isolate(self, k: int, size: int, instance: Instance, program: Sequence[Recorded], cause: Exception) -> None:
        """Computes every request of instance `k` separately, and marks those that fail.

        Every slot is given the inputs of the one request, because the contents of another slot may have caused the
        failure. A model that overwrites its inputs is computed from the overwritten ones.
        """
        state = self._state
        taken = int(state.instance["taken"][k])
        batch = int(state.size["batch"][state.instance["model"][k], size])
        live = [slot for slot in range(taken) if state.slot[k, slot] >= 0]
        inputs = {key: array[:batch].copy() for key, array in instance.inputs.items()}
        outputs = {key: array[:batch].copy() for key, array in instance.outputs.items()}
        alone = len(live) == 1 and (batch == 1 or instance.model.whole_batches)
        found: dict[int, Exception] = {live[0]: cause} if alone else {}
        for slot in live:
            if slot in found:
                continue
            for key, array in instance.inputs.items():
                array[:batch] = inputs[key][slot]
            try:
                for item in program:
                    item.run()
            except Exception as e:
                found[slot] = e
            else:
                for key, array in instance.outputs.items():
                    outputs[key][slot] = array[slot]
        good = next((slot for slot in live if slot not in found), None)
        for key, array in instance.inputs.items():  # the next batch may not fill every slot
            array[:batch] = 0 if good is None else inputs[key][good]
        for key, array in instance.outputs.items():
            array[:batch] = outputs[key]
        state.instance_fault[k] = 0
        for slot, error in found.items():
            state.instance_fault[k, slot >> 6] |= np.uint64(1) << np.uint64(slot & 63)
            self._on_fault(k, slot, error)
        state.instance["faulty"][k] = 1
        self._settled.add(k)
