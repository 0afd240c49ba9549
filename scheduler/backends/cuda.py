"""A real GPU behind the engine: the compiled core launches CUDA graphs, and spins while work is in flight."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np

from paellapy.instrument import env
from paellapy.instrument.device.cuda import CudaDevice
from paellapy.instrument.device.driver import CudaArray, CudaStream, check, driver
from paellapy.instrument.errors import LaunchError, PaellaError
from paellapy.instrument.traces.session import Session, trace
from paellapy.scheduler.backends.base import (
    Backend,
    Launches,
    LoadedModel,
    TracedBlocks,
    TracedPiece,
    device_lock,
    write_handles,
)
from paellapy.scheduler.backends.contention_probe import ContentionProbe
from paellapy.scheduler.backends.cuda_capture import (
    capture_program,
    cupy_in_arena,
    has_threads,
    imported_program,
    in_thread_of,
    instance_pool,
    run_steps,
    warm_up_in_threads,
)
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
from paellapy.scheduler.backends.cuda_loop import CudaLoop, failure
from paellapy.scheduler.backends.cuda_memory import (
    CudaArena,
    CudaMemory,
    CudaPages,
    CudaWeights,
    PinnedBlock,
    free_and_whole_bytes,
)
from paellapy.scheduler.backends.cuda_timing import Gate, node_times_ns, saturated_ns, segment_times_ns
from paellapy.scheduler.core import codes
from paellapy.scheduler.core.rings import Bell
from paellapy.scheduler.core.state import State
from paellapy.scheduler.models import torch_capture
from paellapy.scheduler.models.capture import ModelCapture
from paellapy.scheduler.models.memory import Instance, InstancePlan
from paellapy.scheduler.models.model import ImportedGraph, Model
from paellapy.scheduler.models.profile import ProgramProfile
from paellapy.scheduler.models.program import Cuts, Marks, Program
from paellapy.scheduler.models.tensors import Arrays
from paellapy.scheduler.models.torch_capture import TorchPool, torch_in_use
from paellapy.scheduler.models.weights import Bounds, Layout, WeightRange


class CudaBackend(Backend):
    device: CudaDevice
    foreign_kernels = True
    sleeps_in_read = True

    def __init__(self, device: CudaDevice) -> None:
        self.device = device
        env.warn_if_few_queues()
        device.activate()
        self._loop = CudaLoop(device)
        self._gate = Gate(device.allocate_pinned(64)[:1])
        self._streams = CudaStreams(device)
        self._trace: CudaTrace | None = None
        self._warm_up_pool: TorchPool | None = None  # set while a model of PyTorch's is warmed up
        self._partitions: CudaPartitions | None = None
        self._probe: ContentionProbe | None = None  # created when the shares of segments are first measured
        self._closed = False
        self._pages: CudaPages | None = None  # memory pages of weights that come and go
        self._weight_stream: CudaStream | None = None

    def default_memory_bytes(self) -> int:
        return int(free_and_whole_bytes(self.device)[0] * 0.9)

    def fingerprint(self) -> str:
        version = check(driver().cuDriverGetVersion(), "reading the driver's version")
        return f"{self.device.title} cuda {version} partitions {self.partitions} of {self.partition_share}"

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
                "12.5 or later, or sm_partitions=0", field="sm_partitions", given=count
            ) from e  # fmt: skip
        return self._partitions.sms

    # -- memory

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

    # -- programs

    @contextlib.contextmanager
    def counting(self, capture: ModelCapture) -> Iterator[None]:
        torch_memory = self._warm_up_pool.on(None) if self._warm_up_pool else contextlib.nullcontext()
        with cupy_in_arena(self.device, None, capture.empty), torch_memory:
            yield

    def warm_up_all(self, model: Model, weights: Arrays, sizes: Sequence[int]) -> tuple[int, int]:
        if isinstance(model.source, ImportedGraph):
            return 0, 0  # a captured graph needs no warm-up, and its memory belongs to its owner
        if not torch_in_use(model.uses_torch):
            return super().warm_up_all(model, weights, sizes)
        if model.stateful and model.uses_torch:
            return self._warm_up_step(model, weights, sizes)
        self._warm_up_pool = TorchPool(self.device.index)
        try:
            if has_threads(model):
                scratch = warm_up_in_threads(self, model, weights, sizes)
            else:
                scratch, _ = super().warm_up_all(model, weights, sizes)
            return scratch, self._warm_up_pool.nbytes
        finally:
            self._warm_up_pool.free()
            self._warm_up_pool = None

    def _warm_up_step(self, model: Model, weights: Arrays, sizes: Sequence[int]) -> tuple[int, int]:
        """Also counts the memory that PyTorch holds while a step runs, in any thread."""
        torch: Any = sys.modules["torch"]
        torch.cuda.reset_peak_memory_stats(self.device.index)
        before = torch.cuda.memory_allocated(self.device.index)
        scratch, _ = super().warm_up_all(model, weights, sizes)
        return scratch, torch.cuda.max_memory_allocated(self.device.index) - before

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
        if isinstance(instance.model.source, ImportedGraph):
            program = imported_program(self.device, instance, instance.model.source)
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

    def cut(self, program: Program, bounds: Bounds, instance: Instance, confine: bool = False) -> Launches:
        self.device.activate()
        return cut(program, bounds, instance, self._partitions if confine else None)

    def launch_first(self, launches: Launches, wholes: bool, wait: bool = True) -> None:
        launch_first(launches, wholes, self._stream_of(launches.program), wait)

    def await_first(self, model: Model) -> None:
        await_stream(self._streams.to_capture_on(model.priority).handle)

    def run_segment(self, launches: Launches, k: int) -> None:
        self.device.activate()
        launch_once([launches.handles[k]], self._stream_of(launches.program))

    def grant(self, word: int) -> int:
        self.device.activate()
        with word_graph(word) as graph:
            return instantiate(graph)

    def release(self, launches: Launches) -> None:
        self.device.activate()
        release(launches)

    def discard(self, program: Program) -> None:
        if program.body is not None:
            program.body.destroy()
        super().discard(program)

    # -- measurements

    def node_times_ns(self, program: Program) -> list[float]:
        kernels = [node.kind == "kernel" for node in program.nodes]
        return node_times_ns(program.body, kernels, self._stream_of(program))

    def segment_times_ns(self, launches: Launches, repeats: int, alone: bool) -> tuple[list[float], float, float]:
        return segment_times_ns(launches, repeats, alone, self._stream_of(launches.program), self._gate)

    def saturated_ns(self, instances: Sequence[Launches], rounds: int) -> float:
        self.device.activate()
        streams = self._streams.pool(instances[0].program.model.priority, self._partitions)[: len(instances)]
        return saturated_ns(instances, rounds, [each.handle for each in streams])

    def segment_shares(self, launches: Launches, alone_ns: Sequence[float]) -> list[tuple[float, float]]:
        self.device.activate()
        if self._probe is None:
            self._probe = ContentionProbe(self.device)
        nodes, stream = launches.program.nodes, self._stream_of(launches.program)
        pairs = zip(launches.handles, launches.bounds, alone_ns, strict=True)
        return [self._probe.shares(handle, nodes[first:end], ns, stream) for handle, (first, end), ns in pairs]

    def _stream_of(self, program: Program) -> int:
        return self._streams.to_capture_on(program.model.priority).handle

    # -- the loop

    def pool(self, state: State, priority: int) -> int:
        self.device.activate()
        streams = self._streams.pool(priority, self._partitions)
        row = self._streams.row(priority)
        state.stream[row, : len(streams)] = [each.handle for each in streams]
        return row

    def start(self, state: State, bell: Bell, failed: Callable[[BaseException], None]) -> None:
        self._state, self._bell = state, bell
        self._loop.start(state, bell, failed)
        torch_capture.opened(id(self), self.device.index, partial(run_steps, self.device))

    def call(self, function: Callable[[], None]) -> None:
        self._loop.call(function)

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
        self._loop.stop()

    def close(self) -> None:
        # Free them now: the garbage collector might do so during another engine's capture.
        self._streams.clear()
        if self._probe is not None:
            self._probe.close()
            self._probe = None
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
            self._trace = CudaTrace(self, self._state, records_per_sm, models)
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


class CudaStreams:
    """Streams of an engine by priority: to capture on, and for the core to launch on."""

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


class CudaTrace:
    """Every instance's graphs, captured again with kernels that record. They replace the others while the trace runs.

    Instances are in service, so these graphs cannot be launched beforehand: the first launch of each in a trace takes
    longer.
    """

    def __init__(self, backend: CudaBackend, state: State, records_per_sm: int, models: list[LoadedModel]) -> None:
        self._backend, self._state = backend, state
        self._inner = trace(records_per_sm, backend.device)
        self._result = self._inner.__enter__()
        self._pieces: list[TracedPiece] = []
        self._traced: list[Launches] = []
        self._plain: list[tuple[int, int, Launches]] = []
        try:
            for loaded in models:
                for instance, row, sizes in zip(loaded.instances, loaded.instance_rows, loaded.launches, strict=True):
                    for profile, launches in zip(loaded.profiles, sizes, strict=True):
                        self._swap_in(loaded, instance, row, profile, launches)
        except BaseException:
            self._swap_out({row for loaded in models for row in loaded.instance_rows})
            self._inner.__exit__(None)
            self._release()
            raise

    def _swap_in(
        self, loaded: LoadedModel, instance: Instance, row: int, profile: ProgramProfile, plain: Launches
    ) -> None:
        backend, size = self._backend, loaded.model.batch.index(profile.batch)
        program, ids = backend.capture_traced(instance, loaded.weights, profile.batch, profile.cuts)
        # First of all the pieces: their events are forgotten with them, also where a graph cannot be made.
        for k, (first, end) in [*enumerate(plain.bounds), (codes.WHOLE, (0, len(ids)))]:
            launches = tuple(i for i in ids[first:end] if i)
            self._pieces.append(TracedPiece(row, size, k, launches, replayed=True))
        try:
            traced = backend.cut(program, plain.bounds, instance, confine=bool(plain.confined))
        finally:
            backend.discard(program)
        self._traced.append(traced)
        self._plain.append((row, size, plain))
        write_handles(self._state, row, size, traced)

    def _swap_out(self, rows: set[int]) -> None:
        """Restores the original graphs. `rows`: instances that still exist."""
        for row, size, plain in self._plain:
            if row in rows:
                write_handles(self._state, row, size, plain)

    def _release(self) -> None:
        for launches in self._traced:
            self._backend.release(launches)
        replayed = {launch for piece in self._pieces for launch in piece.launches}
        Session.forget(replayed)
        self._backend.device.forget_events(replayed)

    def finish(self, rows: set[int]) -> TracedBlocks:
        self._swap_out(rows)
        # Leaving waits for the GPU, so no recording kernel is in flight afterwards.
        self._inner.__exit__(None)
        self._release()
        t = self._result
        return TracedBlocks(t.blocks.copy(), t.launches.copy(), t.kernels, self._pieces, t.dropped, t.unfinished,
                            t.ranges, t.count_work)  # fmt: skip
