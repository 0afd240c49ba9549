"""A real GPU behind the engine: the compiled core launches CUDA graphs, and spins while work is in flight."""

from __future__ import annotations

import contextlib
import contextvars
import ctypes
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial
from typing import Any, ParamSpec, TypeVar

import numpy as np
from numpy.typing import NDArray

from paellapy.instrument import env
from paellapy.instrument.device.cuda import CudaDevice
from paellapy.instrument.device.driver import (
    NOT_READY,
    CudaArray,
    CudaStream,
    check,
    driver,
    fail,
    library,
    relaxed_capture,
)
from paellapy.instrument.errors import LaunchError, PaellaError
from paellapy.instrument.numba_ext.link import call_with, compiled
from paellapy.scheduler.backends.base import (
    RETRY_S,
    Backend,
    Bounds,
    Launches,
    LoadedModel,
    TracedBlocks,
    broken_loop,
    device_lock,
)
from paellapy.scheduler.backends.contention_probe import Hogs, part_without_place
from paellapy.scheduler.backends.cuda_capture import capture_program, cupy_in_arena, foreign_program
from paellapy.scheduler.backends.cuda_graphs import (
    CudaPartitions,
    await_stream,
    cut,
    instantiate,
    launch_first,
    launch_once,
    node_ends,
    release,
    word_graph,
)
from paellapy.scheduler.backends.cuda_memory import (
    CudaArena,
    CudaMemory,
    CudaPages,
    CudaWeights,
    PinnedBlock,
    free_and_whole_bytes,
)
from paellapy.scheduler.backends.cuda_timing import CudaTrace, Gate, node_times_ns, saturated_ns, segment_times_ns
from paellapy.scheduler.core import codes
from paellapy.scheduler.core.atomics import call_write, load_at, store_at
from paellapy.scheduler.core.codes import FAIL_MODE
from paellapy.scheduler.core.instances import Copier, awaits_reads
from paellapy.scheduler.core.rings import Bell, arm
from paellapy.scheduler.core.state import State, read_clock
from paellapy.scheduler.core.step import run, wake_producers
from paellapy.scheduler.core.tables import Words
from paellapy.scheduler.models import torch_capture
from paellapy.scheduler.models.capture import ModelCapture
from paellapy.scheduler.models.memory import Instance, InstancePlan
from paellapy.scheduler.models.model import ForeignGraph, Model
from paellapy.scheduler.models.program import Cuts, Marks, Program
from paellapy.scheduler.models.tensors import Arrays, Capturable
from paellapy.scheduler.models.torch_capture import Step, TorchPool, torch_in_use
from paellapy.scheduler.models.torch_module import TorchModule
from paellapy.scheduler.models.weights import Layout, WeightRange

# The core's loop on a real GPU, entirely compiled: it spins, sleeps and wakes without the interpreter.
#
# A loop that slept in Python would need the GIL to wake up, and would have to wait for the server's own thread.


_ZERO = np.uint64(0)
INTERRUPTED, BROKEN = 1, 2


@compiled
def serve(
    s: State, stop: Words, linger_ns: int, scratch: NDArray[np.int64], armed: Words, bell: int, read: int,
    reported: bool,
) -> int:  # fmt: skip
    """Runs the core until `stop[0]` is set (INTERRUPTED), or a launch fails that was not `reported` yet (BROKEN).

    After `linger_ns` without work, it sleeps by reading the eventfd `bell`; `read` is the address of the C function.
    Before that, it arms the bell and looks once more: messages posted before are seen, later ones ring the bell.
    """
    core = s.core[0]
    while True:
        if run(s, stop, linger_ns, scratch) != 0:
            return INTERRUPTED
        if core.mode == FAIL_MODE and core.error != 0 and not reported:
            return BROKEN
        arm(armed.ctypes.data, awaits_reads(s))
        happened = call_with(s.call[0].step, s, read_clock(s, scratch))
        wake_producers(s, scratch)
        # A live request may expire, so the loop sleeps only if there is none.
        if happened == 0 and core.live == 0 and core.flight == 0 and load_at(stop.ctypes.data) == _ZERO:
            # read() has the same signature
            call_write(np.uint64(read), np.int32(bell), scratch[3:].ctypes.data, np.uint64(8))
        store_at(armed.ctypes.data, _ZERO)


# Threads of an engine on a real GPU: one runs the core's loop, one asks the driver whether a stuck GPU is alive.

# The loop keeps spinning for this long after its last work, so that at some hundred requests a second the next one
# finds it awake: waking up takes longer than many kernels. After that it sleeps.
_LINGER_NS = 10_000_000
_WATCH_S = 0.1  # how often the driver is asked whether a GPU without progress is still alive


class CudaThreads:
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


# Streams of an engine on a real GPU: by priority, to capture on and for the core to launch on.


class CudaStreams:
    def __init__(self, device: CudaDevice) -> None:
        self._device = device
        self._captures: dict[int, CudaStream] = {}
        self._scratch_array = CudaArray(device, (1,), np.dtype(np.uint8))
        self.pools: dict[int, list[CudaStream]] = {}  # by CUDA's number for the priority

    def to_capture_on(self, priority: int) -> CudaStream:
        """A stream to capture on: kernels in a graph keep the priority of the stream on which they were captured."""
        if priority not in self._captures:
            self._captures[priority] = CudaStream(self._device, priority)
        return self._captures[priority]

    def pool(self, priority: int, partitions: CudaPartitions | None) -> list[CudaStream]:
        """The streams for launches of a priority: on all SMs, then in each partition.

        Each is used once when it is created, because a stream's first work takes longer.
        """
        level = CudaStream.level(priority)
        if level not in self.pools:
            streams: list[CudaStream] = []
            try:
                for _ in range(codes.OF_PARTITIONS):
                    streams.append(CudaStream(self._device, priority))
                if partitions is not None:
                    for partition in range(len(partitions.sms)):
                        for _ in range(codes.QUEUES):
                            streams.append(partitions.stream(partition, priority))
                for k in (*range(codes.QUEUES), *range(codes.OF_PARTITIONS, len(streams))):
                    opened = driver().cuMemsetD8Async(self._scratch_array.ptr, 0, 1, streams[k].handle)
                    check(opened, "opening a stream")
                    streams[k].synchronize()
            except BaseException:
                # streams of a partition must go before the partition does, even if the error keeps references
                streams.clear()
                raise
            self.pools[level] = streams
        return self.pools[level]

    def row(self, priority: int) -> int:
        """The place of a priority's pool among all pools, in the order of their creation."""
        return list(self.pools).index(CudaStream.level(priority))

    def clear(self) -> None:
        self.pools.clear()
        self._captures.clear()


# Threads in which networks of convolutions run, one for each batch size.
#
# cuDNN plans every convolution when it first runs at a batch size, once per thread, and computes on the host for that.
# With a thread per size the sizes are planned at once, and each is captured in the thread that has its plans. The
# threads stay, because a trace or another load of the same network needs the plans again.


P = ParamSpec("P")
T = TypeVar("T")

_threads: dict[int, ThreadPoolExecutor] = {}  # by batch size, one thread each
_lock = threading.Lock()  # engines on several GPUs may load at once
os.register_at_fork(after_in_child=_threads.clear)  # threads do not survive a fork


def in_thread_of(batch: int, function: Callable[P, T], *given: P.args, **named: P.kwargs) -> T:
    """Calls a function in the thread of a batch size, and waits for its end, also when interrupted."""
    called = _submit(batch, function, *given, **named)
    try:
        return called.result()
    finally:
        wait([called])  # the caller frees memory that the function may use
        del called  # holds the error, whose traceback holds this frame and the tensors of the function


def side_by_side(batches: Sequence[int], function: Callable[[int], T]) -> dict[int, T]:
    """Calls a function with each batch size in its thread, all at once; returns the results of calls that succeeded."""
    called = {batch: _submit(batch, function, batch) for batch in batches}
    found: dict[int, T] = {}
    try:
        for batch, each in called.items():
            # Raised here, an error would have this frame in its traceback, and the frame has the error: the tensors of
            # the failed size would stay on the GPU, where the next attempt needs their memory.
            if each.exception() is None:
                found[batch] = each.result()
    finally:
        wait(called.values())
    return found


def _submit(batch: int, function: Callable[P, T], *given: P.args, **named: P.kwargs) -> Future[T]:
    context = contextvars.copy_context()
    with _lock:
        if batch not in _threads:
            _threads[batch] = ThreadPoolExecutor(1, f"paellapy-size-{batch}")
        return _threads[batch].submit(lambda: context.run(function, *given, **named))


# PyTorch on a real GPU: its libraries loaded ahead, its memory pools, and networks whose sizes are planned at once.


def run_steps(device: CudaDevice, steps: Sequence[Step]) -> None:
    """Runs layers of PyTorch's, on its default stream: kernels on a second stream slow all graphs."""
    torch: Any = sys.modules["torch"]
    lock = device_lock(device)
    for step in steps if torch.cuda.is_available() else ():
        if not lock.acquire(blocking=False):
            return  # a model is loaded: its own runs load the rest
        try:
            device.activate()
            with relaxed_capture(), torch.no_grad():  # the user may capture a graph in another thread
                step(torch.device("cuda", device.index))
                torch.cuda.current_stream(device.index).synchronize()
        finally:
            lock.release()


def instance_pool(device: CudaDevice, model: Capturable) -> TorchPool:
    """The pool of an instance. Instances of a model that changes its weights run one at a time, and share a pool."""
    if not model.stateful:
        return TorchPool(device.index)
    if model.source.pool is None:
        model.source.pool = TorchPool(device.index)
    pool: TorchPool = model.source.pool
    return pool


def has_threads(model: Capturable) -> bool:
    """Whether every batch size of a model runs in a thread of its own."""
    return isinstance(model.source, TorchModule) and model.source.plans_convolutions


def rehearse_in_threads(backend: Backend, model: Model, weights: Arrays, sizes: Sequence[int]) -> int:
    """All sizes run for the first time at once. One by one, in the order of an instance, they then show the memory they
    need. A size that failed beside others is tried again alone, and raises its error then.
    """
    ran = side_by_side(sizes, lambda batch: backend.first_run(model, weights, batch))
    return max(in_thread_of(batch, backend.rehearse, model, weights, batch, ran.get(batch)) for batch in sizes)


class CudaBackend(Backend):
    device: CudaDevice
    foreign_kernels = True
    sleeps_in_read = True

    def __init__(self, device: CudaDevice) -> None:
        self.device = device
        env.warn_if_few_queues()
        device.activate()
        self._threads = CudaThreads(device)
        self._pinned = device._allocate_pinned(64)
        self._gate = Gate(self._pinned[:1])
        self._streams = CudaStreams(device)
        self._trace: CudaTrace | None = None
        self._trial: TorchPool | None = None  # set while a model is rehearsed
        self._partitions: CudaPartitions | None = None
        self._hogs: Hogs | None = None  # created when the shares of segments are first measured
        self._closed = False
        self._pages: CudaPages | None = None  # memory pages of weights that come and go
        self._weight_stream: CudaStream | None = None

    def default_memory_bytes(self) -> int:
        return int(free_and_whole_bytes(self.device)[0] * 0.9)

    def fingerprint(self) -> str:
        version = check(driver().cuDriverGetVersion(), "reading the driver's version")
        return f"{self.device.title} cuda {version} partitions {self.partitions} of {self.partition_share}"

    def instance_memory(self, plan: InstancePlan, arena: Any = None) -> CudaMemory:
        return CudaMemory(self.device, plan, self.shared_slots, arena)

    def arena(self, nbytes: int) -> CudaArena:
        self.device.activate()
        return CudaArena(self.device, nbytes)

    def upload(self, model: Model) -> Arrays:
        self.device.activate()
        return model.place(self.device)

    def weight_range(self, layout: Layout, chunk_bytes: int, map_bytes: int) -> CudaWeights:
        if self._pages is None:
            self._pages = CudaPages(self.device, self.weights_limit_bytes)
            self._weight_stream = CudaStream(self.device, 0)
        assert self._weight_stream is not None
        return CudaWeights(self.device, layout, (chunk_bytes, map_bytes), self._pages, self._weight_stream)

    def host_block(self, nbytes: int) -> PinnedBlock:
        return PinnedBlock(self.device, nbytes)

    def weight_ends(self, program: Program, weights: WeightRange) -> list[tuple[int, int]]:
        return node_ends(program.body.nodes, weights)

    def run_segment(self, launches: Launches, k: int) -> None:
        self.device.activate()
        launch_once([launches.handles[k]], self._streams.to_capture_on(launches.program.model.priority).handle)

    # -- programs

    @contextlib.contextmanager
    def counting(self, capture: ModelCapture) -> Iterator[None]:
        torch_memory = self._trial.on(None) if self._trial else contextlib.nullcontext()
        with cupy_in_arena(self.device, None, capture.empty), torch_memory:
            yield

    def rehearse_all(self, model: Model, weights: Arrays, sizes: Sequence[int]) -> tuple[int, int]:
        if isinstance(model.source, ForeignGraph):
            return 0, 0  # a captured graph needs no rehearsal, and its memory belongs to its owner
        if not torch_in_use(model.uses_torch):
            return super().rehearse_all(model, weights, sizes)
        if model.stateful:
            return self._rehearse_step(model, weights, sizes)
        self._trial = TorchPool(self.device.index)
        try:
            if has_threads(model):
                scratch = rehearse_in_threads(self, model, weights, sizes)
            else:
                scratch, _ = super().rehearse_all(model, weights, sizes)
            return scratch, self._trial.nbytes
        finally:
            self._trial.free()
            self._trial = None

    def capture(
        self, instance: Instance, weights: Arrays, batch: int, cuts: Cuts, marks: Marks | None = None,
        like: Program | None = None,
    ) -> Program:  # fmt: skip
        return self.capture_traced(instance, weights, batch, cuts, marks, like)[0]

    def capture_traced(
        self, instance: Instance, weights: Arrays, batch: int, cuts: Cuts, marks: Marks | None = None,
        like: Program | None = None,
    ) -> tuple[Program, list[int]]:  # fmt: skip
        """Also returns, for each node, the id of its blocks in the running trace."""
        self.device.activate()
        if isinstance(instance.model.source, ForeignGraph):
            program = foreign_program(self.device, instance, instance.model.source)
            return program, [0] * len(program.nodes)
        memory = instance.memory
        assert isinstance(memory, CudaMemory)
        if memory.torch_pool is None and torch_in_use(instance.model.uses_torch):
            memory.torch_pool = instance_pool(self.device, instance.model)
        stream = self._streams.to_capture_on(instance.model.priority)
        given = (self.device, stream, instance, weights, batch, cuts, marks or {}, like)
        if has_threads(instance.model):
            return in_thread_of(batch, capture_program, *given)
        return capture_program(*given)

    def _rehearse_step(self, model: Model, weights: Arrays, sizes: Sequence[int]) -> tuple[int, int]:
        """Also counts the memory that PyTorch holds while a step runs, in any thread."""
        torch: Any = sys.modules["torch"]
        torch.cuda.reset_peak_memory_stats(self.device.index)
        before = torch.cuda.memory_allocated(self.device.index)
        scratch, _ = super().rehearse_all(model, weights, sizes)
        return scratch, torch.cuda.max_memory_allocated(self.device.index) - before

    def node_times_ns(self, program: Program) -> list[float]:
        kernels = [node.kind == "kernel" for node in program.nodes]
        return node_times_ns(program.body, kernels, self._streams.to_capture_on(program.model.priority).handle)

    def wave_blocks(self, program: Program) -> list[int]:
        device = self.device
        return [n.wave_blocks(device.limits, device.sm_count) if n.kind == "kernel" else 0 for n in program.nodes]

    def open_partitions(self, count: int, share: float) -> list[set[int]]:
        self.partitions, self.partition_share = count, share
        if not count:
            return []
        self.device.activate()
        try:
            self._partitions = CudaPartitions(self.device, count, share)
        # RuntimeError and AttributeError come from older drivers and bindings
        except (PaellaError, RuntimeError, AttributeError) as e:
            raise LaunchError(
                f"SM partitions need green contexts, which this GPU or its driver does not support ({e}): use CUDA "
                "12.5 or later, or sm_partitions=0"
            ) from e
        return self._partitions.sms

    def cut(self, program: Program, bounds: Bounds, instance: Instance, confine: bool = False) -> Launches:
        self.device.activate()
        return cut(program, bounds, instance, self._partitions if confine else None)

    def launch_first(self, launches: Launches, wholes: bool, wait: bool = True) -> None:
        launch_first(launches, wholes, self._streams.to_capture_on(launches.program.model.priority).handle, wait)

    def await_first(self, model: Model) -> None:
        await_stream(self._streams.to_capture_on(model.priority).handle)

    def segment_times_ns(self, launches: Launches, repeats: int, alone: bool) -> tuple[list[float], float, float]:
        stream = self._streams.to_capture_on(launches.program.model.priority).handle
        return segment_times_ns(launches, repeats, alone, stream, self._gate)

    def saturated_ns(self, instances: Sequence[Launches], rounds: int) -> float:
        self.device.activate()
        streams = self._streams.pool(instances[0].program.model.priority, self._partitions)[: len(instances)]
        return saturated_ns(instances, rounds, [each.handle for each in streams])

    def grant(self, word: int) -> int:
        self.device.activate()
        with word_graph(word) as graph:
            return instantiate(graph)

    def segment_shares(self, launches: Launches, alone_ns: Sequence[float]) -> list[tuple[float, float]]:
        self.device.activate()
        if self._hogs is None:
            self._hogs = Hogs(self.device)
        hogs, nodes, sms = self._hogs, launches.program.nodes, self.device.sm_count
        stream = self._streams.to_capture_on(launches.program.model.priority).handle
        found = []
        for handle, (first, end), ns in zip(launches.handles, launches.bounds, alone_ns, strict=True):
            kept = part_without_place(nodes[first:end], hogs.takes, self.device.limits, sms)
            found.append((kept, kept) if kept else hogs.shares(handle, ns, stream))
        return found

    def release(self, launches: Launches) -> None:
        self.device.activate()
        release(launches)

    def discard(self, program: Program) -> None:
        if program.body is not None:
            program.body.destroy()
        super().discard(program)

    def pool(self, state: State, priority: int) -> int:
        self.device.activate()
        streams = self._streams.pool(priority, self._partitions)
        row = self._streams.row(priority)
        state.stream[row, : len(streams)] = [each.handle for each in streams]
        return row

    # -- the loop

    def start(self, state: State, bell: Bell, failed: Callable[[BaseException], None]) -> None:
        self._state, self._bell = state, bell
        self._threads.start(state, bell, failed)
        torch_capture.opened(id(self), self.device.index, partial(run_steps, self.device))

    def call(self, function: Callable[[], None]) -> None:
        self._threads.call(function)

    def abandon(self, loaded: LoadedModel) -> None:
        for instance in loaded.instances if loaded.spare is None else (*loaded.instances, loaded.spare):
            pool = instance.memory.torch_pool if isinstance(instance.memory, CudaMemory) else None
            if pool is not None:
                pool.keep()

    def lost(self) -> BaseException | None:
        with contextlib.suppress(PaellaError):
            self.device.activate()
        status = int(driver().cuMemGetInfo()[0])  # after a fault every call of the driver fails with it
        return failure(status) if status else None

    def failure(self, status: int) -> BaseException:
        return failure(status)

    def stop(self) -> None:
        torch_capture.closed(id(self))
        self._threads.stop()

    def close(self) -> None:
        # Free them now: the garbage collector might do so during another engine's capture.
        self._streams.clear()
        if self._hogs is not None:
            self._hogs.close()
            self._hogs = None
        self._weight_stream = None
        if self._pages is not None:
            self._pages.close()
        self._closed = True
        self._close_partitions()

    def _close_partitions(self) -> None:
        """Closes the partitions after the last graph that runs in one; an open trace may still hold such graphs."""
        if self._closed and self._trace is None and self._partitions is not None:
            self._partitions.close()
            self._partitions = None

    # -- traces

    def begin_trace(self, records_per_sm: int, models: list[LoadedModel]) -> None:
        with device_lock(self.device):
            self._trace = CudaTrace(self, self.capture_traced, self._state, records_per_sm, models)
            self.tracing = True

    def end_trace(self, models: list[LoadedModel]) -> TracedBlocks:
        current, self._trace, self.tracing = self._trace, None, False
        assert current is not None
        with device_lock(self.device):
            found = current.finish({row for loaded in models for row in loaded.instance_rows})
        self._close_partitions()
        return found

    def to_trace_ns(self, host_ns: int) -> int:
        return self.device.to_device_ns(host_ns)
