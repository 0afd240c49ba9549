"""Data of a background job: a thread of its own fetches the next batch while a step runs."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterable, Iterator
from typing import Any

from paellapy.scheduler.core.errors import ModelError
from paellapy.scheduler.models.torch_step import Batch

_LOOK_S = 0.05  # how often a fetcher that waits for room looks whether it is wanted any more


class Feed:
    """Batches in order, one fetched ahead. `take` raises what the data raised."""

    def __init__(self, torch: Any, name: str, data: Iterable[Any]) -> None:
        self._torch, self._name = torch, name
        self._left: Iterator[Any] = iter(data)
        self._ahead: queue.Queue[Batch | BaseException | None] = queue.Queue(1)
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._fetch, name=f"paellapy-data-{name}", daemon=True)

    def first(self) -> Batch:
        """The first batch, fetched here; the others come from the thread, which starts now."""
        found = self._next()
        if found is None:
            raise ModelError(f"job {self._name!r}: its data have no batch at all")
        self._thread.start()
        return found

    def take(self) -> Batch | None:
        """The next batch; None: there is no more."""
        found = self._ahead.get()
        if isinstance(found, BaseException):
            raise found
        return found

    def stop(self) -> None:
        self._stopped.set()

    def _next(self) -> Batch | None:
        for given in self._left:
            return Batch(self._torch, self._name, given)
        return None

    def _fetch(self) -> None:
        found: Batch | BaseException | None = None
        while not self._stopped.is_set():
            try:
                found = self._next()
            except BaseException as e:  # whoever takes it is to see it
                found = e
            while not self._stopped.is_set():
                try:
                    self._ahead.put(found, timeout=_LOOK_S)
                    break
                except queue.Full:
                    continue
            if not isinstance(found, Batch):
                return
