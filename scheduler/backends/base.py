"""What a device must offer the engine: memory for lanes, capture of programs, launches cut into segments, a loop."""

from __future__ import annotations

import contextlib
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from paellapy.instrument.device.base import Device
from paellapy.instrument.errors import LaunchError, PaellaError
from paellapy.scheduler.backends.launches import Bounds, Launches, LoadedModel
from paellapy.scheduler.backends.recorded import TracedBlocks
from paellapy.scheduler.core.errors import CaptureError
from paellapy.scheduler.core.loop import Bell
from paellapy.scheduler.core.state import State
from paellapy.scheduler.models.capture import Counting, ModelCapture, call_model, capturing
from paellapy.scheduler.models.lane_memory import Lane, LanePlan, Memory
from paellapy.scheduler.models.model import Model
from paellapy.scheduler.models.program import Cuts, Marks, Program
from paellapy.scheduler.models.tensors import Arrays
from paellapy.scheduler.models.weight_range import Layout, WeightRange

# One capture at a time on a device: other threads' launches go on, other loads wait.
_locks: dict[int, threading.RLock] = {}


def device_lock(device: Device) -> threading.RLock:
    return _locks.setdefault(id(device), threading.RLock())


class Backend(ABC):
    """A device behind the engine. One engine owns one backend."""

    device: Device
    weights_limit_bytes: int = 0  # that weights which come and go may hold together

    @abstractmethod
    def default_memory_bytes(self) -> int:
        """What the engine may use when nobody says."""

    @abstractmethod
    def fingerprint(self) -> str:
        """What measured times depend on beside the program: the part, its driver or its timing model."""

    @abstractmethod
    def lane_memory(self, plan: LanePlan, berth: Any = None) -> Memory:
        """Memory for a lane: of its own on the device, or that of a berth."""

    @abstractmethod
    def berth(self, nbytes: int) -> Any:
        """Memory of the device that lanes share, with `free()`."""

    @abstractmethod
    def upload(self, model: Model) -> Arrays:
        """The model's weights in device memory."""

    @abstractmethod
    def capture(self, lane: Lane, weights: Arrays, batch: int, cuts: Cuts, marks: Marks | None = None) -> Program:
        """Runs the model's function once and keeps what it launches, between the copies of inputs and outputs.

        Kernels in `marks` say when all their blocks are on the SMs.
        """

    def captured_again(self, program: Program, of: Lane, lane: Lane, marks: Marks) -> Program | None:
        """The program of a lane for another, and with marks, where that needs no run of the function; None: it does."""
        return None

    @abstractmethod
    def node_times_ns(self, program: Program) -> list[float]:
        """How long each node takes, run one after the other."""

    @abstractmethod
    def wave_blocks(self, program: Program) -> list[int]:
        """For each node: blocks of its kernel that the GPU holds at once; 0 for what is no kernel."""

    @abstractmethod
    def cut(self, program: Program, bounds: Bounds, lane: Lane, confine: bool = False) -> Launches:
        """Makes the segments launchable; segment k writes to the lane's word k, the whole to its last one.

        `confine`: also inside the lane's windows, as far as its kernels can be.
        """

    def launch_first(self, launches: Launches, wholes: bool) -> None:
        """Launches every segment once, and the whole program, where a first launch takes longer than others.

        The lane is not in service yet.
        """
        return

    @abstractmethod
    def segment_times_ns(self, launches: Launches, repeats: int, alone: bool) -> tuple[list[float], float, float]:
        """Time of each segment, of the whole program, and of that inside a window (0: it is not confined).

        `alone`: nothing else runs meanwhile.
        """

    @abstractmethod
    def saturated_ns(self, lanes: Sequence[Launches], rounds: int) -> float:
        """Time per run when every lane launches its whole program again and again, all at once, each on all SMs."""

    @abstractmethod
    def grant(self, word: int) -> int:
        """What the core can launch to say that a turn is granted: it writes 1 to the word at an address, and that is
        all. It has no end; who has the turn writes the completion word.
        """

    @abstractmethod
    def segment_shares(self, launches: Launches, alone_ns: Sequence[float]) -> list[tuple[float, float]]:
        """Parts that each segment takes of what the GPU can compute and of what it can move, 0 to 1; 0: not known.

        `alone_ns` has the segments' times. Nothing else runs meanwhile.
        """

    @abstractmethod
    def release(self, launches: Launches) -> None: ...

    @abstractmethod
    def pool(self, state: State, priority: int) -> int:
        """The row of `state.stream` whose streams have this priority on the GPU; filled when it is first asked for."""

    @abstractmethod
    def start(self, state: State, bell: Bell, failed: Callable[[BaseException], None]) -> None:
        """Starts the loop in a thread of its own. The bell wakes it: there is something new on a submission ring."""

    @abstractmethod
    def call(self, function: Callable[[], None]) -> None:
        """Runs a function in the loop's thread, between two steps: it may change what the core reads."""

    @abstractmethod
    def begin_trace(self, records_per_sm: int, models: list[LoadedModel]) -> None:
        """Starts recording the blocks of what is launched from now on."""

    @abstractmethod
    def end_trace(self, models: list[LoadedModel]) -> TracedBlocks: ...

    @abstractmethod
    def to_trace_ns(self, host_ns: int) -> int:
        """A time of the host's monotonic clock on the clock of the trace."""

    @abstractmethod
    def stop(self) -> None:
        """Ends the loop; the engine has drained before."""

    def close(self) -> None:
        """Gives back what is left, after the loop has ended and every model is gone."""
        return

    # -- weights that come and go

    @abstractmethod
    def weight_range(self, layout: Layout, chunk_bytes: int) -> WeightRange:
        """Addresses for a model's weights, with memory behind them."""

    @abstractmethod
    def host_block(self, nbytes: int) -> Any:
        """Memory of the host that weights are copied from: an array `host`, and `free()`."""

    @abstractmethod
    def weight_ends(self, program: Program, weights: WeightRange) -> list[tuple[int, int]]:
        """For each node, the number of leading bytes of the weights that it needs: a lower and an upper bound, both
        from the pointers that the node is launched with.
        """

    @abstractmethod
    def run_segment(self, launches: Launches, k: int) -> None:
        """Runs a segment to its end. The lane is not in service yet."""

    # -- common to all

    def rehearse_all(self, model: Model, weights: Arrays) -> tuple[int, int]:
        """Every batch size once: scratch memory of a lane, and what other libraries' allocators take beside it."""
        return max(self.rehearse(model, weights, batch) for batch in model.batch), 0

    def rehearse(self, model: Model, weights: Arrays, batch: int) -> int:
        """Compiles and tunes by running the function, then counts the scratch memory of a second run."""
        inputs, outputs = self._temporaries(model, batch)
        with self.device:
            call_model(model, weights, inputs, outputs, batch, "in its first run")
        try:
            self.device.synchronize()
        except PaellaError as e:
            raise CaptureError(f"model {model.name!r} failed on the GPU in its first run at batch {batch}: {e}") from e
        counting = Counting(model, self.device, computes=self.foreign_kernels)
        with capturing(self.device, counting), self.counting(counting):
            call_model(model, weights, inputs, outputs, batch, "in its second run")
        self.device.synchronize()
        if not counting.launches and not self.foreign_kernels:
            raise CaptureError(f"model {model.name!r} launches no kernel at batch {batch}")
        return counting.scratch_bytes

    def sm_totals(self) -> tuple[float, Any, Any] | None:
        """Until when (ns), and per SM since the start: warp-ns of resident warps, ns with any. None: not known."""
        return None

    @abstractmethod
    def open_windows(self, count: int, share: float) -> list[set[int]]:
        """Makes this many windows, each with this share of the SMs, evenly spread; which SMs are in each.

        Before any model is loaded.
        """

    computes_in_python = False  # whether the loop computes in Python itself, and so competes with other threads for it
    shares_are_free = False  # whether `segment_shares` is known without a measurement
    windows = 0  # of SMs; 0: none
    window_share = 0.0  # of the SMs that each has
    foreign_kernels = False  # whether kernels other than ours can be captured
    sleeps_in_read = False  # the loop sleeps by reading the bell's descriptor
    shared_slots = False  # lanes' host memory is made for other processes to map

    # Called with lane, slot and error, in the loop's thread, where a model failed on the values in one slot.
    on_fault: Callable[[int, int, BaseException], None]

    def counting(self, capture: ModelCapture) -> contextlib.AbstractContextManager[None]:
        """Around a run whose scratch memory is counted: other libraries' allocations count too."""
        return contextlib.nullcontext()

    def discard(self, program: Program) -> None:
        """The program has been cut, or is not wanted: what was captured may go."""
        program.body = None

    def failure(self, status: int) -> BaseException:
        """The error that a status of the core's launches stands for."""
        return LaunchError(f"running a model failed with status {status}")

    def _temporaries(self, model: Model, batch: int) -> tuple[Arrays, Arrays]:
        pair = []
        for specs in (model.inputs, model.outputs):
            made = {k: np.full((batch, *s.shape), s.neutral, s.dtype) for k, s in specs.items()}
            pair.append({k: self.device.array(array) for k, array in made.items()})
        return pair[0], pair[1]
