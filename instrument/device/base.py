"""One interface for every device: memory, streams, events, launches, reports. `cuda` and `virtual` implement it."""

from __future__ import annotations

import contextvars
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar, Protocol, Self

import numpy as np
from numpy.typing import DTypeLike, NDArray

from paellapy.instrument.arguments import Descriptor, Handlers
from paellapy.instrument.device.launcher import Capture, Launcher
from paellapy.instrument.device.parts import SmLimits
from paellapy.instrument.device.preemption import Flag
from paellapy.instrument.device.range_events import Events
from paellapy.instrument.errors import LaunchError, NoDeviceError
from paellapy.instrument.ptx.compiled import Draft, Source
from paellapy.instrument.ptx.pass_config import PassConfig
from paellapy.instrument.records import Records

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
    capture: Capture | None = None  # set while a function's launches are captured

    def __new__(cls, name: str = "auto") -> Self:
        return cls.open(name)  # type: ignore[no-any-return]

    @classmethod
    def open(cls, name: str = "auto") -> Any:
        """The device called `name`, opened on first use."""
        if name == "auto":
            return cls.default()
        if not isinstance(name, str):
            raise NoDeviceError(f"unknown device {name!r}; use a name such as {', '.join(cls.examples())} or 'auto'")
        kind, _, which = name.partition(":")
        if kind not in cls.kinds:
            raise NoDeviceError(f"unknown device {name!r}; use a name such as {', '.join(cls.examples())} or 'auto'")
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
        raise NoDeviceError("no device found. " + " ".join(errors))

    @classmethod
    def examples(cls) -> list[str]:
        return [f"'{kind}:…'" for kind in cls.kinds]

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
        raise LaunchError(f"{self.name} does not support flags, which preempting launches needs")

    @abstractmethod
    def prepare(self, source: Source, config: PassConfig, pick: Callable[[Sequence[Any]], Sequence[Any]]) -> Launcher:
        """Builds and loads a kernel. `pick` selects, from the bound values, those that are passed to the kernel."""

    def prepare_draft(
        self, draft: Draft, config: PassConfig, pick: Callable[[Sequence[Any]], Sequence[Any]]
    ) -> Launcher:
        """As `prepare`, for a device that can use a kernel before it is fully compiled."""
        return self.prepare(draft.source, config, pick)

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
