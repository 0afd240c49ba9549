"""`trace()`: records every block of every instrumented kernel launched inside, and makes a `Trace` of it."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paellapy.instrument.device.base import Device
from paellapy.instrument.env import ImportHook, versions
from paellapy.instrument.errors import TraceError
from paellapy.instrument.gpu_model.costs import product_of
from paellapy.instrument.ptx.compiled import Compiled
from paellapy.instrument.ptx.descriptor import PassConfig
from paellapy.instrument.records import BLOCK, LAUNCH, PRODUCTS, WARP_SHIFT, WORK, Records
from paellapy.instrument.traces.explain import Counting
from paellapy.instrument.traces.ring import Mark, decode
from paellapy.instrument.traces.summary import ranges_of
from paellapy.instrument.traces.trace import DeviceFacts, Trace

# --- `Watch`: names of the kernels that run while a trace is taken; the trace names the ones that do not report -------
# Triton's launch hook tells of the kernels that Triton launches. Inductor launches most of its kernels by a launcher of
# its own, which calls no hook, so its `run` is replaced while a trace runs: at once, or when Inductor is imported.

_INDUCTOR = "torch._inductor.runtime.triton_heuristics"


class Watch:
    """Kernels launched by Triton and Inductor from now until `stop`."""

    def __init__(self) -> None:
        self.names: set[str] = set()
        self._knobs: Any = getattr(sys.modules.get("triton"), "knobs", None)
        if self._knobs is not None:
            self._knobs.runtime.launch_enter_hook.add(self._entered)
        _runs.begin(self.names)

    def _entered(self, launch_metadata: Any) -> None:
        self.names.add(str(launch_metadata.get()["name"]))

    def stop(self) -> None:
        if self._knobs is not None:
            self._knobs.runtime.launch_enter_hook.remove(self._entered)
        _runs.end(self.names)


class _InductorRuns:
    """Inductor's `CachingAutotuner.run`, replaced while at least one trace runs."""

    def __init__(self) -> None:
        self._told: list[set[str]] = []
        self._importing: ImportHook | None = None  # the first `torch.compile` may be inside a trace
        self._class: Any = None
        self._plain: Callable[..., Any] | None = None

    def begin(self, names: set[str]) -> None:
        self._told.append(names)
        if _INDUCTOR in sys.modules:
            self.replace()
        elif self._importing is None:
            self._importing = ImportHook(_INDUCTOR, lambda _: self.replace())
            self._importing.add()

    def replace(self) -> None:
        found = getattr(sys.modules.get(_INDUCTOR), "CachingAutotuner", None)
        if self._told and self._class is None and found is not None:
            self._class, self._plain = found, found.run
            found.run = self._telling(found.run)

    def end(self, names: set[str]) -> None:
        self._told = [each for each in self._told if each is not names]
        if self._told:
            return
        if self._importing is not None:
            self._importing.remove()
            self._importing = None
        if self._class is not None:
            self._class.run = self._plain
            self._class = None

    def _telling(self, run: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(run)
        def tell(tuner: Any, *args: Any, **kwargs: Any) -> Any:
            name = getattr(getattr(tuner, "fn", None), "__name__", None)
            for names in self._told:
                names.add(str(name or "a kernel of torch.compile"))
            return run(tuner, *args, **kwargs)

        return tell


_runs = _InductorRuns()


_LEAST, _MOST = 16, 1 << 22


Made = tuple[Compiled, Sequence[Any]]  # a launch's kernel; and on a real GPU its arguments, with addresses as numbers


class Session:
    """The launches of one trace while it runs. Ids are never reused, so records of earlier traces are recognised."""

    next_id = 1
    # Launches inside CUDA graphs, which may be replayed in a later trace.
    _captured: dict[int, tuple[str, tuple[Any, ...], Made]] = {}  # noqa: RUF012

    def __init__(self, device: Device) -> None:
        self.device = device
        self.first_id = Session.next_id
        self._kernels: dict[str, int] = {}
        self._rows: list[tuple[Any, ...]] = []
        self.begin_ns = device.clock_ns()
        self._made: dict[int, Made] = {}
        self.counted: dict[int, tuple[int, ...]] = {}  # the fields of WORK from `bytes` on, of evaluated launches
        self.last = 0  # the latest recorded launch
        self.unreported = 0  # blocks of launches for which no descriptor was left
        self._in_graphs: dict[int, tuple[str, tuple[Any, ...]]] = {}  # launches that PyTorch's graphs may replay
        # Of Triton's launches: spilled bytes, and registers and spilled bytes of the plain kernel.
        self._foreign_code: dict[int, tuple[int, int, int]] = {}

    def add(
        self,
        compiled: Compiled,
        grid: tuple[int, int, int],
        threads: int,
        shared_bytes: int,
        first: int,
        blocks: int,
        stream: int,
        values: Sequence[Any] = (),
    ) -> int:
        """Records a launch and gives it an id."""
        launch = self.last = Session.next_id
        Session.next_id += 1
        shared = shared_bytes + compiled.code.static_shared_bytes
        warps = -(-threads // 32)
        submit = self.device.host_ns()
        row = (launch, 0, warps, compiled.registers, 0, shared, grid, first, blocks, submit, stream)
        self.note(compiled.name, row)
        self._made[launch] = compiled, values
        if self.device.is_capturing(stream):
            Session._captured[launch] = (compiled.name, row, self._made[launch])
        return launch

    @classmethod
    def forget(cls, launches: Iterable[int]) -> None:
        """Forgets launches in graphs that will not be replayed again."""
        for launch in launches:
            cls._captured.pop(launch, None)

    def reserve(self, count: int) -> NDArray[np.uint32]:
        """Ids for launches that other code will make."""
        first = Session.next_id
        Session.next_id += count
        return np.arange(first, first + count, dtype=np.uint32)

    def add_foreign(self, launch: int, facts: Any) -> None:
        """Records a launch made by Triton's own launcher, under a number from `reserve`."""
        self.note(facts.kernel, self._foreign(launch, facts))

    def may_replay(self, launch: int, facts: Any) -> None:
        """Registers a launch in a CUDA graph that PyTorch captured earlier; it is recorded only if its blocks appear.
        """
        self._in_graphs[launch] = (facts.kernel, self._foreign(launch, facts))

    def _foreign(self, launch: int, facts: Any) -> tuple[Any, ...]:
        if facts.plain_registers:
            self._foreign_code[launch] = facts.spill_bytes, facts.plain_registers, facts.plain_spill_bytes
        submit, grid = self.device.host_ns(), (facts.blocks, 1, 1)
        return (launch, 0, facts.warps, facts.registers, 0, facts.shared_bytes, grid, 0, facts.blocks, submit,
                facts.stream)  # fmt: skip

    def note(self, kernel: str, row: tuple[Any, ...]) -> None:
        number = self._kernels.setdefault(kernel, len(self._kernels))
        self._rows.append((row[0], number, *row[2:]))

    def adopt_replayed(self, seen: Records) -> None:
        """Adds the launches of graphs that were captured before this trace and replayed in it."""
        noted = {row[0] for row in self._rows}
        for launch in np.unique(seen).tolist():
            if launch in noted:
                continue
            if launch < self.first_id and launch in Session._captured:
                kernel, row, self._made[launch] = Session._captured[launch]
                self.note(kernel, row)
            elif launch >= self.first_id and launch in self._in_graphs:
                self.note(*self._in_graphs[launch])

    def work(self, launches: NDArray[np.uint32]) -> Records:
        """Facts about the machine code and the work of these launches."""
        counting, rows = Counting(), []
        parts = {row[0]: row[6:9] for row in self._rows}
        for launch in launches.tolist():
            if launch in self._made:
                made, values = self._made[launch]
                plain = made.source.build(PassConfig())  # kept on disk if the kernel ran plain before
                counted = self.counted.get(launch)
                if counted is None:
                    counted = (*(counting.count(made.source, values, *parts[launch]) or (0, 0, 0)), 0, 0, 0, 0)
                product = PRODUCTS.index(product_of(made.source.ptx, made.source.ttir))
                code = made.code.spill_bytes, plain.registers, parts[launch][2]
                rows.append((launch, *code, *counted, plain.code.spill_bytes, product))
            elif launch in self._foreign_code:
                spilled, registers, plain_spilled = self._foreign_code[launch]
                rows.append((launch, spilled, registers, parts[launch][2], *(0,) * 7, plain_spilled, 0))
        return np.array(rows, WORK)

    def launches(self) -> tuple[Records, tuple[str, ...]]:
        rows = np.array(sorted(self._rows, key=lambda r: r[0]), LAUNCH)
        offset = self.device.to_device_ns(0)
        rows["submit_ns"] += offset
        return rows, tuple(self._kernels)


class trace:
    """Context manager: `with pp.trace() as t:` fills `t` (a `Trace`) when the block is left.

    `records_per_sm` is the size of an SM's ring, a power of two; when more blocks run on an SM, the oldest records are
    overwritten and counted in `t.dropped`. A trace inside another shares its rings, and contains only its own launches.
    """

    def __init__(self, records_per_sm: int = 1 << 14, device: Device | str | None = None) -> None:
        if records_per_sm < _LEAST or records_per_sm > _MOST or records_per_sm & (records_per_sm - 1):
            raise TraceError(
                f"records_per_sm={records_per_sm}: the number must be a power of two from {_LEAST} to {_MOST}",
                field="records_per_sm", given=records_per_sm, limit=(_LEAST, _MOST),
            )
        self.records_per_sm = records_per_sm
        self.device = Device.open(device) if isinstance(device, str) else device

    def __enter__(self) -> Trace:
        self._device = device = self.device or Device.current()
        self._nested = device.session is not None
        if self._nested:
            device.synchronize()  # earlier launches belong to the outer trace alone
        else:
            device.begin_trace(self.records_per_sm)
            session = Session(device)
            for prepare in Device.at_traces:
                prepare(device, session)
            device.session = session
        self._session: Session = device.session
        self._first, self._begin_ns = Session.next_id, device.clock_ns()
        self._watch = Watch()
        self.result = Trace(np.zeros(0, BLOCK), np.zeros(0, LAUNCH), (), self._facts())
        self.result.recording = True
        return self.result

    def _facts(self) -> DeviceFacts:
        device = self._device
        return DeviceFacts(device.title, device.sm_ids, device.limits.warps, device.capability, versions())

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if not self._nested:
            self._device.session = None
        self._watch.stop()
        if kind is not None and issubclass(kind, Exception):
            # The kernel's own error matters more than its trace, which a lost context could not deliver anyway.
            try:
                self._finish(self._session)
            except Exception:
                self.result.recording = False
        else:
            self._finish(self._session)

    def _finish(self, session: Session) -> None:
        device = self._device
        lines, rings = device.read_trace() if self._nested else device.end_trace()
        tails = lines["tail"]
        used = rings["launch"][:, : int(min(rings.shape[1], tails.max()))]  # rings are large and mostly empty
        session.adopt_replayed(used)
        launches, kernels = session.launches()
        # Records of graphs that were captured elsewhere belong to no known launch.
        used[~np.isin(used, launches["launch"])] = 0
        marks = (Mark(session.begin_ns, np.zeros_like(tails)), Mark(device.clock_ns(), tails))
        decoded = decode(tails, rings, launches, marks)
        blocks = decoded.blocks
        if self._nested:
            # Launches of graphs that were captured earlier have smaller numbers; their times distinguish them.
            own = (blocks["launch"] >= self._first) | (blocks["start_ns"] >= self._begin_ns)
            blocks = blocks[own]
            launches = launches[(launches["launch"] >= self._first) | np.isin(launches["launch"], blocks["launch"])]
        dropped = decoded.dropped + session.unreported
        unseen = self._watch.names - set(kernels)
        facts = self._facts()
        self.result.fill(blocks, launches, kernels, facts, dropped, decoded.unfinished, sorted(unseen))
        self.result.count_work = functools.partial(session.work, launches["launch"])
        self.result.ranges = ranges_of(device.range_events(launches["launch"]), self.result.blocks)


# --- live counts: the numbers of blocks and warps on each SM now, from kernels that report at level `count` -----------

_MASK, _HALF = (1 << WARP_SHIFT) - 1, 1 << (WARP_SHIFT - 1)


@dataclass(frozen=True, slots=True, eq=False)
class Counts:
    """Counters of every SM, read while kernels run. Resident = started - ended."""

    started: NDArray[np.int64]  # blocks, since the device was opened or the latest trace began
    ended: NDArray[np.int64]
    resident_blocks: NDArray[np.int64]
    resident_warps: NDArray[np.int64]
    occupancy: NDArray[np.float64]  # resident warps / the maximum of an SM


def counts(device: Device | None = None) -> Counts:
    """The counters of each SM now: of kernels that report at level `count`, also inside engines. Reading does not wait
    for running kernels. Inside a trace kernels write records instead, and each trace lets the counters begin anew.

    >>> int(counts(Device("virtual:h200")).resident_blocks.sum())
    0
    """
    device = device or Device.current()
    lines = device.counts()
    started, ended = lines["started"], lines["ended"]
    blocks, warps = _resident(started, ended)
    return Counts(
        started=(started & _MASK).astype(np.int64),
        ended=(ended & _MASK).astype(np.int64),
        resident_blocks=blocks,
        resident_warps=warps,
        occupancy=warps / device.limits.warps,
    )


def _resident(started: NDArray[Any], ended: NDArray[Any]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Blocks and warps that started and did not end."""
    # The counters wrap, and the block counts carry into the warp counts above them; the difference of the packed words
    # is not affected. A line may be read between the two counters of a block: then the count is 0, not -1.
    difference = (started - ended).view(np.int64)
    blocks = (difference + _HALF & _MASK) - _HALF
    return np.maximum(blocks, 0), np.maximum((difference - blocks) >> WARP_SHIFT, 0)
