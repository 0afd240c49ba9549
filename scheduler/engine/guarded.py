"""Whether an engine takes requests, and the error that callers get when it does not: closed, failed, or a fault."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator

import numpy as np

from paellapy.instrument.errors import PaellaError
from paellapy.scheduler.backends.base import Backend
from paellapy.scheduler.backends.launches import LoadedModel
from paellapy.scheduler.core import codes
from paellapy.scheduler.core.errors import EngineClosedError, EngineFailedError, RequestFailedError, WeightsError
from paellapy.scheduler.engine.background import Job
from paellapy.scheduler.engine.front_end import ENGINE_CLOSED
from paellapy.scheduler.engine.requests import Requester
from paellapy.scheduler.engine.residents import Residents
from paellapy.scheduler.engine.turn import Turns


class Faults:
    """The latest error for each slot on whose values a model failed; filled by the backend."""

    def __init__(self, engine: Guarded) -> None:
        self._engine = weakref.proxy(engine)
        self.latest: dict[tuple[int, int], BaseException] = {}
        self.told: Callable[[str, BaseException], None] | None = None

    def __call__(self, lane: int, slot: int, error: BaseException) -> None:
        self.latest[lane, slot] = error
        loaded = self._engine.loaded_rows().get(int(self._engine.state.lane["model"][lane]))
        if self.told is not None and loaded is not None:
            self.told(loaded.model.name, error)


class Guarded(Requester):
    """An engine that takes requests until it is closed or its GPU fails."""

    _backend: Backend
    _residents: Residents | None
    _by_row: dict[int, LoadedModel]
    _jobs: dict[str, Job]
    _turns: Turns
    _outside: list[str]  # work on the GPU that the core did not launch: loads, and code of jobs
    _faults: Faults
    _failure: BaseException | None
    _closed: bool
    _closing: bool
    _elsewhere: bool  # the engine belongs to the process from which this one was forked
    _culprits = ""  # the models, jobs and turns on the GPU when it failed

    def loaded_rows(self) -> dict[int, LoadedModel]:
        """Loaded models by their row in the core."""
        return dict(self._by_row)

    @property
    def failure(self) -> BaseException | None:
        """The reason why the engine takes no more requests; None while it does."""
        return self._failure

    @property
    def failure_text(self) -> str:
        """The failure, and the models, jobs and turns whose work was on the GPU: one of them caused it."""
        whose = f" (running at that time: {self._culprits})" if self._culprits else ""
        return f"{self._failure}{whose}"

    @property
    def closed(self) -> bool:
        """Whether the engine takes no more requests because it is closed or being closed."""
        return self._closing or self._closed

    def on_fault(self, told: Callable[[str, BaseException], None]) -> None:
        """Calls `told(model, error)` when a model fails on the values of one request, in the loop's thread."""
        self._faults.told = told

    @property
    def over(self) -> bool:
        return self._closed

    def _check_open(self) -> None:
        if self._failure is not None:
            raise self._failed_error()
        if self._elsewhere:
            raise EngineClosedError("this engine belongs to the parent process; create an engine after the fork")
        if self._closing or self._closed:
            raise EngineClosedError(ENGINE_CLOSED)

    def _failed_error(self) -> EngineFailedError:
        error = EngineFailedError(f"the GPU failed, and the engine takes no more requests: {self.failure_text}")
        error.__cause__ = self._failure
        return error

    def _fail(self, cause: BaseException) -> None:
        """Called by the loop when the device is lost: tells every waiting caller why."""
        if self._failure is None:
            self._note_failure(cause)
            self._front.command(codes.FAIL)

    def _note_failure(self, cause: BaseException) -> None:
        self._culprits = self._on_gpu()
        self._failure = cause
        for loaded in list(self._by_row.values()):
            self._backend.abandon(loaded)

    @contextlib.contextmanager
    def outside(self, whose: str) -> Iterator[None]:
        """For work on the GPU that the core does not launch: if the GPU fails meanwhile, the engine's error names it.
        The core would notice the failure only at its next launch, when other work is on the GPU.
        """
        self._outside.append(whose)
        self.count_outside()
        try:
            yield
        except Exception as e:
            lost = self._backend.lost() if self._failure is None else None
            if lost is not None:
                self._fail(lost)
            if self._failure is None or isinstance(e, PaellaError):
                raise
            raise self._failed_error() from e
        finally:
            self._outside.remove(whose)
            self.count_outside()

    def count_outside(self) -> None:
        """Tells the core of work on the GPU that it did not launch; not after a failure, which it may meet later."""
        if self._failure is None:
            self.state.core["outside"][0] = len(self._outside) + self._turns.astray

    def _on_gpu(self) -> str:
        """The names of models, jobs and turns whose work is launched and not done: one of them caused the GPU's fault.
        """
        lanes = self.state.flight[: int(self.state.core["flight"][0])]
        rows = sorted({int(self.state.lane["model"][lane]) for lane in lanes})
        if self.state.core["lost_ns"][0]:  # the core met the failure first, and has ended all flights
            rows = np.flatnonzero(self.state.model["lost"]).tolist()
        flying = [self._named(self._by_row[row].model.name) for row in rows if row in self._by_row]
        return ", ".join(dict.fromkeys((*flying, *map(self._named, self._turns.held), *self._outside)))

    def _named(self, name: str) -> str:
        kind = "job " if name in self._jobs else "turn " if name in self._turns else ""
        return f"{kind}{name!r}"

    def _no_weights(self, row: int, name: str) -> Exception:
        cause = self._residents.mover.errors.get(row) if self._residents is not None else None
        error = WeightsError(f"the weights of model {name!r} could not be brought to the GPU: {cause}")
        error.__cause__ = cause
        return error

    def _failed(self, status: int) -> EngineFailedError:
        if self._failure is None:  # the core met the failure before its loop could report it
            self._note_failure(self._backend.failure(status))
        return self._failed_error()

    def _faulted(self, name: str, lane: int, slot: int) -> RequestFailedError:
        cause = self._faults.latest.pop((lane, slot), None)
        error = RequestFailedError(f"model {name!r} failed on the values of this request: {cause}")
        error.__cause__ = cause
        return error
