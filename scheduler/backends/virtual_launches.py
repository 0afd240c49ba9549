"""Programs on the virtual GPU: recorded with their arrays, cut into pieces, placed on the SM model, and traced."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from paellapy.instrument.device.virtual import VirtualDevice
from paellapy.instrument.device.virtual_launch import NotedLaunch
from paellapy.instrument.gpu_model.commands import Kernel, Placed
from paellapy.instrument.gpu_model.commands import Program as SmProgram
from paellapy.instrument.gpu_model.costs import BlockCost
from paellapy.instrument.gpu_model.model import SmModel
from paellapy.instrument.gpu_model.parts import Part, Timing
from paellapy.instrument.records import Records
from paellapy.instrument.traces.session import Session
from paellapy.scheduler.backends.base import Launches, TracedBlocks, TracedPiece
from paellapy.scheduler.backends.virtual_memory import VirtualMemory
from paellapy.scheduler.models.capture import GuardedArray, Recorded, Recording, call_model, capturing
from paellapy.scheduler.models.memory import Instance
from paellapy.scheduler.models.program import Cuts, Marks, Program
from paellapy.scheduler.models.tensors import Arrays
from paellapy.scheduler.models.weights import Bounds, WeightRange

Step = SmProgram | tuple[str, int]  # kernels, or the kind and bytes of a copy

_PREPARE_AFTER = 3  # runs, after which the evaluator has recorded as much as it can


def record(device: VirtualDevice, instance: Instance, weights: Arrays, batch: int, cuts: Cuts, marks: Marks) -> Program:
    """Runs the model's function once and records its launches, between the copies of inputs and outputs."""
    model = instance.model
    recording = Recording(instance, cuts)
    inputs, outputs = instance.device_inputs(batch), instance.device_outputs(batch)
    for name, array in inputs.items():
        recording.copy("h2d", array.view(np.ndarray), instance.inputs[name][:batch])
    with capturing(device, recording):
        call_model(model, _guarded(weights), _guarded(inputs), _guarded(outputs), batch, "while it was captured")
    for name, array in outputs.items():
        recording.copy("d2h", instance.outputs[name][:batch], array.view(np.ndarray))
    nodes = [item.node for item in recording.items]
    return Program(model, instance.index, batch, nodes, True, recording.items, marks=marks)


def _guarded(arrays: Arrays) -> Arrays:
    return {name: a.view(GuardedArray) if isinstance(a, np.ndarray) else a for name, a in arrays.items()}


def moved(program: Program, of: Instance, instance: Instance, marks: Marks) -> Program | None:
    """The recorded launches with the other instance's arrays, if all can be found. Marks do not change the recording.
    """
    here, there = of.memory, instance.memory
    assert isinstance(here, VirtualMemory)
    assert isinstance(there, VirtualMemory)
    if any(item.compute is not None for item in program.body):  # the arrays that it computes on cannot be seen
        return None

    def move(value: Any) -> Any:
        return here.moved(value, there)

    try:
        body = program.body if here is there else [item.moved(move) for item in program.body]
    except TypeError:
        return None
    return program.for_instance(instance.index, body, marks)


def needed_end(item: Recorded, weights: WeightRange) -> int:
    """The end of the weights that an item needs; all weights where PyTorch computes a whole program at once."""
    if item.compute is not None:
        return weights.layout.nbytes
    return max((weights.end_at(int(a.ctypes.data)) for a in _arrays((item.values, item.source))), default=0)


def _arrays(value: Any) -> Iterator[Any]:
    if isinstance(value, np.ndarray):
        yield value
    elif isinstance(value, tuple | list):
        for each in value:
            yield from _arrays(each)


class VirtualLaunches:
    """What the loop launches, by handle: pieces of programs, and grants of leases."""

    def __init__(self, sm: SmModel, costs: ProgramCosts) -> None:
        self._sm, self._costs = sm, costs
        self._programs: dict[tuple[str, int, int, int], list[Step]] = {}
        self._next = 1
        self.pieces: dict[int, Piece] = {}
        self.grants: dict[int, ctypes.c_uint64] = {}

    def cut(self, program: Program, bounds: Bounds, instance: Instance, partitions: Sequence[int]) -> Launches:
        """Makes the segments launchable, on all SMs and in each of these partitions of the SM model."""
        (handles, whole), *confined = (
            self._made(program, bounds, partition, instance) for partition in (0, *partitions)
        )
        return Launches(program, bounds, handles, whole, [], frozenset(program.marks.values()), confined)

    def _made(self, program: Program, bounds: Bounds, partition: int, instance: Instance) -> tuple[list[int], int]:
        handles = [self._piece(program, first, end, partition, instance) for first, end in bounds]
        return handles, handles[0] if len(bounds) == 1 else self._piece(
            program, 0, len(program.nodes), partition, instance
        )

    def _piece(self, program: Program, first: int, end: int, partition: int, instance: Instance) -> int:
        if partition and not any(node.kind == "kernel" for node in program.nodes[first:end]):
            return 0  # no kernel can be confined
        key = (program.content(), first, end, partition)
        if key not in self._programs:
            self._programs[key] = self.steps(program, first, end, partition)
        handle, self._next = self._next, self._next + 1
        self.pieces[handle] = Piece(program.body[first:end], self._programs[key], instance)
        return handle

    def steps(self, program: Program, first: int, end: int, partition: int) -> list[Step]:
        """The SM model's programs and copies for the nodes from `first` to before `end`."""
        steps: list[Step] = []
        kernels: list[Kernel] = []
        costs = self._costs.of(program)
        for item, cost in zip(program.body[first:end], costs[first:end], strict=True):
            node = item.node
            if cost is not None:
                counts = item.launcher is not None and item.launcher.config.report == "count"
                kernels.append(
                    Kernel(node.blocks, node.threads, node.registers, node.shared_bytes, cost=cost,
                           cluster=node.cluster, first=item.first * node.cluster, counts=counts)
                )  # fmt: skip
                continue
            if kernels:
                steps.append(self._sm.program(kernels, partition))
                kernels = []
            steps.append((node.kind, node.nbytes))
        if kernels:
            steps.append(self._sm.program(kernels, partition))
        return steps

    def grant(self, word: int) -> int:
        """A handle whose launch only writes 1 to the word at an address."""
        handle, self._next = self._next, self._next + 1
        self.grants[handle] = ctypes.c_uint64.from_address(word)
        return handle

    def release(self, launches: Launches) -> None:
        for handles, whole in launches.everywhere:
            for handle in (*handles, whole):
                self.pieces.pop(handle, None)
                self.grants.pop(handle, None)  # of a lease


class Handles(NamedTuple):
    """Handles in the SM model: of a piece's last command, and of its last kernel (-1: it has none)."""

    last: int
    kernel: int


class Piece:
    """A run of recorded items that is launched at once: its computation, and its commands for the SM model."""

    def __init__(self, items: Sequence[Recorded], steps: Sequence[Step], instance: Instance | None = None) -> None:
        self.items, self.steps, self.instance = items, steps, instance
        self.kernels = [item for item in items if item.node.kind == "kernel"]
        self._runs = 0
        self._prepared: list[Callable[[], Any]] = []
        self._placed: Placed | None = None
        self._commands = sum(len(step.commands) if isinstance(step, SmProgram) else 1 for step in steps)
        self._behind_kernel = 0

    def run(self) -> None:
        """Computes the data, with floating-point warnings off.

        The arrays belong to the instance and do not change, so preparations are made only once.
        """
        if self._runs < _PREPARE_AFTER:
            for item in self.items:
                item.run()
            self._runs += 1  # counted at the end: a run that fails has not recorded everything
            if self._runs == _PREPARE_AFTER:
                self._prepared = [call for item in self.items if (call := item.prepare()) is not None]
            return
        for call in self._prepared:
            call()

    def place_again(self, model: SmModel, stream: int, submit_ns: float) -> Handles:
        """As `place`, without a trace: from the second time on, it submits a copy of the first submission."""
        if self._placed is not None and (last := model.again(self._placed, stream, submit_ns)) >= 0:
            return Handles(last, last - self._behind_kernel)
        made = self.place(model, stream, submit_ns)
        self._behind_kernel = made.last - made.kernel
        self._placed = model.placed(made.last - self._commands + 1, made.last)
        return made

    def place(self, model: SmModel, stream: int, submit_ns: float, first_id: int = 0) -> Handles:
        """Puts the piece on a stream. `first_id` 0 leaves no trace."""
        last = kernel = -1
        launch = first_id
        for n, step in enumerate(self.steps):
            if isinstance(step, SmProgram):
                last = model.launch_program(stream, step, launch_id=launch, trace=first_id > 0, submit_ns=submit_ns)
                launch += len(step.commands)
                kernel = last
            else:
                kind, nbytes = step
                ends = n == len(self.steps) - 1
                last = model.copy(stream, nbytes, kind, report=ends, submit_ns=submit_ns)  # type: ignore[arg-type]
        return Handles(last, kernel)


class PieceTracer:
    """Launch ids of the work during a trace. The SM model keeps every block, even more than a ring would hold."""

    def __init__(self, device: VirtualDevice) -> None:
        self.session = Session(device)
        self.pieces: list[TracedPiece] = []

    def note(self, order: tuple[int, int, int], piece: Piece, submit_ns: int, stream: int) -> int:
        """Ids for one launch of a piece; returns the first of them."""
        ids = self.session.reserve(max(1, len(piece.kernels)))
        for launch, item in zip(ids, piece.kernels, strict=False):
            node = item.node
            gx, gy, gz = item.grid
            warps = -(-node.threads // 32)
            self.session.note(
                node.name,
                (int(launch), 0, warps, node.registers, 0, node.shared_bytes, (gx * node.cluster, gy, gz),
                 item.first * node.cluster, node.blocks, submit_ns, stream),
            )  # fmt: skip
        instance, size, segment = order
        self.pieces.append(TracedPiece(instance, size, segment, tuple(int(i) for i in ids), replayed=False))
        return int(ids[0])

    def finish(self, blocks: Records) -> TracedBlocks:
        launches, kernels = self.session.launches()
        number = dict(zip(launches["launch"].tolist(), launches["kernel"].tolist(), strict=True))
        blocks = blocks[np.isin(blocks["launch"], launches["launch"])]
        blocks["kernel"] = [number[launch] for launch in blocks["launch"].tolist()]
        return TracedBlocks(blocks, launches, kernels, self.pieces)


class ProgramCosts:
    """The costs of programs, by content."""

    def __init__(self) -> None:
        self._known: dict[str, list[BlockCost | None]] = {}
        self.warm_ups: dict[int, list[NotedLaunch]] = {}  # launches of the model that is being loaded, by batch size

    def of(self, program: Program) -> list[BlockCost | None]:
        """The costs of each node's blocks, from the warm-up run or from another run of the program."""
        key = program.content()
        if key not in self._known:
            seen = self.seen(program)
            self._known[key] = [item.block_cost() for item in program.body] if seen is None else seen
        return self._known[key]

    def seen(self, program: Program) -> list[BlockCost | None] | None:
        """The costs from the warm-up run, if it had the same launches: no kernel was tuned in it, or is sliced now."""
        seen = self.warm_ups.get(program.batch, [])
        ours = [item for item in program.body if item.launcher is not None]
        if [(e.launcher, e.grid, e.first, e.count) for e in seen] != [
            (item.launcher, item.grid, item.first, item.node.blocks // item.node.cluster) for item in ours
        ]:
            return None
        costs = iter(seen)
        return [item.cost if item.launcher is None else next(costs).cost for item in program.body]


def segment_shares(
    part: Part, timing: Timing, launches: Launches, costs: Sequence[BlockCost | None], alone_ns: Sequence[float]
) -> list[tuple[float, float]]:
    """The fractions of the GPU's arithmetic and bandwidth that each segment uses, 0 to 1."""
    rates = np.array([
        part.fp32_tflops * 1e3 * timing.flops_efficiency,
        part.fp16_tensor_tflops * 1e3 * timing.tensor_efficiency,
        part.bandwidth_gbps * timing.bandwidth_efficiency,
    ])  # fmt: skip
    nodes, found = launches.program.nodes, []
    for (first, end), ns in zip(launches.bounds, alone_ns, strict=True):
        work = np.zeros(3)
        for node, cost in zip(nodes[first:end], costs[first:end], strict=True):
            if cost is not None:
                each = (cost.flops, cost.tensor_flops, cost.bytes)
                work += [float(np.broadcast_to(x, node.blocks).sum()) for x in each]
        plain, tensor, memory = np.minimum(work / (rates * ns), 1.0).round(4).tolist()
        found.append((max(plain, tensor), memory))
    return found
