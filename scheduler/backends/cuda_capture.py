"""Capture on a real GPU: into a CUDA graph, with our launches numbered, sliced and marked."""

from __future__ import annotations

import contextlib
import sys
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from paellapy.instrument.device.base import Launcher
from paellapy.instrument.device.cuda import CudaDevice
from paellapy.instrument.device.cuda_launch import CudaLauncher
from paellapy.instrument.device.driver import CudaStream, check, driver
from paellapy.instrument.env import without_collection
from paellapy.instrument.errors import InstrumentError, LaunchError
from paellapy.instrument.traces.session import Session
from paellapy.scheduler.backends.cuda_graphs import CapturedGraph, add_edge, describe, read_graph
from paellapy.scheduler.core.errors import CaptureError
from paellapy.scheduler.models.capture import InstanceCapture, call_model, capturing, code_digest
from paellapy.scheduler.models.memory import Instance
from paellapy.scheduler.models.model import ForeignGraph
from paellapy.scheduler.models.program import Cuts, Marks, Node, Part, Program
from paellapy.scheduler.models.tensors import Arrays, Capturable
from paellapy.scheduler.models.torch_capture import Draws, InstanceDraws, TorchPool
from paellapy.scheduler.models.torch_module import TorchModule

# CuPy inside a capture: its calls go to our stream, and its memory comes from the instance's arena.


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


class _Foreign:
    """One of our streams under CUDA's stream protocol."""

    def __init__(self, handle: int) -> None:
        self.handle = handle

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self.handle


def _cupy_stream(cupy: Any, handle: int, device: int) -> Any:
    """Our stream as a CuPy object: CuPy 14 deprecates the class that older versions need."""
    if hasattr(cupy.cuda.Stream, "from_external"):
        return cupy.cuda.Stream.from_external(_Foreign(handle))
    return cupy.cuda.ExternalStream(handle, device)


# Recorders: they capture a stream's work into a CUDA graph, through the driver or through PyTorch.


class Recorder:
    """Captures a stream's work into a graph."""

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
            self._let_go()
            raise
        return driver().CUgraph(self.owner.raw_cuda_graph())

    def abandon(self) -> None:
        try:
            self.owner.capture_end()
        except RuntimeError:  # it cannot end properly; the original error is already being raised
            self._let_go()
        self.owner = None  # it holds the pool, and the traceback of the error holds this object

    def _let_go(self) -> None:
        self._pool.stop_recording()
        self.owner = None


def recorder_for(stream: int, pool: TorchPool | None, model: Capturable, drawn: int) -> Recorder:
    if pool is None or not (model.stateful or drawn):
        return Recorder(stream)
    return TorchRecorder(stream, pool, model.source.draws if model.stateful else None)


_sliced: weakref.WeakKeyDictionary[CudaLauncher, Launcher | None] = weakref.WeakKeyDictionary()


def sliced_variant(launcher: CudaLauncher) -> Launcher | None:
    """The same kernel compiled to run any range of its blocks; None if the pass cannot do that."""
    if launcher.compiled.config.sliced:
        return launcher
    if launcher not in _sliced:
        compiled = launcher.compiled
        try:
            _sliced[launcher] = launcher.device.prepare(
                compiled.source, replace(compiled.config, sliced=True), launcher.pick
            )
        except InstrumentError:
            _sliced[launcher] = None
    return _sliced[launcher]


_notifying: weakref.WeakKeyDictionary[CudaLauncher, Launcher | None] = weakref.WeakKeyDictionary()


def notifying_variant(launcher: CudaLauncher) -> Launcher | None:
    """The same kernel, whose last block reports its start; None if the pass cannot do that."""
    if launcher.compiled.config.notifies:
        return launcher
    if launcher not in _notifying:
        compiled = launcher.compiled
        try:
            _notifying[launcher] = launcher.device.prepare(compiled.source, compiled.config.notifying(), launcher.pick)
        except InstrumentError:
            _notifying[launcher] = None
    return _notifying[launcher]


class GraphCapture(InstanceCapture):
    """Sends our launches to the capturing stream, and records which graph node each became."""

    def __init__(self, instance: Instance, cuts: Cuts, marks: Marks, device: CudaDevice) -> None:
        super().__init__(instance, cuts)
        self.device, self._marks = device, marks
        self.marked: Marks = {}  # marks that could be made
        self.nodes: dict[int, tuple[int, Part | None, Any, int]] = {}  # node → launch number, part, code, trace id

    def launch(
        self,
        launcher: CudaLauncher,
        grid: tuple[int, ...],
        values: Sequence[Any],
        block: tuple[int, ...],
        shared_bytes: int,
        part: Part | None,
    ) -> Any:
        if min(grid) <= 0:
            with self.letting_through():
                return launcher(grid, values, block, shared_bytes, part)
        number, parts = self.next_parts(part)
        chosen: Launcher = launcher
        if part is None and parts[0] is not None:
            found = sliced_variant(launcher)
            if found is None:
                parts = [None]
            else:
                chosen = found
        result = None
        for each in parts:
            with self.letting_through(), self._notifying(number, each, chosen) as last:
                result = last(grid, values, block, shared_bytes, each)
            self._note(number, each, launcher.compiled)
        return result

    @contextlib.contextmanager
    def _notifying(self, number: int, part: Part | None, launcher: Launcher) -> Iterator[Launcher]:
        """The launcher to use; for a launch that ends a segment, one that reports to that segment's word."""
        segment = self._marks.get((number, part))
        found = None
        if segment is not None and isinstance(launcher, CudaLauncher) and self.device.session is None:
            found = notifying_variant(launcher)
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
        traced = Session.next_id - 1 if self.device.session is not None else 0
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
                    digest=code_digest(compiled)),
            traced,
        )  # fmt: skip


def _drawing(model: Capturable, draws: InstanceDraws | None) -> contextlib.AbstractContextManager[None]:
    """The context that provides random numbers while the model is captured."""
    if model.stateful:
        found: contextlib.AbstractContextManager[None] = model.source.draws.recording()
        return found
    return contextlib.nullcontext() if draws is None else draws.drawing()


def capture_program(
    device: CudaDevice,
    stream: CudaStream,
    instance: Instance,
    weights: Arrays,
    batch: int,
    cuts: Cuts,
    marks: Marks,
    like: Program | None = None,
) -> tuple[Program, list[int]]:
    """The model's function as a CUDA graph between the copies of inputs and outputs; the nodes' trace ids."""
    cu = driver()
    device.activate()
    model = instance.model
    capture = GraphCapture(instance, cuts, marks, device)
    inputs, outputs = instance.device_inputs(batch), instance.device_outputs(batch)
    handle, pool = stream.handle, instance.memory.torch_pool  # type: ignore[attr-defined]
    drawn = model.source.drawn.get(batch, 0) if isinstance(model.source, TorchModule) else 0
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
                f"GPU, use the default stream, or leave a second stream unjoined ({e})"
            ) from e
        captured = read_graph(graph)
        captured.owner, recorder.owner = recorder.owner, None
        return _program(captured, capture, instance, batch, like)


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


# A graph that was captured elsewhere, as a program: its clone between the copies of inputs and outputs.


def foreign_program(device: CudaDevice, instance: Instance, foreign: ForeignGraph) -> Program:
    """The graph with an instance's copies around it, node by node."""
    device.activate()
    cu = driver()
    clone = check(cu.cuGraphClone(cu.CUgraph(foreign.handle)), "cloning a graph")
    try:
        inner = read_graph(clone)
        before = {b for _, b in inner.edges}
        after = {a for a, _ in inner.edges}
        roots = [node for k, node in enumerate(inner.nodes) if k not in before]
        leaves = [node for k, node in enumerate(inner.nodes) if k not in after]
        last: list[Any] = []
        for key, place in foreign.inputs.items():
            last = [_copy(cu, clone, last, place.address, instance.inputs[key].ctypes.data, place.spec.nbytes, True)]
        for root in roots:
            for node in last:
                add_edge(cu, clone, node, root)
        last = leaves
        for key, place in foreign.outputs.items():
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
