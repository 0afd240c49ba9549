"""Blocks that wait for each other: each runs on its own, and gives way while it waits.

In lockstep a spin lock livelocks (the owner cannot leave the loop before the others do); one block after the other, a
grid-wide barrier deadlocks. So a block that goes round a waiting loop is parked and others get their turn. Only one
runs at any time; a thread is kept for each block that is waiting.
"""

from __future__ import annotations

import contextvars
import threading
from collections import deque
from collections.abc import Callable

from instrument.errors import LaunchError

MAX_WAITING = 4096  # threads; more blocks than any GPU holds at once
MAX_ROUNDS = 200  # turns every waiting block gets while none of them finishes


class Worker:
    """One block on a thread of its own; `resume` runs it until it finishes or waits."""

    def __init__(self, body: Callable[[Callable[[], None]], None]) -> None:
        self.done = False
        self.error: BaseException | None = None
        self._cancelled = False
        self._body = body
        self._go, self._back = threading.Semaphore(0), threading.Semaphore(0)
        context = contextvars.copy_context()  # NumPy's error state lives there
        self._thread = threading.Thread(target=context.run, args=(self._main,), daemon=True)
        self._thread.start()

    def _main(self) -> None:
        self._go.acquire()
        try:
            if not self._cancelled:
                self._body(self.give_way)
        except _Cancelled:
            pass
        except BaseException as error:
            self.error = error
        self.done = True
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
        if self.done:
            self._thread.join()
        if self.error is not None:
            raise self.error

    def cancel(self) -> None:
        self._cancelled = True
        if not self.done:
            self._go.release()
            self._thread.join()


class _Cancelled(BaseException):
    """Unwinds a block that will never finish."""


def take_turns(kernel: str, bodies: list[Callable[[Callable[[], None]], None]]) -> None:
    """Run all bodies to their ends; each gets a function to call while it waits."""
    waiting: deque[Worker] = deque()
    try:
        for body in bodies:
            worker = Worker(body)
            waiting.append(worker)
            worker.resume()
            if worker.done:
                waiting.pop()
            if len(waiting) > MAX_WAITING:
                raise LaunchError(f"kernel {kernel}: more than {MAX_WAITING} blocks wait for each other")
        idle = 0
        while waiting:
            worker = waiting[0]
            worker.resume()
            waiting.popleft()
            if worker.done:
                idle = 0
                continue
            waiting.append(worker)
            idle += 1
            if idle > MAX_ROUNDS * len(waiting):
                raise LaunchError(
                    f"kernel {kernel}: {len(waiting)} blocks wait for each other and none goes on; a barrier over the "
                    "grid needs all its blocks in one launch"
                )
    finally:
        for worker in waiting:
            worker.cancel()
