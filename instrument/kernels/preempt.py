"""`kernel.preemptible[grid](…)`: a launch that can be stopped and resumed; every block runs exactly once.

    launch = kernel.preemptible[grid](x, out, n)
    launch.preempt()     # blocks that have not started will not run
    launch.left          # the numbers of these blocks, once they are known
    launch.resume()      # runs them
    launch.synchronize()

Work that is submitted to the stream behind such a launch starts when the launch is over, preempted or not. Submit work
that needs its results once it is `done`, or under the same flag: then it is preempted too, and resumed after it.
"""

from __future__ import annotations

import functools
import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from paellapy.instrument.device.base import Blocks, Device, Flag, Launcher, Part, Run, Work
from paellapy.instrument.errors import ArgumentError, LaunchError

# --- the largest slice that frees the GPU in time: a bound on turnaround, after Tally (ASPLOS'25) ---------------------
# These are pure functions over a kernel's profile. A slice consists of whole waves, because a smaller slice leaves SMs
# idle: a GEMM on an H200 was 26 % slower in slices of less than a wave.

# Time of a wave whose blocks only look at their flag and leave. An estimate: two round trips to L2 and a block's start.
EXIT_NS = 1500.0


@dataclass(frozen=True, slots=True)
class Wave:
    """A kernel's profile: the blocks that the GPU holds at once, and their duration.

    `exit_ns` is the time of a wave whose blocks are preempted.
    """

    blocks: int
    time_ns: float
    exit_ns: float = EXIT_NS

    def __post_init__(self) -> None:
        if self.blocks < 1 or not 0 < self.time_ns < math.inf or not 0 < self.exit_ns < math.inf:
            raise ArgumentError(
                f"{self}: a wave must have at least one block, and times that are finite and above 0",
                field="wave", given=self,
            )

    @classmethod
    def measured(cls, time_ns: float, blocks: int, wave_blocks: int) -> Wave:
        """A profile from the time of a launch alone on the GPU.

        >>> Wave.measured(time_ns=200_000, blocks=1000, wave_blocks=264)
        Wave(blocks=264, time_ns=50000.0, exit_ns=1500.0)
        """
        return cls(wave_blocks, time_ns / -(-blocks // wave_blocks))

    def drain_ns(self, blocks: int) -> float:
        """The longest time until a slice whose flag was set is gone: one wave ends, and the other blocks leave."""
        return self.time_ns + -(-blocks // self.blocks) * self.exit_ns


@dataclass(frozen=True, slots=True)
class Turnaround:
    """A bound on the time from setting a launch's flag until the GPU is free of it, in whole waves of its kernel.

    >>> Turnaround(us=100).parts(10_240, Wave(264, time_ns=50_000))
    ((0, 5280), (5280, 4960))
    """

    us: float

    def __post_init__(self) -> None:
        if not 0 < self.us < math.inf:
            raise ArgumentError(
                f"us={self.us!r}: a turnaround must be a finite number of microseconds above 0",
                field="us", given=self.us,
            )

    def blocks(self, wave: Wave) -> int:
        """The largest slice that keeps the bound, in whole waves; one wave if none does."""
        return max(1, int((self.us * 1e3 - wave.time_ns) // wave.exit_ns)) * wave.blocks

    def parts(self, total: int, wave: Wave, first: int = 0) -> tuple[Part, ...]:
        """The slices of a launch of `total` blocks: as few as keep the bound, and as equal as whole waves allow."""
        pieces = -(-total // self.blocks(wave))
        each = -(-total // (pieces * wave.blocks)) * wave.blocks if pieces else 0
        return tuple((first + at, min(each, total - at)) for at in range(0, total, each)) if total else ()


@dataclass(frozen=True, slots=True)
class Prepared:
    """A kernel with its arguments: its launchers, and the measurements of its waves."""

    name: str
    work: Work
    launcher: Callable[[bool], Launcher]  # launches the whole grid, or (True) any of its blocks
    wave_blocks: Callable[[], int]  # blocks that the GPU holds at once
    waves: dict[Any, Wave]  # measured so far
    key: Any  # key of this kernel in `waves`
    arguments: Any  # kept alive as long as blocks may read them


class Source(Protocol):
    """A kernel that can be launched under a flag."""

    def prepare_preemptible(self, device: Device, configuration: Any, args: Any, kwargs: Any) -> Prepared: ...


@dataclass(frozen=True, slots=True)
class Preemptible:
    """A kernel whose launches can be preempted: `preemptible[grid](…)`.

    `preemptible(flag=…)` launches under a given flag, which many launches may share; without it, each launch has its
    own. `preemptible(turnaround=…)` launches in slices, so that the GPU is free within that time.
    """

    kernel: Source
    flag: Flag | None = None
    turnaround: Turnaround | None = None

    def __call__(self, flag: Flag | None = None, turnaround: Turnaround | None = None) -> Preemptible:
        return replace(self, flag=flag or self.flag, turnaround=turnaround or self.turnaround)

    def __getitem__(self, configuration: Any) -> Callable[..., PreemptibleLaunch]:
        return functools.partial(self._launch, configuration)

    def _launch(self, configuration: Any, /, *args: Any, **kwargs: Any) -> PreemptibleLaunch:
        device = Device.current()
        device.not_in_capture("launches a kernel that may be preempted")
        prepared = self.kernel.prepare_preemptible(device, configuration, args, kwargs)
        return PreemptibleLaunch(prepared, self.flag or device.flag(), self.turnaround)


class PreemptibleLaunch:
    """A launch that can be preempted and resumed any number of times. Made by `kernel.preemptible[grid](…)`.

    A launch with a turnaround continues with its next slice when `done` is read or the launch is waited for.
    """

    def __init__(self, prepared: Prepared, flag: Flag, turnaround: Turnaround | None) -> None:
        self._prepared, self.flag, self._turnaround = prepared, flag, turnaround
        self._run: Run | None = None  # the current run, or the last one if it was preempted
        self._parts: deque[Part] = deque()  # slices not launched yet
        total = prepared.work.blocks
        if total:
            self._parts.extend(self._slices(0, total))
            self._start(self._parts.popleft())

    def __repr__(self) -> str:
        return f"<launch of {self._prepared.name}, preemptible: {'done' if self.done else 'not done'}>"

    def preempt(self) -> None:
        """Keeps blocks that have not started from running. Returns at once; blocks see the flag a few µs later.

        Other launches under the same flag are preempted too.
        """
        self.flag.set()

    def resume(self) -> None:
        """Runs the remaining blocks, on the stream of the launch."""
        if self._run is not None and not self._run.over():
            if not self.flag.catches(self._run.epoch):
                raise LaunchError(
                    f"the launch of {self._prepared.name!r} is running, so there is nothing to resume: preempt() it "
                    "first", kernel=self._prepared.name, field="resume"
                )
            self._run.wait()  # its remaining blocks only look at the flag and leave
        self._go_on(held=False)

    @property
    def done(self) -> bool:
        """Whether every block has run."""
        if self._run is not None and self._run.over():
            self._go_on(held=True)
        return self._run is None

    @property
    def left(self) -> NDArray[np.int64]:
        """The numbers of the blocks that have not run, in order. Waits for the blocks that have started."""
        found = [np.arange(first, first + count) for first, count in self._parts]
        if self._run is not None:
            self._run.wait()
            found.append(self._run.left())
        return np.sort(np.concatenate(found)) if found else np.zeros(0, np.int64)

    def synchronize(self) -> None:
        """Waits until every block has run. Raises LaunchError if the launch is preempted, since it would wait for ever.
        """
        while self._run is not None:
            self._run.wait()
            before = self._run
            self._go_on(held=True)
            if self._run is before:
                raise LaunchError(
                    f"the launch of {self._prepared.name!r} was preempted with {len(self.left)} blocks left: "
                    "call resume() before synchronize()",
                    kernel=self._prepared.name, field="synchronize", given=len(self.left),
                )

    def _go_on(self, *, held: bool) -> None:
        """After a run: launches its remaining blocks, or the next slice. `held`: not if the run was preempted."""
        run = self._run
        if run is None:
            return
        unfinished = run.count_left() > 0
        if not unfinished:
            self._learn(run)
        if held and (unfinished or (self._parts and self.flag.catches(run.epoch))):
            return
        if unfinished:
            self._start(run)
        elif self._parts:
            self._start(self._parts.popleft())
        else:
            self._run = None

    def _start(self, blocks: Blocks) -> None:
        prepared = self._prepared
        whole = blocks == (0, prepared.work.blocks)
        self._size = blocks[1] if isinstance(blocks, tuple) else blocks.count_left()
        self._run = prepared.launcher(not whole).under(self.flag, prepared.work, blocks)

    def _slices(self, first: int, total: int) -> tuple[Part, ...]:
        """Slices that keep the turnaround. A kernel that was not measured yet starts with one wave."""
        if self._turnaround is None:
            return ((first, total),)
        wave = self._prepared.waves.get(self._prepared.key)
        if wave is not None:
            return self._turnaround.parts(total, wave, first)
        one = min(total, self._prepared.wave_blocks())
        return ((first, one), (first + one, total - one)) if total > one else ((first, one),)

    def _learn(self, run: Run) -> None:
        """Measures a wave by a run that was not preempted, and cuts the remaining blocks accordingly."""
        prepared = self._prepared
        if self._turnaround is None or prepared.key in prepared.waves:
            return
        elapsed_ns = run.elapsed_ns()
        if elapsed_ns > 0:
            prepared.waves[prepared.key] = Wave.measured(elapsed_ns, self._size, prepared.wave_blocks())
        rest = [*self._parts]
        self._parts = deque(part for first, count in rest for part in self._slices(first, count))
