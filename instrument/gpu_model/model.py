"""A discrete-event model of one GPU: SMs, streams, hardware queues, block placement, shared bandwidth, copies.

    sim = SmModel(part("h200"))
    s = sim.stream()
    k = sim.launch(s, Kernel(1024, threads=256, registers=32, cost=BlockCost(bytes=12288)))
    sim.run()
    sim.finish_ns(k)

The core is compiled. `SmModel` checks its input, keeps the arrays large enough, and reads results.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
from numba import types
from numpy.typing import NDArray

from paellapy.instrument.errors import LaunchError, PaellaError
from paellapy.instrument.gpu_model import tables
from paellapy.instrument.gpu_model.blocks import (
    drain_todo,
    finish_work,
    link_new,
    look_at,
    place,
    pool_due,
    pool_serve,
    slot_timer,
    start_grid,
)
from paellapy.instrument.gpu_model.commands import (
    CommandRows,
    Commands,
    Flags,
    Kernel,
    Partitions,
    Placed,
    Program,
    checked_program,
    launch_row,
    placed_commands,
)
from paellapy.instrument.gpu_model.costs import Costs
from paellapy.instrument.gpu_model.parts import Part, Timing
from paellapy.instrument.gpu_model.tables import INF, Ints, State, heap_pop, tree_first
from paellapy.instrument.numba_ext.link import address_of, compiled, part, reachable

# --- the compiled core: the next event, and its time ------------------------------------------------------------------
# No Python objects; time is float64 nanoseconds.


@part
def next_time(s: State) -> float:
    gpu = s.gpu[0]
    at = INF
    if gpu.timed > 0:
        at = s.timed[0]
    if gpu.ready > 0 and gpu.active < gpu.grid_limit:
        at = min(at, max(gpu.now_ns, gpu.front_free_ns))
    if gpu.place != 0:
        at = min(at, max(gpu.now_ns, gpu.place_free_ns))
    for r in range(tables.POOLS):
        at = min(at, pool_due(s, r))
    return at


@part
def advance(s: State, at: float) -> None:
    """Advances the time and the pools' clocks; a clock whose next completion is due is set to it exactly."""
    gpu = s.gpu[0]
    for r in range(tables.POOLS):
        if s.clock[r, tables.C_ACTIVE] > 0.0:
            key = s.tree[r, 1]
            if pool_due(s, r) <= at:
                s.clock[r, tables.C_CLOCK] = key
            else:
                passed = s.clock[r, tables.C_RATE] * (at - gpu.clocks_at_ns)
                s.clock[r, tables.C_CLOCK] = min(key, s.clock[r, tables.C_CLOCK] + passed)
    gpu.clocks_at_ns = at
    gpu.now_ns = at


@part
def step(s: State, at: float) -> None:
    """Handles all events at one time: ends first, so that placement sees everything that is free and ready."""
    gpu = s.gpu[0]
    advance(s, at)
    while gpu.timed > 0 and s.timed[0] <= at:
        identity = s.timed_id[0]
        heap_pop(s.timed, s.timed_id, 0, gpu.timed)
        gpu.timed -= 1
        slots = s.slot.shape[0]
        if identity < slots:
            slot_timer(s, identity)
        elif identity < slots + s.queue.shape[0]:
            s.queue[identity - slots, tables.Q_TIMER] = 0
            look_at(s, identity - slots)
        else:
            finish_work(s, s.stream[identity - slots - s.queue.shape[0], tables.S_CURRENT])
    for r in range(tables.POOLS):
        while s.clock[r, tables.C_ACTIVE] > 0.0 and s.tree[r, 1] <= s.clock[r, tables.C_CLOCK]:
            pool_serve(s, r, tree_first(s.tree[r]))
    drain_todo(s)
    while gpu.ready > 0 and gpu.active < gpu.grid_limit and gpu.front_free_ns <= at:
        handle = s.ready_id[0]
        heap_pop(s.ready, s.ready_id, 0, gpu.ready)
        gpu.ready -= 1
        start_grid(s, handle)
        gpu.front_free_ns = at + gpu.grid_issue_ns
    if gpu.place != 0 and gpu.place_free_ns <= at:
        place(s)


@reachable
def run(s: State, until: float, stop: int) -> int:
    """Advances to `until`, or until nothing can happen, or (`stop`, not 0) until a completion can be fetched."""
    gpu = s.gpu[0]
    link_new(s)
    while True:
        if stop and gpu.unreported > 0:
            return tables.STOPPED
        at = next_time(s)
        if at == INF or at > until:
            gpu.next_ns = at
            if until < INF and until > gpu.now_ns:
                gpu.now_ns = until  # the clocks only move with events, so that stopping in between changes nothing
            return tables.IDLE if at == INF else tables.REACHED
        step(s, at)


def next_event(s: State) -> float:
    """When the next event happens: advances to a time before all events, and so changes nothing."""
    run(s, -INF, 0)
    return float(s.gpu["next_ns"][0])


@compiled
def submit_again(table: NDArray[Any], commands: Commands, last_graph: int, at: float, handle: int) -> int:
    """Submits recorded commands again, from `handle` on; returns how many graph numbers they take after `last_graph`.
    """
    rows, kernels, graphs = commands
    for k in range(rows.shape[0]):
        i = (handle + k) & (table.shape[0] - 1)
        table[i] = rows[k]
        table[i].submit_ns = at
    taken = 0
    for k in range(kernels.shape[0]):
        table[(handle + kernels[k]) & (table.shape[0] - 1)].graph = last_graph + 1 + graphs[k]
        taken = max(taken, graphs[k] + 1)
    return taken


@compiled
def fetch_completed(s: State, into: Ints) -> None:
    """Copies the completions since the last call, in order of time; `into` has room for all of them."""
    gpu = s.gpu[0]
    handle = gpu.done_head
    for k in range(gpu.unreported):
        into[k] = handle
        command = s.command[handle & (s.command.shape[0] - 1)]
        command.status = tables.REPORTED
        handle = command.done_link
    gpu.unreported = 0


def address_of_run() -> int:
    """The address of `run`, for loops: otherwise each would contain a compiled copy of the whole model."""
    return address_of(run, State.numba_type, types.float64, types.int64)


# --- records of traced blocks, and results ----------------------------------------------------------------------------


class TracedRows:
    """The rows of the state's records that are in use. A state that needs more room is replaced by a larger one."""

    def __init__(self) -> None:
        self._rows = 0

    def reserve(self, s: State, n: int) -> tuple[State, int]:
        """The first of n rows for the blocks of a launch."""
        row = self._rows
        while row + n > len(s.trace):
            s = s._replace(trace=tables.doubled(s.trace))
        s.trace["end_ns"][row : row + n] = -1
        self._rows += n
        return s, row

    def ended(self, s: State) -> NDArray[Any]:
        """The blocks that have ended (BLOCK), launch after launch, in order of block."""
        rows = s.trace[: self._rows]
        return rows[rows["end_ns"] >= 0].copy()

    def forget(self, s: State, base: int) -> None:
        """Forgets the blocks of finished launches. Commands before handle `base` are forgotten already."""
        rows = tables.unfinished_launches(s, base)
        rows = rows[s.command["trace"][rows] >= 0]
        kept = [s.trace[s.command["trace"][i] :][: s.command["blocks"][i]].copy() for i in rows]
        self._rows = 0
        for i, blocks in zip(rows, kept, strict=True):
            s.command["trace"][i] = self._rows
            s.trace[self._rows :][: len(blocks)] = blocks
            self._rows += len(blocks)


CopyKind = Literal["h2d", "d2h", "d2d"]
_ENGINES: dict[CopyKind, int] = {"h2d": 0, "d2h": 1, "d2d": 2}


class DeadlockError(PaellaError):
    """Streams wait for events that can no longer happen: `waits` says which stream waits for which event."""


class SmModel:
    """One GPU in simulated time. Streams with a greater `priority` go first (CUDA's numbers are the negatives)."""

    def __init__(
        self,
        part: Part,
        seed: int = 0,
        *,
        timing: Timing | None = None,
        false_dependencies: bool = False,
        connections: int | None = None,
        history: int | None = None,
        lines: NDArray[Any] | None = None,
    ) -> None:
        """`false_dependencies`: streams that share one of `connections` hardware queues wait for each other's heads.

        `history`: number of commands already returned by `completed()` that are kept, for long runs; None keeps all.
        `lines`: the SM_LINE counters to use, if others read them too.
        """
        self.timing = Timing.for_part(part) if timing is None else timing
        self._connections = (connections or part.connections) if false_dependencies else 0
        if not 0 <= self._connections <= part.hardware_queues:
            raise LaunchError(
                f"connections={self._connections}: the {part.title} allows 1 to {part.hardware_queues}",
                field="connections", given=self._connections, limit=part.hardware_queues,
            )
        self.part = part
        self._s = tables.new_state(part, self.timing, seed, lines)
        self._commands = CommandRows(history)
        self._traced = TracedRows()
        self._priorities: list[int] = []
        self._events = 0
        self._graphs = 0
        self._costs = Costs()
        self._flags = Flags()
        self._partitions = Partitions(part)

    # --- submitting ------------------------------------------------------------------------------------------------

    def stream(self, priority: int = 0) -> int:
        """Creates a stream; returns its handle."""
        if abs(priority) > 100:
            raise LaunchError(
                f"priority={priority}: a stream's priority must be from -100 to 100",
                field="priority", given=priority, limit=100,
            )
        number = len(self._priorities)
        if number == len(self._s.stream):
            self._s = tables.more_streams(self._s)
        self._priorities.append(priority)
        self._s.stream[number, tables.S_QUEUE] = number % self._connections if self._connections else number
        return number

    def partition(self, first: int, n: int) -> int:
        """Creates a partition of `n` SMs from `first` on, wrapping around; launches in it run there, like green
        contexts.

        Partitions may overlap. A grid that waits for room in a partition delays only later grids of the same partition;
        a grid without a partition that does not fit delays all.
        """
        self._s, number = self._partitions.make(self._s, first, n)
        return number

    def flag(self) -> int:
        """Creates a flag. Blocks of launches under it run only if its word is below their epoch when they start."""
        self._s, number = self._flags.make(self._s)
        return number

    def set_flag(self, flag: int, word: int) -> None:
        """Sets the flag's word from now on."""
        self._s.flag[self._flags.check(flag)] = word

    def left(self, handle: int) -> NDArray[np.int64]:
        """The numbers of the blocks of a launch that have not run because of its flag, in order of start."""
        return self._flags.left(self._s, self._row(handle))

    def take_left(self, handle: int) -> NDArray[np.int64]:
        """The same for a launch that is over; only once, since the model then drops them."""
        if not self.done(handle):
            raise LaunchError(
                f"launch {handle} is not over, so more of its blocks may be kept from running: run the model until it "
                "is done", field="handle", given=handle
            )
        left = self.left(handle)
        self._flags.release(self._s, self._row(handle))
        return left

    def graph(self) -> int:
        """A number for launches that belong to one graph: consecutive ones follow each other with the gap of a graph.
        """
        self._graphs += 1
        return self._graphs

    def launch(
        self,
        stream: int,
        kernel: Kernel,
        *,
        partition: int = 0,
        graph: int = 0,
        launch_id: int | None = None,
        trace: bool = True,
        report: bool = True,
        submit_ns: float | None = None,
    ) -> int:
        """Puts a kernel on a stream; returns its handle.

        `launch_id` defaults to the handle. With `report=False` the end is not among `completed()`. `partition` confines
        its blocks to some SMs; 0 means all.
        """
        at = self._check(stream, submit_ns)
        takes = self._partitions.footprint(self._s, kernel, partition)
        n_blocks, base = kernel.n_blocks, self._commands.base
        self._s, row, stride = self._costs.of_launch(self._s, base, n_blocks, kernel.cost, kernel.duration_ns)
        flag, epoch, ids = 0, 0, -1
        if kernel.under is not None:
            flag, epoch = kernel.under.flag, kernel.under.epoch
            self._s, ids = self._flags.keep(self._s, kernel)
        self._s, handle = self._commands.reserve(self._s)
        trace_row = -1
        if trace:
            self._s, trace_row = self._traced.reserve(self._s, n_blocks)
        number = handle if launch_id is None else launch_id
        self._s.command[self._row(handle)] = launch_row(
            kernel, takes, self.timing.block_overhead_ns,
            stream=stream, priority=self._priorities[stream], cost=row, cost_stride=stride, trace=trace_row,
            launch=number, graph=graph, report=report, partition=partition, flag=flag, epoch=epoch, ids=ids,
            submit_ns=at,
        )  # fmt: skip
        return handle

    def program(self, kernels: Sequence[Kernel], partition: int = 0) -> Program:
        """Checks a segment's kernels once; `launch_program` then costs the same for any number of kernels.

        `partition` confines the blocks of all of them, at every launch of the program.
        """
        footprints = [self._partitions.footprint(self._s, each, partition) for each in kernels]
        return checked_program(kernels, footprints, partition, self.timing.block_overhead_ns)

    def launch_program(
        self,
        stream: int,
        program: Program,
        *,
        launch_id: int | None = None,
        trace: bool = True,
        submit_ns: float | None = None,
    ) -> int:
        """Puts a program on a stream as one graph; returns the handle of its last kernel, which alone is reported.

        Its kernels have the handles before that one, and `launch_id` counts up from the given one (default: handles).
        """
        at = self._check(stream, submit_ns)
        self._partitions.check_program(self._s, program)
        n = len(program.commands)
        if program.epoch != self._costs.epoch:
            self._s, row = self._costs.keep(self._s, self._commands.base, program.costs)
            program.commands["cost"] += row - program.commands["cost"][0]
            program.epoch = self._costs.epoch
        self._s, handle = self._commands.reserve(self._s, n)
        rows = np.arange(handle, handle + n) & (len(self._s.command) - 1)
        commands = program.commands.copy()
        commands["stream"] = stream
        commands["priority"] = self._priorities[stream]
        commands["graph"] = self.graph()
        commands["submit_ns"] = at
        first_id = handle if launch_id is None else launch_id
        commands["launch"] = np.arange(first_id, first_id + n)
        if trace:
            ends = np.cumsum(commands["blocks"])
            self._s, first = self._traced.reserve(self._s, program.n_blocks)
            commands["trace"] = first + ends - commands["blocks"]
        self._s.command[rows] = commands
        return handle + n - 1

    def placed(self, first: int, last: int) -> Placed:
        """Commands that were just submitted, to be submitted `again`."""
        rows = np.arange(first, last + 1) & (len(self._s.command) - 1)
        return placed_commands(self._s.command[rows], self._costs.epoch)

    def again(self, placed: Placed, stream: int, submit_ns: float) -> int:
        """Submits the same commands again, untraced; returns the last handle, or -1 if their costs are gone."""
        if placed.epoch != self._costs.epoch or placed.stream != stream:
            return -1
        at = self._check(stream, submit_ns)
        n = len(placed.commands.rows)
        self._s, handle = self._commands.reserve(self._s, n)
        s = self._s
        self._graphs += submit_again(s.command, placed.commands, self._graphs, at, handle)
        return handle + n - 1

    def copy(
        self, stream: int, nbytes: int, kind: CopyKind, *, report: bool = True, submit_ns: float | None = None
    ) -> int:
        """Copies on the direction's engine, one copy at a time; returns its handle."""
        at = self._check(stream, submit_ns)
        if kind not in _ENGINES or nbytes < 0:
            raise LaunchError(
                f"copy of {nbytes} bytes, kind {kind!r}: the size must be at least 0, and the kind one of "
                f"{', '.join(_ENGINES)}", field="copy", given=(nbytes, kind)
            )
        t = self.timing
        rate = self.part.pcie_gbps * t.pcie_efficiency
        if kind == "d2d":  # reads and writes
            rate = self.part.bandwidth_gbps * t.bandwidth_efficiency / 2
        handle, i = self._simple(tables.COPY, stream, at, t.copy_latency_ns + nbytes / rate)
        self._s.command["engine"][i] = _ENGINES[kind]
        self._s.command["report"][i] = report
        return handle

    def event(self) -> int:
        """Creates an event that is not recorded yet. Unlike in CUDA, waiting for it waits for a later record."""
        number = self._events
        self._events += 1
        if number == len(self._s.event):
            self._s = self._s._replace(event=tables.doubled(self._s.event))
        self._s.event[number] = (0, 0, -1)
        return number

    def record(self, stream: int, event: int | None = None, submit_ns: float | None = None) -> int:
        """Records an event, which happens when all work on the stream so far is done."""
        at = self._check(stream, submit_ns)
        event = self.event() if event is None else self._check_event(event)
        if self._s.event[event, tables.E_RECORDED]:
            raise LaunchError(
                f"event {event} is already recorded: create another event with `event()`", field="event", given=event
            )
        self._s.event[event, tables.E_RECORDED] = 1
        _, i = self._simple(tables.RECORD, stream, at)
        self._s.command["event"][i] = event
        return event

    def wait(self, stream: int, event: int, submit_ns: float | None = None) -> None:
        """Makes later work on the stream wait for the event."""
        at = self._check(stream, submit_ns)
        self._check_event(event)
        _, i = self._simple(tables.WAIT, stream, at)
        self._s.command["event"][i] = event

    # --- running ---------------------------------------------------------------------------------------------------

    def run(self, until_ns: float | None = None, *, stop_on_completion: bool = False) -> float:
        """Advances to `until_ns`, or until all is done; returns the time. May stop early at the first completion."""
        if until_ns is not None and until_ns < self.now_ns:
            raise LaunchError(
                f"cannot run until {until_ns} ns: the current time is already {self.now_ns} ns",
                field="until_ns", given=until_ns, limit=self.now_ns,
            )
        result = run(self._s, np.inf if until_ns is None else float(until_ns), int(stop_on_completion))
        if result == tables.IDLE and until_ns is None and self._s.gpu["pending"][0] > 0:
            raise self._deadlock()
        return self.now_ns

    def completed(self) -> NDArray[np.int64]:
        """Handles of launches and copies that ended since the last call, in order of time."""
        handles = np.empty(int(self._s.gpu["unreported"][0]), np.int64)
        if len(handles):
            fetch_completed(self._s, handles)
        return handles

    def run_until_done(self, handle: int) -> float:
        """Advances until the command has ended; returns the time of its end."""
        while not self.done(handle):
            following = self.next_event_ns  # which also takes in new commands, and ends those that take no time
            if following < np.inf:
                self.run(following)
            elif not self.done(handle):
                raise self._deadlock()
        return self.finish_ns(handle)

    # --- results ---------------------------------------------------------------------------------------------------

    @property
    def state(self) -> State:
        """The state, for a compiled loop that runs the model. It is replaced whenever more room is needed."""
        return self._s

    @property
    def now_ns(self) -> float:
        return float(self._s.gpu["now_ns"][0])

    @property
    def next_event_ns(self) -> float:
        """When the next event happens, if nothing else is submitted; infinite if there is none."""
        return next_event(self._s)

    @property
    def last_handle(self) -> int:
        """The handle of the latest command; records and waits have handles too."""
        return self._commands.next - 1

    def done(self, handle: int) -> bool:
        return bool(self._s.command["status"][self._row(handle)] >= tables.DONE)

    def start_ns(self, handle: int) -> float:
        """When the first block, or the copy, started. NaN before."""
        return float(self._s.command["start_ns"][self._row(handle)])

    def notify_ns(self, handle: int) -> float:
        """When the last block started: from then on the whole launch is on the SMs. NaN before."""
        return float(self._s.command["notify_ns"][self._row(handle)])

    def finish_ns(self, handle: int) -> float:
        """When the last block, or the copy, ended. NaN before."""
        return float(self._s.command["finish_ns"][self._row(handle)])

    @property
    def lines(self) -> NDArray[Any]:
        """Each SM's live counters (SM_LINE), of kernels with `counts`."""
        return self._s.lines

    def use_until(self, now_ns: float) -> tuple[float, NDArray[np.float64], NDArray[np.float64]]:
        """A time, and per SM up to that time: warp-ns of resident warps, and ns with any resident warp.

        The time is `now_ns`, or the next event if it comes first, because later events are not known yet.
        """
        until = max(self.now_ns, min(now_ns, self.next_event_ns))
        use = self._s.use
        resident = use[:, tables.U_WARPS]
        more = np.where(resident > 0, until - use[:, tables.U_SINCE], 0.0)
        return until, use[:, tables.U_WARP_NS] + resident * more, use[:, tables.U_BUSY_NS] + more

    def blocks(self) -> NDArray[Any]:
        """The ended blocks of traced launches (BLOCK), launch after launch, in order of block."""
        return self._traced.ended(self._s)

    def clear_blocks(self) -> None:
        """Forget the blocks of finished launches, for long traced runs."""
        self._traced.forget(self._s, self._commands.base)

    def check_integrity(self) -> None:
        """Checks that with nothing in flight all resources are free and all counters agree; AssertionError otherwise.
        """
        tables.check_idle(self._s, self.part)

    # --- inside ----------------------------------------------------------------------------------------------------

    def _row(self, handle: int) -> int:
        return self._commands.row(self._s, handle)

    def _check(self, stream: int, submit_ns: float | None) -> float:
        """The time of a submission to this stream."""
        if not 0 <= stream < len(self._priorities):
            raise LaunchError(
                f"no stream {stream}: {len(self._priorities)} exist; create one with `stream()`",
                field="stream", given=stream, limit=len(self._priorities),
            )
        now = self.now_ns
        if submit_ns is None:
            return now
        if submit_ns < now:
            raise LaunchError(
                f"cannot submit at {submit_ns} ns: the current time is already {now} ns",
                field="submit_ns", given=submit_ns, limit=now,
            )
        return submit_ns

    def _check_event(self, event: int) -> int:
        if not 0 <= event < self._events:
            raise LaunchError(
                f"no event {event}: {self._events} exist; create one with `event()`",
                field="event", given=event, limit=self._events,
            )
        return event

    def _deadlock(self) -> DeadlockError:
        pending, waits = int(self._s.gpu["pending"][0]), tables.who_waits(self._s, self._commands.base)
        return DeadlockError(
            f"{pending} commands can never run: {'; '.join(map(str, waits))}", given=pending, waits=waits
        )

    def _simple(self, kind: int, stream: int, at: float, latency: float = 0.0) -> tuple[int, int]:
        self._s, handle = self._commands.reserve(self._s)
        i = self._row(handle)
        self._s.command[i] = tables.command(
            {"kind": kind, "stream": stream, "submit_ns": at, "latency_ns": latency}
        )
        return handle, i
