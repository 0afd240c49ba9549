"""Python functions before and after a model, in threads or processes of the model's own.

A function is called for one request at a time. It ends with its request: a request that is late or cancelled is taken
out of the queue, and a process that works on one is ended after GRACE_S. A thread cannot be ended: its result is
dropped, and another thread takes its place, MOST_LOST times at most.
"""

from __future__ import annotations

import asyncio
import contextlib
import pickle
import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Set
from concurrent.futures import Future
from typing import Any, ClassVar, Protocol

from paellapy.instrument.errors import PaellaError
from paellapy.scheduler.core import codes
from paellapy.scheduler.core.errors import (
    DeadlineError,
    EngineClosedError,
    InputError,
    ModelError,
    StepError,
    UnknownModelError,
)
from paellapy.scheduler.engine.request_values import Values, checked, fitting
from paellapy.scheduler.engine.step_process import DONE, REFUSED, StepProcess
from paellapy.scheduler.models.model import Model

GRACE_S = 1.0  # for a process whose request nobody waits for any more, before it is ended
LOOK_S = 0.05  # between two looks whether somebody still waits
MOST_LOST = 64  # threads of a model, in calls that do not return, in whose place others have come

# The threads of one model's steps.


class _Turn:
    """One call of a function, until its result is there or nobody waits for it."""

    def __init__(self, step: str, values: Values, deadline_ns: int) -> None:
        self.step, self.values, self.deadline_ns = step, values, deadline_ns
        self.future: Future[Any] = Future()
        self._withdrawn_ns = codes.NEVER

    def withdraw(self) -> None:
        self._withdrawn_ns = time.monotonic_ns()
        self.future.cancel()

    @property
    def is_over(self) -> bool:
        """Whether nobody has waited for GRACE_S."""
        return time.monotonic_ns() - min(self.deadline_ns, self._withdrawn_ns) > GRACE_S * 1e9


class Stepped(Protocol):
    """A model or a pipeline with functions."""

    name: str
    workers: int
    processes: bool

    @property
    def functions(self) -> dict[str, Callable[..., Any]]: ...

    @property
    def reads(self) -> Set[str]:
        """The functions whose ValueError refuses the request."""

    def made(self, step: str, found: Any) -> Any:
        """A function's result by name. StepError, InputError: it is not what follows takes."""


class OfModel:
    """The functions of one model."""

    reads: ClassVar[Set[str]] = {"before"}

    def __init__(self, model: Model) -> None:
        self._model = model
        self.name, self.functions = model.name, model.functions
        self.workers, self.processes = model.workers, model.processes

    def made(self, step: str, found: Any) -> dict[str, Any]:
        specs = self._model.inputs if step == "before" else self._model.gives
        if not isinstance(found, Mapping):
            found = dict.fromkeys(list(specs)[:1], found)
        return fitting(self._model, found) if step == "before" else checked(self.name, specs, found)


class StepPool:
    """Runs the functions of one model or pipeline."""

    def __init__(self, model: Stepped) -> None:
        self._name, self._of = model.name, model
        self._functions, self._reads = model.functions, model.reads
        self._packed = b""
        if model.processes:
            try:
                self._packed = pickle.dumps(self._functions)
            except Exception as e:
                raise ModelError(
                    f"model {model.name!r}: its steps cannot be sent to processes ({e}): use functions of a module, or "
                    "leave processes out", model=model.name, field="processes", given=True,
                ) from e  # fmt: skip
        self._turns: queue.SimpleQueue[_Turn | None] = queue.SimpleQueue()
        self._lock, self._requests, self._closing = threading.Lock(), 0, False
        self._workers = model.workers
        self._at: dict[int, _Turn] = {}  # what each thread does, by its number
        self._lost: set[int] = set()  # threads whose places others have taken
        self._started_threads = 0
        self.processes: set[StepProcess] = set()
        first = [self._started()] if self._packed else []  # reports what cannot be imported there
        for _ in range(model.workers):
            mine = first.pop() if first else None
            self._start_thread(mine)

    @contextlib.contextmanager
    def request(self) -> Iterator[None]:
        """A context for one request: the pool stays until it ends."""
        with self._lock:
            if self._closing:
                said = f"model {self._name!r} was unloaded before the request could run"
                raise UnknownModelError(said, model=self._name)
            self._requests += 1
        try:
            yield
        finally:
            with self._lock:
                self._requests -= 1
                over = self._closing and not self._requests
            if over:
                self._end()

    def close(self) -> None:
        """Takes no more requests; ends once those in flight are answered."""
        with self._lock:
            over = not self._closing and not self._requests
            self._closing = True
        if over:
            self._end()

    def _end(self) -> None:
        for _ in range(self._workers):
            self._turns.put(None)

    async def run(self, step: str, values: Values, deadline_ns: int) -> Any:
        """The function's result by name. Cancelling the task withdraws the call."""
        turn = _Turn(step, values, deadline_ns)
        self._turns.put(turn)
        try:
            return await asyncio.wrap_future(turn.future)
        except asyncio.CancelledError:
            self._withdraw(turn)
            raise

    def run_sync(self, step: str, values: Values, deadline_ns: int) -> dict[str, Any]:
        """As `run`; blocks this thread, until the deadline at most."""
        turn = _Turn(step, values, deadline_ns)
        self._turns.put(turn)
        left_s = None if deadline_ns == codes.NEVER else max(0.0, (deadline_ns - time.monotonic_ns()) * 1e-9)
        try:
            found: dict[str, Any] = turn.future.result(left_s)
            return found
        except DeadlineError:
            raise
        except TimeoutError:
            self._withdraw(turn)
            raise late(self._name, step) from None
        except BaseException:  # for example KeyboardInterrupt
            self._withdraw(turn)
            raise

    def _withdraw(self, turn: _Turn) -> None:
        turn.withdraw()
        with self._lock:
            runs_on = turn in self._at.values()
        if runs_on and not self._packed:
            looking = threading.Timer(GRACE_S, self._replace, (turn,))
            looking.daemon = True
            looking.start()

    def _replace(self, turn: _Turn) -> None:
        """Starts a thread in place of that which is still in this call: it may never return."""
        with self._lock:
            for number, each in self._at.items():
                if each is turn and len(self._lost) < MOST_LOST:
                    self._lost.add(number)
                    self._start_thread(None)

    def _start_thread(self, process: StepProcess | None) -> None:
        number = self._started_threads
        self._started_threads += 1
        # Python would wait at its end for other threads than daemons, even for one that never returns
        name = f"{self._name} step {number}"
        threading.Thread(target=self._work, args=(number, process), name=name, daemon=True).start()

    def _made(self, step: str, found: Any) -> Any:
        try:
            return self._of.made(step, found)
        except InputError as e:
            raise StepError(f"`{step}` returned a wrong value: {e}", model=self._name, step=step) from e

    # -- in the pool's threads

    def _work(self, number: int, process: StepProcess | None) -> None:
        while (turn := self._turns.get()) is not None:
            if turn.future.set_running_or_notify_cancel():
                with self._lock:
                    self._at[number] = turn
                process = self._do(turn, process)
                with self._lock:
                    del self._at[number]
                    if number in self._lost:
                        self._lost.discard(number)
                        return
            del turn  # its values
        if process is not None:
            self._drop(process)

    def _do(self, turn: _Turn, process: StepProcess | None) -> StepProcess | None:
        """Calls a function. Returns the thread's process, None if it has ended."""
        try:
            if turn.deadline_ns < time.monotonic_ns():
                raise late(self._name, turn.step)
            if not self._packed:
                found = self._called(turn)
            else:
                process = process or self._started()
                found = self._called_in(process, turn)
            turn.future.set_result(self._made(turn.step, found))
        except _EndedError as e:
            assert process is not None
            self._drop(process)
            process = None
            turn.future.set_exception(self._failed(turn.step, str(e)))
        except PaellaError as e:
            turn.future.set_exception(e)
        except BaseException as e:
            turn.future.set_exception(self._failed(turn.step, f"{type(e).__name__}: {e}"))
        return process

    def _started(self) -> StepProcess:
        process = StepProcess(self._packed)
        self.processes.add(process)
        return process

    def _drop(self, process: StepProcess) -> None:
        self.processes.discard(process)
        process.kill()

    def _called(self, turn: _Turn) -> Any:
        try:
            return self._functions[turn.step](**turn.values)
        except ValueError as e:
            raise self._refused(turn.step, type(e).__name__, str(e), vars(e)) from e
        except PaellaError:
            raise
        except BaseException as e:
            raise self._failed(turn.step, f"{type(e).__name__}: {e}") from e

    def _called_in(self, process: StepProcess, turn: _Turn) -> Any:
        try:
            process.begin(turn.step, turn.values)
            while not process.wait(LOOK_S):
                if turn.is_over:
                    raise _EndedError("it ran on after its request's end, and was ended")
            kind, found = process.answer()
        except (EOFError, OSError) as e:
            raise _EndedError(f"its process ended {process.ending()}") from e
        if kind == DONE:
            return found
        raise self._refused(turn.step, *found) if kind == REFUSED else self._failed(turn.step, ": ".join(found))

    def _refused(self, step: str, kind: str, said: str, facts: Mapping[str, Any]) -> PaellaError:
        if step not in self._reads:  # the request was right, or it would not have come so far
            return self._failed(step, f"{kind}: {said}")
        known = {"model": self._name, "field": step, "given": said, **facts}
        return InputError(f"model {self._name!r}: {said or kind}", **known)

    def _failed(self, step: str, said: str) -> StepError:
        return StepError(f"model {self._name!r}: `{step}` failed: {said}", model=self._name, step=step)


class _EndedError(Exception):
    """A worker's process has ended, or must be ended."""


def late(name: str, step: str = "") -> DeadlineError:
    where = f" in `{step}`" if step else ""
    return DeadlineError(f"model {name!r}: the deadline passed{where}", model=name)


# The steps of all models of an engine.


class StepRunner(Protocol):
    """Runs the steps of one model."""

    def request(self) -> contextlib.AbstractContextManager[None]: ...

    async def run(self, step: str, values: Values, deadline_ns: int) -> Any: ...

    def run_sync(self, step: str, values: Values, deadline_ns: int) -> dict[str, Any]: ...


class Steps(Protocol):
    """The steps of models, run here or in the engine's process."""

    def of(self, model: Any) -> StepRunner: ...


class StepPools:
    """The pools of the models that are loaded in this process."""

    def __init__(self) -> None:
        self._pools: dict[Any, StepPool] = {}  # by model or pipeline

    def open(self, model: Any) -> bool:
        """Makes the pool of a model that needs one and has none; ModelError: processes cannot import its functions."""
        if not getattr(model, "functions", None) or model in self._pools:
            return False
        try:
            self._pools[model] = StepPool(OfModel(model) if isinstance(model, Model) else model)
        except RuntimeError as e:
            raise ModelError(
                f"model {model.name!r}: a process of its steps did not start: {e}. Functions must be importable, and a "
                'script must load its models under `if __name__ == "__main__"`', model=model.name, field="processes",
                given=True,
            ) from e  # fmt: skip
        return True

    def close(self, model: Any) -> None:
        if (pool := self._pools.pop(model, None)) is not None:
            pool.close()

    def close_all(self) -> None:
        for model in list(self._pools):
            self.close(model)

    def of(self, model: Any) -> StepPool:
        pool = self._pools.get(model)
        if pool is None:
            raise EngineClosedError(f"model {model.name!r}: the engine is closed, or has unloaded it", model=model.name)
        return pool
