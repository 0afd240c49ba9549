"""A real GPU behind the engine: the compiled core launches CUDA graphs, and spins while work is in flight."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

from paellapy.instrument import queues
from paellapy.instrument.device.cuda import CudaDevice
from paellapy.instrument.device.cuda_memory import CudaStream
from paellapy.instrument.device.driver import check, driver
from paellapy.instrument.errors import LaunchError, PaellaError
from paellapy.scheduler.backends.base import Backend, device_lock
from paellapy.scheduler.backends.cuda_capture import capture_program
from paellapy.scheduler.backends.cuda_cupy import cupy_in_arena
from paellapy.scheduler.backends.cuda_foreign import foreign_program
from paellapy.scheduler.backends.cuda_graphs import await_stream, instantiate, launch_once, word_graph
from paellapy.scheduler.backends.cuda_hogs import Hogs, part_without_place
from paellapy.scheduler.backends.cuda_launches import cut, launch_first, release
from paellapy.scheduler.backends.cuda_memory import CudaBerth, CudaMemory, free_and_whole_bytes
from paellapy.scheduler.backends.cuda_pointers import node_ends
from paellapy.scheduler.backends.cuda_size_threads import in_thread_of
from paellapy.scheduler.backends.cuda_streams import CudaStreams
from paellapy.scheduler.backends.cuda_threads import CudaThreads, failure
from paellapy.scheduler.backends.cuda_timing import Gate, node_times_ns, saturated_ns, segment_times_ns
from paellapy.scheduler.backends.cuda_torch import has_threads, lane_pool, rehearse_in_threads, run_steps
from paellapy.scheduler.backends.cuda_trace import CudaTrace
from paellapy.scheduler.backends.cuda_weights import CudaPages, CudaWeights, PinnedBlock
from paellapy.scheduler.backends.cuda_windows import CudaWindows
from paellapy.scheduler.backends.launches import Bounds, Launches, LoadedModel
from paellapy.scheduler.backends.recorded import TracedBlocks
from paellapy.scheduler.core.loop import Bell
from paellapy.scheduler.core.state import State
from paellapy.scheduler.models import torch_libraries
from paellapy.scheduler.models.capture import ModelCapture
from paellapy.scheduler.models.foreign import ForeignGraph
from paellapy.scheduler.models.lane_memory import Lane, LanePlan
from paellapy.scheduler.models.model import Model
from paellapy.scheduler.models.program import Cuts, Marks, Program
from paellapy.scheduler.models.tensors import Arrays
from paellapy.scheduler.models.torch_pool import TorchPool, torch_in_use
from paellapy.scheduler.models.weight_range import Layout, WeightRange


class CudaBackend(Backend):
    device: CudaDevice
    foreign_kernels = True
    sleeps_in_read = True

    def __init__(self, device: CudaDevice) -> None:
        self.device = device
        queues.warn_if_few()
        device.activate()
        self._threads = CudaThreads(device)
        self._pinned = device._allocate_pinned(64)
        self._gate = Gate(self._pinned[:1])
        self._streams = CudaStreams(device)
        self._trace: CudaTrace | None = None
        self._trial: TorchPool | None = None  # set while a model is rehearsed
        self._windows: CudaWindows | None = None
        self._hogs: Hogs | None = None  # created when the shares of segments are first measured
        self._closed = False
        self._pages: CudaPages | None = None  # memory pages of weights that come and go
        self._weight_stream: CudaStream | None = None

    def default_memory_bytes(self) -> int:
        return int(free_and_whole_bytes(self.device)[0] * 0.9)

    def fingerprint(self) -> str:
        version = check(driver().cuDriverGetVersion(), "reading the driver's version")
        return f"{self.device.title} cuda {version} windows {self.windows} of {self.window_share}"

    def lane_memory(self, plan: LanePlan, berth: Any = None) -> CudaMemory:
        return CudaMemory(self.device, plan, self.shared_slots, berth)

    def berth(self, nbytes: int) -> CudaBerth:
        self.device.activate()
        return CudaBerth(self.device, nbytes)

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
        self, lane: Lane, weights: Arrays, batch: int, cuts: Cuts, marks: Marks | None = None,
        like: Program | None = None,
    ) -> Program:  # fmt: skip
        return self.capture_traced(lane, weights, batch, cuts, marks, like)[0]

    def capture_traced(
        self, lane: Lane, weights: Arrays, batch: int, cuts: Cuts, marks: Marks | None = None,
        like: Program | None = None,
    ) -> tuple[Program, list[int]]:  # fmt: skip
        """Also returns, for each node, the id of its blocks in the running trace."""
        self.device.activate()
        if isinstance(lane.model.source, ForeignGraph):
            program = foreign_program(self.device, lane, lane.model.source)
            return program, [0] * len(program.nodes)
        memory = lane.memory
        assert isinstance(memory, CudaMemory)
        if memory.torch_pool is None and torch_in_use(lane.model.uses_torch):
            memory.torch_pool = lane_pool(self.device, lane.model)
        stream = self._streams.to_capture_on(lane.model.priority)
        given = (self.device, stream, lane, weights, batch, cuts, marks or {}, like)
        if has_threads(lane.model):
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

    def open_windows(self, count: int, share: float) -> list[set[int]]:
        self.windows, self.window_share = count, share
        if not count:
            return []
        self.device.activate()
        try:
            self._windows = CudaWindows(self.device, count, share)
        # RuntimeError and AttributeError come from older drivers and bindings
        except (PaellaError, RuntimeError, AttributeError) as e:
            raise LaunchError(
                f"windows of SMs need green contexts, which this GPU or its driver does not support ({e}): use CUDA "
                "12.5 or later, or sm_windows=0"
            ) from e
        return self._windows.sms

    def cut(self, program: Program, bounds: Bounds, lane: Lane, confine: bool = False) -> Launches:
        self.device.activate()
        return cut(program, bounds, lane, self._windows if confine else None)

    def launch_first(self, launches: Launches, wholes: bool, wait: bool = True) -> None:
        launch_first(launches, wholes, self._streams.to_capture_on(launches.program.model.priority).handle, wait)

    def await_first(self, model: Model) -> None:
        await_stream(self._streams.to_capture_on(model.priority).handle)

    def segment_times_ns(self, launches: Launches, repeats: int, alone: bool) -> tuple[list[float], float, float]:
        stream = self._streams.to_capture_on(launches.program.model.priority).handle
        return segment_times_ns(launches, repeats, alone, stream, self._gate)

    def saturated_ns(self, lanes: Sequence[Launches], rounds: int) -> float:
        self.device.activate()
        streams = self._streams.pool(lanes[0].program.model.priority, self._windows)[: len(lanes)]
        return saturated_ns(lanes, rounds, [each.handle for each in streams])

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
        streams = self._streams.pool(priority, self._windows)
        row = self._streams.row(priority)
        state.stream[row, : len(streams)] = [each.handle for each in streams]
        return row

    # -- the loop

    def start(self, state: State, bell: Bell, failed: Callable[[BaseException], None]) -> None:
        self._state, self._bell = state, bell
        self._threads.start(state, bell, failed)
        torch_libraries.opened(id(self), self.device.index, partial(run_steps, self.device))

    def call(self, function: Callable[[], None]) -> None:
        self._threads.call(function)

    def abandon(self, loaded: LoadedModel) -> None:
        for lane in loaded.lanes if loaded.spare is None else (*loaded.lanes, loaded.spare):
            pool = lane.memory.torch_pool if isinstance(lane.memory, CudaMemory) else None
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
        torch_libraries.closed(id(self))
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
        self._close_windows()

    def _close_windows(self) -> None:
        """Closes the windows after the last graph that runs in one; an open trace may still hold such graphs."""
        if self._closed and self._trace is None and self._windows is not None:
            self._windows.close()
            self._windows = None

    # -- traces

    def begin_trace(self, records_per_sm: int, models: list[LoadedModel]) -> None:
        with device_lock(self.device):
            self._trace = CudaTrace(self, self.capture_traced, self._state, records_per_sm, models)
            self.tracing = True

    def end_trace(self, models: list[LoadedModel]) -> TracedBlocks:
        current, self._trace, self.tracing = self._trace, None, False
        assert current is not None
        with device_lock(self.device):
            found = current.finish({row for loaded in models for row in loaded.lane_rows})
        self._close_windows()
        return found

    def to_trace_ns(self, host_ns: int) -> int:
        return self.device.to_device_ns(host_ns)
