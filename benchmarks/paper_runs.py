"""Systems and runs of the papers' experiments: engines with loaded models, offered loads, and their results."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from engine_load import Generator, Run
from gpu_clock import gpu_state
from gpu_probe import probe
from numpy.typing import NDArray
from paper_models import VARIANTS, Kind

from paellapy.scheduler.core import codes
from paellapy.scheduler.core.profiles import ModelProfile
from paellapy.scheduler.core.state import Limits
from paellapy.scheduler.core.tuning import Tuning
from paellapy.scheduler.engine.engine import Engine
from paellapy.scheduler.models.profile import model_profile
from paellapy.scheduler.policies.policy import Policy


@dataclass(frozen=True, slots=True)
class Setup:
    """How an engine is set up; systems that differ in policy only share one."""

    batch: tuple[int, ...]
    instances: int
    active: int | None = 8
    quantum_us: float = 100.0
    segments: int = 256
    queues: int = 32  # hardware queues of the process (CUDA_DEVICE_MAX_CONNECTIONS)
    windows: int = 0  # of SMs
    by_share: bool = False  # as many instances in all, more for models that are asked for more often

    def instances_of(self, share: NDArray[np.float64]) -> list[int]:
        if not self.by_share:
            return [self.instances] * len(share)
        spare = (self.instances - LEAST_INSTANCES) * len(share)
        return [LEAST_INSTANCES + round(spare * each) for each in share.tolist()]


TUNING = Tuning.for_part("h200")
LEAST_INSTANCES = 2
PACE_MODELS, PACE_LAUNCHES = 5, 9  # 25 ms for those of figure 11
# A stream per job with whole graphs; a dynamic batcher has one instance of each model, which takes what is queued.
PLAIN = Setup((1,), 12)
DEFAULTS = Setup((1,), 12, queues=8)  # as CUDA has it when nobody says otherwise
BATCHED = Setup((1, 2, 4, 8, 16, 32), 5, by_share=True)
BATCHER = Setup((1, 2, 4, 8, 16, 32), 1)
KERNELS = Setup((1,), 4, quantum_us=1.0, segments=1024)
WINDOWS = replace(PLAIN, windows=8, quantum_us=TUNING.windows_quantum_us)
BATCHED_WINDOWS = replace(BATCHED, windows=8, quantum_us=TUNING.windows_quantum_us)

SETUPS = {
    "plain": PLAIN, "defaults": DEFAULTS, "batched": BATCHED, "batcher": BATCHER, "kernels": KERNELS,
    "windows": WINDOWS, "batched_windows": BATCHED_WINDOWS,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class System:
    """A policy on a setup; `active`: jobs at once, a number of them or (a float) what they may demand together."""

    setup: Setup
    policy: str
    active: int | float | None = None  # None: the policy's own


SYSTEMS = {
    "one stream": System(PLAIN, "serial"),
    "streams": System(DEFAULTS, "streams"),
    "streams, 32 queues": System(PLAIN, "streams"),
    "srpt, 8 active": System(PLAIN, "srpt", 8),
    "edf, 8 active": System(PLAIN, "edf", 8),
    "srpt": System(PLAIN, "srpt", TUNING.demand_limit),
    "edf": System(PLAIN, "edf", TUNING.demand_limit),
    "slack": System(PLAIN, "slack", TUNING.demand_limit),
    "paella": System(PLAIN, "paella", TUNING.demand_limit),
    "hrrn": System(PLAIN, "hrrn", TUNING.demand_limit),
    "dynamic batcher": System(BATCHER, "streams"),
    "srpt, batches": System(BATCHED, "srpt", TUNING.demand_limit),
    "edf, batches": System(BATCHED, "edf", TUNING.demand_limit),
    "slack, batches": System(BATCHED, "slack", TUNING.demand_limit),
    "paella, batches": System(BATCHED, "paella", TUNING.demand_limit),
    "hrrn, batches": System(BATCHED, "hrrn", TUNING.demand_limit),
    "srpt, windows": System(WINDOWS, "srpt", TUNING.demand_limit),
    "slack, windows": System(WINDOWS, "slack", TUNING.demand_limit),
    "slack, batches, windows": System(BATCHED_WINDOWS, "slack", TUNING.demand_limit),
    "hrrn, batches, windows": System(BATCHED_WINDOWS, "hrrn", TUNING.demand_limit),
    "kernel by kernel, srpt": System(KERNELS, "srpt", 8),  # last: it takes longest
}


class Loaded:
    """An engine with models, and the times each takes alone."""

    def __init__(
        self,
        device: str,
        kinds: Sequence[Kind],
        setup: Setup,
        priorities: Sequence[int] | None = None,
        references: dict[str, tuple[NDArray[Any], float]] | None = None,
        shares: bool = False,
    ) -> None:
        self.kinds, self.setup = kinds, setup
        limits = Limits(segments=setup.segments)
        self.engine = Engine(
            device,
            max_active=setup.active,
            quantum_us=setup.quantum_us,
            limits=limits,
            sm_partitions=setup.windows,
            segment_shares=shares,
        )
        self.priorities = list(priorities or [0] * len(kinds))
        where = "cuda" if device.startswith("cuda") else "cpu"
        share = np.array([kind.share for kind in kinds])
        self.share = share / share.sum() if share.sum() else np.full(len(kinds), 1 / len(kinds))
        for kind, priority, instances in zip(kinds, self.priorities, setup.instances_of(self.share), strict=True):
            self.engine.load(kind.model(setup.batch, instances, priority, where))
        names = [kind.label for kind in kinds]
        self.alone_ns = np.array([self.engine.profile(name)[0].whole_ns for name in names])
        self.inputs = [kind.inputs() for kind in kinds]
        self.generator = Generator(self.engine, names, self.inputs)
        found = [references[kind.label] if references is not None else kind.expected(where) for kind in kinds]
        self.expected, self.rounding = [each for each, _ in found], [rounding for _, rounding in found]
        self.checked = self.wrong = 0
        self.launches = self.confined = 0  # of the last run, in all and to windows of SMs

    def check(self, run: Run) -> None:
        """Every output against the module's own in eager mode: within 2 % of the largest, or, where fp16 itself is
        further than that from fp32, as near as that.
        """
        for m, kind in enumerate(self.kinds):
            rows = np.flatnonzero((run.model == m) & (run.status == codes.OK))
            if not len(rows):
                continue
            wanted = self.expected[m][run.which[rows]].reshape(len(rows), -1)
            spec = self.generator.loaded[m].model.outputs
            dtype = next(iter(spec.values())).dtype
            found = run.outputs[rows][:, : wanted.shape[1] * dtype.itemsize].copy().view(dtype).astype(np.float32)
            scale = np.abs(wanted).max() + 1e-6
            bad = ~(np.abs(found - wanted).max(axis=1) <= max(0.02 * scale, self.rounding[m]))
            self.checked += len(rows)
            self.wrong += int(bad.sum())
            if bad.any():
                worst = float(np.abs(found - wanted).max() / scale)
                print(f"{kind.label}: {int(bad.sum())} of {len(rows)} outputs wrong, by up to {worst:.3f} of the scale")

    def mix(self, rng: np.random.Generator, n: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        return rng.choice(len(self.kinds), n, p=self.share).astype(np.int64), rng.integers(0, VARIANTS, n)

    def offer(
        self,
        policy: str | Policy,
        at_ns: NDArray[np.int64],
        model: NDArray[np.int64],
        which: NDArray[np.int64],
        active: int | float | None = None,
        **more: Any,
    ) -> Run:
        self.engine.set_policy(policy)
        state = self.engine.state
        if isinstance(active, float):
            state.core["max_active"][0], state.core["demand_limit"][0] = len(state.instance), active
        elif active is not None:
            state.core["max_active"][0], state.core["demand_limit"][0] = active, np.inf
        before = self._counts()
        run = self.generator.run(at_ns, model, which, priority=self.priorities, **more)
        self.launches, self.confined = (self._counts() - before).tolist()
        self.check(run)
        return run

    def _counts(self) -> NDArray[np.int64]:
        core = self.engine.state.core[0]
        return np.array([core["launches"], core["confined_launches"]])

    def saturate(self, system: System, n: int, outstanding: int, seed: int) -> Run:
        model, which = self.mix(np.random.default_rng(seed), n)
        at = np.zeros(n, np.int64)
        return self.offer(system.policy, at, model, which, system.active, outstanding=outstanding)

    def pace(self) -> dict[str, Any]:
        """How fast the GPU is now, where it is one: times of single launches as measured first ÷ those of now, then its
        clock, and what probes of it say.
        """
        if not self.engine.device.name.startswith("cuda"):
            return {}
        some = range(min(len(self.kinds), PACE_MODELS))
        now = [float(np.median(self.generator.alone_ns(m, 0, PACE_LAUNCHES, copied=False))) for m in some]
        pace = [float(self.alone_ns[m] / ns) for m, ns in zip(some, now, strict=True)]
        return {"pace": pace, **gpu_state(), **probe().look()}

    def summary(self, run: Run) -> dict[str, Any]:
        """Latencies as slowdown (÷ alone at batch 1), of what was answered."""
        good = run.status == codes.OK
        slow = run.latency_ns / self.alone_ns[run.model]
        slow_ok = slow[good] if good.any() else np.array([np.nan])
        return {
            "offered": len(run.model),
            "answered": int(good.sum()),
            "throughput": run.throughput,
            "mean_slowdown": float(slow_ok.mean()),
            "p50_slowdown": float(np.quantile(slow_ok, 0.5)),
            "p99_slowdown": float(np.quantile(slow_ok, 0.99)),
            "within_4x": float((good & (slow <= 4)).mean()),
            "generator_pause_us": run.generator_pause_ns / 1e3,
            "core_pause_us": run.core_pause_ns / 1e3,
            "longest_launch_us": run.longest_launch_ns / 1e3,
            "longest_copy_us": run.longest_copy_ns / 1e3,
            "launches": self.launches,
            "confined_launches": self.confined,
            "mean_batch": float(run.batch[good].mean()) if good.any() else 0.0,
            **{
                f"p{percent}_us": {
                    kind.label: float(np.quantile(run.latency_ns[good & (run.model == m)], percent / 100)) / 1e3
                    for m, kind in enumerate(self.kinds)
                    if (good & (run.model == m)).any()
                }
                for percent in (50, 99)
            },
        }

    def profiles(self) -> list[ModelProfile]:
        """What was measured when the models were loaded: all that the virtual twin knows of them."""
        found = []
        for loaded in self.generator.loaded:
            name = loaded.model.name
            found.append(
                model_profile(
                    loaded.model, self.engine.profile(name), len(loaded.instances), self.engine.limits.requests
                )
            )
        return found

    def close(self) -> None:
        self.engine.close()
