"""A device that launches nothing and records everything, for tests of the steps before a launch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import numpy as np

from paellapy.instrument.device import Device, Event, Launcher, Stream
from paellapy.instrument.errors import LaunchError
from paellapy.instrument.gpu_model.parts import limits_for_capability
from paellapy.instrument.kernels.triton_source import TypeHandlers
from paellapy.instrument.ptx.compiled import Draft, Source
from paellapy.instrument.ptx.descriptor import PassConfig
from paellapy.instrument.records import SM_LINE, Records


@dataclass
class Launch:
    kernel: str
    config: PassConfig
    grid: tuple[int, ...]
    values: list[Any]
    block: tuple[int, ...]
    shared_bytes: int
    part: tuple[int, int] | None
    threads: int | None


@dataclass
class StandInLauncher(Launcher):
    launched = None  # nothing is compiled here

    device: StandInDevice
    source: Source
    config: PassConfig
    pick: Callable[[Sequence[Any]], Sequence[Any]]

    def __call__(
        self,
        grid: tuple[int, ...],
        values: Sequence[Any],
        block: tuple[int, ...] = (),
        shared_bytes: int = 0,
        part: tuple[int, int] | None = None,
    ) -> None:
        if self.device.refuses(self.source):
            raise LaunchError("this kernel needs more than there is", kernel=self.source.name)
        launch = Launch(
            self.source.name, self.config, grid, list(self.pick(values)), block, shared_bytes, part, self.source.threads
        )
        self.device.launches.append(launch)
        self.device.now_ns += self.device.cost_ns(launch)


@dataclass
class StandInEvent(Event):
    at_ns: float

    def done(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass

    def elapsed_ns(self, earlier: StandInEvent) -> float:
        return self.at_ns - earlier.at_ns


@dataclass
class StandInStream(Stream):
    device: StandInDevice

    def synchronize(self) -> None:
        pass

    def wait(self, event: Any) -> None:
        pass

    def record(self) -> StandInEvent:
        return StandInEvent(self.device.now_ns)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass


@dataclass(eq=False, repr=False)
class StandInDevice(Device):
    """Made by `StandInDevice.make()`, since the class itself opens devices by name."""

    launches: list[Launch] = field(default_factory=list)
    lines: Records = field(default_factory=lambda: np.zeros(2, SM_LINE))
    cost_ns: Callable[[Launch], float] = lambda launch: 1.0
    refuses: Callable[[Source], bool] = lambda source: False
    now_ns: float = 0.0

    @classmethod
    def make(cls, **facts: Any) -> StandInDevice:
        device = object.__new__(cls)
        device.__init__(**facts)  # type: ignore[misc]
        device.name, device.title = "stand-in", "Stand-in"
        device.capability, device.limits = (9, 0), limits_for_capability((9, 0))
        device.sm_count = device.sm_ids = len(device.lines)
        device.handlers = TypeHandlers()
        return device

    def _setup(self, which: str) -> None:
        raise NotImplementedError

    def empty(self, shape: Any, dtype: Any = np.float32) -> Any:
        return np.empty(shape, dtype)

    def array(self, data: Any) -> Any:
        return data.copy()

    def stream(self, priority: int = 0) -> StandInStream:
        return StandInStream(self)

    def current_stream(self) -> int:
        return 0

    def record(self) -> Any:
        return self.stream().record()

    def synchronize(self) -> None:
        pass

    def prepare(self, draft: Draft, config: PassConfig, pick: Any) -> StandInLauncher:
        return StandInLauncher(self, draft.source, config, pick)

    def counts(self) -> Records:
        return self.lines

    def begin_trace(self, records_per_sm: int) -> None:
        pass

    def read_trace(self) -> tuple[Records, Records]:
        raise NotImplementedError

    def end_trace(self) -> tuple[Records, Records]:
        raise NotImplementedError

    def clock_ns(self) -> int:
        return int(self.now_ns)
