"""The process of one worker of a model's steps. It has a module of its own, so that such a process imports little."""

from __future__ import annotations

import multiprocessing
import pickle
import signal
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from typing import Any

READY, DONE, REFUSED, FAILED = range(4)  # said by the process; the last two with the error's name, text and facts


class StepProcess:
    """Calls functions in another process, one at a time."""

    def __init__(self, functions: bytes) -> None:
        """`functions` are pickled by their names. RuntimeError: they cannot be imported there."""
        spawn = multiprocessing.get_context("spawn")  # a fork would copy locks that other threads hold
        self._mine, theirs = spawn.Pipe()
        self._process = spawn.Process(target=_serve, args=(theirs,), daemon=True)
        self._process.start()
        theirs.close()
        try:
            self._mine.send_bytes(functions)
            kind, found = pickle.loads(self._mine.recv_bytes())
        except (EOFError, OSError):
            kind, found = FAILED, ("", self.ending())
        if kind != READY:
            self.kill()
            raise RuntimeError(found[1])

    @property
    def pid(self) -> int | None:
        return self._process.pid

    def begin(self, step: str, values: Mapping[str, Any]) -> None:
        """OSError: the process has ended."""
        self._mine.send_bytes(pickle.dumps((step, values), pickle.HIGHEST_PROTOCOL))

    def wait(self, seconds: float) -> bool:
        """Whether the answer is there, or the process has ended."""
        return self._mine.poll(seconds)

    def answer(self) -> tuple[int, Any]:
        """EOFError or OSError: the process has ended."""
        kind, found = pickle.loads(self._mine.recv_bytes())
        return kind, found

    def ending(self) -> str:
        """How the process ended."""
        self._process.join(1.0)
        code = self._process.exitcode
        return f"by signal {-code}" if code is not None and code < 0 else f"with exit code {code}"

    def kill(self) -> None:
        self._process.kill()
        self._process.join()
        self._mine.close()


def _serve(connection: Connection) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl+C ends the engine's process, and that ends this one
    functions: dict[str, Callable[..., Any]] = {}
    try:
        functions = pickle.loads(connection.recv_bytes())
        said: tuple[int, Any] = READY, None
    except BaseException as e:
        said = FAILED, (type(e).__name__, f"{type(e).__name__}: {e}")
    while True:
        try:
            connection.send_bytes(pickle.dumps(said, pickle.HIGHEST_PROTOCOL))
            step, values = pickle.loads(connection.recv_bytes())
        except (EOFError, OSError):  # the engine's process has ended, or wants this one no more
            return
        except Exception as e:  # the value cannot be sent
            said = FAILED, (type(e).__name__, str(e))
            continue
        try:
            said = DONE, functions[step](**values)
        except ValueError as e:
            said = REFUSED, (type(e).__name__, str(e), vars(e))
        except BaseException as e:
            said = FAILED, (type(e).__name__, str(e))
