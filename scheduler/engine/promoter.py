"""The promoter: a thread that moves weights in demand from their files to the host's memory, beside all moves."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable

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
