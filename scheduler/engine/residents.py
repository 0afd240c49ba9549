"""More models than GPU memory: weights in address ranges, a store on the host, and the mover between them.

The core decides which weights come and which leave (core/residency.py); this module carries that out.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from paellapy.instrument.errors import PaellaError
from paellapy.scheduler.backends.base import Backend
from paellapy.scheduler.backends.launches import LoadedModel
from paellapy.scheduler.core import codes
from paellapy.scheduler.core.errors import ModelError, WeightsError
from paellapy.scheduler.core.install import remove
from paellapy.scheduler.core.manage import KEEP, demand_worth, manage, weights_state
from paellapy.scheduler.core.state import State
from paellapy.scheduler.engine.budget import LOOK_S, Budget
from paellapy.scheduler.engine.lane_berths import LaneBerths
from paellapy.scheduler.engine.mover import Mover
from paellapy.scheduler.engine.needs import Trials
from paellapy.scheduler.engine.ordering import order_weights
from paellapy.scheduler.engine.promoter import Promoter
from paellapy.scheduler.engine.weights_account import weights_account
from paellapy.scheduler.models.host_store import HostStore
from paellapy.scheduler.models.model import Model
from paellapy.scheduler.models.profile import ProgramProfile
from paellapy.scheduler.models.tensors import Arrays
from paellapy.scheduler.models.weight_range import Layout, WeightRange


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
        self.berths = LaneBerths(backend, state, self.budget, in_loop, check)
        manage(state, budget_bytes)

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
        return any(self.state.weights["stage"][row] == codes.COMING for row in self._rows_of(name))

    def _rows_of(self, name: str) -> list[int]:
        return [row for row, each in list(self._rows.items()) if each.model.name == name]

    def _promote(self, name: str) -> None:
        def worth(each: str) -> float:
            return max((demand_worth(self.state, row) for row in self._rows_of(each)), default=0.0)

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
        what, keep = f"weights of model {model.name!r}", KEEP[model.resident]
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
        self.berths.leave(name)
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
            trials = Trials(self.backend, found, source, loaded.lanes[0], loaded.launches[0][k])
            loaded.profiles[k] = profile.with_needs(trials.tried(loaded.least_needs[k], profile.needs))

    def add(self, loaded: LoadedModel) -> None:
        """Hands the weights over to the core. The model's rows are written and not open yet."""
        found, row = loaded.range, loaded.row
        w, r = self.state.weights[row], self.state.residency[0]
        if found is None:
            self._rows_of_berths(loaded)
            return

        def hand_over() -> None:
            w["bytes"], w["chunk_bytes"], w["chunks"] = found.held_bytes, found.chunk_bytes, found.chunks
            w["word"], w["keep"] = found.words.ctypes.data, codes.STAYS if loaded.stays else KEEP[loaded.model.resident]
            w["stage"], w["came_ns"], w["used_ns"] = codes.HERE, time.monotonic_ns(), time.monotonic_ns()
            for profile in loaded.profiles:
                self.write_needs(loaded, profile)
            r["budget_bytes"] += found.held_bytes
            r["held_bytes"] += found.held_bytes

        self._rows_of_berths(loaded)
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
            self.state.weights["held"] = 0
            self.state.weights["held"][rows] = 1
            self.state.residency["look"][0] = 1

        if np.flatnonzero(self.state.weights["held"]).tolist() != rows:
            self._in_loop(change)

    def holds(self, loaded: LoadedModel) -> bool:
        """Whether the weights are on the GPU, and stay until `hold` says otherwise."""
        w = self.state.weights[loaded.row]
        return loaded.range is None or bool(w["held"] and w["stage"] == codes.HERE)

    def _rows_of_berths(self, loaded: LoadedModel) -> None:
        for lane, row in zip(loaded.lanes, loaded.lane_rows, strict=True):
            self.state.lane["berth"][row] = codes.NONE if lane.berth is None else lane.berth.index

    def take_out(self, loaded: LoadedModel) -> None:
        """Takes the weights of a closed model out of the core. They may be moving at that moment."""
        row, found = loaded.row, loaded.range
        w, r = self.state.weights[row], self.state.residency[0]
        done = False

        def out() -> None:
            nonlocal done
            if w["stage"] in (codes.COMING, codes.LEAVING):
                return
            held = found.held_bytes if found is not None and w["stage"] == codes.HERE else 0
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
