"""The results of a simulated cluster."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paellapy.scheduler.core.codes import NEVER
from paellapy.scheduler.core.profiles import ModelProfile
from paellapy.scheduler.core.tables import Table

PARTS = 16


@dataclass(frozen=True, slots=True)
class ClusterResults:
    """The results of one run. `requests` has one row per request (fleet_state.ASKED), in order of arrival."""

    models: tuple[ModelProfile, ...]
    router: str
    gpus: int
    seconds: float
    requests: Table
    events: int

    @property
    def done(self) -> NDArray[np.bool_]:
        found: NDArray[np.bool_] = self.requests["finish_ns"] != NEVER
        return found

    @property
    def lost(self) -> int:
        """The number of requests without an answer."""
        return int((~self.done).sum())

    @property
    def again(self) -> int:
        """The number of requests that were sent more than once."""
        return int((self.requests["sent"] > 1).sum())

    def latency_ms(self, model: str | None = None) -> NDArray[np.float64]:
        """Latencies of the answered requests, of one model or of all."""
        rows = self._rows(model)
        return np.asarray((rows["finish_ns"] - rows["first_ns"]) * 1e-6)

    def _rows(self, model: str | None) -> Table:
        rows = self.requests[self.done]
        if model is None:
            return rows
        return np.asarray(rows[rows["model"] == [each.name for each in self.models].index(model)])

    def slowdown(self) -> NDArray[np.float64]:
        """Latency ÷ the time alone on a GPU with the profiled speed."""
        rows = self._rows(None)
        alone = np.array([each.alone_ns() for each in self.models])
        return np.asarray((rows["finish_ns"] - rows["first_ns"]) / alone[rows["model"]])

    def attainment(self, model: str | None = None) -> float:
        """The fraction of all requests answered within their model's target, or answered at all for models without one.
        """
        met = self._met()
        if model is not None:
            met = met[self.requests["model"] == [each.name for each in self.models].index(model)]
        return float(met.mean()) if len(met) else 1.0

    def attainment_error(self) -> float:
        """The standard error of the attainment, from `PARTS` consecutive parts of the run."""
        parts = [each.mean() for each in np.array_split(self._met(), PARTS) if len(each)]
        return float(np.std(parts, ddof=1) / np.sqrt(len(parts))) if len(parts) > 1 else 0.0

    def _met(self) -> NDArray[np.bool_]:
        rows, target = self.requests, np.array([float(each.target_ns) for each in self.models])
        found: NDArray[np.bool_] = self.done & (rows["finish_ns"] - rows["first_ns"] <= target[rows["model"]])
        return found

    def summary(self) -> dict[str, float]:
        ms = self.latency_ms()
        p50, p99 = np.percentile(ms, (50, 99)) if len(ms) else (float("nan"),) * 2
        slow = float(np.percentile(self.slowdown(), 99)) if len(ms) else float("nan")
        return {
            "requests": len(self.requests), "p50_ms": float(p50), "p99_ms": float(p99), "slowdown_p99": slow,
            "attainment": self.attainment(), "lost": self.lost, "sent_again": self.again,
        }  # fmt: skip

    def __str__(self) -> str:
        found = self.summary()
        return (
            f"{self.router} on {self.gpus} GPUs: {found['requests']:,} requests in {self.seconds:g} s, p50 "
            f"{found['p50_ms']:.2f} ms, p99 {found['p99_ms']:.2f} ms, p99 slowdown {found['slowdown_p99']:.1f}, within "
            f"target {found['attainment']:.1%}, lost {found['lost']}"
        )

    def to_dict(self) -> dict[str, Any]:
        return {"router": self.router, "gpus": self.gpus, "seconds": self.seconds, **self.summary()}
