"""Blocks that wait for each other: each runs separately, and gives way while it waits.

In lockstep a spin lock would livelock, since the owner cannot leave the loop before the others do; one block after the
other, a grid-wide barrier would deadlock. So a block in a waiting loop is parked and others get their turn. Only one
runs at any time. A thread runs blocks one after the other until one of them waits; then the next thread takes over.
"""

from __future__ import annotations

import contextvars
import threading
from collections import deque
from collections.abc import Callable, Iterator

from paellapy.instrument.errors import LaunchError

MAX_WAITING = 4096  # threads; more than the blocks that any GPU holds at once
MAX_ROUNDS = 200  # turns of every waiting block without any finishing, before memory is checked
MAX_LOOKS = 5_000  # checks with changed memory but without a finished block, after which the kernel counts as endless

Body = Callable[[Callable[[], None]], None]  # one block; it calls its argument while it waits


class Turns:
    """The blocks still to be started, and the number of finished ones."""

    def __init__(self, bodies: list[Body]) -> None:
        self.todo: Iterator[Body] = iter(bodies)
        self.left = len(bodies)  # not yet started
        self.done = 0

    def next(self) -> Body | None:
        body = next(self.todo, None)
        self.left -= body is not None
        return body


class Worker:
    """A thread that runs blocks; `resume` lets it continue until none is left or its block waits."""

    def __init__(self, turns: Turns) -> None:
        self.finished = False
        self.error: BaseException | None = None
        self._turns, self._cancelled = turns, False
        self._go, self._back = threading.Semaphore(0), threading.Semaphore(0)
        context = contextvars.copy_context()  # it holds NumPy's error state
        self._thread = threading.Thread(target=context.run, args=(self._main,), daemon=True)
        self._thread.start()

    def _main(self) -> None:
        self._go.acquire()
        try:
            while not self._cancelled and (body := self._turns.next()) is not None:
                body(self.give_way)
                self._turns.done += 1
        except _Cancelled:
            pass
        except BaseException as error:
            self.error = error
        self.finished = True
        self._back.release()

    def give_way(self) -> None:
        """Called by the block itself."""
        self._back.release()
        self._go.acquire()
        if self._cancelled:
            raise _Cancelled

    def resume(self) -> None:
        self._go.release()
        self._back.acquire()
        if self.error is not None:
            raise self.error

    def cancel(self) -> None:
        """Unwinds a block that will never finish."""
        if not self.finished:
            self._cancelled = True
            self._go.release()
        self._thread.join()


class _Cancelled(BaseException):
    """Raised inside a cancelled block."""


def take_turns(kernel: str, bodies: list[Body], memory: Callable[[], int]) -> None:
    """Runs all bodies to their ends; each receives a function to call while it waits.

    `memory` returns a number that stands for the contents of the memory that the kernel writes. Blocks that take work
    from a queue may loop many times before one of them finishes, and changes of memory show that they make progress.
    """
    turns = Turns(bodies)
    workers: list[Worker] = []
    waiting: deque[Worker] = deque()
    idle, done, seen, looks = 0, 0, memory(), 0
    try:
        while turns.left or waiting:
            if turns.left and len(waiting) < MAX_WAITING:
                worker = Worker(turns)
                workers.append(worker)
            else:
                worker = waiting.popleft()
            worker.resume()
            if not worker.finished:
                waiting.append(worker)
            idle = 0 if turns.done > done else idle + 1
            done, looks = turns.done, looks if idle else 0
            if idle > MAX_ROUNDS * max(1, len(waiting)):
                before, seen = seen, memory()
                idle, looks = 0, looks + 1
                if before == seen or looks > MAX_LOOKS:
                    raise LaunchError(_stuck(kernel, len(waiting), before == seen))
    finally:
        for worker in workers:
            worker.cancel()


def _stuck(kernel: str, waiting: int, still: bool) -> str:
    if still:
        why = "wait for each other without progress; a barrier over the grid needs all its blocks in one launch"
    else:
        why = f"poll in a loop, and none has finished in {MAX_LOOKS * MAX_ROUNDS:,} turns; bound that loop"
    return f"kernel {kernel}: {waiting} blocks {why}"
