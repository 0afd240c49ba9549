"""Admission: a request that cannot be done in time is refused at once, instead of late.

The core predicts when a request would be done from the profiles of what its policy puts before it. What really happens
is slower by a factor that depends on the host, on kernels that disturb each other, and on a virtual GPU on the CPU
that computes for it. So the factor is learnt, as a high quantile of measured ÷ predicted.
"""

from __future__ import annotations

import math
import time
from typing import Literal

from scheduler import state as st
from scheduler.core_predict import predict_finish
from scheduler.engine import Engine
from scheduler.model import Model
from serving.errors import RefusedError

Mode = Literal["targets", "deadlines", "off"]

QUANTILE = 0.95
STEP = 0.1  # of the logarithm, for one measurement


class Slowdown:
    """A quantile of measured ÷ predicted, followed step by step (stochastic approximation, in the logarithm)."""

    __slots__ = ("_log",)

    def __init__(self) -> None:
        self._log = 0.0

    @property
    def factor(self) -> float:
        return math.exp(self._log)

    def note(self, predicted_ns: float, measured_ns: float) -> None:
        x = math.log(max(measured_ns, 1.0) / max(predicted_ns, 1.0))
        if x > self._log:
            self._log += STEP * QUANTILE
        else:
            # Far below what is believed, the belief is old: an overload has passed.
            self._log -= STEP * ((1 - QUANTILE) if x > self._log - 1.0 else 0.5)


class Admission:
    """`mode`: refuse by the requests' deadlines only, also by their models' targets, or never."""

    def __init__(self, engine: Engine, mode: Mode = "targets") -> None:
        self._engine, self.mode = engine, mode
        self._slowdown: dict[str, Slowdown] = {}

    def check(self, model: Model, row: int, priority: int | None, deadline_ms: float | None) -> float | None:
        """The predicted time in nanoseconds, for `note`; None where there is no limit to keep."""
        limit_ms = deadline_ms if deadline_ms is not None or self.mode != "targets" else model.target_ms
        if limit_ms is None or self.mode == "off":
            return None
        state, now = self._engine.state, time.monotonic_ns()
        deadline_ns = st.NEVER if deadline_ms is None else now + int(deadline_ms * 1e6)
        predicted_ns = max(1, predict_finish(state, row, now, priority, deadline_ns) - now)
        # With nothing before it a request is only refused for what it takes itself; so there is always one to learn by.
        idle = state.g[st.LIVE] == 0
        expected_ms = predicted_ns * 1e-6 * (1.0 if idle else self.slowdown(model.name).factor)
        if expected_ms <= limit_ms:
            return float(predicted_ns)
        kind = "deadline" if deadline_ms is not None else "target"
        raise RefusedError(
            f"model {model.name!r}: it would take {expected_ms:.3g} ms now, and the {kind} is {limit_ms:.3g} ms",
            f"predicted_{kind}",
            retry_after_s=(expected_ms - limit_ms) * 1e-3,
        )

    def note(self, name: str, predicted_ns: float | None, measured_ns: float) -> None:
        """An admitted request is done."""
        if predicted_ns is not None:
            self.slowdown(name).note(predicted_ns, measured_ns)

    def slowdown(self, name: str) -> Slowdown:
        found = self._slowdown.get(name)
        if found is None:
            found = self._slowdown[name] = Slowdown()
        return found
