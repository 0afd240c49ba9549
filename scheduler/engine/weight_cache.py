"""More models than GPU memory: weights in address ranges, a store on the host, and the mover between them.

The core decides which weights come and which leave (core/residency.py); this module carries that out.
"""

from __future__ import annotations

import logging
import os
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from paellapy.instrument.errors import PaellaError
from paellapy.scheduler.backends.base import LoadedModel
from paellapy.scheduler.core import codes
from paellapy.scheduler.core.errors import MemoryPlanError, ModelError, WeightsError
from paellapy.scheduler.core.profiles import remove
from paellapy.scheduler.core.residency import hit_rate, set_weight_budget, value_in_host_memory, weights_state
from paellapy.scheduler.core.state import State
from paellapy.scheduler.engine.core_loop import CoreLoop
from paellapy.scheduler.engine.memory_budget import LOOK_S, ORDER_S, Budget, InstanceArenas
from paellapy.scheduler.engine.weight_dependencies import Trials
from paellapy.scheduler.models.host_store import HostStore
from paellapy.scheduler.models.model import Model
from paellapy.scheduler.models.profile import ProgramProfile
from paellapy.scheduler.models.tensors import Arrays
from paellapy.scheduler.models.weights import Layout, WeightRange

# The mover: a thread that carries out the core's orders about weights, one after the other.


class WeightMover:
    """Calls `bring` and `evict` with a model's row, and reports errors of both to the core."""

    def __init__(self, core: CoreLoop, bring: Callable[[int], None], evict: Callable[[int], None]) -> None:
        self._core, self._state, self._bring, self._evict = core, core.state, bring, evict
        self.stuck: dict[int, PaellaError] = {}  # by row: why the latest eviction failed; the weights are still there
        self.last_stuck: PaellaError | None = None
        self.ordered: dict[int, bool] = {}  # by row: whether the latest order by hand was to come
        self._unfreed: set[int] = set()  # rows of failed evictions whose memory later orders may count on
        self._stopping = False
        self._fd = os.eventfd(0, os.EFD_CLOEXEC)
        self._thread = threading.Thread(target=self._run, name="paellapy-mover", daemon=True)
        self._thread.start()
        self._state.residency["mover_fd"][0] = self._fd

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
                self._core.weight_errors.pop(row, None)
                self._check_memory(number)
                self._bring(row)
        except Exception as e:  # an order without an answer would leave requests waiting for ever
            error = e if isinstance(e, PaellaError) else PaellaError(f"{type(e).__name__}: {e}")
            if kind == codes.EVICT:
                self.stuck[row] = self.last_stuck = error
                self._unfreed.add(row)
            else:
                self._core.weight_errors[row] = error
            self._state.moved[row, 0] = codes.MOVE_FAILED
        self._core.wake()

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


def keep_of(model: Model) -> int:
    """What the core does with a model's weights. Where lengths vary they stay: each length is a model of its own to the
    core, and all use these weights.
    """
    return codes.PINNED if model.lengths is not None else codes.KEEP[model.resident]


@dataclass(slots=True)
class Placed:
    """A model's weights in their range, as its function receives them."""

    weights: Arrays
    range: WeightRange | None  # None: the weights stay where they are


class WeightCache:
    """The weights of an engine's models: all of them on the host, and on the GPU as many as its memory holds."""

    def __init__(self, core: CoreLoop, budget_bytes: int, host_bytes: int) -> None:
        self._core, self._backend, self._state = core, core.backend, core.state
        self._backend.weights_limit_bytes = budget_bytes
        self.store = HostStore(host_bytes, self._backend.host_block, in_use=self._reads)
        self._rows: dict[int, LoadedModel] = {}
        self.budget = Budget(core, budget_bytes)
        self._noting = threading.Lock()
        self._promoter = Promoter(self._promote)
        self.arenas = InstanceArenas(core, self.budget)
        set_weight_budget(self._state, budget_bytes)
        self._mover = WeightMover(core, self._bring, self._evict)
        self.budget.why_stuck = lambda: str(self._mover.last_stuck)

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
        return any(self._state.weights["location"][row] == codes.LOADING for row in self._rows_of(name))

    def _rows_of(self, name: str) -> list[int]:
        return [row for row, each in list(self._rows.items()) if each.model.name == name]

    def _promote(self, name: str) -> None:
        def worth(each: str) -> float:
            return max((value_in_host_memory(self._state, row) for row in self._rows_of(each)), default=0.0)

        if self.store.promote(name, worth):
            self._note_places()

    def _note_places(self) -> None:
        """Marks, for predictions, which weights are in files and therefore take longer to arrive."""
        with self._noting:
            for row, loaded in list(self._rows.items()):
                slow = self.store.where(loaded.model.name) == "disk"
                ns = 1.0 / float(self._state.tuning["file_gbps"][0]) if slow else 0.0
                self._state.weights["ns_per_byte"][row] = ns

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
                self.budget.claim(model.name, model.weights_bytes, model.priority)
            return Placed(self._backend.upload(model), None)
        layout = Layout([part.nbytes for part in parts])
        self.budget.place(model.name, max(layout.nbytes, 1), model.priority, keep_of(model))

        def fill(host: Any) -> None:
            for part, offset in zip(parts, layout.offsets, strict=True):
                host[offset : offset + part.nbytes] = part

        self.store.put(model.name, layout.nbytes, fill)
        found: WeightRange | None = None
        try:
            chunk_bytes, map_bytes = (int(self._state.tuning[each][0]) for each in ("chunk_bytes", "map_bytes"))
            found = self._backend.weight_range(layout, chunk_bytes, map_bytes)
            if found.held_bytes > layout.nbytes:
                rest = found.held_bytes - max(layout.nbytes, 1)
                self.budget.place(model.name, rest, model.priority, keep_of(model))
            found.write(self.store.take(model.name), 0, layout.nbytes)
            return Placed(model.place_over(self._backend.device, found, order), found)
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
        if found is None or model.whole_batches:
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
            trials = Trials(self._backend, found, source, loaded.instances[0], loaded.launches[0][k])
            loaded.profiles[k] = profile.with_needs(trials.tried(loaded.least_needs[k], profile.needs))

    def add(self, loaded: LoadedModel) -> None:
        """Hands the weights over to the core. The model's rows are written and not open yet."""
        found, row = loaded.range, loaded.row
        w, r = self._state.weights[row], self._state.residency[0]
        if found is None:
            self._rows_of_arenas(loaded)
            return

        def hand_over() -> None:
            w["bytes"], w["chunk_bytes"], w["chunks"] = found.held_bytes, found.chunk_bytes, found.chunks
            w["word"] = found.words.ctypes.data
            shared = loaded.model.whole_batches  # the weights stay until the other model is loaded
            w["keep"] = codes.PINNED if loaded.stays or shared else keep_of(loaded.model)
            w["location"], w["came_ns"], w["used_ns"] = codes.RESIDENT, time.monotonic_ns(), time.monotonic_ns()
            for profile in loaded.profiles:
                self.write_needs(loaded, profile)
            r["budget_bytes"] += found.held_bytes
            r["held_bytes"] += found.held_bytes

        self._rows_of_arenas(loaded)
        self._rows[row] = loaded
        self._core.run(hand_over)
        self._note_places()
        self.budget.taken.pop(loaded.model.name)  # the model itself holds nothing else
        self.budget.placing = None

    def share(self, held: LoadedModel, other: LoadedModel) -> None:
        """Lets a second model of the core need the weights of the first one, which come and go from now on."""

        def link() -> None:
            w = self._state.weights
            w["of"][other.row], w["also"][held.row] = held.row + 1, other.row + 1
            w["keep"][held.row] = keep_of(held.model)
            for profile in other.profiles:
                self.write_needs(other, profile)

        self._core.run(link)

    def _holder(self, loaded: LoadedModel) -> LoadedModel:
        of = int(self._state.weights["of"][loaded.row])
        return self._rows[of - 1] if of else loaded

    def write_needs(self, loaded: LoadedModel, profile: ProgramProfile) -> None:
        """Tells the core which chunks each segment of one batch size needs. Call it between two steps."""
        found, k = self._holder(loaded).range, loaded.model.batch.index(profile.batch)
        whole = 0 if found is None else found.layout.nbytes
        needs = np.array(profile.needs or (whole,) * len(profile.segments))
        chunk = 1 if found is None else found.chunk_bytes
        self._state.segment["chunks"][loaded.row, k, : len(needs)] = -(-needs // chunk)

    def hold(self, models: Sequence[LoadedModel]) -> None:
        """Keeps the weights of these models, and of no others, on the GPU: from now on, or once they have come."""
        rows = sorted({each.row for each in map(self._holder, models) if each.range is not None})

        def change() -> None:
            self._state.weights["locked"] = 0
            self._state.weights["locked"][rows] = 1
            self._state.residency["pending"][0] = 1

        if np.flatnonzero(self._state.weights["locked"]).tolist() != rows:
            self._core.run(change)

    def holds(self, loaded: LoadedModel) -> bool:
        """Whether the weights are on the GPU, and stay until `hold` says otherwise."""
        loaded = self._holder(loaded)
        w = self._state.weights[loaded.row]
        return loaded.range is None or bool(w["locked"] and w["location"] == codes.RESIDENT)

    def _rows_of_arenas(self, loaded: LoadedModel) -> None:
        for instance, row in zip(loaded.instances, loaded.instance_rows, strict=True):
            self._state.instance["arena"][row] = codes.NONE if instance.arena is None else instance.arena.index

    def take_out(self, loaded: LoadedModel) -> None:
        """Takes the weights of a closed model out of the core. They may be moving at that moment."""
        row, found = loaded.row, loaded.range
        w, r = self._state.weights[row], self._state.residency[0]
        done = False

        def out() -> None:
            nonlocal done
            if w["location"] in (codes.LOADING, codes.EVICTING):
                return
            held = found.held_bytes if found is not None and w["location"] == codes.RESIDENT else 0
            if w["of"]:
                self._state.weights["also"][w["of"] - 1] = 0
            remove(self._state, row)
            r["budget_bytes"] -= held
            if held:
                self.budget.taken[loaded.model.name] = self.budget.taken.get(loaded.model.name, 0) + held
            done = True

        while not done:
            self._core.run(out)
            time.sleep(0 if done else LOOK_S)
        self._rows.pop(row, None)

    # -- for display

    def account(self) -> dict[str, Any]:
        """The core's and the store's figures for every model."""
        return weights_account(self._state, {row: each.model for row, each in list(self._rows.items())}, self.store)

    # -- by hand

    def move(self, loaded: LoadedModel, wanted: bool) -> None:
        """Orders weights to come or to leave although no request requires it, and waits until they have."""
        row, mover, errors = loaded.row, self._mover, self._core.weight_errors
        known = self._rows.get(row)  # None: its weights are not managed
        w, aim = self._state.weights[row], codes.RESIDENT if wanted else codes.OFF_GPU

        def flag() -> None:
            w["prefetch"], w["evict_requested"] = int(wanted), int(not wanted and w["location"] != codes.OFF_GPU)
            if wanted and w["location"] == codes.OFF_GPU:
                w["ordered_ns"] = time.monotonic_ns()
            mover.ordered[row] = wanted
            self._state.residency["pending"][0] = 1

        if not wanted and w["keep"] == codes.PINNED:
            raise ModelError(
                "these weights cannot be evicted, because the model has resident=True or lengths, changes its "
                "weights, or has none: unload the model instead", model=loaded.model.name, field="resident",
            )  # fmt: skip
        # counted, because the weights may move again before this thread looks
        counter = "brought" if wanted else "evicted"
        before, stuck = int(w[counter]), int(w["stuck"])
        errors.pop(row, None)  # of an earlier order
        self._core.run(flag)
        end = time.monotonic() + ORDER_S
        while w["location"] != aim and w[counter] == before:
            self._core.check_open()
            if self._rows.get(row) is not known:
                raise ModelError("the model was unloaded meanwhile", model=loaded.model.name)
            if mover.ordered[row] != wanted and w["location"] == (codes.OFF_GPU if wanted else codes.RESIDENT):
                other = "leave" if wanted else "come"
                raise ModelError(f"the weights were ordered to {other} by another call meanwhile", ordered=other)
            if row in errors and w["location"] == codes.OFF_GPU:
                raise errors[row]
            if not wanted and w["stuck"] != stuck:
                raise mover.stuck[row]
            if time.monotonic() > end:
                raise MemoryPlanError(
                    f"the weights did not move within {ORDER_S:.0f} s: models in use or of higher priority hold all "
                    "memory", model=loaded.model.name, limit=ORDER_S,
                )  # fmt: skip
            time.sleep(LOOK_S)

    def state_of(self, row: int) -> str:
        """The place of the weights: `resident`, `loading 43 %`, `leaving`, `host` or `disk`."""
        return weights_state(self._state, row)

    def close(self) -> None:
        self._mover.close()
        self._promoter.close()

    def close_store(self) -> None:
        self.store.close()
