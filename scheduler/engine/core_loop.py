"""The core as the rest of an engine sees it: its tables, changes between two of its steps, its health, and its end."""

from __future__ import annotations

import contextlib
import os
import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Generic, TypeVar

import numpy as np

from paellapy.instrument.errors import PaellaError
from paellapy.scheduler.backends.base import Backend, LoadedModel
from paellapy.scheduler.core import codes, step
from paellapy.scheduler.core.errors import (
    EngineClosedError,
    EngineFailedError,
    RequestFailedError,
    UnknownModelError,
    WeightsError,
)
from paellapy.scheduler.core.processes import FEW_CORES, usable_cpus
from paellapy.scheduler.core.rings import Bell
from paellapy.scheduler.core.state import Limits, State, new_state
from paellapy.scheduler.engine import ring_calls
from paellapy.scheduler.engine.ring_client import ENGINE_CLOSED, SPIN_NS, Loaded, RingClient, Waiter
from paellapy.scheduler.policies.policy import Policy

AnyModel = TypeVar("AnyModel", bound=Loaded)


@dataclass(slots=True)
class ModelTable(Generic[AnyModel]):
    """The loaded models: those that take requests by name, and all by their rows in the core, also jobs and leases."""

    by_name: dict[str, AnyModel] = field(default_factory=dict)
    by_row: dict[int, AnyModel] = field(default_factory=dict)

    def find(self, name: str) -> AnyModel:
        found = self.by_name.get(name)
        if found is None:
            loaded = ", ".join(self.by_name) or "none"
            raise UnknownModelError(f"no model named {name!r} is loaded; loaded: {loaded}", model=name)
        return found


class Core(ABC):
    """A core that requests are sent to, in this process or in another one."""

    state: State
    ring: RingClient
    models: ModelTable[Any]
    over: bool  # the core is gone, so that nothing can be released to it any more

    @abstractmethod
    def check_open(self) -> None:
        """Raises an error if no requests are taken."""

    @abstractmethod
    def failed(self, status: int) -> EngineFailedError:
        """The error of requests that end because the GPU failed."""

    def no_weights(self, row: int, name: str) -> Exception:
        """The error of requests whose model's weights could not be brought to the GPU."""
        why = "the engine's log says why"
        return WeightsError(f"the weights of model {name!r} could not be brought to the GPU; {why}", model=name)

    def faulted(self, name: str, instance: int, slot: int) -> RequestFailedError:
        """The error of a request on whose values the model failed."""
        why = "the engine's log says why"
        return RequestFailedError(f"model {name!r} failed on the values of this request; {why}", model=name)


class CoreLoop(Core):
    """The core of this process, in the backend's thread. It takes requests until it is closed or its GPU fails."""

    def __init__(self, backend: Backend, state: State, limits: Limits) -> None:
        self.backend, self.state = backend, state
        self.models = ModelTable[LoadedModel]()
        self.bell = Bell(state.bell, backend.sleeps_in_read)
        self.ring = RingClient(state, limits, 0, self.bell, self._open_wake_fd())
        self.failure: BaseException | None = None  # why no more requests are taken
        self.closing = False
        self.policy: Policy  # set by the engine, which attaches it to the state
        self.weight_errors: dict[int, PaellaError] = {}  # by row: why the latest order to bring weights failed
        # Told of a model's name and error when the model fails on the values of one request, in the loop's thread.
        self.on_fault: Callable[[str, BaseException], None] | None = None
        self._faults: dict[tuple[int, int], BaseException] = {}  # the latest by instance and slot
        self._outside: list[str] = []  # work on the GPU that the core did not launch: loads, code of jobs and leases
        self._culprits: list[str] = []  # the models, jobs and leases on the GPU when it failed
        self.over = self._ended = self._forked = False
        _loops.add(self)

    def _open_wake_fd(self) -> int:
        """Creates the eventfd. It is closed with its last reference, not by `close`: other loops may hold it."""
        fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        weakref.finalize(self, os.close, fd)
        self.state.wake_fd[0, 0] = fd
        return fd

    def start(self) -> None:
        _load_ring_calls()
        step.attach_loop(self.state)
        if not self.backend.computes_in_python and usable_cpus() > FEW_CORES:
            self.ring.spin_ns = SPIN_NS
        self.backend.on_fault = self._note_fault
        self.backend.start(self.state, self.bell, self.fail)

    # -- between its steps

    def call(self, function: Callable[[], None]) -> None:
        """Runs a function between two steps of the core, when it may change tables that the core reads."""
        self.backend.call(function)

    def run(self, change: Callable[[], None]) -> None:
        """As `call`; waits until the function has run, and raises its error."""
        done = threading.Event()
        failed: list[BaseException] = []

        def run() -> None:
            try:
                change()
            except BaseException as e:  # the loop continues; the error goes to the caller of this function
                failed.append(e)
            finally:
                done.set()

        if self._ended:
            change()
            return
        self.backend.call(run)
        while not done.wait(0.1):
            if not self.closing:
                self.check_open()  # a loop that has ended makes no more changes
        if failed:
            raise failed[0]

    def wake(self) -> None:
        os.eventfd_write(self.bell.fd, 1)

    @property
    def is_idle(self) -> bool:
        """Whether no request is there, of any process."""
        return self.ring.waiting == 0 and not self.state.core["live"][0]

    # -- its health

    def check_open(self) -> None:
        if self.failure is not None:
            raise self._failed_error()
        if self._forked:
            raise EngineClosedError("this engine belongs to the parent process; create an engine after the fork")
        if self.closing:
            raise EngineClosedError(ENGINE_CLOSED)

    @property
    def failure_text(self) -> str:
        """The failure, and the models, jobs and leases whose work was on the GPU: one of them caused it."""
        whose = f" (running at that time: {', '.join(self._culprits)})" if self._culprits else ""
        return f"{self.failure}{whose}"

    def _failed_error(self) -> EngineFailedError:
        said = f"the GPU failed, and the engine takes no more requests: {self.failure_text}"
        error = EngineFailedError(said, running=self._culprits)
        error.__cause__ = self.failure
        return error

    def fail(self, cause: BaseException) -> None:
        """Called by the loop when the device is lost: tells every waiting caller why."""
        if self.failure is None:
            self._note_failure(cause)
            self.ring.command(codes.FAIL)

    def _note_failure(self, cause: BaseException) -> None:
        self._culprits = self.on_gpu
        self.failure = cause
        for loaded in list(self.models.by_row.values()):
            self.backend.abandon(loaded)

    def failed(self, status: int) -> EngineFailedError:
        if self.failure is None:  # the core met the failure before its loop could report it
            self._note_failure(self.backend.failure(status))
        return self._failed_error()

    def no_weights(self, row: int, name: str) -> Exception:
        cause = self.weight_errors.get(row)
        error = WeightsError(f"the weights of model {name!r} could not be brought to the GPU: {cause}", model=name)
        error.__cause__ = cause
        return error

    def _note_fault(self, instance: int, slot: int, error: BaseException) -> None:
        """Called by the loop when a model failed on the values in one slot."""
        self._faults[instance, slot] = error
        loaded = self.models.by_row.get(int(self.state.instance["model"][instance]))
        if self.on_fault is not None and loaded is not None:
            self.on_fault(loaded.model.name, error)

    def faulted(self, name: str, instance: int, slot: int) -> RequestFailedError:
        cause = self._faults.pop((instance, slot), None)
        error = RequestFailedError(f"model {name!r} failed on the values of this request: {cause}", model=name)
        error.__cause__ = cause
        return error

    # -- work on the GPU that the core did not launch

    def begin_outside(self, whose: str) -> None:
        self._outside.append(whose)
        self._count_outside()

    def end_outside(self, whose: str) -> None:
        self._outside.remove(whose)
        self._count_outside()

    @contextlib.contextmanager
    def outside(self, whose: str) -> Iterator[None]:
        """For work on the GPU that the core does not launch: if the GPU fails meanwhile, the engine's error names it.
        The core would notice the failure only at its next launch, when other work is on the GPU.
        """
        self.begin_outside(whose)
        try:
            yield
        except Exception as e:
            lost = self.backend.lost() if self.failure is None else None
            if lost is not None:
                self.fail(lost)
            if self.failure is None or isinstance(e, PaellaError):
                raise
            raise self._failed_error() from e
        finally:
            self.end_outside(whose)

    def _count_outside(self) -> None:
        """Tells the core; not after a failure, which it may meet later."""
        if self.failure is None:
            self.state.core["outside"][0] = len(self._outside)

    @property
    def on_gpu(self) -> list[str]:
        """The models, jobs and leases whose work is launched and not done: one of them causes a fault of the GPU."""
        instances = self.state.flight[: int(self.state.core["flight"][0])]
        rows = sorted({int(self.state.instance["model"][instance]) for instance in instances})
        if self.state.core["lost_ns"][0]:  # the core met the failure first, and has ended all flights
            rows = np.flatnonzero(self.state.model["lost"]).tolist()
        models = self.models.by_row
        return list(dict.fromkeys((*(models[row].title for row in rows if row in models), *self._outside)))

    # -- its end

    def stop(self) -> None:
        """Finishes the accepted requests, and ends the loop."""
        if self.failure is None:
            self.ring.command(codes.DRAIN)
        waiter = Waiter()
        while self.ring.waiting:
            self.ring.wait(waiter, 0.05)
        self.backend.stop()
        self._ended = True

    def close_ring(self) -> None:
        """Call it once nothing rings the bell any more."""
        self.bell.close()
        self.ring.detach_all()

    def forget(self) -> None:
        """In a forked process: the loop, and the holders of its locks, exist only in the parent."""
        self.closing = self._forked = True


@cache
def _load_ring_calls() -> None:
    """Loads the compiled code that submits and answers, for which the first request would wait."""
    ring_calls.warm_up(new_state(Limits(models=1, instances=1, requests=1, segments=1)))


def _forget_all() -> None:
    for loop in list(_loops):
        loop.forget()


_loops: weakref.WeakSet[CoreLoop] = weakref.WeakSet()
os.register_at_fork(after_in_child=_forget_all)
