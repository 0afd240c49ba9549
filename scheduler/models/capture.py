"""Captures: stand-ins for the device while a model's function runs, with clear errors for forbidden operations."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from paellapy.instrument import cache
from paellapy.instrument.device.base import Device
from paellapy.instrument.device.launcher import Capture
from paellapy.instrument.errors import PaellaError
from paellapy.scheduler.core.errors import CaptureError
from paellapy.scheduler.models.guarded_array import REMEDY
from paellapy.scheduler.models.lane_memory import Bump, Lane, aligned
from paellapy.scheduler.models.program import Cuts, Part
from paellapy.scheduler.models.tensors import Arrays, Capturable
from paellapy.scheduler.models.users_line import users_line, users_line_of


class ModelCapture(Capture):
    """A capture on behalf of one model, whose name its errors mention."""

    def __init__(self, model: Capturable) -> None:
        super().__init__()
        self.model = model
        self.launches = 0

    def refuse(self, doing: str) -> None:
        raise CaptureError(f"model {self.model.name!r} {doing} at {users_line()}; {REMEDY}")

    @contextlib.contextmanager
    def letting_through(self) -> Iterator[None]:
        """Lets calls inside the context reach the device itself."""
        self.passing = True
        try:
            yield
        finally:
            self.passing = False


class Counting(ModelCapture):
    """Counts the scratch memory that a run asks for: the size of a lane's arena.

    `computes`: launches run at once, for libraries that would notice if they did not.
    """

    def __init__(self, model: Capturable, device: Device, computes: bool = True) -> None:
        super().__init__(model)
        self.device, self.computes = device, computes
        self.scratch_bytes = 0
        self._keep: list[Any] = []

    def empty(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Any:
        with self.letting_through():
            array = self.device.empty(shape, dtype)
        self._keep.append(array)  # the real arena frees nothing before the end either
        self.scratch_bytes += aligned(int(np.prod(shape, dtype=np.int64)) * dtype.itemsize)
        return array

    def launch(
        self,
        launcher: Any,
        grid: tuple[int, ...],
        values: Sequence[Any],
        block: tuple[int, ...],
        shared_bytes: int,
        part: Part | None,
    ) -> Any:
        self.launches += 1
        if not self.computes:
            return None
        with self.letting_through():
            return launcher(grid, values, block, shared_bytes, part)


class LaneCapture(ModelCapture):
    """A capture into a lane, whose arena provides the scratch memory."""

    def __init__(self, lane: Lane, cuts: Cuts) -> None:
        super().__init__(lane.model)
        self.lane, self.cuts = lane, cuts
        self._bump = Bump(lane.plan.scratch_bytes)

    def empty(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Any:
        try:
            return self.lane.scratch(self._bump, shape, dtype)
        except CaptureError as e:
            raise CaptureError(f"model {self.model.name!r} at {users_line()} {e}") from None

    def next_parts(self, part: Part | None) -> tuple[int, Sequence[Part | None]]:
        """The number of this launch, and its slices. A launch that the user sliced stays as it is."""
        number, self.launches = self.launches, self.launches + 1
        if part is not None or number not in self.cuts:
            return number, [part]
        return number, self.cuts[number]


def code_digest(compiled: Any) -> str:
    return _text_digest(compiled.ptx)


@lru_cache(1024)  # a program launches the same few kernels again and again, on every lane
def _text_digest(text: str) -> str:
    return cache.digest(text)[:16]


@contextlib.contextmanager
def capturing(device: Device, capture: ModelCapture) -> Iterator[None]:
    """Makes `capture` stand in for the device in this thread."""
    device.capture = capture
    try:
        with device:
            yield
    finally:
        device.capture = None


def call_model(model: Capturable, weights: Arrays, inputs: Arrays, outputs: Arrays, batch: int, doing: str) -> None:
    """Runs the model's function; every error it raises names the model."""
    try:
        result = model.fn(weights.copy(), dict(inputs), dict(outputs))
    except CaptureError as e:
        named = str(e) if repr(model.name) in str(e) else f"model {model.name!r} {e}"
        raise CaptureError(named) from e.__cause__
    except Exception as e:
        where = users_line_of(e)
        kind = "" if isinstance(e, PaellaError) else f"{type(e).__name__}: "
        raise CaptureError(f"model {model.name!r} failed at {where} {doing} at batch {batch}: {kind}{e}") from e
    if result is not None:
        raise CaptureError(
            f"model {model.name!r}: fn returned a {type(result).__name__}; write the results into `outputs` and return "
            "None"
        )
