"""One interface for every device: memory, streams, events, launches, reports. `cuda` and `virtual` implement it."""

from __future__ import annotations

import contextlib
import contextvars
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple, Protocol, Self

import numpy as np
from numpy.typing import DTypeLike, NDArray

from paellapy.instrument.arguments import Descriptor, Handlers
from paellapy.instrument.errors import ArgumentError, LaunchError, NoDeviceError
from paellapy.instrument.gpu_model.parts import SmLimits
from paellapy.instrument.ptx.compiled import Compiled, Draft
from paellapy.instrument.ptx.descriptor import PassConfig
from paellapy.instrument.ptx.ranges import Ranges, Sites
from paellapy.instrument.records import MOST_EPOCHS, RANGE_HEAD, RANGE_RECORD, WHOLE_BLOCK, Records

# --- preemption on every device: a flag that launches look at, and a run of some blocks under it ----------------------


class Flag(ABC):
    """A word in the device's memory. Launches made under it are numbered; setting it preempts all launches made so far.

    Blocks of these launches that have not started do not run. Launches made later run, even if the flag is still being
    set.
    """

    def __init__(self) -> None:
        self._epoch = 0  # number of the latest launch
        self._word = 0
        self._highest = 0  # the highest number that it was ever set to

    def next_epoch(self) -> int:
        """The number for the next launch."""
        if self._epoch == MOST_EPOCHS:
            raise LaunchError(
                f"{MOST_EPOCHS} launches were made under one flag, its maximum: make a new flag",
                field="flag", limit=MOST_EPOCHS,
            )
        self._epoch += 1
        return self._epoch

    def set(self) -> None:
        """Preempts the launches made under this flag so far. Returns at once; blocks see the flag a few µs later."""
        self._word = self._highest = self._epoch
        self._write(self._word)

    def clear(self) -> None:
        """Lets blocks run that have not started yet. Blocks that were kept from running stay out."""
        self._word = 0
        self._write(0)

    def catches(self, epoch: int) -> bool:
        """Whether the launch of this number is preempted now."""
        return self._word >= epoch

    def has_caught(self, epoch: int) -> bool:
        """Whether the launch of this number may have been preempted at any time."""
        return self._highest >= epoch

    @abstractmethod
    def _write(self, word: int) -> None:
        """Writes the word to the place where blocks read it."""


@dataclass(frozen=True, slots=True)
class Work:
    """A kernel's launch parameters, without the selection of blocks."""

    grid: tuple[int, int, int]
    values: Sequence[Any]
    stream: Any
    block: tuple[int, ...] = ()
    shared_bytes: int = 0

    @property
    def blocks(self) -> int:
        x, y, z = self.grid
        return x * y * z


class Run(ABC):
    """One launch of some blocks under a flag."""

    epoch: int

    @abstractmethod
    def over(self) -> bool:
        """Whether each of its blocks has ended, or was kept from running."""

    @abstractmethod
    def wait(self) -> None:
        """Waits until it is over."""

    @abstractmethod
    def count_left(self) -> int:
        """The number of its blocks that have not run. For runs that are over."""

    @abstractmethod
    def left(self) -> NDArray[np.int64]:
        """The numbers of these blocks in their grid. For runs that are over."""

    @abstractmethod
    def elapsed_ns(self) -> float:
        """The time from its first block's start to its last block's end. For runs that are over."""


Part = tuple[int, int]  # the first block and the number of blocks
Blocks = Part | Run  # the last: the remaining blocks of another run


# --- launchers: kernels loaded on a device; and captures, which take their launches in place of the device ------------

_MOST_BLOCKS = (2**31 - 1, 65_535, 65_535)  # in x, y and z, on every GPU


def check_grid(kernel: str, grid: Sequence[int]) -> None:
    """Raises ArgumentError for an invalid grid; an empty grid is valid."""
    if any(extent < 0 for extent in grid):
        raise ArgumentError(
            f"kernel {kernel!r}: grid {tuple(grid)} has a negative extent: extents must be at least 0",
            kernel=kernel, field="grid", given=tuple(grid), limit=0,
        )
    if any(extent > most for extent, most in zip(grid, _MOST_BLOCKS, strict=False)):
        most = " × ".join(f"{n:,}" for n in _MOST_BLOCKS)
        raise ArgumentError(
            f"kernel {kernel!r}: grid {tuple(grid)} is too large: a GPU takes {most} blocks at most",
            kernel=kernel, field="grid", given=tuple(grid), limit=most,
        )


Pick = Callable[[Sequence[Any]], Sequence[Any]]  # selects, from the bound values, those that the kernel takes


class Launcher(ABC):
    """A kernel loaded on a device, ready to be launched with bound values."""

    compiled: Compiled
    result: Any = None  # of `kernel[grid](…)` for a Triton kernel

    @abstractmethod
    def __call__(
        self,
        grid: tuple[int, ...],
        values: Sequence[Any],
        block: tuple[int, ...] = (),
        shared_bytes: int = 0,
        part: tuple[int, int] | None = None,
    ) -> Any:
        """Launches on the device's current stream. `part` = (first, count) runs only these blocks of the grid."""

    def under(self, flag: Any, work: Work, blocks: Blocks) -> Run:
        """Launches some blocks under a flag, on the work's own stream. For kernels built with `preempt`."""
        raise LaunchError(f"{type(self).__name__} does not support launches under a flag", field="flag")


class Call(NamedTuple):
    """The arguments of a launcher."""

    grid: tuple[int, ...]
    values: Sequence[Any]
    block: tuple[int, ...]
    shared_bytes: int
    part: Part | None


class Capture(ABC):
    """Stands in for the device in one thread while a function's launches are captured instead of run."""

    def __init__(self) -> None:
        self._thread = threading.get_ident()
        self.passing = False  # set while the capture itself launches
        self.notify_word = 0  # address to which a launch at level `notify` writes, instead of a word of the device

    @property
    def mine(self) -> bool:
        """Whether this thread is being captured; other threads are not affected."""
        return self._thread == threading.get_ident()

    @property
    def active(self) -> bool:
        """Whether the capture handles a call made now in this thread."""
        return not self.passing and self._thread == threading.get_ident()

    @abstractmethod
    def empty(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Any:
        """Memory that the captured work may use each time it is replayed."""

    @abstractmethod
    def launch(self, launcher: Any, call: Call) -> Any:
        """Takes a call of a launcher in place of the device."""

    @abstractmethod
    def refuse(self, doing: str) -> None:
        """Raises an error for an operation that cannot be replayed."""


# --- events of ranges as a device records them: which range began or ended, in which block, and how far through it ----

MOST_BYTES = 1 << 30  # most bytes of records in one trace; with more blocks than fit, each keeps fewer records
RECORDS = 256  # records kept per lane; a record has up to three moments, and a moment one or more events
_FEWEST = 16


@dataclass(frozen=True, slots=True, eq=False)
class Events:
    """Events of one launch, in order within each lane."""

    launch: int
    names: tuple[str, ...]
    block: NDArray[np.uint32]
    warp: NDArray[np.uint16]
    tag: NDArray[np.uint32]
    part: NDArray[np.float64]  # fraction of the block's time that had passed, 0 to 1
    start_lo: NDArray[np.uint32] | None = None  # from the block's record, where a launch may run several times
    overwritten: int = 0

    def at(self, chosen: NDArray[np.bool_]) -> Events:
        return replace(
            self,
            block=self.block[chosen],
            warp=self.warp[chosen],
            tag=self.tag[chosen],
            part=self.part[chosen],
            start_lo=None if self.start_lo is None else self.start_lo[chosen],
        )


@dataclass(frozen=True, slots=True)
class EventLayout:
    """The layout of one launch's records: heads, then `lanes` rings for each of `blocks`, with `records` each."""

    ranges: Ranges
    sites: Sites
    blocks: int
    lanes: int
    records: int

    @classmethod
    def of(cls, ranges: Ranges, sites: Sites, blocks: int, threads: int, records: int = RECORDS) -> EventLayout:
        lanes = ranges.lanes(threads)
        layout = cls(ranges, sites, blocks, lanes, records)
        while layout.nbytes > MOST_BYTES and records > _FEWEST:
            records //= 2
            layout = cls(ranges, sites, blocks, lanes, records)
        return layout

    @property
    def ring_bytes(self) -> int:
        """The size of a ring, and its alignment."""
        return self.records * RANGE_RECORD.itemsize

    @property
    def heads_bytes(self) -> int:
        return self.blocks * self.lanes * RANGE_HEAD.itemsize

    @property
    def nbytes(self) -> int:
        return self.heads_bytes + self.blocks * self.lanes * self.ring_bytes

    @property
    def mask(self) -> int:
        return self.ring_bytes - 1

    def read(self, launch: int, memory: NDArray[np.uint8]) -> Events:
        """The events that a launch's blocks recorded. Blocks that did not run are removed later, by their records."""
        clocks, tags, size = self._site_tables()
        heads = memory[: self.heads_bytes].view(RANGE_HEAD)[::-1]
        rings = memory[self.heads_bytes :].view(RANGE_RECORD).reshape(-1, self.records)
        used, events = heads["used"].astype(np.int64) // RANGE_RECORD.itemsize, heads["events"].astype(np.int64)
        # A block that did not run leaves what was there before.
        wrong = (events < used * min(size, default=0)) | (events > used * max(size, default=0))
        used[wrong] = events[wrong] = 0
        kept = np.minimum(used, self.records)
        lane, place = _expanded(kept)
        found = rings[lane, (used[lane] - kept[lane] + place) & (self.records - 1)]
        known = found["site"] < len(size)  # all, but in a block that did not run
        lane, found = lane[known], found[known]
        row, place = _expanded(size[found["site"]])
        lane, site = lane[row], found["site"][row]
        head = heads[lane // self.lanes * self.lanes]  # the clocks of the block
        clock = found["clocks"][row, clocks[site, place]]
        whole = (head["clock_end"] - head["clock_start"]).astype(float)
        passed = (clock - head["clock_start"]).view(np.int32).astype(float)  # negative before the start
        warp = lane % self.lanes if self.ranges.per_warp else np.full(len(lane), WHOLE_BLOCK)
        return Events(
            launch,
            self.ranges.names,
            (lane // self.lanes).astype(np.uint32),
            warp.astype(np.uint16),
            tags[site, place],
            np.clip(passed / np.maximum(whole, 1), 0, 1),
            head["start_lo"].copy(),
            max(0, int(events.sum()) - len(row)),
        )

    def _site_tables(self) -> tuple[NDArray[np.int64], NDArray[np.uint32], NDArray[np.int64]]:
        """For each site and event its clock and its tag; and the number of events of each site."""
        events = [[(clock, tag) for clock, tags in enumerate(site) for tag in tags] for site in self.sites.moments]
        size = np.array([len(each) for each in events], np.int64)
        table = np.zeros((len(events), max(size, default=0), 2), np.int64)
        for site, each in enumerate(events):
            table[site, : len(each)] = each
        return table[:, :, 0], table[:, :, 1].astype(np.uint32), size


def _expanded(counts: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The numbers of some groups, repeated for each of their members, and the members' numbers.

    >>> [each.tolist() for each in _expanded(np.array([2, 0, 1]))]
    [[0, 0, 2], [0, 1, 0]]
    """
    which = np.repeat(np.arange(len(counts)), counts)
    return which, np.arange(len(which)) - np.repeat(np.cumsum(counts) - counts, counts)


_current: contextvars.ContextVar[Device | None] = contextvars.ContextVar("paellapy_device", default=None)


class Array(Protocol):
    """Memory of a device, typed and shaped. Kernels take it as an argument."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> np.dtype[Any]: ...
    def numpy(self) -> NDArray[Any]: ...


class Event(ABC):
    """A point in a stream."""

    @abstractmethod
    def done(self) -> bool: ...
    @abstractmethod
    def synchronize(self) -> None: ...
    @abstractmethod
    def elapsed_ns(self, earlier: Any) -> float:
        """Nanoseconds between an earlier event and this one."""


class Stream(ABC):
    """An ordered queue of work. `with stream:` makes it the current one."""

    @abstractmethod
    def synchronize(self) -> None: ...
    @abstractmethod
    def wait(self, event: Any) -> None:
        """Makes work submitted from now on start after `event`."""

    @abstractmethod
    def record(self) -> Event: ...
    @abstractmethod
    def __enter__(self) -> Self: ...
    @abstractmethod
    def __exit__(self, *_: object) -> None: ...


class Device(ABC):
    """A GPU, real or virtual: `Device("cuda:0")`, `Device("virtual:h200")`, `Device("auto")`.

    There is one object per device; `with device:` makes it the one kernels run on.
    """

    kinds: ClassVar[dict[str, type[Device]]] = {}
    first: ClassVar[str] = ""  # the meaning of "cuda" without a colon
    _open: ClassVar[dict[str, Device]] = {}
    # Called with the device and the session when a trace begins, so that other launchers can prepare.
    at_traces: ClassVar[list[Callable[[Device, Any], None]]] = []

    name: str
    title: str  # the part's marketing name
    capability: tuple[int, int]
    sm_count: int
    sm_ids: int  # SM numbers in reports are below this; on parts with disabled SMs it may exceed sm_count
    limits: SmLimits
    handlers: Handlers
    session: Any = None  # the active trace, if any
    timing: bool = False  # trials run, whose errors must be those of their own launch
    capture: Capture | None = None  # set while a function's launches are captured

    def __new__(cls, name: str = "auto") -> Self:
        return cls.open(name)  # type: ignore[no-any-return]

    @classmethod
    def open(cls, name: str = "auto") -> Any:
        """The device called `name`, opened on first use."""
        if name == "auto":
            return cls.default()
        kind, _, which = name.partition(":") if isinstance(name, str) else ("", "", "")
        if kind not in cls.kinds:
            examples = ", ".join(f"'{each}:…'" for each in cls.kinds)
            raise NoDeviceError(
                f"unknown device {name!r}; use a name such as {examples} or 'auto'", field="device", given=name
            )
        which = which or cls.kinds[kind].first
        full = f"{kind}:{which}" if which else kind
        if full not in cls._open:
            # Set up here and not in __init__, which Python would run again for every Device(name).
            device = object.__new__(cls.kinds[kind])
            device._setup(which)
            cls._open[full] = device
        return cls._open[full]

    @classmethod
    def opened(cls) -> list[Device]:
        """The devices that are open."""
        return list(cls._open.values())

    @abstractmethod
    def _setup(self, which: str) -> None:
        """Opens the device; `which` is the text after the colon of its name."""

    @classmethod
    def default(cls) -> Device:
        """The first real GPU if there is one, otherwise the first device of another kind."""
        errors = []
        for kind in cls.kinds:
            try:
                return cls.open(kind)  # type: ignore[no-any-return]
            except NoDeviceError as e:
                errors.append(str(e))
        raise NoDeviceError("no device found. " + " ".join(errors), field="device")

    @staticmethod
    def current() -> Device:
        """The device that kernels run on: that of the innermost `with device:`, otherwise the default."""
        device = _current.get()
        if device is None:
            device = Device.default()
            _current.set(device)
        return device

    def __enter__(self) -> Self:
        self._tokens().append(_current.set(self))
        return self

    def __exit__(self, *_: object) -> None:
        _current.reset(self._tokens().pop())

    def _tokens(self) -> list[contextvars.Token[Device | None]]:
        """Of this thread: others may have entered the device at the same time."""
        local = self.__dict__.get("_entered") or self.__dict__.setdefault("_entered", threading.local())
        return local.__dict__.setdefault("tokens", [])  # type: ignore[no-any-return]

    def __repr__(self) -> str:
        return f"<{self.name}: {self.title}, {self.sm_count} SMs, compute capability {self.target[3:]}>"

    @property
    def target(self) -> str:
        """The architecture to compile for, e.g. "sm_90"."""
        return f"sm_{self.capability[0]}{self.capability[1]}"

    # -- memory and order

    @abstractmethod
    def empty(self, shape: int | tuple[int, ...], dtype: DTypeLike = np.float32) -> Array:
        """Uninitialised memory."""

    @abstractmethod
    def array(self, data: NDArray[Any]) -> Array:
        """A copy of `data` in the device's memory."""

    @abstractmethod
    def stream(self, priority: int = 0) -> Stream:
        """A new stream. Larger priorities go first."""

    @abstractmethod
    def current_stream(self) -> Any: ...

    @abstractmethod
    def record(self) -> Event:
        """An event on the current stream."""

    @abstractmethod
    def synchronize(self) -> None:
        """Waits for all work submitted so far."""

    def not_in_capture(self, doing: str) -> None:
        """Refuses an operation that cannot be captured, if this thread is being captured."""
        if self.capture is not None and self.capture.active:
            self.capture.refuse(doing)

    # -- kernels and their reports

    def flag(self) -> Flag:
        """A flag to preempt launches with."""
        raise LaunchError(f"{self.name} does not support flags, which preempting launches needs", field="flag")

    @abstractmethod
    def prepare(self, draft: Draft, config: PassConfig, pick: Pick) -> Launcher:
        """Builds and loads a kernel."""

    evaluates = False  # whether kernels are evaluated from their TTIR

    @abstractmethod
    def counts(self) -> Records:
        """Live counters per SM (records.SM_LINE) of kernels that report at level `count`."""

    @abstractmethod
    def begin_trace(self, records_per_sm: int) -> None:
        """Starts recording blocks."""

    @abstractmethod
    def read_trace(self) -> tuple[Records, Records]:
        """The records so far: counters (records.SM_LINE) per SM, and rings (records.RING_RECORD), SM × slot."""

    @abstractmethod
    def end_trace(self) -> tuple[Records, Records]:
        """Stops recording, and returns the records."""

    def range_events(self, launches: NDArray[np.uint32]) -> Iterable[Events]:
        """The events of ranges that kernels recorded, for these launches of the latest trace."""
        return ()

    def tile(self, descriptor: Descriptor, facts: Any) -> Any:
        """A tensor descriptor in the form that this device's kernels take; `facts` come from Triton's compiler."""
        return descriptor

    @contextlib.contextmanager
    def untraced(self) -> Iterator[None]:
        """Launches inside are trials: they are timed, and are not part of a trace."""
        before = self.session, self.timing
        self.session, self.timing = None, True
        try:
            yield
        finally:
            self.session, self.timing = before

    def is_capturing(self, stream: Any) -> bool:
        """Whether launches on `stream` are recorded for later instead of run."""
        return False

    @abstractmethod
    def clock_ns(self) -> int:
        """The current time on the clock of the device's reports."""

    def host_ns(self) -> int:
        """The current time on the host's clock, which stamps launches."""
        return time.perf_counter_ns()

    def to_device_ns(self, host_ns: int) -> int:
        """Converts a time from `host_ns()` to the clock of the device's reports."""
        return host_ns
