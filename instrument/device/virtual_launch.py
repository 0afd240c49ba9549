"""A launch on the virtual GPU: computes the blocks' data, then passes their costs to the SM model."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from paellapy.instrument.device import launch_hook
from paellapy.instrument.device.base import (
    RECORDS,
    Blocks,
    Call,
    Capture,
    Events,
    Flag,
    Launcher,
    Pick,
    Run,
    Work,
    check_grid,
)
from paellapy.instrument.errors import LaunchError, PaellaError
from paellapy.instrument.gpu_model.commands import Kernel, Under
from paellapy.instrument.gpu_model.costs import BlockCost, CostModel, KernelCost
from paellapy.instrument.gpu_model.model import SmModel
from paellapy.instrument.gpu_model.parts import WARP, Part, active_clusters, occupancy
from paellapy.instrument.ptx.compiled import Compiled, Draft
from paellapy.instrument.ptx.descriptor import PassConfig
from paellapy.instrument.ptx.ranges import Ranges
from paellapy.instrument.records import RANGE_END, RANGE_RECORD, WHOLE_BLOCK, Records
from paellapy.instrument.triton_ir import TtirProgram
from paellapy.instrument.triton_ir.cost import SHARES
from paellapy.instrument.triton_ir.machine import Mark

# --- preemption on the virtual GPU: the data of a block are computed once it is known that the block has run ----------
# The costs of blocks are computed at the launch, as for any other launch; memory is restored afterwards.


class Host(Protocol):
    """The parts of the virtual GPU that flags and runs use."""

    runs: list[VirtualRun]

    @property
    def model(self) -> SmModel: ...
    def submit(self) -> float: ...
    def wait_until(self, ns: float) -> None: ...
    def settle(self) -> None: ...


class VirtualFlag(Flag):
    def __init__(self, device: Host) -> None:
        super().__init__()
        self._device, self.number = device, device.model.flag()

    def _write(self, word: int) -> None:
        """Writes the word: the host's call takes as long as a launch, and the word arrives after the latency of one."""
        model = self._device.model
        model.run(self._device.submit() + model.timing.launch_ns)
        model.set_flag(self.number, word)


class VirtualRun(Run):
    """A launch in the SM model whose data are computed once it is over."""

    def __init__(
        self,
        device: Host,
        under: Under,
        handle: int,
        stream: int,
        costs: Records,
        compute: Callable[[NDArray[np.int64]], object],
    ) -> None:
        self.epoch, self.handle, self.stream = under.epoch, handle, stream
        self._device, self._blocks, self._costs, self._compute = device, under.blocks, costs, compute
        self._left: NDArray[np.int64] | None = None
        self.error: PaellaError | None = None  # of its blocks, which `left` raises
        device.runs.append(self)
        device.settle()

    def over(self) -> bool:
        model = self._device.model
        model.run(max(model.now_ns, self._device.submit()))  # the query itself takes some time on the host
        self._device.settle()
        return self._left is not None

    def wait(self) -> None:
        if self._left is None:
            self._device.wait_until(self._device.model.run_until_done(self.handle))

    def settle(self) -> None:
        """Computes the data of the blocks that ran, now that they are known. Any call of the device may lead here."""
        self._left = self._device.model.take_left(self.handle)
        ran = np.setdiff1d(self._blocks, self._left, assume_unique=True)
        try:
            if len(ran):
                self._compute(ran)
        except PaellaError as error:
            self.error = error

    def count_left(self) -> int:
        return len(self.left())

    def left(self) -> NDArray[np.int64]:
        if self.error is not None:
            raise self.error.with_traceback(None)
        assert self._left is not None, "ask a run that is over"
        return self._left

    def costs_of(self, blocks: NDArray[np.int64]) -> Records:
        """The costs of some of its blocks."""
        order = np.argsort(self._blocks)
        return self._costs[order[np.searchsorted(self._blocks, blocks, sorter=order)]]

    def elapsed_ns(self) -> float:
        model = self._device.model
        return model.finish_ns(self.handle) - model.start_ns(self.handle)


def without_effects(arguments: Sequence[Any], run: Callable[[], Records]) -> Records:
    """The result of `run`, with the memory of its arguments restored afterwards."""
    arrays = [a for a in arguments if isinstance(a, np.ndarray) and a.flags.writeable]
    kept = [a.copy() for a in arrays]
    try:
        return run()
    finally:
        for array, before in zip(arrays, kept, strict=True):
            array[...] = before


_SAMPLED = 16  # blocks that stand for all of a launch whose time is predicted

# --- ranges on the virtual GPU: an event is placed in its block in proportion to the cost up to that point ------------

_KEPT = RECORDS * RANGE_RECORD["clocks"].shape[0]  # events per block
Price = Callable[[Records], NDArray[np.float64]]


def events_of(
    launch: int, ranges: Ranges, marks: Sequence[Mark], ids: NDArray[np.int64], cost: Records, price: Price
) -> Events:
    """`ids` are the blocks that ran, `cost` is the total cost of each, and `price` converts costs to times.

    Warps are not distinguished: an event recorded per warp is recorded for its block. As on a GPU, a block keeps only
    its last events: as many as fill its records if each has a clock of its own.
    """
    whole = price(cost)
    order = np.argsort(ids)
    columns: list[tuple[NDArray[np.int64], NDArray[np.uint32], NDArray[np.float64]]] = []
    for mark in marks:
        tag = ranges.names.index(mark.marker.name) | (0 if mark.marker.begins else RANGE_END)
        passed = price(np.ascontiguousarray(mark.cost).view(cost.dtype).reshape(-1))
        row = order[np.searchsorted(ids[order], mark.ids)]
        columns.append((mark.ids, np.full(len(passed), tag, np.uint32), passed / np.maximum(whole[row], 1e-9)))
    if not columns:
        nothing = np.zeros(0, np.uint32)
        return Events(launch, ranges.names, nothing, nothing.astype(np.uint16), nothing, np.zeros(0))
    block, tags, part = (np.concatenate(column) for column in zip(*columns, strict=True))
    by = np.argsort(block, kind="stable")
    last = np.searchsorted(block[by], block[by], side="right") - 1  # the last event of each event's block
    kept = by[last - np.arange(len(by)) < _KEPT]
    warp = np.full(len(kept), WHOLE_BLOCK, np.uint16)
    lost = len(by) - len(kept)
    return Events(
        launch, ranges.names, block[kept].astype(np.uint32), warp, tags[kept], np.clip(part[kept], 0, 1), None, lost
    )


class Gpu(Host, Protocol):
    """The parts of the virtual GPU that a launch uses."""

    part: Part
    costs: CostModel
    capture: Capture | None
    session: Any
    timing: bool
    noted: list[NotedLaunch] | None
    events: list[Events]  # events of ranges, in the current trace

    def place(self, submit: Callable[[], object]) -> None: ...
    def current_stream(self) -> int: ...
    def finish(self, stream: int) -> None: ...


@dataclass(frozen=True, slots=True)
class Submission:
    """Where and when a launch was submitted, and which blocks of its grid it runs."""

    grid: tuple[int, int, int]
    first: int
    count: int
    at_ns: float
    stream: int
    under: Under | None = None  # the flag under which it runs


class VirtualNotification:
    """The result of a launch at level `notify`: set once its last block is on an SM."""

    def __init__(self, model: SmModel, handle: int) -> None:
        self._model, self._handle = model, handle

    @property
    def time_ns(self) -> int:
        """When the last block started, on the device's clock; 0 before that."""
        at = self._model.notify_ns(self._handle)
        return 0 if np.isnan(at) else max(1, int(at))

    def __bool__(self) -> bool:
        return self.time_ns > 0


@dataclass(frozen=True, slots=True, eq=False)
class NotedLaunch:
    """A launch that ran, and the costs of its blocks."""

    launcher: VirtualLauncher
    grid: tuple[int, int, int]
    first: int
    count: int
    cost: BlockCost | None


class VirtualLauncher(Launcher):
    def __init__(self, device: Gpu, draft: Draft, config: PassConfig, pick: Pick) -> None:
        if not draft.ttir:
            raise LaunchError(
                f"kernel {draft.name!r} is CUDA C, which the virtual GPU compiles but cannot run: "
                'it evaluates Triton kernels. Run it on a real GPU: pp.Device("cuda").',
                kernel=draft.name, field="source",
            )
        self.device, self.config, self.pick = device, config, pick
        self.name, self._draft = draft.name, draft
        self._refusal: PaellaError | None = None
        threads, has_tma = WARP * draft.metadata.get("num_warps", 4), device.part.sm.capability >= (9, 0)
        self.program = TtirProgram.parse(draft.ttir, draft.name, threads, has_tma)
        self.program.fits = self._fits
        if "tt.elementwise_inline_asm" in draft.ttir:
            _ = self.compiled  # only `ptxas` knows whether this GPU has the instructions

    def _fits(self, running: int) -> bool:
        """Whether the GPU has room for one more of Triton's programs while `running` of them have not ended."""
        if running < self.device.part.sms and self._draft.metadata.get("num_ctas", 1) == 1:
            return True  # known before it is compiled: an SM holds at least one block of a kernel that can run
        return running < self._resident

    @functools.cached_property
    def _resident(self) -> int:
        made, part = self.compiled, self.device.part
        cluster = made.source.cluster
        held = occupancy(part, self.threads, made.registers, made.shared_bytes, cluster).blocks_per_sm
        return active_clusters(part, held, cluster) if cluster > 1 else held * part.sms

    @functools.cached_property
    def compiled(self) -> Compiled:  # type: ignore[override]  # other launchers have it from the beginning
        """The fully compiled kernel, for a block's resources on an SM; LaunchError if a block fits on none."""
        try:
            made = self._draft.source.build(self.config)
            assert made.source.threads is not None
            occupancy(self.device.part, made.source.threads, made.registers, made.shared_bytes, made.source.cluster)
        except PaellaError as error:
            if not hasattr(error, "kernel"):
                error.args = (f"kernel {self.name!r}: {error}",)
                error.__dict__["kernel"] = self.name
            self._refusal = error
            raise error from None
        return made

    @property
    def threads(self) -> int:
        threads = self.compiled.source.threads
        assert threads is not None
        return threads

    @functools.cached_property
    def _kernel_cost(self) -> KernelCost:
        return self.device.costs.of_kernel(self.compiled, self.threads, self.program.facts)

    def __call__(
        self,
        grid: tuple[int, ...],
        values: Sequence[Any],
        block: tuple[int, ...] = (),
        shared_bytes: int = 0,
        part: tuple[int, int] | None = None,
    ) -> VirtualNotification | None:
        device = self.device
        if device.capture is not None and device.capture.active:
            return device.capture.launch(self, Call(grid, values, block, shared_bytes, part))  # type: ignore[no-any-return]
        gx, gy, gz = (*grid, 1, 1)[:3]
        check_grid(self.name, (gx, gy, gz))
        if min(gx, gy, gz) == 0:
            return None  # an empty grid launches nothing, as in Triton
        if self._refusal is not None:
            raise self._refusal.with_traceback(None)
        if launch_hook.hold is not None:
            launch_hook.hold()
        first, count = part or (0, gx * gy * gz)
        self.device.finish(self.device.current_stream())
        marks: list[Mark] | None = [] if device.session is not None and self.program.facts.ranges.names else None
        cost = self.evaluate(values, (gx, gy, gz), first, count, marks)
        submit = Submission((gx, gy, gz), first, count, device.submit(), device.current_stream())
        if device.session is None and device.noted is None and not (self.config.notifies or device.timing):
            device.place(functools.partial(self._place, cost, values, submit))
            return None
        handle = self._place(cost, values, submit, device.session, device.noted)
        if marks is not None:
            ids = np.arange(first, first + count)
            priced = self._kernel_cost.alone_ns
            device.events.append(events_of(device.session.last, self.program.facts.ranges, marks, ids, cost, priced))
        return VirtualNotification(device.model, handle) if self.config.notifies else None

    def under(self, flag: VirtualFlag, work: Work, blocks: Blocks) -> VirtualRun:
        """Launches some blocks under a flag. Costs are computed now, data once it is known which blocks ran."""
        if isinstance(blocks, tuple):
            first, count = blocks
            ids = np.arange(first, first + count)
            costs = self._price(work, ids)
        else:
            assert isinstance(blocks, VirtualRun)
            ids = np.sort(blocks.left())
            costs = blocks.costs_of(ids)
        under = Under(flag.number, flag.next_epoch(), ids)
        device = self.device
        submit = Submission(work.grid, int(ids[0]), len(ids), device.submit(), work.stream, under)
        handle = self._place(costs, work.values, submit, device.session, device.noted)
        arguments, program = self.pick(work.values), self.program

        def compute(ran: NDArray[np.int64]) -> None:
            program.run(arguments, work.grid, ran)

        return VirtualRun(self.device, under, handle, work.stream, costs, compute)

    def _price(self, work: Work, ids: NDArray[np.int64]) -> Records:
        """The costs of blocks, from the current data; if that fails, earlier runs on the stream are waited for."""
        arguments = self.pick(work.values)
        price = functools.partial(self.program.run, arguments, work.grid, ids, record=False)
        try:
            return without_effects(arguments, price)
        except PaellaError:
            if all(run.stream != work.stream for run in self.device.runs):
                raise
        self.device.finish(work.stream)
        return without_effects(arguments, price)

    def evaluate(
        self,
        values: Sequence[Any],
        grid: tuple[int, int, int],
        first: int,
        count: int,
        marks: list[Mark] | None = None,
    ) -> Records:
        """Computes the data of some blocks; returns the cost of each."""
        return self.program.run(self.pick(values), grid, range(first, first + count), marks=marks)

    def prepare(
        self, values: Sequence[Any], grid: tuple[int, int, int], first: int, count: int
    ) -> Callable[[], None] | None:
        """A prepared `evaluate` for the same arrays, without costs; None if nothing was recorded."""
        return self.program.prepare(self.pick(values), grid, range(first, first + count))

    def costs(self, grid: tuple[int, ...], values: Sequence[Any]) -> tuple[Records, Sequence[Any]]:
        """The costs of the blocks of a launch that is not made, and its values. Some blocks stand for all."""
        whole = (*grid, 1, 1)[:3]
        count = whole[0] * whole[1] * whole[2]
        if not count:
            return np.zeros(0), values
        chosen = np.unique(np.linspace(0, count - 1, count if self.program.facts.serial else _SAMPLED).astype(np.int64))
        arguments = self.pick(values)
        run = functools.partial(self.program.run, arguments, whole, chosen, record=False)
        return without_effects(arguments, run)[np.arange(count) * len(chosen) // count], values

    def predict_ns(self, grid: tuple[int, ...], costs: Records, values: Sequence[Any]) -> float:
        """The time from the first block's start to the last one's end, alone on the GPU, with these costs."""
        if not len(costs):
            return 0.0
        model = SmModel(self.device.part, timing=self.device.costs.timing)
        handle = model.launch(model.stream(), self._kernel(costs, values, 0, len(costs)))
        model.run()
        return model.finish_ns(handle) - model.start_ns(handle)

    def _kernel(
        self, cost: Records, values: Sequence[Any], first: int, count: int, under: Under | None = None
    ) -> Kernel:
        """A launch of some blocks in the form that the SM model takes."""
        compiled = self.compiled
        cluster, priced = compiled.source.cluster, self.block_cost(cost, values)
        return Kernel(
            count * cluster, self.threads, compiled.registers, compiled.shared_bytes,
            cost=priced, cluster=cluster, first=first * cluster, under=under, counts=self.config.report == "count",
        )  # fmt: skip

    def _place(
        self,
        cost: Records,
        values: Sequence[Any],
        submit: Submission,
        session: Any = None,
        noted: list[NotedLaunch] | None = None,
    ) -> int:
        """Passes a launch to the SM model. `session` and `noted` are those at its launch: placing may come later."""
        device, compiled, stream = self.device, self.compiled, submit.stream
        cluster = compiled.source.cluster
        first, blocks = submit.first * cluster, submit.count * cluster
        kernel = self._kernel(cost, values, submit.first, submit.count, submit.under)
        if noted is not None:
            noted.append(NotedLaunch(self, submit.grid, submit.first, submit.count, kernel.cost))
        launch_id = 0
        if session is not None:
            gx, gy, gz = submit.grid
            shared = compiled.source.dynamic_shared_bytes
            launch_id = session.add(compiled, (gx * cluster, gy, gz), self.threads, shared, first, blocks, stream)
            session.counted[launch_id] = _counted(cost, self.device.costs.timing.sector_update_ns)
        traced = session is not None
        return device.model.launch(
            stream, kernel, launch_id=launch_id, trace=traced, report=False, submit_ns=submit.at_ns
        )

    def block_cost(self, cost: Records, values: Sequence[Any] = ()) -> BlockCost:
        """The evaluator's counts in the form that the SM model takes; `values` are the launch's arguments."""
        return self._kernel_cost.block_cost(cost, values)


def _counted(cost: Records, turn_ns: float) -> tuple[int, ...]:
    """The work of a launch: the fields of WORK from `bytes` on."""
    total = {name: int(cost[name].sum()) for name in cost.dtype.names or ()}
    used = total["bytes_loaded"] + total["bytes_stored"]
    hottest, queue_ns = round(total["hottest"] / SHARES), round(total["pressure"] * turn_ns / SHARES)
    return used, total["flops"], total["dot_flops"], total["wasted"], total["updates"], hottest, queue_ns
