"""`RemoteEngine`: the request side of an engine in another process, over shared memory.

It outlives the processes it talks to. When one ends, all waiting callers are told at once, and every request is refused
until the next process is there (`attach`). Each process has its own shared memory, so a late completion of the old one
is never seen.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from paellapy.instrument.numba_ext.link import compile_for
from paellapy.scheduler.core import abort
from paellapy.scheduler.core.errors import EngineAwayError, EngineFailedError, ModelError
from paellapy.scheduler.core.job import GPU, JOB
from paellapy.scheduler.core.processes import SharedBlock
from paellapy.scheduler.core.rings import Bell
from paellapy.scheduler.core.state import Limits, State, new_state, view_state
from paellapy.scheduler.core.tenants import tenants_stats
from paellapy.scheduler.engine.client import RequestClient
from paellapy.scheduler.engine.core_loop import Core, ModelTable
from paellapy.scheduler.engine.engine import Engine
from paellapy.scheduler.engine.input_staging import SharedStage
from paellapy.scheduler.engine.ring_client import Pending, RingClient
from paellapy.scheduler.engine.stats import GpuUse, core_stats, live_stats, model_stats, occupancy
from paellapy.scheduler.engine.steps import Steps
from paellapy.scheduler.models.memory import Instance, InstancePlan, Memory
from paellapy.scheduler.models.model import Model
from paellapy.scheduler.policies.policy import Policy, attach_functions

AWAY = "the engine's process has ended and is being started again; try again in a moment"


class MappedMemory(Memory):
    """An instance's host memory, mapped into another process."""

    def __init__(self, block: SharedBlock) -> None:
        self.block, self.host = block, block.array

    def array(self, offset: int, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Any:
        raise NotImplementedError("GPU memory is accessible only in the engine's process")

    def free(self) -> None:
        self.host, self.block = np.empty(0, np.uint8), None


def _nobody(size: int) -> None:
    pass


@dataclass(slots=True)
class RemoteModel:
    """A model that the engine's process has loaded."""

    model: Model
    row: int
    generation: int
    instance_of: dict[int, Instance]
    memory_bytes: int = 0
    by_length: dict[int, RemoteModel] = field(default_factory=dict)
    ask_length: Callable[[int], None] = _nobody  # tells the engine's process that requests want this size
    _asked: set[int] = field(default_factory=set)

    @staticmethod
    def over(model: Model, told: Mapping[str, Any], blocks: Sequence[SharedBlock]) -> RemoteModel:
        """A model in the memory of which the engine's process has told."""
        plan = InstancePlan(**told["plan"])
        mapped = {
            number: Instance(k, model, plan, MappedMemory(block))
            for k, (number, block) in enumerate(zip(told["instances"], blocks, strict=True))
        }
        return RemoteModel(model, told["row"], told["generation"], mapped, told["memory_bytes"])

    def want_length(self, size: int) -> None:
        if size not in self._asked:
            self._asked.add(size)
            self.ask_length(size)

    @property
    def sizes(self) -> list[RemoteModel]:
        """The model at each of its captured lengths, or alone."""
        return [self, *(each for each in self.by_length.values() if each is not self)]


@dataclass(slots=True)
class Link:
    """The resources that the engine's process passes to one of its producers."""

    limits: Limits
    producer: int
    state: SharedBlock
    bell_fd: int
    wake_fd: int
    stage: SharedBlock
    stage_address: int  # an address in the engine's process
    policy: Policy
    device: str = ""
    title: str = ""
    facts: dict[str, Any] = field(default_factory=dict)


class RemoteCore(Core):
    """The core of another process, or a placeholder while there is none."""

    def __init__(self) -> None:
        self.limits = Limits(models=1, instances=1, requests=1, segments=1)
        self.state = _placeholder(self.limits)
        self.link: Link | None = None
        self.over = True
        self.models = ModelTable[RemoteModel]()
        self.ring = RingClient(self.state, self.limits, 0, Bell(self.state.bell), -1)
        self.ring.closed = True

    def attach(self, link: Link) -> None:
        shared = view_state(link.limits, link.state.array)
        # Addresses of compiled functions are valid only in the process that wrote them, and predictions need our own.
        self.state = shared._replace(call=np.zeros_like(shared.call), job=np.zeros(2, JOB))
        bell, stage = Bell(self.state.bell, fd=link.bell_fd), SharedStage(link.stage, link.stage_address)
        before, self.ring = self.ring, RingClient(self.state, link.limits, link.producer, bell, link.wake_fd, stage)
        self.ring.watchers, self.ring.counters = before.watchers, before.counters
        self.limits, self.link, self.over = link.limits, link, False

    def lose(self) -> list[Pending]:
        """The process is gone: the requests whose answers will never come."""
        self.link, self.over = None, True
        with contextlib.suppress(Exception):  # an error of one caller; the others still get their answers
            self.ring.drain()  # answers that the process posted before it ended, such as the cause of a GPU failure
        left = self.ring.abandon()
        self.ring.detach_all()
        self.models.by_name, self.models.by_row = {}, {}
        return left

    def check_open(self) -> None:
        if self.link is None:
            raise EngineAwayError(AWAY)

    def failed(self, status: int) -> EngineFailedError:
        # The engine's process logs the cause, and ends.
        why = f" (CUDA's status {status})" if status else ""
        return EngineFailedError(
            f"the GPU failed{why}: the server's log says why; the engine is being started again", status=status
        )


class RemoteEngine:
    """An engine for a process that only submits requests."""

    def __init__(self, steps: Steps | None = None) -> None:
        """`steps` has the engine's process run the steps of models."""
        self.core = RemoteCore()
        self.client = RequestClient(self.core, steps)
        self.failure: BaseException | None = None
        self.policy = ""
        self.current_policy: Policy | None = None
        self.facts: dict[str, Any] = {"memory": {"budget_bytes": 0, "held_bytes": 0}}
        self._since = time.monotonic()

    # -- the other process

    def attach(self, link: Link) -> None:
        """Connects to a new engine process."""
        assert self.link is None
        self.core.attach(link)
        self.set_policy(link.policy)
        self.facts = link.facts or self.facts

    def set_policy(self, policy: Policy) -> None:
        """Sets the policy that the engine's process uses from now on, for predictions here."""
        self.policy, self.current_policy = policy.name, policy
        attach_functions(self.state, policy)

    def set_models(self, models: Mapping[str, RemoteModel]) -> None:
        """Sets the loaded models. A model that is being unloaded is kept until its outstanding answers have arrived."""
        table = self.core.models
        answering = {each.loaded.row for each in self.core.ring.pending()}
        kept = {row: each for row, each in table.by_row.items() if row in answering}
        table.by_name = dict(models)
        table.by_row = kept | {each.row: each for model in models.values() for each in model.sizes}

    def lose(self) -> None:
        """Disconnects from a process that is gone: tells every waiting caller, and drops its memory."""
        for pending in self.core.lose():
            pending.fail(EngineAwayError(AWAY))

    # -- the interface of an engine

    @property
    def state(self) -> State:
        return self.core.state

    @property
    def limits(self) -> Limits:
        return self.core.limits

    @property
    def link(self) -> Link | None:
        return self.core.link

    @property
    def models(self) -> dict[str, Model]:
        return {name: each.model for name, each in self.core.models.by_name.items()}

    def loaded_rows(self) -> dict[int, RemoteModel]:
        return {each.row: each for model in self.core.models.by_name.values() for each in model.sizes}

    def watch(self, watcher: Callable[[Any], None]) -> Callable[[], None]:
        """Calls `watcher` for the requests of this process; see `Engine.watch`."""
        return self.core.ring.watch(watcher)

    def count(self, counter: Callable[[Any], None]) -> Callable[[], None]:
        return self.core.ring.count(counter)

    def occupancy(self) -> GpuUse:
        """The GPU's occupancy by the engine's launches."""
        return occupancy(self.state)

    def stats(self) -> dict[str, Any]:
        """Counts from the core's shared tables: of all producers together."""
        return {
            "device": self.link.title if self.link else "",
            "policy": self.policy,
            "uptime_s": time.monotonic() - self._since,
            **core_stats(self.state),
            "memory": self.facts["memory"],
            "models": {
                name: {
                    **model_stats(self.state, each.row),
                    **live_stats(self.state, each.row),
                    "instances": len(each.instance_of),
                    "memory_bytes": each.memory_bytes,
                }
                for model in self.core.models.by_name.values()
                for name, each in ((each.model.name, each) for each in model.sizes)
            },
            "tenants": tenants_stats(self.state),
        }


def _placeholder(limits: Limits) -> State:
    """Tables without contents, to be read while there is no engine."""
    state = new_state(limits)
    for name in GPU.names or ():
        if name.startswith("capacity"):
            state.gpu[name] = 1.0
    return state


# Producers of other processes, seen from the engine: the resources each is given, and their recovery when it ends.


STAGE_BYTES = 256 << 20  # staged inputs per producer; pages use memory only once they are written


class Producers:
    """The producers with numbers from 1, of an engine whose limits allow more than one producer."""

    def __init__(self, engine: Engine) -> None:
        assert engine.shared_state is not None, "the engine was made for one process"
        self._engine, self.state = engine, engine.shared_state
        self._wake_fd: dict[int, int] = {}
        self._stage: dict[int, SharedBlock] = {}

    def warm_up(self) -> None:
        """Compiles the functions needed when a producer dies, since the core would stand still while they compile."""
        compile_for(abort.reclaim, self._engine.state, 1, time.monotonic_ns())

    def attach(self, producer: int) -> tuple[int, SharedBlock]:
        """Gives a producer its resources: the eventfd that announces completions, and memory for staged inputs."""
        if not 1 <= producer < self._engine.limits.producers:
            raise ModelError(f"producer {producer}: this engine has producers 1 to {self._engine.limits.producers - 1}")
        if producer in self._wake_fd:
            raise ModelError(f"producer {producer} is attached already; detach it first")
        fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._wake_fd[producer] = fd
        self._engine.state.wake_fd[producer, 0] = fd
        if producer not in self._stage:
            self._stage[producer] = SharedBlock(STAGE_BYTES)
        return fd, self._stage[producer]

    def detach(self, producer: int) -> int:
        """Takes back everything that a producer had, once its process is gone. Returns the number of its requests."""
        state, found, done = self._engine.state, [0], threading.Event()

        def take_back() -> None:
            state.wake_fd[producer, 0] = -1
            found[0] = abort.reclaim(state, producer, time.monotonic_ns())
            done.set()

        self._engine.core.call(take_back)
        while not done.wait(0.1):
            if self._engine.closed:
                break
        os.close(self._wake_fd.pop(producer))
        return found[0]
