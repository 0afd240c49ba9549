"""`LoadedModels`: loads models, jobs and leases into the core while others run, and takes them out again."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np

from paellapy.scheduler.backends.base import LoadedModel
from paellapy.scheduler.core import codes
from paellapy.scheduler.core.errors import ModelError
from paellapy.scheduler.core.processes import spare_a_cpu
from paellapy.scheduler.core.profiles import checked_priority, remove
from paellapy.scheduler.engine.core_loop import CoreLoop
from paellapy.scheduler.engine.lazy_capture import LazyCapture
from paellapy.scheduler.engine.loading import Loader, LoadTimes, install, shown
from paellapy.scheduler.engine.ring_client import Waiter
from paellapy.scheduler.models.model import Model


class LoadedModels:
    """`instances`: how many a model gets where it does not say."""

    def __init__(self, core: CoreLoop, loader: Loader, instances: int) -> None:
        self.core, self.state, self.weight_cache = core, core.state, loader.weight_cache
        self.lock = threading.RLock()  # held while a model is loaded or unloaded
        self._loader, self._instances = loader, instances
        self.lazy_capture = LazyCapture(core, loader, self.lock, self.load_length)
        self._by_name, self._by_row = core.models.by_name, core.models.by_row
        self.on_length: list[Callable[[], None]] = []  # called when a model was captured at another length

    def add(self, model: Model) -> None:
        """Loads a model that takes requests by its name."""
        with self.lock:
            self.core.check_open()
            if model.resident is False and self.weight_cache is None:
                raise ModelError(
                    f"model {model.name!r}: resident=False has no effect where all weights stay on the GPU: create the "
                    "engine with memory_bytes, or leave resident out", model=model.name, field="resident", given=False,
                )  # fmt: skip
            if model.resident is False and model.lengths is not None:
                raise ModelError(
                    f"model {model.name!r}: weights that all lengths share stay on the GPU: leave resident out, or "
                    "load the model with one length", model=model.name, field="resident", given=False,
                )  # fmt: skip
            with self.core.outside(repr(model.name)):
                loaded = self.load(model)
                try:
                    self._load_lengths(loaded)
                except BaseException:
                    self._close_all(loaded)
                    raise
                self._by_name[model.name] = loaded

    def _load_lengths(self, loaded: LoadedModel) -> None:
        """Has the other sizes of a model whose inputs vary in length captured: now, or when requests want them."""
        lengths = loaded.model.lengths
        if lengths is not None:
            loaded.by_length = {lengths.longest: loaded}
            for size in lengths.sizes[:-1] if loaded.model.capture == "ahead" else ():
                self.load_length(loaded, size)
            self.lazy_capture.add(loaded)

    def load_length(self, loaded: LoadedModel, size: int) -> None:
        """Captures a model at another size of its length; the caller holds the lock."""
        made = self.load(loaded.model.at_length(size, loaded.weights))
        loaded.by_length = dict(sorted([*loaded.by_length.items(), (size, made)]))
        for told in self.on_length:
            told()

    def find(self, name: str) -> LoadedModel:
        """The model that takes requests by this name; an UnknownModelError if there is none."""
        found: LoadedModel = self.core.models.find(name)
        return found

    def load_beside(self, model: Model) -> LoadedModel:
        """Loads a model that takes no requests by its name."""
        with self.lock, self.core.outside(repr(model.name)):
            return self.load(model)

    def load(self, model: Model) -> LoadedModel:
        """Compiles, captures, measures and opens a model. Loaded models keep running meanwhile."""
        with self.lock:
            self.check_name(model.name, "unload it first", leases_too=True)
            free = int(np.count_nonzero(self.state.instance["model"] == codes.NONE))
            wanted, loaded_already, places = model.instances or 1, len(self._by_row), len(self.state.model)
            if free < wanted or loaded_already >= places:
                field, given, limit = ("instances", wanted, free) if free < wanted else ("models", places + 1, places)
                raise ModelError(
                    f"no room for model {model.name!r}: {loaded_already} of {places} models and all but {free} of "
                    f"{len(self.state.instance)} instances are in use; unload a model, or raise the engine's limits",
                    model=model.name, field=field, given=given, limit=limit,
                )  # fmt: skip
            times = LoadTimes(model.name)
            with shown(times):
                loaded = self._loader.load(model, min(self._instances, free), self.core.is_idle, times)
                with times.phase("install"):
                    self._install(loaded)
                    if self.weight_cache is not None:
                        self.weight_cache.add(loaded)
            if self.core.ring.spin_ns:  # the core's loop spins, too
                spare_a_cpu()
            loaded.load_s = times.seconds
            self._open(loaded)
            self.lazy_capture.add(loaded)
            return loaded

    def open_leases(self, loaded: LoadedModel) -> None:
        """Opens the leases of one name, which are loaded already."""
        self._install(loaded)
        self._open(loaded)

    def _install(self, loaded: LoadedModel) -> None:
        install(self.state, loaded, self.core.backend.pool(self.state, loaded.model.priority))

    def _open(self, loaded: LoadedModel) -> None:
        self._by_row[loaded.row] = loaded
        self.core.ring.command(codes.OPEN_MODEL, loaded.row)

    def check_name(self, name: str, remedy: str, leases_too: bool = False) -> None:
        """Raises if the name belongs to a model or a job."""
        if any(each.model.name == name and (leases_too or each.kind != "lease") for each in self._by_row.values()):
            raise ModelError(f"a model or a job named {name!r} is loaded already; {remedy}", field="name", given=name)

    def remove(self, loaded: LoadedModel) -> None:
        """Refuses the model's new requests, and unloads it once the others are finished."""
        with self.lock:
            del self._by_name[loaded.model.name]
            self._close_all(loaded)

    def _close_all(self, loaded: LoadedModel) -> None:
        """Closes a model with all its lengths."""
        self.lazy_capture.forget(loaded)
        shorter = [each for each in loaded.by_length.values() if each is not loaded]
        loaded.by_length = {}
        for each in (*shorter, loaded):
            self._close(each)

    def close(self, loaded: LoadedModel) -> None:
        """Unloads a job, unless the engine has unloaded everything or its GPU has failed."""
        if loaded.row in self._by_row and self.core.failure is None:
            self._close(loaded)

    def _close(self, loaded: LoadedModel) -> None:
        waiter = Waiter()
        self.core.ring.on_model_closed(loaded.row, waiter.set)
        self.core.ring.command(codes.CLOSE_MODEL, loaded.row)
        self.core.ring.wait(waiter)
        if self.weight_cache is None:
            remove(self.state, loaded.row)
        else:
            self.weight_cache.take_out(loaded)
        self.free(loaded)

    def free(self, loaded: LoadedModel) -> None:
        """Frees the memory of a model that is not in the core any more."""
        self.lazy_capture.forget(loaded)
        del self._by_row[loaded.row]
        self._loader.unload(loaded)

    def end_captures(self) -> None:
        self.lazy_capture.close()


def model_priority(what: str, priority: Any) -> int:
    try:
        return checked_priority(priority)
    except ValueError as e:
        raise ModelError(f"{what}: {e}", field="priority", given=priority) from None
