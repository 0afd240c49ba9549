"""Loads a model: warm up, plan memory, and prepare its programs. The result is ready for the core."""

from __future__ import annotations

import bisect
import contextlib
import logging
import os
import threading
import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from paellapy.instrument.env import console
from paellapy.instrument.errors import PaellaError
from paellapy.scheduler.backends.base import Backend, Launches, LoadedModel, device_lock, write_handles
from paellapy.scheduler.core import profiles as core_profiles
from paellapy.scheduler.core.codes import CHOICES
from paellapy.scheduler.core.errors import ModelError
from paellapy.scheduler.core.profiles import TOGETHER
from paellapy.scheduler.core.state import Limits, State
from paellapy.scheduler.core.tuning import Tuning
from paellapy.scheduler.core.values import is_finite_number, shortened
from paellapy.scheduler.engine.weight_cache import WeightCache
from paellapy.scheduler.models import profile as profiles
from paellapy.scheduler.models.memory import Arena, Instance, InstancePlan, MemoryPlan, Reservation, plan_instance
from paellapy.scheduler.models.model import Model
from paellapy.scheduler.models.profile import ProgramProfile, model_profile
from paellapy.scheduler.models.program import Cuts, Marks, Program, cut, last_kernels, plan_slices
from paellapy.scheduler.models.tensors import Arrays
from paellapy.scheduler.models.weights import WeightRange, in_order, needs_like, needs_of, steps_of

# Time spent loading a model: seconds by phase, a progress line for a long load, and one line in the log.


PHASES = ("upload", "warm up", "memory", "capture", "measure", "cut", "first launches", "weights", "install")
PATIENCE_S = 2.0  # a load that takes longer shows its current phase

_log = logging.getLogger("paellapy.load")


class LoadTimes:
    """Seconds of one load by phase. The time of a nested phase does not count for the outer one."""

    def __init__(self, model: str) -> None:
        self.model = model
        self.seconds: dict[str, float] = {}
        self._current: list[str] = []
        self._since = time.perf_counter()

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        assert name in PHASES, name
        self._turn()
        self._current.append(name)
        try:
            yield
        finally:
            self._turn()
            self._current.pop()

    def _turn(self) -> None:
        """Starts another phase: the time since the last call belongs to the phase that ends."""
        now = time.perf_counter()
        if self._current:
            name = self._current[-1]
            self.seconds[name] = self.seconds.get(name, 0.0) + now - self._since
        self._since = now

    @property
    def doing(self) -> str:
        """The current phase; "" between two phases."""
        return self._current[-1] if self._current else ""

    @property
    def total_s(self) -> float:
        return sum(self.seconds.values())

    def __str__(self) -> str:
        """The total, and the phases that took a noticeable time, the longest first.

        >>> times = LoadTimes("net")
        >>> times.seconds = {"capture": 0.31, "upload": 0.0004, "measure": 1.2}
        >>> str(times)
        'net: 1.51 s (measure 1.20, capture 0.31)'
        """
        longest = sorted(self.seconds.items(), key=lambda item: -item[1])
        parts = ", ".join(f"{name} {seconds:.2f}" for name, seconds in longest if seconds >= 0.005)
        return f"{self.model}: {self.total_s:.2f} s" + (f" ({parts})" if parts else "")


@contextlib.contextmanager
def shown(times: LoadTimes) -> Iterator[None]:
    """Shows the current phase during a long load, and writes one line to the log at its end. Without a terminal, the
    phase is one line in the log or, where nobody reads the log, on stderr. PAELLAPY_QUIET=1 turns it off.
    """
    ended = threading.Event()
    watcher = threading.Thread(target=_watch, args=(times, ended), name="paellapy-load-line", daemon=True)
    watcher.start()
    try:
        yield
    finally:
        ended.set()
        watcher.join()
    _log.info("loaded %s", times)


def _watch(times: LoadTimes, ended: threading.Event) -> None:
    if ended.wait(PATIENCE_S) or os.environ.get("PAELLAPY_QUIET"):
        return
    shown_at = console(stderr=True)
    if shown_at.is_jupyter or not shown_at.is_terminal:  # one line: a line that is redrawn needs a terminal
        if _log.isEnabledFor(logging.INFO) and _log.hasHandlers():
            _log.info("loading %s: %s …", times.model, times.doing)
        else:
            shown_at.print(f"loading {times.model}: {times.doing} …", highlight=False, soft_wrap=True)
        return
    began = time.perf_counter() - PATIENCE_S
    with shown_at.status("") as line:
        while not ended.wait(0.1):
            line.update(f"loading {times.model}: {times.doing}, {time.perf_counter() - began:.0f} s")


# Prepares one batch size of a model: captures its program, measures it, cuts it into segments, for every instance.


_REPEATS = 15
_BRIEF_NS = 10e6  # a program that takes longer in one piece is not run merely to warm up its first launch
_ROUNDS = 3  # rounds of TOGETHER instances at once, to measure the throughput of a full GPU


def check_quantum(quantum_us: float, whose: str = "") -> None:
    if not is_finite_number(quantum_us) or quantum_us < 1:
        raise ModelError(
            f"{whose}quantum_us={shortened(quantum_us)}: the duration of a segment must be a number of at least 1 µs",
            field="quantum_us", given=quantum_us, limit=1,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Rules:
    """How programs are prepared on one backend."""

    backend: Backend
    limits: Limits
    tuning: Tuning
    quantum_ns: float
    measure_shares: bool  # whether to measure the shares of compute and bandwidth that segments use


class Preparation:
    """One batch size of a model while it is prepared for all instances. `alone`: nothing else runs on the GPU.

    If the instances are in service, the program is tried out in a spare instance, and only captured for the others:
    nothing may be launched in their memory.
    """

    def __init__(self, rules: Rules, loaded: LoadedModel, batch: int, times: LoadTimes, alone: bool) -> None:
        self._rules, self._backend, self._loaded = rules, rules.backend, loaded
        self._batch, self._times, self._alone = batch, times, alone
        own_us = loaded.model.quantum_us
        self._quantum_ns = rules.quantum_ns if own_us is None else own_us * 1e3
        self._in_service = batch in loaded.later
        self._captured = contextlib.ExitStack()  # discards what was captured
        self._first = loaded.instances[0]
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
        confined = known.slowdown_in_partition <= self._rules.tuning.most_partition_stretch
        for instance in loaded.instances:
            program = (
                sliced if instance is self._first and not marks else self._again(sliced, instance, known.cuts, marks)
            )
            with self._times.phase("cut"):
                made.append(backend.cut(program, known.bounds, instance, confined))
            if not self._in_service:
                with self._times.phase("first launches"):
                    # The first instance shows errors of a launch where they arise. On an idle GPU, the launches of
                    # later instances run while the host captures the next.
                    wait = len(made) == 1 or not alone
                    backend.launch_first(made[-1], known.whole_ns < _BRIEF_NS, wait)
            if len(made) > 1:  # the first is still read
                backend.discard(program)
        with self._times.phase("first launches"):
            backend.await_first(loaded.model)
        crowd = made[: 1 if loaded.model.stateful else TOGETHER]
        # a measurement with fewer instances overestimates the demand of a larger crowd
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
        if loaded.model.whole_batches:  # trial runs say nothing: their outputs depend on a state
            return known.with_needs(())
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

    def _capture(
        self, instance: Instance, cuts: Cuts, marks: Marks | None = None, like: Program | None = None
    ) -> Program:
        with self._times.phase("capture"):
            program = self._backend.capture(instance, self._loaded.weights, self._batch, cuts, marks, like)
        self._captured.callback(self._backend.discard, program)
        return program

    def _again(self, program: Program, instance: Instance, cuts: Cuts, marks: Marks) -> Program:
        """The program of the first instance, made for another instance."""
        with self._times.phase("capture"):
            found = self._backend.copied(program, self._first, instance, marks)
        if found is None:
            return self._capture(instance, cuts, marks, program)
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
            launches = backend.cut(program, bounds, self._first, confine=backend.partitions > 0)
        try:
            with self._times.phase("measure"):
                segment_ns, whole_ns, partition_ns = backend.segment_times_ns(launches, _REPEATS, self._alone)
        finally:
            backend.release(launches)
        waves, limits = backend.wave_blocks(program), backend.device.limits
        segments = tuple(
            profiles.segment_profile(program.nodes[a:b], waves[a:b], t, limits)
            for (a, b), t in zip(bounds, segment_ns, strict=True)
        )
        return ProgramProfile(
            self._batch, tuple(bounds), segments, whole_ns, cuts, program.chain, partition_ns=partition_ns
        )

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
        weight_cache: WeightCache | None = None,
    ) -> None:  # fmt: skip
        self.backend, self.memory, self.limits, self.weight_cache = backend, memory, limits, weight_cache
        self.tuning, self.quantum_ns = tuning, quantum_ns
        self._loads = 0

    def load(self, model: Model, instances_wanted: int, alone: bool, times: LoadTimes | None = None) -> LoadedModel:
        """`alone`: nothing else runs on the GPU, so timings are undisturbed. `times` receives phase durations."""
        self._check(model)
        with device_lock(self.backend.device), model.preserved():
            return self._load(model, instances_wanted, alone, times or LoadTimes(model.name))

    def _load(self, model: Model, instances_wanted: int, alone: bool, times: LoadTimes) -> LoadedModel:
        backend = self.backend
        weights_bytes = model.weights_bytes
        # Reserve weights first: a model whose weights alone do not fit is refused before any of them is copied.
        self.memory.reserve(model.name, weights_bytes, 0, 1)
        later = model.later_batch
        spare = bool(later) and self.weight_cache is None
        sizes = [batch for batch in model.batch if batch not in later]
        instances: list[Instance] = []
        made: list[list[Launches]] = []
        found: WeightRange | None = None
        try:
            weights, found, (scratch, foreign) = self._warmed_up(model, sizes, times)
            weights_bytes = weights_bytes if found is None else found.held_bytes
            plan = plan_instance(model, scratch, self.limits.segments)
            self.memory.release(model.name)
            reservation, arenas = self._reserve(model, weights_bytes, plan, foreign, instances_wanted, spare)
            with times.phase("memory"):
                for k, arena in enumerate(arenas):
                    memory = backend.instance_memory(plan, None if arena is None else arena.memory)
                    instances.append(Instance(k, model, plan, memory, self._partitions(k)))
                    instances[-1].arena = arena
                    for key, spec in model.ranges.items():  # a batch that is not full runs with the slots' old contents
                        instances[-1].inputs[key][...] = spec.neutral
            self._loads += 1
            served = instances[:-1] if spare else instances
            made += ([] for _ in served)
            kind = "job" if model.stateful else "model"
            loaded = LoadedModel(model, weights, reservation, served, [], made, range=found, kind=kind)
            loaded.later, loaded.spare = dict.fromkeys(later, ""), instances[-1] if spare else None
            with self._to_itself(arenas):
                for batch in sizes:
                    Preparation(self._rules(), loaded, batch, times, alone).make()
                if self.weight_cache is not None:
                    with times.phase("weights"):
                        self.weight_cache.settle(loaded)
        except BaseException:
            self.memory.release(model.name)
            self._free(instances, made)
            self._forget(model, found)
            raise
        return loaded

    def _warmed_up(
        self, model: Model, sizes: Sequence[int], times: LoadTimes
    ) -> tuple[Arrays, WeightRange | None, tuple[int, int]]:
        """The weights on the GPU, after a first run of every size, and the memory that the runs need."""
        with times.phase("upload"):
            weights, found = self._place(model)
        try:
            noting = Noting(weights)
            with times.phase("warm up"):
                needed = self.backend.warm_up_all(model, noting, sizes)
            if found is not None and noting.in_other_order and not model.whole_batches:
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
        if self.weight_cache is None:
            return self.backend.upload(model), None
        placed = self.weight_cache.place(model, order)
        return placed.weights, placed.range

    def _forget(self, model: Model, found: WeightRange | None) -> None:
        if self.weight_cache is not None:
            self.weight_cache.forget(model.name, found)

    def _to_itself(self, arenas: Sequence[Arena | None]) -> contextlib.AbstractContextManager[None]:
        """Keeps other models out of shared instance memory while this model runs to be measured."""
        shared = [each for each in arenas if each is not None]
        return contextlib.nullcontext() if self.weight_cache is None else self.weight_cache.arenas.kept(shared)

    def _rules(self) -> Rules:
        return Rules(self.backend, self.limits, self.tuning, self.quantum_ns, self.measure_shares)

    def add_size(self, loaded: LoadedModel, batch: int, alone: bool) -> None:
        """Captures another batch size of a model that serves, and whose weights are on the GPU."""
        model = loaded.model
        with device_lock(self.backend.device), model.preserved(), self._with_spare(loaded):
            self.backend.warm_up_all(model, loaded.weights, [batch])
            Preparation(self._rules(), loaded, batch, LoadTimes(model.name), alone).make()

    @contextlib.contextmanager
    def _with_spare(self, loaded: LoadedModel) -> Iterator[None]:
        """Gives the model a spare instance, where memory is too short to keep one for every model."""
        if self.weight_cache is None:
            yield
            return
        like = loaded.instances[0]
        assert like.arena is not None
        with self.weight_cache.arenas.beside(loaded.model, like.arena) as arena:
            memory = self.backend.instance_memory(like.plan, arena.memory)
            loaded.spare = Instance(len(loaded.instances), loaded.model, like.plan, memory, like.partitions)
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
            loaded.reservation = replace(loaded.reservation, instances=len(loaded.instances))
            self.memory.note(loaded.model.name, loaded.reservation)

    def _reserve(
        self, model: Model, weights_bytes: int, plan: InstancePlan, foreign: int, wanted: int, spare: bool
    ) -> tuple[Reservation, Sequence[Arena | None]]:
        """Reserves memory for instances: their own, or shared with instances of other models where weights come and go.
        `spare`: and for one more, to capture in while the others serve.
        """
        # Instances that take turns share the memory that other libraries allocate.
        instance_bytes = plan.device_bytes + (-(-foreign // (model.instances or 1)) if model.stateful else foreign)
        if self.weight_cache is None:
            least, most = (model.instances or 1) + spare, (model.instances or wanted) + spare
            reservation = self.memory.reserve(model.name, weights_bytes, instance_bytes, most, least)
            return reservation, [None] * reservation.instances
        arenas = self.weight_cache.arenas.instances_for(model, plan.device_bytes, foreign, wanted)
        return self.memory.note(model.name, Reservation(weights_bytes, instance_bytes, len(arenas))), arenas

    def _check(self, model: Model) -> None:
        n = self.limits
        for what, count, limit in (
            ("batch sizes", len(model.batch), n.sizes),
            ("requests in its largest batch", 1 if model.whole_batches else model.max_batch, n.batch),
            ("inputs", len(model.inputs), n.inputs),
            ("instances", model.instances or 1, n.instances_per_model),
        ):
            if count > limit:
                raise ModelError(
                    f"model {model.name!r} has {count} {what}; the engine takes up to {limit}", model=model.name,
                    field=what, given=count, limit=limit,
                )  # fmt: skip

    def _partitions(self, instance: int) -> tuple[int, ...]:
        """A selection of partitions spread over the GPU, different for each instance and each model."""
        n = self.backend.partitions
        choices = min(n, CHOICES)
        return tuple((self._loads + instance + k * n // choices) % n for k in range(choices))

    def unload(self, loaded: LoadedModel) -> None:
        """Frees everything of the model, which must have no launch in flight."""
        self._free(loaded.instances, loaded.launches)
        if loaded.spare is not None:
            loaded.spare.memory.free()
        loaded.weights.clear()
        self.memory.release(loaded.model.name)
        self._forget(loaded.model, loaded.range)

    def _free(self, instances: list[Instance], made: list[list[Launches]]) -> None:
        """Frees the launches first, because they write to the instances' memory."""
        for each in made:
            for launches in each:
                self.backend.release(launches)
        for instance in instances:
            instance.memory.free()


# Writes a loaded model and the SM partitions into the core's tables.


def install(state: State, loaded: LoadedModel, pool: int) -> None:
    """Fills the model's rows, so that it only remains to open it. Its launches use the streams of this pool."""
    model = loaded.model
    profile = model_profile(model, loaded.profiles, len(loaded.instances), len(state.request))
    loaded.row, rows = core_profiles.install(state, profile, model.batch, model.whole_batches)
    loaded.generation = int(state.model["generation"][loaded.row])
    loaded.instance_of = dict(zip(rows, loaded.instances, strict=True))
    if model.stateful:  # only one of its instances runs at a time, as if the instances shared memory
        state.instance["arena"][rows] = rows[0]
    state.model["n_inputs"][loaded.row] = len(model.inputs)
    for k, spec in enumerate(model.inputs.values()):
        state.input_bytes[loaded.row, k] = spec.nbytes * model.slot_items
    for instance, row in zip(loaded.instances, loaded.instance_rows, strict=True):
        instance.words[:] = instance.draining[:] = 0
        state.instance["pool"][row] = pool
        state.instance_partition[row, : len(instance.partitions)] = instance.partitions
        for k, array in enumerate(instance.inputs.values()):
            state.input_address[row, k] = array.ctypes.data
    for each in loaded.profiles:
        _write_launches(state, loaded, each.batch)


def install_size(state: State, loaded: LoadedModel, batch: int) -> None:
    """Adds a batch size to a model that serves; call it between two steps of the core."""
    _write_launches(state, loaded, batch)
    profile = model_profile(loaded.model, loaded.profiles, len(loaded.instances), len(state.request))
    core_profiles.install_size(state, loaded.row, profile, batch)


def _write_launches(state: State, loaded: LoadedModel, batch: int) -> None:
    """Writes the launches of one batch size, and the words by which the core learns of their end."""
    size = loaded.model.batch.index(batch)
    at = [each.batch for each in loaded.profiles].index(batch)
    for instance, row, made in zip(loaded.instances, loaded.instance_rows, loaded.launches, strict=True):
        launches, words, draining = made[at], instance.words, instance.draining
        segments = state.launch[row, size, : len(launches.handles)]
        for i in range(len(launches.handles)):
            segments["word"][i] = words.ctypes.data + 8 * i
            segments["draining"][i] = draining.ctypes.data + 8 * i if i in launches.notified else 0
        state.whole["word"][row, size] = words[-1:].ctypes.data
        state.whole["draining"][row, size] = 0
        write_handles(state, row, size, launches)


def install_partitions(state: State, partitions: Sequence[Collection[int]]) -> None:
    """Writes the SMs of each partition. Where two partitions share SMs, a job in one also fills the other."""
    n = state.core["partitions"][0] = len(partitions)
    state.overlap[:n, :n] = [[len(set(a) & set(b)) for b in partitions] for a in partitions]
