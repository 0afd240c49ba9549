"""A process as the guest of an engine: its launches wait at a gate while the engine needs the GPU for itself.

The gate is a block of words that the engine hands over. If the engine ends, the gate opens. If another engine starts,
the process becomes its guest.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
import time
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paellapy.instrument.device import launch_hook
from paellapy.scheduler.core.processes import SharedBlock
from paellapy.scheduler.engine.guests import Greeting, GreetingError, NoEngineError, knock

_MOST_IN_FLIGHT = 1 << 32
_ANSWER_S = 5.0  # an engine that does not answer within this time counts as absent
_RETRY_S = 1.0
FIRST_PAUSE_S, LAST_PAUSE_S = 0.02, 2.0  # pause between two searches for libraries: at first, and later
_PAUSES = 25  # a pause is at least this many times the processor time of a search


class Guest:
    """This process as the guest of an engine."""

    def __init__(
        self, name: str, priority: int = -1, share: float = 1.0, engine: str | None = None, in_flight: int = 0
    ) -> None:
        if not 0 <= in_flight <= _MOST_IN_FLIGHT:
            raise GreetingError(f"in_flight is {in_flight}: give a number of kernels up to 2³², or 0 for no limit")
        self._in_flight = in_flight
        self._about = Greeting(name, priority, share, os.getpid())
        self._engine = engine
        self._free: NDArray[np.uint64] = np.zeros(launch_hook.WORDS, np.uint64)
        self._free[launch_hook.SHARE] = launch_hook.SHARE_UNIT
        self.cell = np.zeros(1, np.uint64)  # address of the gate's words in use, for compiled code
        self._block: SharedBlock | None = None
        self._left: list[Any] = []  # blocks that other threads may still read
        self._patched = 0  # pointers to the driver that lead through the gate
        self._open()
        self.name = ""

    @property
    def words(self) -> NDArray[np.uint64]:
        return self._free if self._block is None else self._block.array[: 8 * launch_hook.WORDS].view(np.uint64)

    def join(self) -> None:
        """Becomes the engine's guest, after which launches wait at the gate. NoEngineError if that is not possible."""
        self._follow(self.connect())
        launch_hook.keep_forever(self)  # the driver's callers read `cell` and the words
        launch_hook.hold = lambda: launch_hook.Gate(self.words).wait()
        self._watch()
        os.register_at_fork(after_in_child=self._after_fork)

    def _watch(self) -> None:
        threading.Thread(target=self._watch_driver, name="paellapy-gate", daemon=True).start()

    def _after_fork(self) -> None:
        """A forked process shares the words, and so the gate. If the driver is in use already, the fork cannot use it.
        """
        if not self._patched:
            self._watch()

    def connect(self) -> socket.socket:
        line = knock(self._engine)
        line.settimeout(_ANSWER_S)
        try:
            line.send(self._about.message())
            said, descriptors, _, _ = socket.recv_fds(line, 4096, 1)
            answer = json.loads(said) if said else {"error": "it closed the connection"}
            if not descriptors or not isinstance(answer, dict):
                why = answer.get("error") if isinstance(answer, dict) else answer
                raise NoEngineError(f"the engine refused this process: {why}")
            block = SharedBlock.of(descriptors[0])
        except (OSError, ValueError) as e:
            line.close()
            raise NoEngineError(f"the engine does not answer: {e}") from e
        except NoEngineError:
            line.close()
            raise
        line.settimeout(None)
        self.name, self._block = str(answer.get("name")), block
        block.array[: 8 * launch_hook.WORDS].view(np.uint64)[launch_hook.IN_FLIGHT] = self._in_flight
        self.cell[0] = block.address
        return line

    def _open(self) -> None:
        """Opens the gate: without an engine, nothing waits."""
        self._left.append(self._block)
        self._block = None
        self.cell[0] = self._free.ctypes.data

    def _follow(self, line: socket.socket) -> None:
        def follow() -> None:
            current: socket.socket | None = line
            while True:
                if current is not None:
                    with contextlib.suppress(OSError):
                        current.recv(1)  # returns when the engine ends, since it sends nothing
                    current.close()
                    self._open()
                    current = None
                time.sleep(_RETRY_S)
                with contextlib.suppress(NoEngineError):
                    current = self.connect()

        threading.Thread(target=follow, name="paellapy-guest", daemon=True).start()

    def _watch_driver(self) -> None:
        """Puts the gate before the driver's launch functions, whenever a library has looked them up."""
        cells = launch_hook.Cells(int(self.cell.ctypes.data))
        wait_s = FIRST_PAUSE_S
        while True:
            began = time.thread_time()
            # Libraries fill their tables on first use, which may be late in a script. So the search never ends, but
            # takes a small part of the time.
            new = cells.look()
            wait_s = FIRST_PAUSE_S if new or not cells.patched else min(1.5 * wait_s, LAST_PAUSE_S)
            if cells.patched:
                self._patched = self.words[launch_hook.CELLS] = cells.patched
            time.sleep(max(wait_s, _PAUSES * (time.thread_time() - began)))
