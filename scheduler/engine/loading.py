"""The models of an engine: loaded, unloaded, profiled, and their weights moved to and from the GPU."""

from __future__ import annotations

import itertools
import threading
import time
from typing import Any

import numpy as np

from paellapy.instrument.device import Device
from paellapy.scheduler.backends.launches import LoadedModel
from paellapy.scheduler.core import codes
from paellapy.scheduler.core.errors import ModelError
from paellapy.scheduler.core.install import remove
from paellapy.scheduler.core.job import READS_SHARES
from paellapy.scheduler.core.profiles import ModelProfile
from paellapy.scheduler.core.state import Limits
from paellapy.scheduler.engine.governed import Governed
from paellapy.scheduler.engine.install import install
from paellapy.scheduler.engine.later_sizes import LaterSizes
from paellapy.scheduler.engine.load_times import LoadTimes, shown
from paellapy.scheduler.engine.loader import Loader
from paellapy.scheduler.engine.request_checks import find_model
from paellapy.scheduler.engine.residents import Residents
from paellapy.scheduler.engine.submitting import submit
from paellapy.scheduler.engine.waiters import Waiter, thread_waiter
from paellapy.scheduler.models.model import Model
from paellapy.scheduler.models.profile import model_profile


class Loading(Governed):
    """An engine that loads models while others run."""

    device: Device
    limits: Limits
    _loading: threading.RLock
    _loader: Loader
    _later: LaterSizes
    _models: dict[str, LoadedModel]
    _segment_shares: bool | None

    def load(self, model: Model) -> None:
        """Compiles, captures, measures and opens a model. Loaded models keep running meanwhile."""
        with self._loading:
            self._check_open()
            if not isinstance(model, Model):
                raise ModelError(f"load() takes a pp.Model, not a {type(model).__name__}")
            if model.resident is False and self._residents is None:
                raise ModelError(
                    f"model {model.name!r}: resident=False has no effect where all weights stay on the GPU: "
                    "create the engine with memory_bytes, or leave resident out"
                )
            with self.outside(repr(model.name)):
                self._models[model.name] = self._load(model)

    def _load(self, model: Model) -> LoadedModel:
        with self._loading:
            if model.name in self._models or model.name in self._jobs or model.name in self._turns:
                raise ModelError(f"a model or a job named {model.name!r} is loaded already; unload it first")
            free = int(np.count_nonzero(self.state.lane["model"] == codes.NONE))
            wanted = min(self.max_active or self.tuning.default_active, self.limits.lanes_per_model, free)
            if free < (model.lanes or 1) or len(self._by_row) >= len(self.state.model):
                raise ModelError(
                    f"no room for model {model.name!r}: {len(self._by_row)} of {len(self.state.model)} models and all "
                    f"but {free} of {len(self.state.lane)} lanes are in use; unload a model, or raise the engine's "
                    "limits"
                )
            reads = bool(self._policy.facts & READS_SHARES)
            self._loader.measure_shares = reads if self._segment_shares is None else self._segment_shares
            times = LoadTimes(model.name)
            with shown(times):
                loaded = self._loader.load(model, wanted, self._is_idle(), times)
                with times.phase("install"):
                    install(self.state, loaded, self._backend.pool(self.state, model.priority))
                    if self._residents is not None:
                        self._residents.add(loaded)
            loaded.load_s = times.seconds
            self._by_row[loaded.row] = loaded
            self._front.command(codes.OPEN_MODEL, loaded.row)
            self._later.add(loaded)
            return loaded

    def unload(self, name: str) -> None:
        """Finishes the model's requests, refuses new ones, and frees its memory. Other models keep running."""
        with self._loading:
            loaded = self._find(name)
            del self._models[name]
            self._close_model(loaded)

    def _close_model(self, loaded: LoadedModel) -> None:
        waiter = Waiter()
        self._front.on_model_closed(loaded.row, waiter.set)
        self._front.command(codes.CLOSE_MODEL, loaded.row)
        self._front.wait(waiter)
        if self._residents is None:
            remove(self.state, loaded.row)
        else:
            self._residents.take_out(loaded)
        self._forget(loaded)

    def _forget(self, loaded: LoadedModel) -> None:
        self._later.forget(loaded)
        del self._by_row[loaded.row]
        self._loader.unload(loaded)

    def prefetch(self, name: str) -> None:
        """Brings a model's weights to the GPU although no request needs them yet; returns when they are there."""
        row = self._find(name).row
        self._managed(name).ask(row, True)

    def evict(self, name: str) -> None:
        """Takes a model's weights off the GPU once none of its requests runs. The next request brings them back."""
        row = self._find(name).row
        self._managed(name).ask(row, False)

    def weights_state(self, name: str) -> str:
        """Where a model's weights are: `resident`, `loading 43 %`, `leaving`, `host` or `disk`."""
        row = self._find(name).row
        return "resident" if self._residents is None else self._residents.state_of(row)

    def _managed(self, name: str) -> Residents:
        if self._residents is None:
            raise ModelError(
                f"model {name!r}: this engine keeps all weights on the GPU; create it with memory_bytes to move them"
            )
        return self._residents

    def try_batch(self, name: str, known_ns: float = 0.0) -> float:
        """Runs a full batch of requests and records its duration (ns), which admission uses as its first estimate.

        `known_ns` is the duration that an earlier engine found: then no batch runs.
        """
        loaded = self._find(name)
        if known_ns:
            self.state.model["trial_ns"][loaded.row] = known_ns
            return known_ns
        model, waiter, done = loaded.model, thread_waiter(), itertools.count(1)
        batch = min(model.max_batch, codes.OWN_ROWS // 2)
        inputs = {key: np.full(spec.shape, spec.neutral, spec.dtype) for key, spec in model.inputs.items()}

        def finish(_: Any) -> None:
            if next(done) == batch:
                waiter.set()

        began = time.monotonic_ns()
        submit(self._front, loaded, [inputs] * batch, self._terms(loaded, None, None, None), [finish] * batch)
        self._front.wait(waiter)
        took = (time.monotonic_ns() - began) * model.max_batch / batch
        self.state.model["trial_ns"][loaded.row] = took
        return took

    def tried_ns(self, name: str) -> float:
        """The duration that `try_batch` recorded last, also of an engine that has failed; 0 if it has not run."""
        loaded = self._models.get(name)
        return 0.0 if loaded is None else float(self.state.model["trial_ns"][loaded.row])

    @property
    def models(self) -> dict[str, Model]:
        """The models that are loaded, by name."""
        return {name: loaded.model for name, loaded in self._models.items()}

    def profile(self, name: str) -> list[Any]:
        """The model's segments and their measured times: one `ProgramProfile` per captured batch size."""
        return list(self._find(name).profiles)

    def model_profile(self, name: str) -> ModelProfile:
        """The facts about a model that simulations need: `pp.simulate([engine.model_profile("mlp")], …)`."""
        loaded = self._find(name)
        return model_profile(loaded.model, loaded.profiles, len(loaded.lanes), self.limits.requests)

    def _find(self, name: str) -> LoadedModel:
        self._check_open()
        return find_model(self._models, name)

    def _row(self, row: int) -> LoadedModel | None:
        return self._by_row.get(row)
