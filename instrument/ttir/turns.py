"""Blocks that wait for each other: each runs on its own, and gives way while it waits.

In lockstep a spin lock livelocks (the owner cannot leave the loop before the others do); one block after the other, a
grid-wide barrier deadlocks. So a block that goes round a waiting loop is parked and others get their turn. Only one
runs at any time. A thread runs blocks one after the other until one of them waits; the next thread takes over there.
"""

from __future__ import annotations

import contextvars
import threading
from collections import deque
from collections.abc import Callable, Iterator

from paellapy.instrument.errors import LaunchError

MAX_WAITING = 4096  # threads; more blocks than any GPU holds at once
MAX_ROUNDS = 200  # turns every waiting block gets while none of them finishes

Body = Callable[[Callable[[], None]], None]  # one block; it calls its argument while it waits


class Turns:
    """The blocks still to be started, and how many are done."""

    def __init__(self, bodies: list[Body]) -> None:
        self.todo: Iterator[Body] = iter(bodies)
        self.left = len(bodies)  # not yet started
        self.done = 0

    def next(self) -> Body | None:
        body = next(self.todo, None)
        self.left -= body is not None
        return body


class Worker:
    """A thread that runs blocks; `resume` lets it go on until there are none left or its block waits."""

    def __init__(self, turns: Turns) -> None:
        self.finished = False
        self.error: BaseException | None = None
        self._turns, self._cancelled = turns, False
        self._go, self._back = threading.Semaphore(0), threading.Semaphore(0)
        context = contextvars.copy_context()  # NumPy's error state lives there
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
        """Unwind a block that will never finish."""
        if not self.finished:
            self._cancelled = True
            self._go.release()
        self._thread.join()


class _Cancelled(BaseException):
    """Raised inside a cancelled block."""


def take_turns(kernel: str, bodies: list[Body]) -> None:
    """Run all bodies to their ends; each gets a function to call while it waits."""
    turns = Turns(bodies)
    workers: list[Worker] = []
    waiting: deque[Worker] = deque()
    try:
        while turns.left:
            workers.append(Worker(turns))
            workers[-1].resume()
            if not workers[-1].finished:
                waiting.append(workers[-1])
            if len(waiting) > MAX_WAITING:
                raise LaunchError(f"kernel {kernel}: more than {MAX_WAITING} blocks wait for each other")
        idle, done = 0, turns.done
        while waiting:
            worker = waiting.popleft()
            worker.resume()
            if not worker.finished:
                waiting.append(worker)
            idle = 0 if turns.done > done else idle + 1
            done = turns.done
            if idle > MAX_ROUNDS * max(1, len(waiting)):
                raise LaunchError(
                    f"kernel {kernel}: {len(waiting)} blocks wait for each other and none goes on; a barrier over the "
                    "grid needs all its blocks in one launch"
                )
    finally:
        for worker in workers:
            worker.cancel()
