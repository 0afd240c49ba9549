"""Loads a model: rehearse, plan memory, and prepare its programs. The result is ready for the core."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from paellapy.scheduler.backends.base import Backend, device_lock
from paellapy.scheduler.backends.launches import Launches, LoadedModel
from paellapy.scheduler.core.codes import CHOICES
from paellapy.scheduler.core.errors import ModelError
from paellapy.scheduler.core.state import Limits
from paellapy.scheduler.core.tuning import Tuning
from paellapy.scheduler.engine.load_times import LoadTimes
from paellapy.scheduler.engine.preparing import Preparation, Rules
from paellapy.scheduler.engine.residents import Residents
from paellapy.scheduler.models.berths import Berth
from paellapy.scheduler.models.lane_memory import Lane, LanePlan, MemoryPlan, Reservation, plan_lane
from paellapy.scheduler.models.model import Model
from paellapy.scheduler.models.tensors import Arrays
from paellapy.scheduler.models.weight_range import WeightRange


class Noting(dict[str, Any]):
    """Weights that note the order in which a function takes them, because they come to the GPU in this order."""

    def __init__(self, weights: Arrays, taken: dict[str, None] | None = None) -> None:
        super().__init__(weights)
        self._taken = {} if taken is None else taken

    def copy(self) -> Noting:
        return Noting(self, self._taken)

    def __getitem__(self, name: str) -> Any:
        self._taken[name] = None
        return super().__getitem__(name)

    @property
    def order(self) -> list[str]:
        return list(self._taken)

    @property
    def in_other_order(self) -> bool:
        """Whether weights that were taken lie in another order, or behind others that were not."""
        return self.order != list(self)[: len(self._taken)]


class Loader:
    """Loads models onto one backend."""

    # whether to measure the shares of compute and bandwidth that segments use, even if that takes time
    measure_shares = False

    def __init__(
        self, backend: Backend, memory: MemoryPlan, limits: Limits, tuning: Tuning, quantum_ns: float,
        residents: Residents | None = None,
    ) -> None:  # fmt: skip
        self.backend, self.memory, self.limits, self.residents = backend, memory, limits, residents
        self.tuning, self.quantum_ns = tuning, quantum_ns
        self._loads = 0

    def load(self, model: Model, lanes_wanted: int, alone: bool, times: LoadTimes | None = None) -> LoadedModel:
        """`alone`: nothing else runs on the GPU, so timings are undisturbed. `times` receives phase durations."""
        self._check(model)
        with device_lock(self.backend.device), model.preserved():
            return self._load(model, lanes_wanted, alone, times or LoadTimes(model.name))

    def _load(self, model: Model, lanes_wanted: int, alone: bool, times: LoadTimes) -> LoadedModel:
        backend = self.backend
        weights_bytes = model.weights_bytes
        # Reserve weights first: a model whose weights alone do not fit is refused before any of them is copied.
        self.memory.reserve(model.name, weights_bytes, 0, 1)
        later = model.later_batch
        spare = bool(later) and self.residents is None
        sizes = [batch for batch in model.batch if batch not in later]
        lanes: list[Lane] = []
        made: list[list[Launches]] = []
        found: WeightRange | None = None
        try:
            weights, found, (scratch, foreign) = self._rehearsed(model, sizes, times)
            weights_bytes = weights_bytes if found is None else found.held_bytes
            plan = plan_lane(model, scratch, self.limits.segments)
            self.memory.release(model.name)
            reservation, berths = self._reserve(model, weights_bytes, plan, foreign, lanes_wanted, spare)
            with times.phase("memory"):
                for k, berth in enumerate(berths):
                    memory = backend.lane_memory(plan, None if berth is None else berth.memory)
                    lanes.append(Lane(k, model, plan, memory, self._windows(k)))
                    lanes[-1].berth = berth
                    for key, spec in model.ranges.items():  # a batch that is not full runs with the slots' old contents
                        lanes[-1].inputs[key][...] = spec.neutral
            self._loads += 1
            served = lanes[:-1] if spare else lanes
            made += ([] for _ in served)
            loaded = LoadedModel(model, weights, reservation, served, [], made, range=found)
            loaded.later, loaded.spare = dict.fromkeys(later, ""), lanes[-1] if spare else None
            with self._to_itself(berths):
                for batch in sizes:
                    Preparation(self._rules(), loaded, batch, times, alone).make()
                if self.residents is not None:
                    with times.phase("weights"):
                        self.residents.settle(loaded)
        except BaseException:
            self.memory.release(model.name)
            self._free(lanes, made)
            self._forget(model, found)
            raise
        return loaded

    def _rehearsed(
        self, model: Model, sizes: Sequence[int], times: LoadTimes
    ) -> tuple[Arrays, WeightRange | None, tuple[int, int]]:
        """The weights on the GPU, after a first run of every size, and the memory that the runs need."""
        with times.phase("upload"):
            weights, found = self._place(model)
        try:
            noting = Noting(weights)
            with times.phase("rehearse"):
                needed = self.backend.rehearse_all(model, noting, sizes)
            if found is not None and noting.in_other_order:
                with times.phase("upload"):
                    self._forget(model, found)
                    found = None
                    weights, found = self._place(model, noting.order)
        except BaseException:
            self._forget(model, found)
            raise
        return weights, found, needed

    def _place(self, model: Model, order: Sequence[str] = ()) -> tuple[Arrays, WeightRange | None]:
        """The weights on the GPU; where they may come and go, in a range, those named in `order` first."""
        if self.residents is None:
            return self.backend.upload(model), None
        placed = self.residents.place(model, order)
        return placed.weights, placed.range

    def _forget(self, model: Model, found: WeightRange | None) -> None:
        if self.residents is not None:
            self.residents.forget(model.name, found)

    def _to_itself(self, berths: Sequence[Berth | None]) -> contextlib.AbstractContextManager[None]:
        """Keeps other models out of shared lane memory while this model runs to be measured."""
        shared = [each for each in berths if each is not None]
        return contextlib.nullcontext() if self.residents is None else self.residents.berths.kept(shared)

    def _rules(self) -> Rules:
        return Rules(self.backend, self.limits, self.tuning, self.quantum_ns, self.measure_shares)

    def add_size(self, loaded: LoadedModel, batch: int, alone: bool) -> None:
        """Captures another batch size of a model that serves, and whose weights are on the GPU."""
        model = loaded.model
        with device_lock(self.backend.device), model.preserved(), self._with_spare(loaded):
            self.backend.rehearse_all(model, loaded.weights, [batch])
            Preparation(self._rules(), loaded, batch, LoadTimes(model.name), alone).make()

    @contextlib.contextmanager
    def _with_spare(self, loaded: LoadedModel) -> Iterator[None]:
        """Gives the model a spare lane, where memory is too short to keep one for every model."""
        if self.residents is None:
            yield
            return
        like = loaded.lanes[0]
        assert like.berth is not None
        with self.residents.berths.beside(loaded.model, like.berth) as berth:
            memory = self.backend.lane_memory(like.plan, berth.memory)
            loaded.spare = Lane(len(loaded.lanes), loaded.model, like.plan, memory, like.windows)
            try:
                for key, spec in loaded.model.ranges.items():
                    loaded.spare.inputs[key][...] = spec.neutral
                yield
            finally:
                loaded.spare = None
                memory.free()

    def free_spare(self, loaded: LoadedModel) -> None:
        """Frees the memory in which later sizes are captured: none is left."""
        if loaded.spare is not None:
            loaded.spare.memory.free()
            loaded.spare = None
            loaded.reservation = replace(loaded.reservation, lanes=len(loaded.lanes))
            self.memory.note(loaded.model.name, loaded.reservation)

    def _reserve(
        self, model: Model, weights_bytes: int, plan: LanePlan, foreign: int, wanted: int, spare: bool
    ) -> tuple[Reservation, Sequence[Berth | None]]:
        """Reserves memory for lanes: their own, or shared with lanes of other models where weights come and go.
        `spare`: and for one more, to capture in while the others serve.
        """
        # Lanes that take turns share the memory that other libraries allocate.
        lane_bytes = plan.device_bytes + (-(-foreign // (model.lanes or 1)) if model.stateful else foreign)
        if self.residents is None:
            least, most = (model.lanes or 1) + spare, (model.lanes or wanted) + spare
            reservation = self.memory.reserve(model.name, weights_bytes, lane_bytes, most, least)
            return reservation, [None] * reservation.lanes
        berths = self.residents.berths.lanes_for(model, plan.device_bytes, foreign, wanted)
        return self.memory.note(model.name, Reservation(weights_bytes, lane_bytes, len(berths))), berths

    def _check(self, model: Model) -> None:
        n = self.limits
        for what, count, limit in (
            ("batch sizes", len(model.batch), n.sizes),
            ("requests in its largest batch", model.max_batch, n.batch),
            ("inputs", len(model.inputs), n.inputs),
            ("lanes", model.lanes or 1, n.lanes_per_model),
        ):
            if count > limit:
                raise ModelError(f"model {model.name!r} has {count} {what}; the engine takes up to {limit}")

    def _windows(self, lane: int) -> tuple[int, ...]:
        """A selection of windows spread over the GPU, different for each lane and each model."""
        n = self.backend.windows
        choices = min(n, CHOICES)
        return tuple((self._loads + lane + k * n // choices) % n for k in range(choices))

    def unload(self, loaded: LoadedModel) -> None:
        """Frees everything of the model, which must have no launch in flight."""
        self._free(loaded.lanes, loaded.launches)
        if loaded.spare is not None:
            loaded.spare.memory.free()
        loaded.weights.clear()
        self.memory.release(loaded.model.name)
        self._forget(loaded.model, loaded.range)

    def _free(self, lanes: list[Lane], made: list[list[Launches]]) -> None:
        """Frees the launches first, because they write to the lanes' memory."""
        for each in made:
            for launches in each:
                self.backend.release(launches)
        for lane in lanes:
            lane.memory.free()
