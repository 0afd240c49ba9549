"""`Engine`: loads models onto one GPU, takes requests, returns results.

with pp.Engine("virtual:h200", policy="paella") as engine:
    engine.load(model)
    y = engine.infer_sync("double", {"x": x})["y"]
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
import time
import warnings
import weakref
from collections.abc import Mapping
from html import escape
from typing import Self

from paellapy.instrument.device import Device, VirtualDevice
from paellapy.instrument.errors import PaellaError
from paellapy.scheduler.backends.launches import LoadedModel
from paellapy.scheduler.core import codes, step
from paellapy.scheduler.core.capacity import Capacity, set_capacity
from paellapy.scheduler.core.loop import Bell
from paellapy.scheduler.core.shared_memory import SharedBlock
from paellapy.scheduler.core.state import Limits, new_state, state_bytes
from paellapy.scheduler.core.tuning import Tuning
from paellapy.scheduler.engine.background import Job
from paellapy.scheduler.engine.front_end import FrontEnd
from paellapy.scheduler.engine.guarded import Faults
from paellapy.scheduler.engine.guests import Guests
from paellapy.scheduler.engine.install import install_windows
from paellapy.scheduler.engine.later_sizes import LaterSizes
from paellapy.scheduler.engine.loader import Loader
from paellapy.scheduler.engine.observed import Observed
from paellapy.scheduler.engine.residents import Residents
from paellapy.scheduler.engine.settings import check_settings, half_of_the_host, open_backend
from paellapy.scheduler.engine.slots import Slot
from paellapy.scheduler.engine.tap import Tap
from paellapy.scheduler.engine.turn import Turns
from paellapy.scheduler.engine.waiters import Waiter
from paellapy.scheduler.models.lane_memory import MemoryPlan
from paellapy.scheduler.policies.policy import Policy, find_policy

_TRACED = (
    "a trace of the virtual GPU does not record the requests of an engine, only how its models are loaded: write "
    "`with engine.trace() as t:` around the requests"
)


class Engine(Observed):
    """Runs models on one device under a policy. Thread-safe; `close()`, or leaving `with`, finishes requests first."""

    def __init__(
        self,
        device: str | Device | None = None,
        policy: str | Policy = "paella",
        memory_bytes: int | None = None,
        quantum_us: float | None = None,
        max_active: int | None = None,
        *,
        host_bytes: int | None = None,
        sm_windows: int = 0,
        segment_shares: bool | None = None,
        limits: Limits | None = None,
        tuning: Tuning | Mapping[str, float] | None = None,
    ) -> None:
        """Without a device: the current one, as for kernels (`with pp.Device(…):`, else the GPU if there is one).

        `memory_bytes`: GPU memory that weights and lanes may use. None: most of the GPU's memory, and a model that does
        not fit is refused. With a number, more models can be loaded than fit: weights are moved to and from the GPU on
        demand. Weights that are not on the GPU are kept in host memory up to `host_bytes` (None: half of host memory),
        and in files beyond that.

        `quantum_us`: approximate duration of a segment; None: 100, or 150 with windows of SMs.

        `max_active`: number of batches that may share the GPU at once. None: batches are added until their measured
        demand reaches two to three GPUs, and more are added while a queue persists.

        `sm_windows`: number of windows of SMs, 8 for instance. While many batches share the GPU, each launch is
        confined to one window unless that would slow it much. Kernels of PyTorch's libraries can be
        confined; kernels that paellapy loads itself run on all SMs of a real GPU.

        `segment_shares`: measure, when a model is loaded, the share of the GPU's bandwidth and tensor units that each
        of its segments uses. None: measure if the policy reads these shares. A virtual GPU always knows them.

        `tuning`: the scheduler's tuning numbers by name, for experiments (`paellapy doctor --verbose` lists them);
        numbers that are not given keep the GPU's values.
        """
        policy = find_policy(policy)  # a wrong name is reported before anything is created
        self.device = Device.open(device) if isinstance(device, str) else device or Device.current()
        self.tuning = Tuning.for_device(self.device, tuning)
        quantum_us = self.tuning.segment_us(sm_windows) if quantum_us is None else quantum_us
        check_settings(quantum_us, max_active, memory_bytes, host_bytes, sm_windows)
        self.limits, self.max_active = limits or Limits(), max_active
        self._failure: BaseException | None = None
        self._closed = self._closing = self._elsewhere = self._loop_ended = False
        self._loading, self._begins_to_close = threading.RLock(), threading.Lock()
        self._backend = open_backend(self.device)
        if self.device.session is not None and isinstance(self.device, VirtualDevice):
            warnings.warn(_TRACED, stacklevel=2)
        self._backend.shared_slots = self.limits.fronts > 1
        self.shared_state = SharedBlock(state_bytes(self.limits)) if self.limits.fronts > 1 else None
        self.state = new_state(self.limits, None if self.shared_state is None else self.shared_state.array)
        self.state.tuning[:] = self.tuning.row()
        set_capacity(self.state, Capacity.of(self.device.sm_count, self.device.limits))
        install_windows(self.state, self._backend.open_windows(sm_windows, self.tuning.window_share))
        self.state.core["hold"][0] = 1
        self._policy = self._attach(policy)
        self.memory = MemoryPlan(memory_bytes or self._backend.default_memory_bytes())
        self._residents = None if memory_bytes is None else self._manage_memory(host_bytes)
        self._loader = Loader(self._backend, self.memory, self.limits, self.tuning, quantum_us * 1e3, self._residents)
        self._later = LaterSizes(self.state, self._loader, self._loading, self._between_steps, self._is_idle)
        self._models: dict[str, LoadedModel] = {}
        self._jobs: dict[str, Job] = {}
        self._by_row: dict[int, LoadedModel] = {}
        self.bell = Bell(self.state.bell, self._backend.sleeps_in_read)
        self._front = FrontEnd(self.state, self.limits, 0, self.bell, self._open_wake_fd())
        self._tap = Tap(self.state) if self.limits.fronts > 1 else None
        self._unwatch, self._turns, self._outside = self._check_open, Turns(self), list[str]()
        self._slots: weakref.WeakSet[Slot] = weakref.WeakSet()
        self._since, self._segment_shares = time.monotonic(), segment_shares
        self._start()
        self.guests = Guests(self)
        _engines.add(self)

    def _manage_memory(self, host_bytes: int | None) -> Residents:
        """Creates the manager that moves weights to and from the GPU within the budget."""
        host = half_of_the_host() if host_bytes is None else host_bytes
        budget = self.memory.budget_bytes
        residents = Residents(self._backend, self.state, budget, host, self._between_steps, self._check_open)
        self.memory.weights_on_gpu = lambda: int(self.state.residency["held_bytes"][0])
        self.memory.lanes_held = lambda: residents.berths.held_bytes
        self.memory.account = residents.account
        residents.start(lambda: os.eventfd_write(self.bell.fd, 1))
        return residents

    def _start(self) -> None:
        """Starts the core's loop and the threads that it notifies."""
        step.attach_loop(self.state)
        self._faults = self._backend.on_fault = Faults(self)
        self._backend.start(self.state, self.bell, self._fail)

    def _open_wake_fd(self) -> int:
        """Creates the eventfd. It is closed with its last reference, not by `close()`: other loops may hold it."""
        fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        weakref.finalize(self, os.close, fd)
        self.state.wake_fd[0, 0] = fd
        return fd

    # -- the end

    def close(self) -> None:
        """Refuses new requests, finishes the accepted ones, and frees everything."""
        # Only the first call closes. Another one does not wait for it: a signal's handler may have interrupted it, or a
        # job's callback may have made the call, and the first waits for the job.
        if self._closed or self._closing or not self._begins_to_close.acquire(blocking=False):
            return
        try:
            self._end_other_work()
            self._closing = self._front.ending = True
        finally:
            self._begins_to_close.release()
        for slot in list(self._slots):
            slot.cancel()  # these slots cannot be written any more, and their lanes would wait for ever
        with self._loading:
            if self._failure is None:
                self._front.command(codes.DRAIN)
            waiter = Waiter()
            while self._front.waiting:
                self._front.wait(waiter, 0.05)
            self._backend.stop()
            self._loop_ended = True
            self.guests.free()
            if self._residents is not None:
                self._residents.close()
            self.bell.close()  # the mover has rung it until now
            self._front.detach_all()
            # A lost GPU cannot free anything: our calls fail, and PyTorch's raise a RuntimeError.
            unfreed = (PaellaError, RuntimeError) if self._failure else ()
            for loaded in list(self._by_row.values()):
                with contextlib.suppress(*unfreed):
                    self._forget(loaded)
            self._models.clear()
            if self._residents is not None:
                with contextlib.suppress(*unfreed):
                    self._residents.close_store()
            with contextlib.suppress(*unfreed):
                self._backend.close()
            self._closed = True

    def _end_other_work(self) -> None:
        """Ends everything that is no request."""
        for job in list(self._jobs.values()):
            job.stop()
        for job in list(self._jobs.values()):
            job.join()
        self._turns.end()
        self.guests.end()
        self._later.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.to_thread(self.close)

    def __repr__(self) -> str:
        what = "failed" if self._failure else "closed" if self._closed else self.policy
        return f"<Engine on {self.device.name}: {what}, {len(self._models)} models, {self._front.waiting} requests>"

    def _repr_html_(self) -> str:
        """HTML for notebooks, with one row per model."""
        rows = "".join(
            f"<tr><td>{escape(name)}</td><td>{', '.join(map(str, model.batch))}</td>"
            f"<td>{'–' if model.target_ms is None else f'{model.target_ms:g}'}</td></tr>"
            for name, model in self.models.items()
        )
        head = "<tr><th>model</th><th>batch sizes</th><th>target, ms</th></tr>"
        return f"<table><caption>{escape(repr(self))}</caption>{head}{rows}</table>"


def _forget_all() -> None:
    """Runs in a forked process: the loops of its engines, and the holders of their locks, exist only in the parent."""
    for engine in list(_engines):
        engine._closing = engine._elsewhere = True


_engines: weakref.WeakSet[Engine] = weakref.WeakSet()
os.register_at_fork(after_in_child=_forget_all)
