"""Leases: code that was not captured gets the GPU when the core grants it, and gives it back when the core wants it.

    with engine.lease("script", priority=-1) as lease:
        for batch in work:
            compute(batch)
            lease.give_way()  # lets other work go first if it is waiting

To the core a lease is a job of one segment that begins when it is granted and ends when it is given back: policies
rank, admit and charge it like any other. A lease that has been wanted back for `give_back_ms` ends in any case.
"""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, Self

import numpy as np

from paellapy.scheduler.backends.base import Launches, LoadedModel
from paellapy.scheduler.core.errors import ModelError
from paellapy.scheduler.core.profiles import SegmentProfile
from paellapy.scheduler.engine.client import RequestClient
from paellapy.scheduler.engine.loaded_models import LoadedModels, model_priority
from paellapy.scheduler.engine.ring_client import Entry, Pending
from paellapy.scheduler.models.memory import Instance, MemoryPlan, plan_instance
from paellapy.scheduler.models.model import Model
from paellapy.scheduler.models.profile import ProgramProfile
from paellapy.scheduler.models.program import Program
from paellapy.scheduler.models.tensors import Arrays, TensorSpec

# Leases as a model of the core: its only segment signals that a lease is granted, and no work on the GPU ends it.


_USUAL_NS = 1e6  # assumed duration of a lease until one has been measured


def _never(weights: Arrays, inputs: Arrays, outputs: Arrays) -> None:
    raise AssertionError("the core never runs the code of a lease; its owner does")


def load_leases(
    models: LoadedModels, memory: MemoryPlan, name: str, priority: int, share: float
) -> LoadedModel:
    """Loads a model whose only segment signals that a lease is granted; no work on the GPU ends it."""
    nothing = {"nothing": TensorSpec((1,), np.uint8)}
    model = Model(
        name, _never, inputs=nothing, outputs=nothing, batch=(1,), instances=1, priority=priority, share=share
    )
    plan = plan_instance(model, 0, 1)
    reservation = memory.reserve(name, 0, plan.device_bytes, 1)
    backend, state = models.core.backend, models.core.state
    instance = Instance(0, model, plan, backend.instance_memory(plan))
    handle = backend.grant(int(instance.draining.ctypes.data))
    segment = SegmentProfile(_USUAL_NS, blocks=1, warps=1, registers=0)
    profile = ProgramProfile(1, ((0, 1),), (segment,), _USUAL_NS, {}, True)
    launches = Launches(Program(model, 0, 1, [], True, None), ((0, 1),), [handle], 0, [instance])
    loaded = LoadedModel(model, {}, reservation, [instance], [profile], [[launches]], kind="lease")
    models.open_leases(loaded)
    row = loaded.instance_rows[0]
    state.whole["handle"][row, 0] = handle  # the program has one segment, so the whole program is the same launch
    state.whole["word"][row, 0] = state.launch["word"][row, 0, 0]
    return loaded


_WATCH_S = 0.0005  # how often leases are checked while there are any
_SOON_S, _LATE_S = 20e-6, 500e-6  # how often a waiting lease is polled: at first, and later on


class _Busy:
    """Whose lease it is, of all leases of one name: a thread's or a task's."""

    def __init__(self, name: str) -> None:
        self._name, self._lock = name, threading.Lock()
        self._holder: object = None

    def acquire(self, blocking: bool = True) -> bool:
        me = _me()
        if self._holder == me:
            raise ModelError(
                f"lease {self._name!r} is held here already, so a second one would wait for ever: use the first, or "
                "another name", field="name", given=self._name,
            )  # fmt: skip
        if not self._lock.acquire(blocking):
            return False
        self._holder = me
        return True

    def hand_over(self) -> None:
        """The holder gave up: another thread releases the name when the lease has ended."""
        self._holder = None

    def release(self) -> None:
        self._holder = None
        self._lock.release()


def _me() -> object:
    """The task that runs here, or else the thread."""
    try:
        return asyncio.current_task() or threading.get_ident()
    except RuntimeError:  # no event loop runs
        return threading.get_ident()


class Leases:
    """All leases of one engine, and the thread that takes overdue leases back."""

    def __init__(self, client: RequestClient, models: LoadedModels, memory: MemoryPlan) -> None:
        self.client, self.core, self._models, self._memory = client, models.core, models, memory
        self._lock = threading.Lock()
        self._names: dict[str, LoadedModel] = {}
        self._busy: dict[str, _Busy] = {}
        self._held: list[Lease] = []
        self._astray: list[Lease] = []  # those that were taken back while their code went on
        self._wake, self._ended = threading.Event(), False
        self._thread: threading.Thread | None = None

    def make(self, name: str, priority: int, share: float, give_back_ms: float) -> Lease:
        """A lease that its owner can enter."""
        self.core.check_open()
        rank = model_priority(f"lease {name!r}", priority)
        with self._models.lock:
            self._models.check_name(name, "give the lease another name")
            places = len(self.core.state.model)
            if name not in self._names and len(self.core.models.by_row) >= places:
                raise ModelError(
                    f"no room for leases named {name!r}: models, jobs and the names of leases take all {places} "
                    "places, and a name keeps its place: give leases an earlier name, unload a model, or raise the "
                    "engine's limits", field="name", given=name, limit=places,
                )  # fmt: skip
            return Lease(self, name, rank, share, give_back_ms)

    def find(self, name: str, priority: int, share: float) -> tuple[LoadedModel, _Busy]:
        with self._lock:
            if name not in self._names:
                self._names[name] = load_leases(self._models, self._memory, name, priority, share)
                self._busy[name] = _Busy(name)
            model = self._names[name].model
            if (model.priority, model.share) != (priority, share):
                raise ModelError(
                    f"leases named {name!r} have priority {model.priority} and share {model.share}: give leases "
                    "with other values another name", field="name", given=name, priority=model.priority,
                    share=model.share,
                )  # fmt: skip
            return self._names[name], self._busy[name]

    def watch(self, lease: Lease) -> None:
        with self._lock:
            self._held.append(lease)
            if self._thread is None:
                self._thread = threading.Thread(target=self._watch, name="paellapy-leases", daemon=True)
                self._thread.start()
        self._wake.set()

    def forget(self, lease: Lease) -> None:
        """The lease's code has ended."""
        with self._lock:
            if lease in self._held:
                self._held.remove(lease)
            if lease in self._astray:
                self._astray.remove(lease)
                self.core.end_outside(lease.title)

    def note_taken(self, lease: Lease) -> None:
        """The lease was taken back: if its code goes on, it runs beside other work."""
        with self._lock:
            if lease in self._held:
                self._astray.append(lease)
                self.core.begin_outside(lease.title)

    def end(self) -> None:
        """Ends every lease, because the engine closes."""
        self._ended = True
        self._wake.set()
        for lease in list(self._held):
            lease.take_back()

    def _watch(self) -> None:
        while not self._ended:
            self._wake.wait()
            for lease in list(self._held):
                lease.look()
            if self._held:
                time.sleep(_WATCH_S)
            else:
                self._wake.clear()
                if self._held:
                    self._wake.set()

    def stats(self) -> dict[str, Any]:
        held = {lease.name for lease in list(self._held)}
        return {
            name: {
                "kind": "leases",
                "state": "running" if name in held else "waiting",
                "steps": int(self.core.state.outcome[loaded.row, 0]),
                "priority": loaded.model.priority,
                "share": loaded.model.share,
            }
            for name, loaded in self._names.copy().items()
        }


class Lease:
    """Repeated leases on the GPU for one owner: a context manager, also for asyncio."""

    def __init__(self, leases: Leases, name: str, priority: int, share: float, give_back_ms: float):
        if not give_back_ms > 0:
            raise ModelError(
                f"lease {name!r}: give_back_ms={give_back_ms}; the time must be above 0", field="give_back_ms",
                given=give_back_ms,
            )  # fmt: skip
        self.name, self.title = name, f"lease {name!r}"
        self._leases, self._core, self._give_back_s = leases, leases.core, give_back_ms * 1e-3
        self._loaded, self._busy = leases.find(name, priority, share)
        self._instance = self._loaded.instances[0]
        self._ended = _Request(self._loaded)
        self._taking = threading.Lock()
        self._since_s = 0.0  # when it was first wanted back
        self._inside = False  # between the begin and the end of `with`
        self.over = False  # it was taken back: other work is on the GPU now

    # -- for its owner

    def wanted(self) -> bool:
        """Whether work of higher priority exists, or work of the same priority waits."""
        state, own = self._core.state, self._loaded.model.priority
        core = state.core[0]
        mine = self._loaded.instance_rows[0]
        active = state.active[: int(core["active"])]
        ready = state.ready[: int(core["ready"])]
        rank = state.instance["priority"]
        client, model = divmod(state.held_queues[: int(core["held_queues"])], 1 << 32)
        outside = model[state.held_back["over_limit"][client, model] == 0]  # models of requests that wait for `admit`
        others = state.model["priority"][outside[outside != self._loaded.row]]
        return bool((rank[active] > own).any() or (rank[ready[ready != mine]] >= own).any() or (others >= own).any())

    def give_way(self) -> bool:
        """If the lease is wanted, gives it back and waits for the next one. Returns whether it did."""
        if not self._to_give():
            return False
        self._release()
        self._acquire()
        return True

    async def give_way_async(self) -> bool:
        """As `give_way`, in an asyncio task."""
        if not self._to_give():
            return False
        await _in_thread(self._release)
        await self._acquire_async()
        return True

    def _to_give(self) -> bool:
        if not self._inside:
            raise ModelError(f"lease {self.name!r} is not held: call give_way() inside `with engine.lease(…)`")
        return self.over or self.wanted()

    def __enter__(self) -> Self:
        self._busy.acquire()
        self._acquire()
        self._inside = True
        return self

    def __exit__(self, *_: object) -> None:
        if self._inside:  # otherwise `give_way` was interrupted, and has given up the lease
            self._leave()

    async def __aenter__(self) -> Self:
        while not self._busy.acquire(blocking=False):
            await asyncio.sleep(_LATE_S)
        await self._acquire_async()
        self._inside = True
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._inside:
            await _in_thread(self._leave)

    # -- the lease

    def _ask(self) -> None:
        try:
            self._core.check_open()
            self._instance.draining[0] = 0
            self.over, self._since_s = False, 0.0
            self._ended = _Request(self._loaded)
            self._leases.client.reserve(self._loaded).begin_for(self._ended)
        except BaseException:
            self._inside = False
            self._busy.release()
            raise

    def _acquire(self) -> None:
        """Waits for the lease. If that fails, the name is free again at once, or when the lease asked for has ended."""
        self._ask()
        try:
            since = time.monotonic()
            while not self._granted():
                time.sleep(_SOON_S if time.monotonic() - since < 1e-3 else _LATE_S)
        except BaseException:
            self._give_up()
            raise
        self._leases.watch(self)

    async def _acquire_async(self) -> None:
        self._ask()
        try:
            while not self._granted():
                await asyncio.sleep(_LATE_S)
        except BaseException:
            self._give_up()
            raise
        self._leases.watch(self)

    def _granted(self) -> bool:
        if self._instance.draining[0]:
            return True
        self._core.check_open()
        self._core.ring.drain()  # the lease's instance may wait until the end of the last lease is read
        return False

    def _give_up(self) -> None:
        """Stops waiting for the lease: it ends as soon as it is granted. Until then its name stays busy, because a
        second lease in the same instance would take this one's grant for its own.
        """
        self._inside = False
        self._busy.hand_over()

        def end() -> None:
            try:
                while not self._instance.draining[0] and not self._ended.over and not self._core.over:
                    self._core.ring.drain()
                    time.sleep(_LATE_S)
                self._end()
            finally:
                self._busy.release()

        threading.Thread(target=end, name="paellapy-lease-end", daemon=True).start()

    def _leave(self) -> None:
        self._inside = False
        try:
            self._release()
        finally:
            self._busy.release()

    def _release(self) -> None:
        try:
            with self._core.outside(self.title):
                self._leases.forget(self)
                _wait_for_work()
        finally:
            self._end()

    def _end(self) -> None:
        """Ends the lease, and waits until the core knows."""
        self.take_back()
        while not self._ended.over and not self._core.over:
            self._core.ring.drain()
            time.sleep(_SOON_S)

    def take_back(self) -> None:
        """Ends the lease, so that the core continues; callable from any thread."""
        with self._taking:
            if not self.over:
                self.over = True
                self._leases.note_taken(self)
                self._instance.words[0] = 1
                self._core.ring.nudge()

    def look(self) -> None:
        """Takes the lease back if it has been wanted for too long; called by the thread that watches leases."""
        if self.over:
            return
        now = time.monotonic()
        if not self.wanted():
            self._since_s = 0.0
        elif not self._since_s:
            self._since_s = now
        elif now - self._since_s > self._give_back_s:
            self.take_back()


class _Request(Pending):
    """A lease as a request to the core. `over`: it has ended, in any way."""

    __slots__ = ("over",)

    def __init__(self, loaded: LoadedModel) -> None:
        super().__init__(loaded)
        self.over = False

    def finish(self, entry: Entry) -> None:
        self.over = True

    def fail(self, error: Exception) -> None:
        self.over = True


async def _in_thread(function: Callable[[], None]) -> None:
    """Runs the function in a thread, to its end also if this task is cancelled meanwhile."""
    await asyncio.shield(asyncio.to_thread(function))


def _wait_for_work() -> None:
    """Waits for the work that the lease's code launched, because it is part of the lease."""
    torch: Any = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.current_stream().synchronize()
    cupy: Any = sys.modules.get("cupy")
    if cupy is not None:
        cupy.cuda.get_current_stream().synchronize()
