"""More models than GPU memory: weights in address ranges, a store on the host, and the mover between them.

The core decides which weights come and which leave (core/residency.py); this module carries that out.
"""

from __future__ import annotations

import logging
import math
import os
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paellapy.instrument.errors import PaellaError
from paellapy.scheduler.backends.base import Backend, Launches, LoadedModel
from paellapy.scheduler.core import codes
from paellapy.scheduler.core.errors import MemoryPlanError, ModelError, WeightsError
from paellapy.scheduler.core.profiles import remove
from paellapy.scheduler.core.residency import hit_rate, set_weight_budget, value_in_host_memory, weights_state
from paellapy.scheduler.core.state import State
from paellapy.scheduler.engine.memory_budget import LOOK_S, ORDER_S, Budget, InstanceArenas
from paellapy.scheduler.models.host_store import HostStore
from paellapy.scheduler.models.memory import Instance
from paellapy.scheduler.models.model import Model
from paellapy.scheduler.models.profile import ProgramProfile
from paellapy.scheduler.models.tensors import Arrays, TensorSpec
from paellapy.scheduler.models.weights import Layout, WeightRange

# The mover: a thread that carries out the core's orders about weights, one after the other.


class Mover:
    """Calls `bring` and `evict` with a model's row, and reports errors of both to the core."""

    def __init__(
        self, state: State, bring: Callable[[int], None], evict: Callable[[int], None], ring: Callable[[], None]
    ) -> None:
        """`ring` wakes the core's loop."""
        self._state, self._bring, self._evict, self._ring = state, bring, evict, ring
        self.errors: dict[int, PaellaError] = {}  # by row: why the latest order to bring weights failed
        self.stuck: dict[int, PaellaError] = {}  # by row: why the latest eviction failed; the weights are still there
        self.last_stuck: PaellaError | None = None
        self.ordered: dict[int, bool] = {}  # by row: whether the latest order by hand was to come
        self._unfreed: set[int] = set()  # rows of failed evictions whose memory later orders may count on
        self._stopping = False
        self._fd = os.eventfd(0, os.EFD_CLOEXEC)
        self._thread = threading.Thread(target=self._run, name="paellapy-mover", daemon=True)
        self._thread.start()
        state.residency["mover_fd"][0] = self._fd

    def _run(self) -> None:
        ring, head = self._state.move_ring, 0
        while True:
            while head < int(ring[codes.MOVE_TAIL, 0]):
                cell = self._state.move[head % len(self._state.move)]
                self._carry_out(int(cell["kind"]), int(cell["model"]), head)
                head += 1
                ring[codes.MOVE_HEAD, 0] = head
            if self._stopping:
                return
            os.eventfd_read(self._fd)

    def _carry_out(self, kind: int, row: int, number: int) -> None:
        try:
            if kind == codes.EVICT:
                self._evict(row)
                self._state.moved[row, 0] = codes.EVICTED
            else:
                self.errors.pop(row, None)
                self._check_memory(number)
                self._bring(row)
        except Exception as e:  # an order without an answer would leave requests waiting for ever
            error = e if isinstance(e, PaellaError) else PaellaError(f"{type(e).__name__}: {e}")
            if kind == codes.EVICT:
                self.stuck[row] = self.last_stuck = error
                self._unfreed.add(row)
            else:
                self.errors[row] = error
            self._state.moved[row, 0] = codes.MOVE_FAILED
        self._ring()

    def _check_memory(self, number: int) -> None:
        """Refuses an order that the core gave before it knew of a failed eviction: its memory may not be free."""
        for row in list(self._unfreed):
            known = self._state.moved[row, 0] != codes.MOVE_FAILED
            if not known or number < int(self._state.residency["stuck_before"][0]):
                raise MemoryPlanError(f"their memory is not free: {self.stuck[row]}") from self.stuck[row]
            self._unfreed.discard(row)

    def close(self) -> None:
        """Ends the thread. Call it after the core's loop has ended, when no more orders come."""
        self._state.residency["mover_fd"][0] = codes.NONE
        self._stopping = True
        os.eventfd_write(self._fd, 1)
        self._thread.join()
        os.close(self._fd)


# The promoter: a thread that moves weights in demand from their files to the host's memory, beside all moves.


_log = logging.getLogger("paellapy.load")


class Promoter:
    """Calls `promote` with the names of models, one after the other. The thread starts with the first name."""

    def __init__(self, promote: Callable[[str], None]) -> None:
        self._promote = promote
        self._wanted: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._ended = False
        self._thread: threading.Thread | None = None

    def want(self, name: str) -> None:
        """The model was brought from its file; only the mover calls this."""
        self._wanted.put(name)
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="paellapy-promoter", daemon=True)
            self._thread.start()

    def _run(self) -> None:
        while True:
            name = self._wanted.get()
            if self._ended:
                return
            try:
                self._promote(name)
            except Exception as e:  # the weights stay in their file, from which they can be brought
                _log.warning("the weights of model %r stay on the disk: %s", name, e)

    def close(self) -> None:
        """Ends the thread, after a promotion that has begun. Call it after the mover has ended."""
        self._ended = True
        if self._thread is not None:
            self._wanted.put("")
            self._thread.join()


# Orders by hand: weights that come to the GPU or leave it although no request requires it.


def order_weights(
    state: State, mover: Mover, in_loop: Callable[[Callable[[], None]], None], check: Callable[[], None], row: int,
    wanted: bool,
) -> None:  # fmt: skip
    """Orders the weights of a model to come or to leave, and waits until they have. `check` raises if they cannot: the
    model or the engine is gone.
    """
    w, aim = state.weights[row], codes.RESIDENT if wanted else codes.OFF_GPU

    def flag() -> None:
        w["prefetch"], w["evict_requested"] = int(wanted), int(not wanted and w["location"] != codes.OFF_GPU)
        if wanted and w["location"] == codes.OFF_GPU:
            w["ordered_ns"] = time.monotonic_ns()
        mover.ordered[row] = wanted
        state.residency["pending"][0] = 1

    if not wanted and w["keep"] == codes.PINNED:
        raise ModelError(
            "these weights cannot be evicted, because the model has resident=True, changes its weights, or has none: "
            "unload the model instead"
        )
    # counted, because the weights may move again before this thread looks
    counter = "brought" if wanted else "evicted"
    before, stuck = int(w[counter]), int(w["stuck"])
    mover.errors.pop(row, None)  # of an earlier order
    in_loop(flag)
    end = time.monotonic() + ORDER_S
    while w["location"] != aim and w[counter] == before:
        check()
        if mover.ordered[row] != wanted and w["location"] == (codes.OFF_GPU if wanted else codes.RESIDENT):
            raise ModelError(f"the weights were ordered to {'leave' if wanted else 'come'} by another call meanwhile")
        if row in mover.errors and w["location"] == codes.OFF_GPU:
            raise mover.errors[row]
        if not wanted and w["stuck"] != stuck:
            raise mover.stuck[row]
        if time.monotonic() > end:
            raise MemoryPlanError(
                f"the weights did not move within {ORDER_S:.0f} s: models in use or of higher priority hold all memory"
            )
        time.sleep(LOOK_S)


# The account of weights that come and go: their places, hits and misses, and the moves so far.


def weights_account(state: State, models: Mapping[int, Model], store: HostStore) -> dict[str, Any]:
    """The core's and the store's figures, in total and for each model; `models` are by row."""
    r, w, starts = state.residency[0], state.weights, state.segment["chunks"][:, 0, 0]
    found = {}
    for row, model in models.items():
        one = w[row]
        found[model.name] = {
            "state": weights_state(state, row),
            "resident": model.resident,
            "stored": store.where(model.name),
            "weights_on_gpu_bytes": int(one["bytes"]) if one["location"] in (codes.LOADING, codes.RESIDENT) else 0,
            "starts_with_bytes": min(int(one["bytes"]), int(starts[row]) * int(one["chunk_bytes"])),
            "hits": int(one["hits"]),
            "misses": int(one["misses"]),
            "brought": int(one["brought"]),
            "evicted": int(one["evicted"]),
            "reload_s": float(one["reload_ns"]) * 1e-9,
        }
    return {
        "host_budget_bytes": store.budget_bytes,
        "host_bytes": store.held_bytes,
        "file_bytes": store.file_bytes,
        "promoted": store.promoted,
        "promoted_bytes": store.promoted_bytes,
        "displaced": store.displaced,
        "hit_rate": hit_rate(state),
        "brought": int(r["brought"]),
        "brought_bytes": int(r["brought_bytes"]),
        "evicted": int(r["evicted"]),
        "evicted_bytes": int(r["evicted_bytes"]),
        "failed": int(r["failed"]),
        "reload_s": float(r["reload_ns"]) * 1e-9,
        "models": found,
    }


# Which weights each segment needs: guessed from the launch arguments of its kernels, and verified by test runs.
#
# A kernel's pointer arguments show which weights it reads. Some kernels hide a pointer in a structure that cannot be
# read; libraries also leave stale pointers in structures that they fill partly, to weights that the kernel never reads.
# So there are several guesses: the most that a kernel's pointers ask for, the least, and the needs of as many kernels
# as agree that weights are used in order. A guess is accepted if the program gives the same outputs when weights arrive
# no sooner than the guess says, in memory that held other contents before. A larger guess that only some segments
# require is then lowered for the other segments. Weights arrive in chunks, so all needs are whole chunks.


Needs = tuple[int, ...]
_LATER = (0, 1, 2, 4)  # guesses shift the needs by this many segments
# byte patterns; the second is a small positive number in every type, so a ReLU lets it through
_NO_NUMBERS, _NUMBERS = 0xFF, 0x3C
_NEAR = 1e-2
_MOST_TESTS = 48  # of lowered needs: each copies the weights to the GPU once or twice


class Trials:
    """Test runs of one program on an instance that is not in service yet."""

    def __init__(
        self, backend: Backend, weights: WeightRange, source: Any, instance: Instance, launches: Launches
    ) -> None:
        self._backend, self._weights, self._source, self._instance = backend, weights, source, instance
        self._launches = launches
        self._fill_inputs()
        self._expected = self._run(None)
        # Kernels that add in varying order give different bits in each run.
        self._exact = same(self._expected, self._run(None), exact=True)

    def tried(self, least: Sequence[Needs], most: Needs) -> Needs:
        """The smallest needs found with which the program runs correctly; at worst all weights from the start."""
        chunk, whole = self._weights.chunk_bytes, self._weights.layout.nbytes
        most, *least = (tuple(min(-(-n // chunk) * chunk, whole) for n in each) for each in (most, *least))
        every = guesses(least, most) if self._exact else guesses([most], most)
        try:
            found = next((each for each in every if self._runs_with(each)), (whole,) * len(most))
            smallest = tuple(map(min, zip(*every, strict=True)))
            return found if found == smallest or not self._exact else lowered(smallest, found, self._runs_with, chunk)
        finally:
            self._weights.write(self._source, 0, whole)

    def _runs_with(self, guess: Needs) -> bool:
        return all(same(self._expected, self._run(guess, old), self._exact) for old in (_NO_NUMBERS, _NUMBERS))

    def _fill_inputs(self) -> None:
        """Writes random values like a request's: with zeros as inputs, weights might make no difference."""
        draw = np.random.default_rng(0)
        for name, array in self._instance.inputs.items():
            values = _drawn(draw, self._instance.model.inputs[name], array.shape)
            if values is not None:
                array[...] = values.astype(array.dtype)

    def _run(self, needs: Needs | None, old: int = _NO_NUMBERS) -> list[Any]:
        """The outputs of one run. With `needs`, weights arrive just before the segment that needs them, and the last
        ones not at all.
        """
        if needs is not None:
            self._weights.fill(old)
        there = 0
        for k in range(len(self._launches.handles)):
            if needs is not None and needs[k] > there:
                self._weights.write(self._source, there, needs[k])
                there = needs[k]
            self._backend.run_segment(self._launches, k)
        return [array.copy() for array in self._instance.outputs.values()]


def _drawn(draw: np.random.Generator, spec: TensorSpec, shape: tuple[int, ...]) -> NDArray[Any] | None:
    """Values that an input may have: also masks and indices, so that all parts of tables count. None: not known."""
    if spec.low is not None and spec.high is not None and spec.dtype.kind in "iu":
        if {spec.low, spec.high} & {-math.inf, math.inf}:  # as good as no bound
            return None
        limits = np.iinfo(spec.dtype)
        low, high = max(math.ceil(spec.low), limits.min), min(math.floor(spec.high), limits.max)
        return draw.integers(low, high, shape, spec.dtype.newbyteorder("="), endpoint=True) if low <= high else None
    if spec.dtype.kind == "b":
        return draw.integers(0, 2, shape)
    return draw.standard_normal(shape) if spec.dtype.kind in "fV" and not spec.has_range else None


def guesses(least: Sequence[Needs], most: Needs) -> list[Needs]:
    """The guesses to test, smallest needs first: the needs that the pointers show, then the needs of a slightly later
    segment, for kernels that hide pointers.

    >>> guesses([(1, 2, 3)], (1, 3, 3))
    [(1, 2, 3), (1, 3, 3), (2, 3, 3), (3, 3, 3)]
    """
    last = len(most) - 1
    shifted = {tuple(needs[min(k + n, last)] for k in range(last + 1)) for needs in (*least, most) for n in _LATER}
    return sorted(shifted, key=lambda needs: (sum(needs), needs))


def lowered(
    smallest: Needs, found: Needs, runs_with: Callable[[Needs], bool], chunk: int, most: int = _MOST_TESTS
) -> Needs:
    """Needs between the smallest ones and those that were found to suffice, lowered segment by segment from the
    producer.

    More weights than needed never harm, so both the segments that can do with the smallest needs and the need of the
    first segment that cannot are found by bisection.

    >>> lowered((1, 2, 3, 4), (4, 4, 4, 4), lambda needs: all(map(int.__ge__, needs, (1, 3, 3, 4))), 1)
    (1, 3, 3, 4)
    """
    wanted, best, tests = list(smallest), found, 0

    def passes(ahead: Sequence[int]) -> bool:
        """Whether these needs of the first segments suffice, with the needs that were found behind them."""
        nonlocal best, tests
        tests += 1
        needs = tuple(accumulate([*ahead, *found[len(ahead) :]], max))
        if not runs_with(needs):
            return False
        best = min(best, needs, key=sum)
        return True

    first = 0
    while tests < most and not passes(wanted):
        last = len(found)  # segments before `first` are known to pass, and some before `last` not
        while last - first > 1 and tests < most:
            middle = (first + last) // 2
            first, last = (middle, last) if passes(wanted[:middle]) else (first, middle)
        steps = [*range(wanted[first] // chunk * chunk + chunk, found[first], chunk), found[first]]
        low, high = 0, len(steps) - 1
        while low < high and tests < most:
            middle = (low + high) // 2
            low, high = (low, middle) if passes([*wanted[:first], steps[middle]]) else (middle + 1, high)
        if tests == most:
            break
        wanted[first:] = [max(each, steps[high]) for each in wanted[first:]]
        first += 1
    return best


def same(expected: Sequence[Any], found: Sequence[Any], exact: bool) -> bool:
    """Whether outputs are equal: bit by bit if `exact`, else within the tolerance of sums in varying order."""
    for a, b in zip(expected, found, strict=True):
        if a.tobytes() == b.tobytes():
            continue
        if exact or a.dtype.kind not in "fV":  # kind V: the dtypes of ml_dtypes
            return False
        x, y = a.astype(np.float32), b.astype(np.float32)
        if not np.isfinite(y).all() or np.abs(x - y).max() > _NEAR * max(float(np.abs(x).max()), 1e-6):
            return False
    return True


@dataclass(slots=True)
class Placed:
    """A model's weights in their range, as its function receives them."""

    weights: Arrays
    range: WeightRange | None  # None: the weights stay where they are


class Residents:
    """`in_loop` runs a function between two steps of the core and waits; `check` raises if the engine has ended."""

    def __init__(
        self, backend: Backend, state: State, budget_bytes: int, host_bytes: int,
        in_loop: Callable[[Callable[[], None]], None], check: Callable[[], None],
    ) -> None:  # fmt: skip
        self.backend, self.state = backend, state
        backend.weights_limit_bytes = budget_bytes
        self._in_loop, self._check = in_loop, check
        self.store = HostStore(host_bytes, backend.host_block, in_use=self._reads)
        self._rows: dict[int, LoadedModel] = {}
        self.budget = Budget(state, budget_bytes, in_loop, check)
        self._noting = threading.Lock()
        self._promoter = Promoter(self._promote)
        self.arenas = InstanceArenas(backend, state, self.budget, in_loop, check)
        set_weight_budget(state, budget_bytes)

    def start(self, ring: Callable[[], None]) -> None:
        self.mover = Mover(self.state, self._bring, self._evict, ring)
        self.budget.why_stuck = lambda: str(self.mover.last_stuck)

    # -- called by the mover

    def _bring(self, row: int) -> None:
        loaded = self._rows[row]
        assert loaded.range is not None
        name = loaded.model.name
        source, on_disk = self.store.take(name), self.store.where(name) == "disk"
        loaded.range.bring(source)
        self._note_places()
        if on_disk:
            self._promoter.want(name)

    def _reads(self, name: str) -> bool:
        """Whether the host's memory of this model may be read: the model is being loaded, or copies may be under way.
        """
        placing = self.budget.placing
        if placing is not None and placing.name == name:
            return True
        return any(self.state.weights["location"][row] == codes.LOADING for row in self._rows_of(name))

    def _rows_of(self, name: str) -> list[int]:
        return [row for row, each in list(self._rows.items()) if each.model.name == name]

    def _promote(self, name: str) -> None:
        def worth(each: str) -> float:
            return max((value_in_host_memory(self.state, row) for row in self._rows_of(each)), default=0.0)

        if self.store.promote(name, worth):
            self._note_places()

    def _note_places(self) -> None:
        """Marks, for predictions, which weights are in files and therefore take longer to arrive."""
        with self._noting:
            for row, loaded in list(self._rows.items()):
                slow = self.store.where(loaded.model.name) == "disk"
                ns = 1.0 / float(self.state.tuning["file_gbps"][0]) if slow else 0.0
                self.state.weights["ns_per_byte"][row] = ns

    def _evict(self, row: int) -> None:
        loaded = self._rows[row]
        assert loaded.range is not None
        try:
            loaded.range.evict()
        except Exception as e:
            raise WeightsError(
                f"the weights of model {loaded.model.name!r} could not leave the GPU and are still there: {e}"
            ) from e

    # -- loading

    def place(self, model: Model, order: Sequence[str] = ()) -> Placed:
        """Puts the weights into the host's store and, in an address range of their own, on the GPU. Weights named in
        `order` lie first.
        """
        parts = model.weight_parts(order)
        if not parts:  # its weights are unknown, or they change: they stay on the GPU
            if model.weights_bytes:  # the weights of a background job belong to its owner
                self.budget.claim(model.name, model.weights_bytes, model.priority, f"weights of model {model.name!r}")
            return Placed(self.backend.upload(model), None)
        layout = Layout([part.nbytes for part in parts])
        what, keep = f"weights of model {model.name!r}", codes.KEEP[model.resident]
        self.budget.place(model.name, max(layout.nbytes, 1), model.priority, keep, what)

        def fill(host: Any) -> None:
            for part, offset in zip(parts, layout.offsets, strict=True):
                host[offset : offset + part.nbytes] = part

        self.store.put(model.name, layout.nbytes, fill)
        found: WeightRange | None = None
        try:
            chunk_bytes, map_bytes = (int(self.state.tuning[each][0]) for each in ("chunk_bytes", "map_bytes"))
            found = self.backend.weight_range(layout, chunk_bytes, map_bytes)
            if found.held_bytes > layout.nbytes:
                rest = found.held_bytes - max(layout.nbytes, 1)
                self.budget.place(model.name, rest, model.priority, keep, f"the last page of {what}")
            found.write(self.store.take(model.name), 0, layout.nbytes)
            return Placed(model.place_over(self.backend.device, found, order), found)
        except BaseException:
            self.forget(model.name, found)
            raise

    def forget(self, name: str, found: WeightRange | None) -> None:
        """Frees everything of a model that is not, or no longer, in the core."""
        self.budget.placing = None
        self.arenas.leave(name)
        try:
            if found is not None:
                found.free()
        except PaellaError as e:
            self.budget.lost_bytes += self.budget.taken.pop(name, 0)
            raise WeightsError(
                f"model {name!r} is unloaded, but the GPU memory of its weights could not be freed and stays counted "
                f"in memory_bytes: {e}"
            ) from e
        finally:
            self.store.drop(name)
        if name in self.budget.taken:
            self.budget.give(name)

    def settle(self, loaded: LoadedModel) -> None:
        """Finds out which weights each segment needs, and whether the model changes its weights."""
        found, model = loaded.range, loaded.model
        if found is None:
            return
        source = self.store.take(model.name)
        if not found.holds(source):
            if model.resident is False:
                raise ModelError(
                    f"model {model.name!r} changes its own weights or buffers when it runs, so they cannot be evicted: "
                    "load it with resident=True"
                )
            loaded.stays = True
            self.budget.keep_placed()
            return
        for k in range(len(loaded.profiles)):
            profile = loaded.profiles[k]
            trials = Trials(self.backend, found, source, loaded.instances[0], loaded.launches[0][k])
            loaded.profiles[k] = profile.with_needs(trials.tried(loaded.least_needs[k], profile.needs))

    def add(self, loaded: LoadedModel) -> None:
        """Hands the weights over to the core. The model's rows are written and not open yet."""
        found, row = loaded.range, loaded.row
        w, r = self.state.weights[row], self.state.residency[0]
        if found is None:
            self._rows_of_arenas(loaded)
            return

        def hand_over() -> None:
            w["bytes"], w["chunk_bytes"], w["chunks"] = found.held_bytes, found.chunk_bytes, found.chunks
            w["word"] = found.words.ctypes.data
            w["keep"] = codes.PINNED if loaded.stays else codes.KEEP[loaded.model.resident]
            w["location"], w["came_ns"], w["used_ns"] = codes.RESIDENT, time.monotonic_ns(), time.monotonic_ns()
            for profile in loaded.profiles:
                self.write_needs(loaded, profile)
            r["budget_bytes"] += found.held_bytes
            r["held_bytes"] += found.held_bytes

        self._rows_of_arenas(loaded)
        self._rows[row] = loaded
        self._in_loop(hand_over)
        self._note_places()
        self.budget.taken.pop(loaded.model.name)  # the model itself holds nothing else
        self.budget.placing = None

    def write_needs(self, loaded: LoadedModel, profile: ProgramProfile) -> None:
        """Tells the core which chunks each segment of one batch size needs. Call it between two steps."""
        found, k = loaded.range, loaded.model.batch.index(profile.batch)
        whole = 0 if found is None else found.layout.nbytes
        needs = np.array(profile.needs or (whole,) * len(profile.segments))
        chunk = 1 if found is None else found.chunk_bytes
        self.state.segment["chunks"][loaded.row, k, : len(needs)] = -(-needs // chunk)

    def hold(self, models: Sequence[LoadedModel]) -> None:
        """Keeps the weights of these models, and of no others, on the GPU: from now on, or once they have come."""
        rows = sorted(each.row for each in models if each.range is not None)

        def change() -> None:
            self.state.weights["locked"] = 0
            self.state.weights["locked"][rows] = 1
            self.state.residency["pending"][0] = 1

        if np.flatnonzero(self.state.weights["locked"]).tolist() != rows:
            self._in_loop(change)

    def holds(self, loaded: LoadedModel) -> bool:
        """Whether the weights are on the GPU, and stay until `hold` says otherwise."""
        w = self.state.weights[loaded.row]
        return loaded.range is None or bool(w["locked"] and w["location"] == codes.RESIDENT)

    def _rows_of_arenas(self, loaded: LoadedModel) -> None:
        for instance, row in zip(loaded.instances, loaded.instance_rows, strict=True):
            self.state.instance["arena"][row] = codes.NONE if instance.arena is None else instance.arena.index

    def take_out(self, loaded: LoadedModel) -> None:
        """Takes the weights of a closed model out of the core. They may be moving at that moment."""
        row, found = loaded.row, loaded.range
        w, r = self.state.weights[row], self.state.residency[0]
        done = False

        def out() -> None:
            nonlocal done
            if w["location"] in (codes.LOADING, codes.EVICTING):
                return
            held = found.held_bytes if found is not None and w["location"] == codes.RESIDENT else 0
            remove(self.state, row)
            r["budget_bytes"] -= held
            if held:
                self.budget.taken[loaded.model.name] = self.budget.taken.get(loaded.model.name, 0) + held
            done = True

        while not done:
            self._in_loop(out)
            time.sleep(0 if done else LOOK_S)
        self._rows.pop(row, None)

    # -- for display

    def account(self) -> dict[str, Any]:
        """The core's and the store's figures for every model."""
        return weights_account(self.state, {row: each.model for row, each in list(self._rows.items())}, self.store)

    # -- by hand

    def ask(self, row: int, wanted: bool) -> None:
        """Orders weights to come or to leave although no request requires it, and waits for it."""
        loaded = self._rows.get(row)

        def check() -> None:
            self._check()
            if self._rows.get(row) is not loaded:
                raise ModelError("the model was unloaded meanwhile")

        order_weights(self.state, self.mover, self._in_loop, check, row, wanted)

    def state_of(self, row: int) -> str:
        """The place of the weights: `resident`, `loading 43 %`, `leaving`, `host` or `disk`."""
        return weights_state(self.state, row)

    def close(self) -> None:
        self.mover.close()
        self._promoter.close()

    def close_store(self) -> None:
        self.store.close()
