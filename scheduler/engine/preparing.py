"""Prepares one batch size of a model: captures its program, measures it, cuts it into segments, for every lane."""

from __future__ import annotations

import bisect
import contextlib
from dataclasses import dataclass, replace

from paellapy.instrument.errors import PaellaError
from paellapy.scheduler.backends.base import Backend
from paellapy.scheduler.backends.launches import Launches, LoadedModel
from paellapy.scheduler.core.demand import TOGETHER
from paellapy.scheduler.core.state import Limits
from paellapy.scheduler.core.tuning import Tuning
from paellapy.scheduler.engine.load_times import LoadTimes
from paellapy.scheduler.models import profile as profiles
from paellapy.scheduler.models.lane_memory import Lane
from paellapy.scheduler.models.profile import ProgramProfile
from paellapy.scheduler.models.program import Cuts, Marks, Program, last_kernels
from paellapy.scheduler.models.segments import cut, plan_slices
from paellapy.scheduler.models.weight_range import WeightRange, in_order, needs_of
from paellapy.scheduler.models.weight_steps import needs_like, steps_of

_REPEATS = 15
_BRIEF_NS = 10e6  # a program that takes longer in one piece is not run merely to warm up its first launch
_ROUNDS = 3  # rounds of TOGETHER lanes at once, to measure the throughput of a full GPU


@dataclass(frozen=True, slots=True)
class Rules:
    """How programs are prepared on one backend."""

    backend: Backend
    limits: Limits
    tuning: Tuning
    quantum_ns: float
    measure_shares: bool  # whether to measure the shares of compute and bandwidth that segments use


class Preparation:
    """One batch size of a model while it is prepared for all lanes. `alone`: nothing else runs on the GPU.

    If the lanes are in service, the program is tried out in a spare lane, and only captured for the others: nothing may
    be launched in their memory.
    """

    def __init__(self, rules: Rules, loaded: LoadedModel, batch: int, times: LoadTimes, alone: bool) -> None:
        self._rules, self._backend, self._loaded = rules, rules.backend, loaded
        self._batch, self._times, self._alone = batch, times, alone
        own_us = loaded.model.quantum_us
        self._quantum_ns = rules.quantum_ns if own_us is None else own_us * 1e3
        self._in_service = batch in loaded.later
        self._captured = contextlib.ExitStack()  # discards what was captured
        self._first = loaded.lanes[0]
        if self._in_service:
            assert loaded.spare is not None
            self._first = loaded.spare

    def make(self) -> None:
        """Captures, cuts and measures the program; measurements that are known already are not repeated."""
        made: list[Launches] = []
        try:
            with self._captured:
                known = self._make(made)
        except BaseException:
            with contextlib.suppress(PaellaError):  # an earlier error is being raised
                self._backend.await_first(self._loaded.model)
            for launches in made:
                self._backend.release(launches)
            raise
        at = bisect.bisect(self._loaded.profiles, self._batch, key=lambda each: each.batch)
        for own, launches in zip(self._loaded.launches, made, strict=True):
            own.insert(at, launches)
        self._loaded.profiles.insert(at, known)

    def _make(self, made: list[Launches]) -> ProgramProfile:
        backend, loaded, alone = self._backend, self._loaded, self._alone
        first = self._capture(self._first, {})
        where = profiles.key(first.content(), backend.fingerprint(), self._quantum_ns)
        known = profiles.load(where)
        if known is None or known.batch != self._batch:
            known = self._plan(first)
            if alone:  # a measurement beside other work serves this load only and is not stored
                profiles.store(where, known)
        sliced = self._capture(self._first, known.cuts) if known.cuts else first
        if loaded.range is not None:
            known = self._with_needs(known, sliced, loaded.range)
        marks = last_kernels(sliced.nodes, known.bounds)
        confined = known.stretch_in_window <= self._rules.tuning.most_window_stretch
        for lane in loaded.lanes:
            program = sliced if lane is self._first and not marks else self._again(sliced, lane, known.cuts, marks)
            with self._times.phase("cut"):
                made.append(backend.cut(program, known.bounds, lane, confined))
            if not self._in_service:
                with self._times.phase("first launches"):
                    # The first lane shows errors of a launch where they arise. On an idle GPU, the launches of later
                    # lanes run while the host captures the next.
                    wait = len(made) == 1 or not alone
                    backend.launch_first(made[-1], known.whole_ns < _BRIEF_NS, wait)
            if len(made) > 1:  # the first is still read
                backend.discard(program)
        with self._times.phase("first launches"):
            backend.await_first(loaded.model)
        crowd = made[: 1 if loaded.model.stateful else TOGETHER]
        # a measurement with fewer lanes overestimates the demand of a larger crowd
        if alone and not self._in_service and known.together < len(crowd) > 1:
            with self._times.phase("measure"):
                demand = backend.saturated_ns(crowd, _ROUNDS) / known.whole_ns
            known = replace(known, demand=min(max(demand, 0.01), 1.0), together=len(crowd))
            profiles.store(where, known)
        wanted = backend.shares_are_free or (alone and not self._in_service and self._rules.measure_shares)
        if wanted and not known.shares:
            with self._times.phase("measure"):
                known = self._with_shares(known, made[0])
            if alone:
                profiles.store(where, known)
        return known

    def _with_needs(self, known: ProgramProfile, program: Program, weights: WeightRange) -> ProgramProfile:
        """The profile with the weights that segments need. Before the model serves they are guesses, which will be
        tried out; later the needs of a size that was tried out, or all weights if its program takes other steps.
        """
        loaded = self._loaded
        ends = self._backend.weight_ends(program, weights)
        steps = steps_of(program.nodes, ends)
        if self._in_service:
            tried = [each for each in loaded.profiles if each.batch in loaded.steps]
            found = (needs_like(steps, known.bounds, loaded.steps[t.batch], t.bounds, t.needs) for t in tried)
            return known.with_needs(next(filter(None, found), ()))
        loaded.steps[self._batch] = steps
        least, most = zip(*ends, strict=True)
        fewer = least, in_order(least, most)
        loaded.least_needs.append([tuple(needs_of(each, known.bounds)) for each in fewer])
        return known.with_needs(needs_of(most, known.bounds))

    def _with_shares(self, known: ProgramProfile, launches: Launches) -> ProgramProfile:
        alone_ns = [each.time_ns for each in known.segments]
        found = self._backend.segment_shares(launches, alone_ns)
        segments = tuple(
            replace(each, compute=compute, memory=memory)
            for each, (compute, memory) in zip(known.segments, found, strict=True)
        )
        return replace(known, segments=segments, shares=True)

    def _capture(self, lane: Lane, cuts: Cuts, marks: Marks | None = None, like: Program | None = None) -> Program:
        with self._times.phase("capture"):
            program = self._backend.capture(lane, self._loaded.weights, self._batch, cuts, marks, like)
        self._captured.callback(self._backend.discard, program)
        return program

    def _again(self, program: Program, lane: Lane, cuts: Cuts, marks: Marks) -> Program:
        """The program of the first lane, made for another lane."""
        with self._times.phase("capture"):
            found = self._backend.captured_again(program, self._first, lane, marks)
        if found is None:
            return self._capture(lane, cuts, marks, program)
        self._captured.callback(self._backend.discard, found)
        return found

    def _plan(self, first: Program) -> ProgramProfile:
        """Decides where to cut, from the times of the nodes, and measures the resulting segments."""
        backend = self._backend
        program, times = first, self._node_times_ns(first)
        waves = backend.wave_blocks(first)
        cuts = plan_slices(first.nodes, times, waves, self._quantum_ns, self._rules.tuning.slice_quanta)
        if cuts:
            program = self._capture(self._first, cuts)
            times = self._node_times_ns(program)
        bounds = self._bounds(times)
        with self._times.phase("cut"):
            launches = backend.cut(program, bounds, self._first, confine=backend.windows > 0)
        try:
            with self._times.phase("measure"):
                segment_ns, whole_ns, window_ns = backend.segment_times_ns(launches, _REPEATS, self._alone)
        finally:
            backend.release(launches)
        waves, limits = backend.wave_blocks(program), backend.device.limits
        segments = tuple(
            profiles.segment_profile(program.nodes[a:b], waves[a:b], t, limits)
            for (a, b), t in zip(bounds, segment_ns, strict=True)
        )
        return ProgramProfile(self._batch, tuple(bounds), segments, whole_ns, cuts, program.chain, window_ns=window_ns)

    def _node_times_ns(self, program: Program) -> list[float]:
        with self._times.phase("measure"):
            return self._backend.node_times_ns(program)

    def _bounds(self, times_ns: list[float]) -> list[tuple[int, int]]:
        """Segments of about one quantum, or longer ones where the core's tables could not hold that many."""
        quantum_ns, most = self._quantum_ns, self._rules.limits.segments
        bounds = cut(times_ns, quantum_ns)
        while len(bounds) > most:
            quantum_ns *= 1.25 * len(bounds) / most
            bounds = cut(times_ns, quantum_ns)
        return bounds
