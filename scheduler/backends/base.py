"""`Backend`, the interface between the engine and a GPU: memory, capture of programs, launches, a loop, traces."""

from __future__ import annotations

import contextlib
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from paellapy.instrument.device.base import Device
from paellapy.instrument.errors import LaunchError, PaellaError
from paellapy.instrument.records import WORK, Records
from paellapy.instrument.traces.summary import TracedRanges
from paellapy.scheduler.core.codes import CHOICES
from paellapy.scheduler.core.errors import CaptureError
from paellapy.scheduler.core.rings import Bell
from paellapy.scheduler.core.state import State
from paellapy.scheduler.models.capture import Counting, ModelCapture, call_model, capturing
from paellapy.scheduler.models.memory import Instance, InstancePlan, Memory, Reservation
from paellapy.scheduler.models.model import Model
from paellapy.scheduler.models.profile import ProgramProfile
from paellapy.scheduler.models.program import Cuts, Marks, Program
from paellapy.scheduler.models.tensors import Arrays
from paellapy.scheduler.models.weights import Bounds, Layout, Steps, WeightRange

RETRY_S = 0.1  # a loop goes on this long after an error, since the error may come again at once


@dataclass(slots=True)
class Launches:
    """One program ready to be launched: each segment, and the whole. `handles` are meaningful to the backend only."""

    program: Program
    bounds: Bounds
    handles: list[int]
    whole: int
    keep: list[Any] = field(default_factory=list)
    notified: frozenset[int] = frozenset()  # segments that report when all blocks of their last kernel are on the SMs
    # the same launches in each of the instance's partitions
    confined: list[tuple[list[int], int]] = field(default_factory=list)

    @property
    def everywhere(self) -> list[tuple[list[int], int]]:
        """The handles of the segments and of the whole program: on all SMs, then in each partition."""
        return [(self.handles, self.whole), *self.confined]


@dataclass(slots=True)
class LoadedModel:
    """A model with its memory and launches, as the engine keeps it."""

    model: Model
    weights: Arrays
    reservation: Reservation
    instances: list[Instance]
    profiles: list[ProgramProfile]  # one per captured batch size, ascending
    launches: list[list[Launches]] = field(default_factory=list)  # [instance][captured batch size]
    row: int = -1
    generation: int = 0  # generation of the row
    instance_of: dict[int, Instance] = field(default_factory=dict)  # instances by their numbers in the core
    load_s: dict[str, float] = field(default_factory=dict)  # seconds spent loading it, by phase
    range: WeightRange | None = None  # of weights that come and go
    # by batch size: lower bounds of the weights' bytes, where the profile's `needs` are upper bounds
    least_needs: list[list[tuple[int, ...]]] = field(default_factory=list)
    steps: dict[int, Steps] = field(default_factory=dict)  # by batch size whose needs were found by trial runs
    later: dict[int, str] = field(default_factory=dict)  # batch sizes not captured yet; the error of a failed capture
    spare: Instance | None = None  # memory to capture and measure these sizes in, because the instances are in service
    stays: bool = False  # the model changes its weights, so they cannot leave the GPU
    kind: str = "model"  # or "job", "lease"
    # Of a model whose inputs vary in length: what takes its requests, by size, itself included; replaced as a whole.
    by_length: dict[int, LoadedModel] = field(default_factory=dict)
    wanted_lengths: set[int] = field(default_factory=set)  # sizes that requests wanted and that are not captured
    length_errors: dict[int, str] = field(default_factory=dict)  # why a size could not be captured

    def want_length(self, size: int) -> None:
        """A request would take this size, which is not captured."""
        if size not in self.length_errors:
            self.wanted_lengths.add(size)

    @property
    def title(self) -> str:
        """Its name, for messages."""
        return f"{self.model.name!r}" if self.kind == "model" else f"{self.kind} {self.model.name!r}"

    @property
    def instance_rows(self) -> list[int]:
        return list(self.instance_of)


@dataclass(frozen=True, slots=True)
class TracedPiece:
    """A segment in a trace, with its launch ids; each replay may have ids of its own."""

    instance: int
    size: int
    segment: int
    launches: tuple[int, ...]
    replayed: bool  # whether every run of the instance has the same ids


@dataclass(frozen=True, slots=True)
class TracedBlocks:
    """The blocks and launches that a backend recorded; on a real GPU with their ranges and their work."""

    blocks: Records
    launches: Records
    kernels: tuple[str, ...]
    pieces: list[TracedPiece]
    dropped: int = 0
    unfinished: int = 0
    ranges: TracedRanges = field(default_factory=TracedRanges)
    count_work: Callable[[], Records] = lambda: np.zeros(0, WORK)


class Backend(ABC):
    """A device behind the engine. One engine owns one backend."""

    device: Device
    computes_in_python = False  # whether the loop computes in Python, and so competes with others for the interpreter
    shares_are_free = False  # whether `segment_shares` is known without a measurement
    foreign_kernels = False  # whether kernels other than ours can be captured
    sleeps_in_read = False  # whether the loop sleeps by reading the bell's descriptor
    shared_slots = False  # whether other processes map the instances' host memory
    weights_limit_bytes = 0  # limit for all weights that come and go together
    partitions = 0  # number of SM partitions; 0: none
    partition_share = 0.0  # fraction of the SMs in each partition
    tracing = False  # whether the blocks of all launches are being recorded

    # Called with instance, slot and error, in the loop's thread, when a model failed on the values in one slot.
    on_fault: Callable[[int, int, BaseException], None]

    @abstractmethod
    def default_memory_bytes(self) -> int:
        """The memory that the engine may use if none is given."""

    @abstractmethod
    def fingerprint(self) -> str:
        """The facts on which measured times depend besides the program: the part, its driver or its timing model."""

    @abstractmethod
    def open_partitions(self, count: int, share: float) -> list[set[int]]:
        """Makes this many partitions, each with this share of the SMs, before any model is loaded; returns their SMs.
        """

    # -- memory

    @abstractmethod
    def instance_memory(self, plan: InstancePlan, arena: Any = None) -> Memory:
        """Memory for an instance: its own on the device, or that of an arena."""

    @abstractmethod
    def arena(self, nbytes: int) -> Any:
        """Device memory that instances share, with `free()`."""

    @abstractmethod
    def upload(self, model: Model) -> Arrays:
        """The model's weights in device memory."""

    @abstractmethod
    def host_block(self, nbytes: int) -> Any:
        """Host memory from which weights are copied: an array `host`, and `free()`."""

    @abstractmethod
    def weight_range(self, layout: Layout, chunk_bytes: int, map_bytes: int) -> WeightRange:
        """Addresses and memory for weights that come in chunks; memory is mapped in parts of at least `map_bytes`."""

    @abstractmethod
    def weight_ends(self, program: Program, weights: WeightRange) -> list[tuple[int, int]]:
        """Bounds for the leading bytes of the weights that each node needs, from the node's launch arguments."""

    # -- programs

    def warm_up_all(self, model: Model, weights: Arrays, sizes: Sequence[int]) -> tuple[int, int]:
        """Runs each batch size; returns an instance's scratch memory, and the memory of other libraries."""
        return max(self.warm_up(model, weights, batch) for batch in sizes), 0

    def warm_up(self, model: Model, weights: Arrays, batch: int, ran: tuple[Arrays, Arrays] | None = None) -> int:
        """Compiles and tunes by a first run (`ran`, if it was made already); returns the scratch memory of a second."""
        inputs, outputs = ran or self.first_run(model, weights, batch)
        counting = Counting(model, self.device, computes=self.foreign_kernels)
        with capturing(self.device, counting), self.counting(counting):
            call_model(model, weights, inputs, outputs, batch, "in its second run")
        self.device.synchronize()
        if not counting.launches and not self.foreign_kernels:
            raise CaptureError(
                f"model {model.name!r} launches no kernel at batch {batch}: its function must launch at least one",
                model=model.name, batch=batch, launches=0,
            )  # fmt: skip
        return counting.scratch_bytes

    def first_run(self, model: Model, weights: Arrays, batch: int) -> tuple[Arrays, Arrays]:
        """Runs the function once on inputs of its own, and returns them and the outputs."""
        inputs, outputs = (
            {k: self.device.array(np.full((batch, *s.shape), s.neutral, s.dtype)) for k, s in specs.items()}
            for specs in (model.inputs, model.outputs)
        )
        with self.device:
            call_model(model, weights, inputs, outputs, batch, "in its first run")
        try:
            self.device.synchronize()
        except PaellaError as e:
            raise CaptureError(
                f"model {model.name!r} failed on the GPU in its first run at batch {batch}: {e}", model=model.name,
                batch=batch,
            ) from e  # fmt: skip
        return inputs, outputs

    def counting(self, capture: ModelCapture) -> contextlib.AbstractContextManager[None]:
        """The context for a run whose scratch memory is counted, including other libraries' allocations."""
        return contextlib.nullcontext()

    @abstractmethod
    def capture(
        self, instance: Instance, weights: Arrays, batch: int, cuts: Cuts, marks: Marks | None = None,
        like: Program | None = None,
    ) -> Program:  # fmt: skip
        """Runs the model's function once and records its launches, between the copies of inputs and outputs.

        Kernels in `marks` report when all their blocks are on the SMs. `like` is the same program in another instance:
        where the launches are the same, its nodes need not be described again.
        """

    def copied(self, program: Program, of: Instance, instance: Instance, marks: Marks) -> Program | None:
        """The program of one instance for another, with marks; None if it must be captured instead."""
        return None

    @abstractmethod
    def cut(self, program: Program, bounds: Bounds, instance: Instance, confine: bool = False) -> Launches:
        """Makes the segments launchable. Segment k writes to the instance's word k, the whole program to its last word.

        `confine`: also make launches inside the instance's partitions, as far as the kernels allow it.
        """

    def launch_first(self, launches: Launches, wholes: bool, wait: bool = True) -> None:
        """Launches everything once, on devices where a first launch takes longer, before the instance is in service.

        `wait`: until each launch has ended; otherwise `await_first` must follow.
        """
        return

    def await_first(self, model: Model) -> None:
        """Waits for the first launches of a model that were not waited for."""
        return

    @abstractmethod
    def run_segment(self, launches: Launches, k: int) -> None:
        """Runs a segment to its end, before the instance is in service."""

    @abstractmethod
    def grant(self, word: int) -> int:
        """A handle whose launch, by the core, only writes 1 to the word at an address: it grants a lease.

        The launch never completes by itself; the lease's owner writes the completion word.
        """

    @abstractmethod
    def release(self, launches: Launches) -> None:
        """Frees the handles of a program."""

    def discard(self, program: Program) -> None:
        """Frees the captured program, once it has been cut or is not wanted."""
        program.body = None

    # -- measurements

    @abstractmethod
    def node_times_ns(self, program: Program) -> list[float]:
        """The time of each node, when nodes run one after the other."""

    def wave_blocks(self, program: Program) -> list[int]:
        """For each node: blocks of its kernel that the GPU holds at once; 0 for other nodes."""
        limits, sms = self.device.limits, self.device.sm_count
        return [node.wave_blocks(limits, sms) if node.kind == "kernel" else 0 for node in program.nodes]

    @abstractmethod
    def segment_times_ns(self, launches: Launches, repeats: int, alone: bool) -> tuple[list[float], float, float]:
        """The time of each segment, of the whole program, and of that inside a partition (0: not confined).

        `alone`: nothing else runs meanwhile.
        """

    @abstractmethod
    def saturated_ns(self, instances: Sequence[Launches], rounds: int) -> float:
        """Time per run when all instances launch their whole programs repeatedly and at once, each on all SMs."""

    @abstractmethod
    def segment_shares(self, launches: Launches, alone_ns: Sequence[float]) -> list[tuple[float, float]]:
        """The fractions of the GPU's arithmetic and bandwidth that each segment uses, 0 to 1; 0: not known.

        `alone_ns` has the segments' times. Nothing else may run meanwhile.
        """

    # -- the loop

    @abstractmethod
    def pool(self, state: State, priority: int) -> int:
        """The row of `state.stream` whose streams have this priority on the GPU; filled on first use."""

    @abstractmethod
    def start(self, state: State, bell: Bell, failed: Callable[[BaseException], None]) -> None:
        """Starts the loop in its own thread. The bell wakes it when a submission ring has a new message."""

    @abstractmethod
    def call(self, function: Callable[[], None]) -> None:
        """Runs a function in the loop's thread, between two steps, when it may change tables that the core reads."""

    @abstractmethod
    def stop(self) -> None:
        """Ends the loop, after the engine has drained."""

    def close(self) -> None:
        """Frees the remaining resources, after the loop has ended and every model is unloaded."""
        return

    def sm_totals(self) -> tuple[float, Any, Any] | None:
        """A time (ns), and per SM up to that time: warp-ns of resident warps, ns with any. None if unknown."""
        return None

    def lost(self) -> BaseException | None:
        """The error after which nothing can run on the GPU any more; None: there was none."""
        return None

    def abandon(self, loaded: LoadedModel) -> None:
        """The GPU is lost: keeps for ever what must not be freed any more."""
        return

    def failure(self, status: int) -> BaseException:
        """The error for a status of the core's launches."""
        return LaunchError(f"running a model failed with status {status}", status=status)

    # -- traces

    @abstractmethod
    def begin_trace(self, records_per_sm: int, models: list[LoadedModel]) -> None:
        """Starts recording the blocks of all launches from now on."""

    @abstractmethod
    def end_trace(self, models: list[LoadedModel]) -> TracedBlocks:
        """The blocks and launches since `begin_trace`; recording ends."""

    @abstractmethod
    def to_trace_ns(self, host_ns: int) -> int:
        """Converts a time of the host's monotonic clock to the clock of the trace."""


# A device has one capture at a time: launches of other threads continue, other loads wait.
_locks: dict[int, threading.RLock] = {}


def device_lock(device: Device) -> threading.RLock:
    return _locks.setdefault(id(device), threading.RLock())


def write_handles(state: State, row: int, size: int, launches: Launches) -> None:
    """Writes the handles that the core launches. They are aligned words, each read at the next launch: they may change
    while an instance runs, if both variants use the same buffers and completion words.
    """
    for k, handle in enumerate(launches.handles):
        state.launch["handle"][row, size, k] = handle
    state.whole["handle"][row, size] = launches.whole
    none = [([0] * len(launches.handles), 0)] * (CHOICES - len(launches.confined))
    for choice, (handles, whole) in enumerate([*launches.confined, *none]):
        for k, handle in enumerate(handles):
            state.confined[row, size, k, choice] = handle
        state.confined[row, size, -1, choice] = whole


def broken_loop(cause: BaseException) -> RuntimeError:
    """The failure of an engine whose loop met this error. The loop goes on: only the core can end requests with it."""
    error = RuntimeError(f"the engine's own loop met an error, {type(cause).__name__}: {cause}; start a new engine")
    error.__cause__ = cause
    return error
