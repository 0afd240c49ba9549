"""Data of a background job: a separate thread fetches the next batch while a step runs."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterable, Iterator
from typing import Any

from paellapy.scheduler.core.errors import ModelError
from paellapy.scheduler.models.tensors import TensorSpec
from paellapy.scheduler.models.torch_step import Batch

_LOOK_S = 0.05  # how often a thread that waits for the other checks whether the feed was stopped


class Feed:
    """Batches in order, fetched ahead if the job wants that. `take` raises any error that the data raised.

    `skip_ragged`: batches whose shapes or types differ from the first batch's are left out and counted.
    """

    def __init__(self, torch: Any, name: str, data: Iterable[Any], skip_ragged: bool = False) -> None:
        self._torch, self._name, self._skip_ragged = torch, name, skip_ragged
        self.skipped = 0
        self._specs: dict[str, TensorSpec] | None = None  # of the first batch
        try:
            self._left: Iterator[Any] = iter(data)
        except TypeError:
            raise ModelError(
                f"job {name!r}: data={data!r} is no iterable of batches: give a data loader, a list or a generator"
            ) from None
        self._ahead: queue.Queue[Batch | BaseException | None] = queue.Queue(1)
        self._stopped, self._fetches_ahead = threading.Event(), True
        self._asked = threading.Semaphore(0)  # batches that `take` asked for and the thread has not begun to fetch
        self._thread = threading.Thread(target=self._fetch, name=f"paellapy-data-{name}", daemon=True)

    def first(self) -> Batch:
        """Fetches the first batch, in this thread."""
        found = self._next()
        if found is None:
            raise ModelError(f"job {self._name!r}: `data` yielded no batch; give an iterable with at least one")
        self._specs = found.specs
        return found

    def start(self, ahead: bool = True) -> None:
        """Starts the thread that fetches the other batches; without `ahead`, each only when `take` asks for it.

        Call it when the job's step is loaded: loading sets PyTorch's generators back, and batches that were drawn from
        them meanwhile would be drawn a second time.
        """
        self._fetches_ahead = ahead
        self._thread.start()

    def take(self) -> Batch | None:
        """The next batch, or None at the end of the data or after `stop`."""
        self._asked.release()
        while not self._stopped.is_set():
            try:
                found = self._ahead.get(timeout=_LOOK_S)
            except queue.Empty:
                continue
            if isinstance(found, BaseException):
                raise found
            return found
        return None

    def stop(self) -> None:
        self._stopped.set()

    def _next(self) -> Batch | None:
        for given in self._left:
            batch = Batch(self._torch, self._name, given)
            if self._specs is None or not self._skip_ragged or batch.specs == self._specs:
                return batch
            self.skipped += 1
            if self._stopped.is_set():
                break
        return None

    def _fetch(self) -> None:
        found: Batch | BaseException | None = None
        while not self._stopped.is_set():
            if not self._fetches_ahead and not self._asked.acquire(timeout=_LOOK_S):
                continue
            try:
                found = self._next()
            except BaseException as e:  # `take` raises it in the job's thread
                found = e
            while not self._stopped.is_set():
                try:
                    self._ahead.put(found, timeout=_LOOK_S)
                    break
                except queue.Full:
                    continue
            if not isinstance(found, Batch):
                return
