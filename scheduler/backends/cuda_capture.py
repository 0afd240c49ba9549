"""Capture on a real GPU: a model's function becomes a CUDA graph, with our launches numbered, sliced and marked.

CuPy and PyTorch are captured too: their calls go to our stream, and their memory comes from the instance.
"""

from __future__ import annotations

import contextlib
import contextvars
import os
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import replace
from typing import Any, ParamSpec, TypeVar

import numpy as np

from paellapy.instrument.device.base import Call, Launcher
from paellapy.instrument.device.cuda import CudaDevice
from paellapy.instrument.device.cuda_launch import CudaLauncher
from paellapy.instrument.device.driver import CudaStream, check, driver, relaxed_capture
from paellapy.instrument.env import without_collection
from paellapy.instrument.errors import InstrumentError, LaunchError
from paellapy.instrument.ptx.compiled import Draft
from paellapy.instrument.ptx.descriptor import PassConfig
from paellapy.scheduler.backends.base import Backend, device_lock
from paellapy.scheduler.backends.cuda_graphs import CapturedGraph, add_edges, describe, read_graph
from paellapy.scheduler.core.errors import CaptureError
from paellapy.scheduler.models.capture import InstanceCapture, call_model, capturing, code_digest
from paellapy.scheduler.models.joined import Chain
from paellapy.scheduler.models.memory import Instance
from paellapy.scheduler.models.model import ImportedGraph, Model
from paellapy.scheduler.models.program import Cuts, Marks, Node, Part, Program
from paellapy.scheduler.models.tensors import Arrays, Capturable
from paellapy.scheduler.models.torch_capture import Draws, InstanceDraws, Step, TorchPool
from paellapy.scheduler.models.torch_module import TorchModule

P = ParamSpec("P")
T = TypeVar("T")


def capture_program(
    device: CudaDevice, stream: CudaStream, instance: Instance, weights: Arrays, batch: int, cuts: Cuts, marks: Marks,
    like: Program | None = None,
) -> tuple[Program, list[int]]:  # fmt: skip
    """The model's function as a CUDA graph between the copies of inputs and outputs; the nodes' trace ids."""
    cu = driver()
    device.activate()
    model = instance.model
    capture = GraphCapture(instance, cuts, marks, device)
    inputs, outputs = instance.device_inputs(batch), instance.device_outputs(batch)
    handle, pool = stream.handle, instance.memory.torch_pool  # type: ignore[attr-defined]
    drawn = model.source.drawn.get(batch, 0) if isinstance(model.source, TorchModule | Chain) else 0
    draws = instance.memory.draws(instance.index) if drawn else None  # type: ignore[attr-defined]
    with (
        without_collection(),  # CUDA does not allow it to free streams and memory inside a capture
        _drawing(model, draws),
        capturing(device, capture),
        stream,
        cupy_in_arena(device, handle, capture.empty),
        (recorder := recorder_for(handle, pool, model, drawn)).memory(pool),
    ):
        recorder.begin()
        try:
            for name, array in inputs.items():
                source = instance.inputs[name].ctypes.data
                check(cu.cuMemcpyHtoDAsync(array.ptr, source, array.nbytes, handle), "capturing a copy")
            call_model(model, weights, inputs, outputs, batch, "while it was captured")
            if draws is not None:
                draws.move_on(drawn)
            for name, array in outputs.items():
                target = instance.outputs[name].ctypes.data
                check(cu.cuMemcpyDtoHAsync(target, array.ptr, array.nbytes, handle), "capturing a copy")
        except BaseException:
            recorder.abandon()
            raise
        try:
            graph = recorder.end()
        except (LaunchError, RuntimeError) as e:
            raise CaptureError(
                f"model {model.name!r} at batch {batch} cannot be captured: a captured function must not wait for the "
                f"GPU, use the default stream, or leave a second stream unjoined ({e})", model=model.name, batch=batch
            ) from e  # fmt: skip
        captured = read_graph(graph)
        captured.owner, recorder.owner = recorder.owner, None
        return _program(captured, capture, instance, batch, like)


def _drawing(model: Capturable, draws: InstanceDraws | None) -> contextlib.AbstractContextManager[None]:
    """The context that provides random numbers while the model is captured."""
    if model.stateful and model.uses_torch:
        found: contextlib.AbstractContextManager[None] = model.source.draws.recording()
        return found
    return contextlib.nullcontext() if draws is None else draws.drawing()


def _program(
    captured: CapturedGraph, capture: GraphCapture, instance: Instance, batch: int, like: Program | None
) -> tuple[Program, list[int]]:
    known = like.nodes if like is not None and _same_shape(captured, like) else [None] * len(captured.nodes)
    try:
        # Describing a node takes longer than capturing it. Our own launches may differ from instance to instance, in a
        # variant that reports; those of libraries do not.
        described = [
            capture.describe(node) if seen is None or int(node) in capture.nodes else (seen, 0)
            for node, seen in zip(captured.nodes, known, strict=True)
        ]
    except BaseException:
        captured.destroy()
        raise
    nodes = [node for node, _ in described]
    program = Program(instance.model, instance.index, batch, nodes, captured.chain, captured, marks=capture.marked)
    return program, [traced for _, traced in described]


def _same_shape(captured: CapturedGraph, like: Program) -> bool:
    """Whether a graph has as many nodes as that of another instance, with the same edges."""
    return like.body is not None and len(captured.nodes) == len(like.nodes) and captured.edges == like.body.edges


class GraphCapture(InstanceCapture):
    """Sends our launches to the capturing stream, and records which graph node each became."""

    def __init__(self, instance: Instance, cuts: Cuts, marks: Marks, device: CudaDevice) -> None:
        super().__init__(instance, cuts)
        self.device, self._marks = device, marks
        self.marked: Marks = {}  # marks that could be made
        self.nodes: dict[int, tuple[int, Part | None, Any, int]] = {}  # node → launch number, part, code, trace id

    def launch(self, launcher: CudaLauncher, call: Call) -> Any:
        if min(call.grid) <= 0:
            with self.letting_through():
                return launcher(*call)
        number, parts = self.next_parts(call.part)
        chosen: Launcher = launcher
        if call.part is None and parts[0] is not None:
            sliced = variant(launcher, replace(launcher.compiled.config, sliced=True))
            chosen, parts = (launcher, [None]) if sliced is None else (sliced, parts)
        result = None
        for part in parts:
            with self.letting_through(), self._notifying(number, part, chosen) as last:
                result = last(*call._replace(part=part))
            self._note(number, part, launcher.compiled)
        return result

    @contextlib.contextmanager
    def _notifying(self, number: int, part: Part | None, launcher: Launcher) -> Iterator[Launcher]:
        """The launcher to use; for a launch that ends a segment, one that reports to that segment's word."""
        segment = self._marks.get((number, part))
        found = None
        if segment is not None and isinstance(launcher, CudaLauncher) and self.device.session is None:
            found = variant(launcher, launcher.compiled.config.notifying())
        if segment is None or found is None:
            yield launcher
            return
        self.marked[number, part] = segment
        self.notify_word = int(self.instance.draining[segment:].ctypes.data)
        try:
            yield found
        finally:
            self.notify_word = 0

    def _note(self, number: int, part: Part | None, compiled: Any) -> None:
        """Records the node just added: the one on which the next operation on the stream depends."""
        info = check(driver().cuStreamGetCaptureInfo(self.device.current_stream()), "reading a capture")
        dependencies = info[3]
        traced = self.device.session.last if self.device.session is not None else 0
        self.nodes[int(dependencies[-1])] = (number, part, compiled, traced)

    def describe(self, node: Any) -> tuple[Node, int]:
        """Facts about a node, including our own if we launched it; and the id of its blocks in a trace."""
        found = describe(self.device, node, self.model.name)
        ours = self.nodes.get(int(node))
        if ours is None:
            return found, 0
        number, part, compiled, traced = ours
        source = compiled.source
        divisible = source.cluster == 1 and not source.cooperative and not source.scratch_bytes
        return (
            replace(found, name=compiled.name, launch=number, part=part, cluster=source.cluster, divisible=divisible,
                    digest=code_digest(compiled.ptx)),
            traced,
        )  # fmt: skip


_variants: weakref.WeakKeyDictionary[CudaLauncher, dict[PassConfig, Launcher | None]] = weakref.WeakKeyDictionary()


def variant(launcher: CudaLauncher, config: PassConfig) -> Launcher | None:
    """The same kernel with other changes; None if the passes cannot make them."""
    compiled = launcher.compiled
    if config == compiled.config:
        return launcher
    known = _variants.setdefault(launcher, {})
    if config not in known:
        try:
            known[config] = launcher.device.prepare(Draft.of(compiled.source), config, launcher.pick)
        except InstrumentError:
            known[config] = None
    return known[config]


class Recorder:
    """Captures a stream's work into a graph, through the driver."""

    owner: Any = None

    def __init__(self, stream: int) -> None:
        self.stream = stream

    def memory(self, pool: TorchPool | None) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext() if pool is None else pool.on(self.stream)

    def begin(self) -> None:
        mode = driver().CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
        check(driver().cuStreamBeginCapture(self.stream, mode), "starting a capture")

    def end(self) -> Any:
        return check(driver().cuStreamEndCapture(self.stream), "ending a capture")

    def abandon(self) -> None:
        status, graph = driver().cuStreamEndCapture(self.stream)
        if not int(status) and int(graph):
            driver().cuGraphDestroy(graph)


class TorchRecorder(Recorder):
    """Captures through PyTorch, for training: the backward pass runs in PyTorch's own threads, whose memory must also
    come from the pool, and random numbers need a graph that is registered with their generator.
    """

    def __init__(self, stream: int, pool: TorchPool, draws: Draws | None) -> None:
        super().__init__(stream)
        self._pool = pool
        torch: Any = sys.modules["torch"]
        self.owner = torch.cuda.CUDAGraph(keep_graph=True)
        if draws is not None:
            draws.register(self.owner)

    def memory(self, pool: TorchPool | None) -> contextlib.AbstractContextManager[None]:
        return self._pool.stream_only(self.stream)

    def begin(self) -> None:
        self._pool.begin(self.owner)

    def end(self) -> Any:
        try:
            self.owner.capture_end()
        except RuntimeError:
            self._release()
            raise
        return driver().CUgraph(self.owner.raw_cuda_graph())

    def abandon(self) -> None:
        try:
            self.owner.capture_end()
        except RuntimeError:  # it cannot end properly; the original error is already being raised
            self._release()
        self.owner = None  # it holds the pool, and the traceback of the error holds this object

    def _release(self) -> None:
        self._pool.stop_recording()
        self.owner = None


def recorder_for(stream: int, pool: TorchPool | None, model: Capturable, drawn: int) -> Recorder:
    step = model.stateful and model.uses_torch
    if pool is None or not (step or drawn):
        return Recorder(stream)
    return TorchRecorder(stream, pool, model.source.draws if step else None)


# -- graphs that were captured elsewhere


def imported_program(device: CudaDevice, instance: Instance, imported: ImportedGraph) -> Program:
    """A clone of the graph between the copies of an instance's inputs and outputs."""
    device.activate()
    cu = driver()
    clone = check(cu.cuGraphClone(cu.CUgraph(imported.handle)), "cloning a graph")
    try:
        inner = read_graph(clone)
        before = {b for _, b in inner.edges}
        after = {a for a, _ in inner.edges}
        roots = [node for k, node in enumerate(inner.nodes) if k not in before]
        last: list[Any] = []
        for key, place in imported.inputs.items():
            last = [_copy(cu, clone, last, place.address, instance.inputs[key].ctypes.data, place.spec.nbytes, True)]
        if last and roots:
            add_edges(cu, clone, last * len(roots), roots)
        last = [node for k, node in enumerate(inner.nodes) if k not in after]
        for key, place in imported.outputs.items():
            last = [_copy(cu, clone, last, instance.outputs[key].ctypes.data, place.address, place.spec.nbytes, False)]
        whole = read_graph(clone)
        nodes = [describe(device, node, instance.model.name) for node in whole.nodes]
    except BaseException:
        cu.cuGraphDestroy(clone)
        raise
    return Program(instance.model, instance.index, 1, nodes, whole.chain, whole)


def _copy(cu: Any, graph: Any, after: list[Any], target: int, source: int, nbytes: int, to_gpu: bool) -> Any:
    """Adds a copy between the host and the GPU behind some nodes."""
    host, device = cu.CUmemorytype.CU_MEMORYTYPE_HOST, cu.CUmemorytype.CU_MEMORYTYPE_DEVICE
    params = cu.CUDA_MEMCPY3D()
    params.srcMemoryType, params.dstMemoryType = (host, device) if to_gpu else (device, host)
    if to_gpu:
        params.srcHost, params.dstDevice = source, cu.CUdeviceptr(target)
    else:
        params.srcDevice, params.dstHost = cu.CUdeviceptr(source), target
    params.WidthInBytes, params.Height, params.Depth = nbytes, 1, 1
    context = check(cu.cuCtxGetCurrent(), "reading the context")
    return check(cu.cuGraphAddMemcpyNode(graph, after, len(after), params, context), "adding a copy")


# -- CuPy


@contextlib.contextmanager
def cupy_in_arena(device: CudaDevice, stream: int | None, take: Any) -> Iterator[None]:
    """Sends CuPy's calls to our stream and takes its memory from the arena, if CuPy is in use."""
    cupy = sys.modules.get("cupy")
    if cupy is None:
        yield
        return

    def allocate(nbytes: int) -> Any:
        array = take((nbytes,), np.dtype(np.uint8))
        memory = cupy.cuda.UnownedMemory(array.ptr, nbytes, array, device.index)
        return cupy.cuda.MemoryPointer(memory, 0)

    with contextlib.ExitStack() as stack:
        stack.enter_context(cupy.cuda.Device(device.index))
        stack.enter_context(cupy.cuda.using_allocator(allocate))
        if stream is not None:
            stack.enter_context(_cupy_stream(cupy, stream, device.index))
        yield


class _OurStream:
    """One of our streams under CUDA's stream protocol."""

    def __init__(self, handle: int) -> None:
        self.handle = handle

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self.handle


def _cupy_stream(cupy: Any, handle: int, device: int) -> Any:
    """Our stream as a CuPy object: CuPy 14 deprecates the class that older versions need."""
    if hasattr(cupy.cuda.Stream, "from_external"):
        return cupy.cuda.Stream.from_external(_OurStream(handle))
    return cupy.cuda.ExternalStream(handle, device)


# -- PyTorch


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
    if not (model.stateful and model.uses_torch):
        return TorchPool(device.index)
    if model.source.pool is None:
        model.source.pool = TorchPool(device.index)
    pool: TorchPool = model.source.pool
    return pool


# cuDNN plans every convolution when it first runs at a batch size, once per thread, and computes on the host for that.
# With a thread per size the sizes are planned at once, and each is captured in the thread that has its plans. The
# threads stay, because a trace or another load of the same network needs the plans again.
_threads: dict[int, ThreadPoolExecutor] = {}  # by batch size, one thread each
_lock = threading.Lock()  # engines on several GPUs may load at once
os.register_at_fork(after_in_child=_threads.clear)  # threads do not survive a fork


def has_threads(model: Capturable) -> bool:
    """Whether every batch size of a model runs in a thread of its own."""
    return isinstance(model.source, TorchModule) and model.source.plans_convolutions


def warm_up_in_threads(backend: Backend, model: Model, weights: Arrays, sizes: Sequence[int]) -> int:
    """All sizes run for the first time at once. One by one, in the order of an instance, they then show the memory they
    need. A size that failed beside others runs again alone, and raises its error then.
    """
    ran = side_by_side(sizes, lambda batch: backend.first_run(model, weights, batch))
    return max(in_thread_of(batch, backend.warm_up, model, weights, batch, ran.get(batch)) for batch in sizes)


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
