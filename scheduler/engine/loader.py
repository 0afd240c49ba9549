"""Loads a model: rehearse, plan memory, capture, measure, cut. The result is ready for the core."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import replace

from paellapy.scheduler.backends.base import Backend, device_lock
from paellapy.scheduler.backends.launches import Launches, LoadedModel
from paellapy.scheduler.core.codes import CHOICES
from paellapy.scheduler.core.demand import TOGETHER
from paellapy.scheduler.core.errors import ModelError
from paellapy.scheduler.core.state import Limits
from paellapy.scheduler.core.tuning import Tuning
from paellapy.scheduler.engine.load_times import LoadTimes
from paellapy.scheduler.engine.residents import Residents
from paellapy.scheduler.models import profile as profiles
from paellapy.scheduler.models.berths import Berth
from paellapy.scheduler.models.lane_memory import Lane, LanePlan, MemoryPlan, Reservation, plan_lane
from paellapy.scheduler.models.model import Model
from paellapy.scheduler.models.profile import ProgramProfile
from paellapy.scheduler.models.program import Cuts, Marks, Program, last_kernels
from paellapy.scheduler.models.segments import cut, plan_slices
from paellapy.scheduler.models.weight_range import WeightRange, in_order, needs_of

_REPEATS = 15
_BRIEF_NS = 10e6  # a program that takes longer in one piece is not run merely to warm up its first launch
_ROUNDS = 3  # rounds of TOGETHER lanes at once, to measure the throughput of a full GPU

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
        lanes: list[Lane] = []
        made: list[list[Launches]] = []
        found: WeightRange | None = None
        try:
            with times.phase("upload"):
                if self.residents is None:
                    weights = backend.upload(model)
                else:
                    placed = self.residents.place(model)
                    weights, found = placed.weights, placed.range
                    weights_bytes = weights_bytes if found is None else found.held_bytes
            with times.phase("rehearse"):
                scratch, foreign = backend.rehearse_all(model, weights)
            plan = plan_lane(model, scratch, self.limits.segments)
            self.memory.release(model.name)
            reservation, berths = self._reserve(model, weights_bytes, plan, foreign, lanes_wanted)
            with times.phase("memory"):
                for k, berth in enumerate(berths):
                    memory = backend.lane_memory(plan, None if berth is None else berth.memory)
                    lanes.append(Lane(k, model, plan, memory, self._windows(k)))
                    lanes[-1].berth = berth
                    for key, spec in model.ranges.items():  # a batch that is not full runs with the slots' old contents
                        lanes[-1].inputs[key][...] = spec.neutral
            self._loads += 1
            made += ([] for _ in lanes)
            loaded = LoadedModel(model, weights, reservation, lanes, [], made, range=found)
            with self._to_itself(berths):
                for batch in model.batch:
                    with contextlib.ExitStack() as captured:
                        _Program(self, loaded, batch, times, captured).make(alone)
                if self.residents is not None:
                    with times.phase("weights"):
                        self.residents.settle(loaded)
        except BaseException:
            self.memory.release(model.name)
            self._free(lanes, made)
            if self.residents is not None:
                self.residents.forget(model.name, found)
            raise
        return loaded

    def _to_itself(self, berths: Sequence[Berth | None]) -> contextlib.AbstractContextManager[None]:
        """Keeps other models out of shared lane memory while this model runs to be measured."""
        shared = [each for each in berths if each is not None]
        return contextlib.nullcontext() if self.residents is None else self.residents.kept(shared)

    def _reserve(
        self, model: Model, weights_bytes: int, plan: LanePlan, foreign: int, wanted: int
    ) -> tuple[Reservation, Sequence[Berth | None]]:
        """Reserves memory for lanes: their own, or shared with lanes of other models where weights come and go."""
        # Lanes that take turns share the memory that other libraries allocate.
        lane_bytes = plan.device_bytes + (-(-foreign // (model.lanes or 1)) if model.stateful else foreign)
        if self.residents is None:
            least = model.lanes or 1
            reservation = self.memory.reserve(model.name, weights_bytes, lane_bytes, model.lanes or wanted, least)
            return reservation, [None] * reservation.lanes
        berths = self.residents.lanes_for(model, plan.device_bytes, foreign, wanted)
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
        loaded.weights.clear()
        if self.residents is not None:
            self.residents.forget(loaded.model.name, loaded.range)
        self.memory.release(loaded.model.name)

    def _free(self, lanes: list[Lane], made: list[list[Launches]]) -> None:
        """Frees the launches first, because they write to the lanes' memory."""
        for each in made:
            for launches in each:
                self.backend.release(launches)
        for lane in lanes:
            lane.memory.free()


class _Program:
    """One batch size of a model while it is prepared for all lanes. `captured` discards the capture on any exit."""

    def __init__(
        self, loader: Loader, loaded: LoadedModel, batch: int, times: LoadTimes, captured: contextlib.ExitStack
    ) -> None:
        self._backend, self._loader, self._loaded = loader.backend, loader, loaded
        self._batch, self._times, self._captured = batch, times, captured
        own_us = loaded.model.quantum_us
        self._quantum_ns = loader.quantum_ns if own_us is None else own_us * 1e3

    def make(self, alone: bool) -> None:
        """Captures, cuts and measures the program; measurements that are known already are not repeated."""
        backend, loaded = self._backend, self._loaded
        first = self._capture(loaded.lanes[0], {})
        where = profiles.key(first.content(), backend.fingerprint(), self._quantum_ns)
        known = profiles.load(where)
        if known is None or known.batch != self._batch:
            known = self._plan(first, alone)
            if alone:  # a measurement beside other work serves this load only and is not stored
                profiles.store(where, known)
        sliced = self._capture(loaded.lanes[0], known.cuts) if known.cuts else first
        if loaded.range is not None:
            least, most = zip(*backend.weight_ends(sliced, loaded.range), strict=True)
            known = known.with_needs(needs_of(most, known.bounds))
            loaded.least_needs.append([tuple(needs_of(each, known.bounds)) for each in (least, in_order(least))])
        marks = last_kernels(sliced.nodes, known.bounds)
        confined = known.stretch_in_window <= self._loader.tuning.most_window_stretch
        for k, lane in enumerate(loaded.lanes):
            program = self._again(sliced, lane, known.cuts, marks) if k > 0 or marks else sliced
            with self._times.phase("cut"):
                loaded.launches[k].append(backend.cut(program, known.bounds, lane, confined))
            with self._times.phase("first launches"):
                backend.launch_first(loaded.launches[k][-1], wholes=known.whole_ns < _BRIEF_NS)
            if k:
                backend.discard(program)
        crowd = [launches[-1] for launches in loaded.launches[: 1 if loaded.model.stateful else TOGETHER]]
        # a measurement with fewer lanes overestimates the demand of a larger crowd
        if alone and known.together < len(crowd) > 1:
            with self._times.phase("measure"):
                demand = backend.saturated_ns(crowd, _ROUNDS) / known.whole_ns
            known = replace(known, demand=min(max(demand, 0.01), 1.0), together=len(crowd))
            profiles.store(where, known)
        wanted = backend.shares_are_free or (alone and self._loader.measure_shares)
        if wanted and not known.shares:
            with self._times.phase("measure"):
                known = self._with_shares(known)
            if alone:
                profiles.store(where, known)
        loaded.profiles.append(known)

    def _with_shares(self, known: ProgramProfile) -> ProgramProfile:
        alone_ns = [each.time_ns for each in known.segments]
        found = self._backend.segment_shares(self._loaded.launches[0][-1], alone_ns)
        segments = tuple(
            replace(each, compute=compute, memory=memory)
            for each, (compute, memory) in zip(known.segments, found, strict=True)
        )
        return replace(known, segments=segments, shares=True)

    def _capture(self, lane: Lane, cuts: Cuts, marks: Marks | None = None) -> Program:
        with self._times.phase("capture"):
            program = self._backend.capture(lane, self._loaded.weights, self._batch, cuts, marks)
        self._captured.callback(self._backend.discard, program)
        return program

    def _again(self, program: Program, lane: Lane, cuts: Cuts, marks: Marks) -> Program:
        """The program of lane 0, made for another lane."""
        with self._times.phase("capture"):
            found = self._backend.captured_again(program, self._loaded.lanes[0], lane, marks)
        if found is None:
            return self._capture(lane, cuts, marks)
        self._captured.callback(self._backend.discard, found)
        return found

    def _plan(self, first: Program, alone: bool) -> ProgramProfile:
        """Decides where to cut, from the times of the nodes, and measures the resulting segments."""
        backend = self._backend
        program, times = first, self._node_times_ns(first)
        waves, loader = backend.wave_blocks(first), self._loader
        cuts = plan_slices(first.nodes, times, waves, self._quantum_ns, loader.tuning.slice_quanta)
        if cuts:
            program = self._capture(self._loaded.lanes[0], cuts)
            times = self._node_times_ns(program)
        bounds = self._bounds(times)
        with self._times.phase("cut"):
            launches = backend.cut(program, bounds, self._loaded.lanes[0], confine=backend.windows > 0)
        try:
            with self._times.phase("measure"):
                segment_ns, whole_ns, window_ns = backend.segment_times_ns(launches, _REPEATS, alone)
        finally:
            backend.release(launches)
        waves, limits = backend.wave_blocks(program), backend.device.limits
        segments = tuple(
            profiles.segment_profile(program.nodes[a:b], waves[a:b], t, limits)
            for (a, b), t in zip(bounds, segment_ns, strict=True)
        )
        return ProgramProfile(
            self._batch, tuple(bounds), segments, whole_ns, cuts, program.chain, window_ns=window_ns
        )

    def _node_times_ns(self, program: Program) -> list[float]:
        with self._times.phase("measure"):
            return self._backend.node_times_ns(program)

    def _bounds(self, times_ns: list[float]) -> list[tuple[int, int]]:
        """Segments of about one quantum, or longer ones where the core's tables could not hold that many."""
        quantum_ns, most = self._quantum_ns, self._loader.limits.segments
        bounds = cut(times_ns, quantum_ns)
        while len(bounds) > most:
            quantum_ns *= 1.25 * len(bounds) / most
            bounds = cut(times_ns, quantum_ns)
        return bounds
