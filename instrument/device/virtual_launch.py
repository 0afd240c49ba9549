"""A launch on the virtual GPU: compute the blocks' data, then give their costs to the SM model."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from paellapy.instrument.compiled import Compiled
from paellapy.instrument.device.base import Capture, Launcher, check_grid
from paellapy.instrument.device.cost_model import CostModel
from paellapy.instrument.device.parts import Part
from paellapy.instrument.device.preemption import Blocks, Work
from paellapy.instrument.device.sm_costs import BlockCost
from paellapy.instrument.device.sm_model import SmModel
from paellapy.instrument.device.sm_program import Kernel, Under
from paellapy.instrument.device.virtual_preempt import VirtualFlag, VirtualRun, without_effects
from paellapy.instrument.errors import LaunchError, PaellaError
from paellapy.instrument.occupancy import occupancy
from paellapy.instrument.records import Records
from paellapy.instrument.ttir import TtirProgram


class Gpu(Protocol):
    """What a launch asks of the virtual GPU it is made on."""

    part: Part
    costs: CostModel
    model: SmModel
    capture: Capture | None
    session: Any
    noted: list[NotedLaunch] | None

    runs: list[VirtualRun]

    def submit(self) -> float: ...
    def current_stream(self) -> int: ...
    def wait_until(self, ns: float) -> None: ...
    def settle(self) -> None: ...
    def finish(self, stream: int) -> None: ...


class VirtualNotification:
    """What a launch at level `notify` returns: set once its last block is on an SM."""

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
    """A launch that ran, and what its blocks cost."""

    launcher: VirtualLauncher
    grid: tuple[int, int, int]
    first: int
    count: int
    cost: BlockCost | None


class VirtualLauncher(Launcher):
    def __init__(self, device: Gpu, compiled: Compiled, pick: Callable[[Sequence[Any]], Sequence[Any]]) -> None:
        source = compiled.source
        if not source.ttir:
            raise LaunchError(
                f"kernel {compiled.name!r} is CUDA C, which the virtual GPU compiles but cannot run: "
                'it evaluates Triton kernels. Run it on a real GPU: pp.Device("cuda").'
            )
        self.device, self.compiled, self.pick = device, compiled, pick
        self.program = TtirProgram.parse(source.ttir, compiled.name)
        assert source.threads is not None
        self.threads = source.threads
        self._kernel_cost = device.costs.of_kernel(compiled, self.threads, self.program.dot_dtype)
        occupancy(device.part, self.threads, compiled.registers, compiled.shared_bytes, source.cluster)

    def __call__(
        self,
        grid: tuple[int, ...],
        values: Sequence[Any],
        block: tuple[int, ...] = (),
        shared_bytes: int = 0,
        part: tuple[int, int] | None = None,
    ) -> VirtualNotification | None:
        if self.device.capture is not None and self.device.capture.active:
            return self.device.capture.launch(self, grid, values, block, shared_bytes, part)  # type: ignore[no-any-return]
        gx, gy, gz = (*grid, 1, 1)[:3]
        check_grid(self.compiled.name, (gx, gy, gz))
        if min(gx, gy, gz) == 0:
            return None  # an empty grid is no work, as in Triton
        first, count = part or (0, gx * gy * gz)
        self.device.finish(self.device.current_stream())
        cost = self.evaluate(values, (gx, gy, gz), first, count)
        handle = self._place(cost, values, (gx, gy, gz), first, count)
        if self.compiled.config.notifies:
            return VirtualNotification(self.device.model, handle)
        return None

    def under(self, flag: VirtualFlag, work: Work, blocks: Blocks) -> VirtualRun:
        """Launches some blocks under a flag. Their costs are worked out now, their data once it is known who ran."""
        if isinstance(blocks, tuple):
            first, count = blocks
            ids = np.arange(first, first + count)
            costs = self._price(work, ids)
        else:
            assert isinstance(blocks, VirtualRun)
            ids = np.sort(blocks.left())
            costs = blocks.costs_of(ids)
        under = Under(flag.number, flag.next_epoch(), ids)
        handle = self._place(costs, work.values, work.grid, int(ids[0]), len(ids), under, work.stream)
        arguments, program = self.pick(work.values), self.program

        def compute(ran: NDArray[np.int64]) -> None:
            program.run(arguments, work.grid, ran)

        return VirtualRun(self.device, under, handle, work.stream, costs, compute)

    def _price(self, work: Work, ids: NDArray[np.int64]) -> Records:
        """What blocks cost, judged by the data there is; where that fails, what runs before them is waited for."""
        arguments = self.pick(work.values)
        price = functools.partial(self.program.run, arguments, work.grid, ids, record=False)
        try:
            return without_effects(arguments, price)
        except PaellaError:
            if all(run.stream != work.stream for run in self.device.runs):
                raise
        self.device.finish(work.stream)
        return without_effects(arguments, price)

    def evaluate(self, values: Sequence[Any], grid: tuple[int, int, int], first: int, count: int) -> Records:
        """Computes the data of some blocks; what each of them cost."""
        return self.program.run(self.pick(values), grid, range(first, first + count))

    def prepare(
        self, values: Sequence[Any], grid: tuple[int, int, int], first: int, count: int
    ) -> Callable[[], None] | None:
        """`evaluate` for the same arrays again and again, without its cost; None where nothing was recorded."""
        return self.program.prepare(self.pick(values), grid, range(first, first + count))

    def _place(
        self,
        cost: Records,
        values: Sequence[Any],
        grid: tuple[int, int, int],
        first: int,
        count: int,
        under: Under | None = None,
        stream: int | None = None,
    ) -> int:
        device, compiled = self.device, self.compiled
        cluster = compiled.source.cluster
        submit = device.submit()
        session = device.session
        stream = device.current_stream() if stream is None else stream
        launch_id = 0
        if session is not None:
            gx, gy, gz = grid
            wide = (gx * cluster, gy, gz)
            launch_id = session.add(compiled, wide, self.threads, compiled.source.dynamic_shared_bytes,
                                    first * cluster, count * cluster, stream)  # fmt: skip
        kernel = Kernel(
            count * cluster,
            self.threads,
            compiled.registers,
            compiled.shared_bytes,
            cost=self.block_cost(cost, values),
            cluster=cluster,
            first=first * cluster,
            under=under,
        )
        if device.noted is not None:
            device.noted.append(NotedLaunch(self, grid, first, count, kernel.cost))
        traced = session is not None
        return device.model.launch(stream, kernel, launch_id=launch_id, trace=traced, report=False, submit_ns=submit)

    def block_cost(self, cost: Records, values: Sequence[Any] = ()) -> BlockCost:
        """The evaluator's counts as the SM model takes them; `values` are the launch's arguments."""
        return self._kernel_cost.block_cost(cost, values)
