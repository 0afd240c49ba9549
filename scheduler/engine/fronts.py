"""Front ends of other processes, seen from the engine: the resources each is given, and their recovery when it ends."""

from __future__ import annotations

import os
import threading
import time

from paellapy.instrument.jit import compile_for
from paellapy.scheduler.core import step
from paellapy.scheduler.core.errors import ModelError
from paellapy.scheduler.core.shared_memory import SharedBlock
from paellapy.scheduler.engine.engine import Engine

STAGE_BYTES = 256 << 20  # staged inputs per front end; pages use memory only once they are written


class Fronts:
    """The front ends with numbers from 1, of an engine whose limits allow more than one front end."""

    def __init__(self, engine: Engine) -> None:
        assert engine.shared_state is not None, "the engine was made for one process"
        self._engine, self.state = engine, engine.shared_state
        self._wake_fd: dict[int, int] = {}
        self._stage: dict[int, SharedBlock] = {}

    def warm_up(self) -> None:
        """Compiles the functions needed when a front end dies, since the core would stand still while they compile."""
        compile_for(step.reclaim, self._engine.state, 1, time.monotonic_ns())

    def attach(self, front: int) -> tuple[int, SharedBlock]:
        """Gives a front end its resources: the eventfd that announces completions, and memory for staged inputs."""
        if not 1 <= front < self._engine.limits.fronts:
            raise ModelError(f"front end {front}: this engine has front ends 1 to {self._engine.limits.fronts - 1}")
        if front in self._wake_fd:
            raise ModelError(f"front end {front} is attached already; detach it first")
        fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._wake_fd[front] = fd
        self._engine.state.wake_fd[front, 0] = fd
        if front not in self._stage:
            self._stage[front] = SharedBlock(STAGE_BYTES)
        return fd, self._stage[front]

    def detach(self, front: int) -> int:
        """Takes back everything that a front end had, once its process is gone. Returns the number of its requests."""
        state, found, done = self._engine.state, [0], threading.Event()

        def take_back() -> None:
            state.wake_fd[front, 0] = -1
            found[0] = step.reclaim(state, front, time.monotonic_ns())
            done.set()

        self._engine.call_in_loop(take_back)
        while not done.wait(0.1):
            if self._engine.closed:
                break
        os.close(self._wake_fd.pop(front))
        return found[0]
