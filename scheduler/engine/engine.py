"""`Engine`: loads models onto one GPU, takes requests, returns results.

with pp.Engine("virtual:h200", policy="paella") as engine:
    engine.load(model)
    y = engine.infer_sync("double", {"x": x})["y"]
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Mapping
from html import escape
from typing import Any, Self

import numpy as np

from paellapy.instrument.device import Device, VirtualDevice
from paellapy.instrument.errors import PaellaError
from paellapy.scheduler.backends.launches import LoadedModel
from paellapy.scheduler.backends.recorded import TracedBlocks
from paellapy.scheduler.core import codes, step
from paellapy.scheduler.core.capacity import Capacity, set_capacity
from paellapy.scheduler.core.errors import ModelError, UnknownModelError
from paellapy.scheduler.core.install import remove
from paellapy.scheduler.core.job import READS_SHARES
from paellapy.scheduler.core.loop import Bell
from paellapy.scheduler.core.profiles import ModelProfile
from paellapy.scheduler.core.shared_memory import SharedBlock
from paellapy.scheduler.core.state import Limits, new_state, state_bytes
from paellapy.scheduler.core.tuning import Tuning
from paellapy.scheduler.engine.background import Job
from paellapy.scheduler.engine.front_end import FrontEnd
from paellapy.scheduler.engine.guarded import Faults
from paellapy.scheduler.engine.guests import Guests
from paellapy.scheduler.engine.hosting import Hosting
from paellapy.scheduler.engine.install import install, install_windows
from paellapy.scheduler.engine.later_sizes import LaterSizes
from paellapy.scheduler.engine.load_times import LoadTimes, shown
from paellapy.scheduler.engine.loader import Loader
from paellapy.scheduler.engine.residents import Residents
from paellapy.scheduler.engine.settings import check_settings, half_of_the_host, open_backend
from paellapy.scheduler.engine.slots import Slot
from paellapy.scheduler.engine.stats import core_stats, loaded_stats
from paellapy.scheduler.engine.submitting import submit
from paellapy.scheduler.engine.tap import Tap
from paellapy.scheduler.engine.trace import EngineTrace, trace_engine
from paellapy.scheduler.engine.turn import Turns
from paellapy.scheduler.engine.waiters import Waiter, thread_waiter
from paellapy.scheduler.models.lane_memory import MemoryPlan
from paellapy.scheduler.models.model import Model
from paellapy.scheduler.models.profile import model_profile
from paellapy.scheduler.policies.policy import Policy, find_policy

_TRACED = (
    "a trace of the virtual GPU does not record the requests of an engine, only how its models are loaded: write "
    "`with engine.trace() as t:` around the requests"
)


class Engine(Hosting):
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
        self._loading = threading.RLock()
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
        self._unwatch: Callable[[], None] = self._check_open  # stops the running trace from watching
        self._slots: weakref.WeakSet[Slot] = weakref.WeakSet()
        self._since, self._segment_shares = time.monotonic(), segment_shares
        self._start()
        self._turns, self.guests = Turns(self), Guests(self)
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

    # -- models

    def load(self, model: Model) -> None:
        """Compiles, captures, measures and opens a model. Loaded models keep running meanwhile."""
        with self._loading:
            self._check_open()
            if not isinstance(model, Model):
                raise ModelError(f"load() takes a pp.Model, not a {type(model).__name__}")
            self._models[model.name] = self._load(model)

    def _load(self, model: Model) -> LoadedModel:
        with self._loading:
            if model.name in self._models or model.name in self._jobs or model.name in self._turns:
                raise ModelError(f"a model or a job named {model.name!r} is loaded already; unload it first")
            free = int(np.count_nonzero(self.state.lane["model"] == codes.NONE))
            wanted = min(self.max_active or self.tuning.default_active, self.limits.lanes_per_model, free)
            if free < (model.lanes or 1) or len(self._by_row) >= len(self.state.model):
                raise ModelError(
                    f"no room for model {model.name!r}: {len(self._by_row)} of {len(self.state.model)} models and all "
                    f"but {free} of {len(self.state.lane)} lanes are in use; unload a model, or raise the engine's "
                    "limits"
                )
            reads = bool(self._policy.facts & READS_SHARES)
            self._loader.measure_shares = reads if self._segment_shares is None else self._segment_shares
            times = LoadTimes(model.name)
            with shown(times):
                loaded = self._loader.load(model, wanted, self._is_idle(), times)
                with times.phase("install"):
                    install(self.state, loaded, self._backend.pool(self.state, model.priority))
                    if self._residents is not None:
                        self._residents.add(loaded)
            loaded.load_s = times.seconds
            self._by_row[loaded.row] = loaded
            self._front.command(codes.OPEN_MODEL, loaded.row)
            self._later.add(loaded)
            return loaded

    def unload(self, name: str) -> None:
        """Finishes the model's requests, refuses new ones, and frees its memory. Other models keep running."""
        with self._loading:
            loaded = self._find(name)
            del self._models[name]
            self._close_model(loaded)

    def _close_model(self, loaded: LoadedModel) -> None:
        waiter = Waiter()
        self._front.on_model_closed(loaded.row, waiter.set)
        self._front.command(codes.CLOSE_MODEL, loaded.row)
        self._front.wait(waiter)
        if self._residents is None:
            remove(self.state, loaded.row)
        else:
            self._residents.take_out(loaded)
        self._forget(loaded)

    def _forget(self, loaded: LoadedModel) -> None:
        self._later.forget(loaded)
        self._loader.unload(loaded)
        del self._by_row[loaded.row]

    def prefetch(self, name: str) -> None:
        """Brings a model's weights to the GPU although no request needs them yet; returns when they are there."""
        self._managed(name).ask(self._find(name).row, True)

    def evict(self, name: str) -> None:
        """Takes a model's weights off the GPU once none of its requests runs. The next request brings them back."""
        self._managed(name).ask(self._find(name).row, False)

    def weights_state(self, name: str) -> str:
        """Where a model's weights are: `resident`, `loading 43 %`, `leaving`, `host` or `disk`."""
        return "resident" if self._residents is None else self._residents.state_of(self._find(name).row)

    def _managed(self, name: str) -> Residents:
        if self._residents is None:
            raise ModelError(
                f"model {name!r}: this engine keeps all weights on the GPU; create it with memory_bytes to move them"
            )
        return self._residents

    def try_batch(self, name: str) -> float:
        """Runs a full batch of requests and records its duration (ns), which admission uses as its first estimate."""
        loaded = self._find(name)
        model, waiter, done = loaded.model, thread_waiter(), itertools.count(1)
        batch = min(model.max_batch, codes.OWN_ROWS // 2)
        inputs = {key: np.full(spec.shape, spec.neutral, spec.dtype) for key, spec in model.inputs.items()}

        def finish(_: Any) -> None:
            if next(done) == batch:
                waiter.set()

        began = time.monotonic_ns()
        submit(self._front, loaded, [inputs] * batch, self._terms(loaded, None, None, None), [finish] * batch)
        self._front.wait(waiter)
        took = (time.monotonic_ns() - began) * model.max_batch / batch
        self.state.model["trial_ns"][loaded.row] = took
        return took

    @property
    def models(self) -> dict[str, Model]:
        """The models that are loaded, by name."""
        return {name: loaded.model for name, loaded in self._models.items()}

    def profile(self, name: str) -> list[Any]:
        """The model's segments and their measured times: one `ProgramProfile` per captured batch size."""
        return list(self._find(name).profiles)

    def model_profile(self, name: str) -> ModelProfile:
        """The facts about a model that simulations need: `pp.simulate([engine.model_profile("mlp")], …)`."""
        loaded = self._find(name)
        return model_profile(loaded.model, loaded.profiles, len(loaded.lanes), self.limits.requests)

    # -- state

    def stats(self) -> dict[str, Any]:
        """Counts and latencies so far, for the engine and for every model."""
        return {
            "device": self.device.title,
            "policy": self.policy,
            "tuning": self.tuning.note,
            "uptime_s": self.uptime_s,
            **core_stats(self.state),
            "memory": {"held_bytes": self.memory.held_bytes, **self.memory()},
            "models": {
                each.model.name: loaded_stats(self.state, each)
                for each in self.loaded_rows().values()
                if not each.model.stateful and each.model.name not in self._turns
            },
            "jobs": self.job_stats(),
            "tenants": self.tenants,
        }

    def sm_totals(self) -> tuple[float, Any, Any] | None:
        """A time (ns), and per SM up to that time: warp-ns of resident warps, ns with any. None if unknown.

        A virtual GPU knows these totals. On a real GPU only instrumented kernels report them
        (`paellapy.instrument.traces.live.counts`).
        """
        return self._backend.sm_totals()

    def watch(self, watcher: Callable[[Any], None]) -> Callable[[], None]:
        """Calls `watcher(entry)` (tables.COMPLETION) for every request that ends; call the returned function to stop.

        A request of this process is seen before its answer; requests of other processes are seen soon after theirs.
        """
        if self._tap is not None:
            return self._tap.watch(watcher)
        self._front.watchers.append(watcher)
        return lambda: self._front.watchers.remove(watcher)

    @property
    def uptime_s(self) -> float:
        """Seconds since the engine was created."""
        return time.monotonic() - self._since

    def trace(self, records_per_sm: int = 1 << 14) -> trace_engine:
        """Context manager: records all requests, segments and blocks that run inside it, on one clock."""
        self._check_open()
        return trace_engine(self, records_per_sm)

    def begin_trace(self, records_per_sm: int, note: Callable[[Any], None]) -> None:
        with self._loading:
            self._backend.begin_trace(records_per_sm, list(self._by_row.values()))
            self._unwatch = self.watch(note)

    def end_trace(self, note: Callable[[Any], None]) -> tuple[TracedBlocks, Callable[[Any], Any]]:
        with self._loading:
            recorded = self._backend.end_trace(list(self._by_row.values()))
            self._front.drain()
            if self._tap is not None:
                self._tap.look()
            self._unwatch()
        return recorded, self._backend.to_trace_ns

    def call_in_loop(self, function: Callable[[], None]) -> None:
        """Calls the function between two steps of the core, when it may change tables that the core reads."""
        self._backend.call(function)

    def count(self, counter: Callable[[Any], None]) -> Callable[[], None]:
        """As `watch`, for the requests of this process only, several completions at a time (tables.COMPLETION)."""
        self._front.counters.append(counter)
        return lambda: self._front.counters.remove(counter)

    # -- the end

    def close(self) -> None:
        """Refuses new requests, finishes the accepted ones, and frees everything."""
        if self._closed or self._closing:
            return
        for job in list(self._jobs.values()):
            job.stop()
        for job in list(self._jobs.values()):
            job.join()
        self._turns.end()
        self.guests.end()
        self._later.close()
        self._closing = True
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
            if self._residents is not None:
                self._residents.close()
            self._front.detach_all()
            for loaded in list(self._by_row.values()):
                with contextlib.suppress(*(PaellaError,) if self._failure else ()):  # a lost GPU cannot free anything
                    self._forget(loaded)
            self._models.clear()
            if self._residents is not None:
                self._residents.close_store()
            self._backend.close()
            self._closed = True

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

    # -- inside

    def _find(self, name: str) -> LoadedModel:
        self._check_open()
        loaded = self._models.get(name)
        if loaded is None:
            known = ", ".join(self._models) or "none"
            raise UnknownModelError(f"no model named {name!r} is loaded; loaded: {known}")
        return loaded

    def _row(self, row: int) -> LoadedModel | None:
        return self._by_row.get(row)


def _forget_all() -> None:
    """Runs in a forked process: the loops of its engines, and the holders of their locks, exist only in the parent."""
    for engine in list(_engines):
        engine._closing = engine._elsewhere = True


_engines: weakref.WeakSet[Engine] = weakref.WeakSet()
os.register_at_fork(after_in_child=_forget_all)


__all__ = ["Engine", "EngineTrace", "Slot"]
