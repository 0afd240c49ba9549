"""`LazyCapture`: captures batch sizes and lengths of models that serve, each when it was first wanted."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Sequence

from paellapy.instrument.errors import PaellaError
from paellapy.scheduler.backends.base import LoadedModel
from paellapy.scheduler.core import codes
from paellapy.scheduler.engine.core_loop import CoreLoop
from paellapy.scheduler.engine.loading import Loader, install_size

_log = logging.getLogger("paellapy.load")
_LOOK_S = 0.02  # how often the thread looks for sizes that batches wanted


class LazyCapture:
    """A thread that captures. `loading` is the lock that loads and unloads hold."""

    def __init__(
        self, core: CoreLoop, loader: Loader, loading: threading.RLock,
        load_length: Callable[[LoadedModel, int], None],
    ) -> None:  # fmt: skip
        self._core, self._state, self._loader, self._loading = core, core.state, loader, loading
        self._load_length = load_length
        self._models: list[LoadedModel] = []  # those with sizes left to capture
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def add(self, loaded: LoadedModel) -> None:
        """Captures the model's later sizes and lengths from now on; the caller holds the lock."""
        if (loaded.later or lengths_left(loaded)) and loaded not in self._models:
            self._models.append(loaded)
            if self._thread is None:
                self._thread = threading.Thread(target=self._watch, name="paellapy-sizes", daemon=True)
                self._thread.start()

    def forget(self, loaded: LoadedModel) -> None:
        """The model is unloaded; the caller holds the lock."""
        if loaded in self._models:
            self._models.remove(loaded)

    def close(self) -> None:
        """Ends the thread, after the capture that is under way. The caller must not hold the lock."""
        self._ended.set()
        if self._thread is not None:
            self._thread.join()

    def _watch(self) -> None:
        while not self._ended.wait(_LOOK_S):
            if not any(self.wanted(each) or each.wanted_lengths for each in list(self._models)):
                continue
            # With a time-out: whoever holds the lock may be waiting for this thread to end, or for memory.
            if self._loading.acquire(timeout=_LOOK_S):
                try:
                    self.capture_next()
                finally:
                    self._loading.release()
            else:
                self._hold([])
        self._hold([])

    def _hold(self, models: Sequence[LoadedModel]) -> None:
        """Keeps the weights of these models on the GPU, once they have come, and of no others."""
        if self._loader.weight_cache is not None:
            with contextlib.suppress(PaellaError):  # the engine has failed: no weights move any more
                self._loader.weight_cache.hold(models)

    def _is_there(self, loaded: LoadedModel) -> bool:
        """Whether the weights are on the GPU until they are let go."""
        return self._loader.weight_cache is None or self._loader.weight_cache.holds(loaded)

    def wanted(self, loaded: LoadedModel) -> list[int]:
        """Batch sizes that are wanted and not captured."""
        sizes = self._state.size[loaded.row, : len(loaded.model.batch)]
        return [int(b) for b in sizes["batch"][(sizes["capture"] == codes.WANTED) & (sizes["segments"] == 0)]]

    def capture_next(self) -> None:
        """One size at a time, so that loads and unloads get their turn. A trace records the sizes it began with."""
        if self._ended.is_set() or self._loader.backend.tracing:
            self._hold([])
            return
        longer = next((each for each in self._models if each.wanted_lengths), None)
        if longer is not None:  # its weights stay on the GPU
            self._capture_length(longer, longer.wanted_lengths.pop())
            return
        wanting = [each for each in self._models if self.wanted(each)]
        self._hold(wanting)  # weights that are away are not brought for this: requests will bring them
        loaded = next((each for each in wanting if self._is_there(each)), None)
        if loaded is None:
            return
        self._hold([loaded])
        self._capture(loaded, self.wanted(loaded)[0])
        self._hold([])
        if "" not in loaded.later.values():
            self._loader.free_spare(loaded)
            self._end_if_done(loaded)

    def _capture_length(self, loaded: LoadedModel, size: int) -> None:
        if size not in lengths_left(loaded):  # wanted again while it was being captured
            return
        try:
            self._load_length(loaded, size)
        except Exception as e:  # requests of this length go on being padded to a longer one
            loaded.length_errors[size] = f"{type(e).__name__}: {e}"
            _log.warning("model %r: length %d could not be captured: %s", loaded.model.name, size, e)
        self._end_if_done(loaded)

    def _end_if_done(self, loaded: LoadedModel) -> None:
        if "" not in loaded.later.values() and not lengths_left(loaded) and loaded in self._models:
            self._models.remove(loaded)

    def _capture(self, loaded: LoadedModel, batch: int) -> None:
        row = self._state.size[loaded.row, loaded.model.batch.index(batch)]
        try:
            self._loader.add_size(loaded, batch, self._core.is_idle)
            self._core.run(lambda: self._install(loaded, batch))
        except Exception as e:  # concerns this size alone: batches go on at the sizes that are there
            loaded.later[batch] = f"{type(e).__name__}: {e}"
            row["capture"] = codes.GIVEN_UP
            _log.warning("model %r: batch size %d could not be captured: %s", loaded.model.name, batch, e)
        else:
            del loaded.later[batch]

    def _install(self, loaded: LoadedModel, batch: int) -> None:
        install_size(self._state, loaded, batch)
        if self._loader.weight_cache is not None:
            (profile,) = (each for each in loaded.profiles if each.batch == batch)
            self._loader.weight_cache.write_needs(loaded, profile)


def lengths_left(loaded: LoadedModel) -> list[int]:
    """Lengths that may still be captured."""
    lengths = loaded.model.lengths
    if lengths is None or not loaded.by_length:
        return []
    return [n for n in lengths.sizes if n not in loaded.by_length and n not in loaded.length_errors]
