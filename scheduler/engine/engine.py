"""`Engine`: models on one GPU, requests in, results out. Everything else is behind it.

with pp.Engine("virtual:h200", policy="paella") as engine:
    engine.load(model)
    y = engine.infer_sync("double", {"x": x})["y"]
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import math
import os
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from html import escape
from typing import Any, Self

import numpy as np

from paellapy.instrument.device import CudaDevice, Device, VirtualDevice
from paellapy.instrument.errors import PaellaError
from paellapy.scheduler.backends.base import Backend
from paellapy.scheduler.backends.launches import LoadedModel
from paellapy.scheduler.backends.recorded import TracedBlocks
from paellapy.scheduler.core import codes, step
from paellapy.scheduler.core.capacity import Capacity, set_capacity
from paellapy.scheduler.core.errors import (
    EngineClosedError,
    EngineFailedError,
    MemoryPlanError,
    ModelError,
    RequestFailedError,
    UnknownModelError,
    WeightsError,
)
from paellapy.scheduler.core.install import remove
from paellapy.scheduler.core.job import READS_SHARES
from paellapy.scheduler.core.loop import Bell
from paellapy.scheduler.core.profiles import ModelProfile
from paellapy.scheduler.core.shared_memory import SharedBlock
from paellapy.scheduler.core.state import Limits, new_state, state_bytes
from paellapy.scheduler.core.tenants import checked_tenants, give_tenant, tenants_stats
from paellapy.scheduler.core.tuning import Tuning
from paellapy.scheduler.engine.background import Job, Reports, check_memory
from paellapy.scheduler.engine.feed import Feed
from paellapy.scheduler.engine.front_end import FrontEnd, Waiter, thread_waiter
from paellapy.scheduler.engine.guests import Guests
from paellapy.scheduler.engine.install import install, install_windows
from paellapy.scheduler.engine.load_times import LoadTimes, shown
from paellapy.scheduler.engine.loader import Loader
from paellapy.scheduler.engine.requests import Requester, Slot
from paellapy.scheduler.engine.residents import Residents
from paellapy.scheduler.engine.stats import core_stats, loaded_stats
from paellapy.scheduler.engine.tap import Tap
from paellapy.scheduler.engine.trace import EngineTrace, trace_engine
from paellapy.scheduler.engine.turn import Turn, Turns
from paellapy.scheduler.models.lane_memory import MemoryPlan
from paellapy.scheduler.models.model import Model
from paellapy.scheduler.models.profile import model_profile
from paellapy.scheduler.models.torch_module import needs_torch
from paellapy.scheduler.models.torch_step import TorchStep
from paellapy.scheduler.policies.attach import attach_policy
from paellapy.scheduler.policies.policy import Policy, find_policy

_TRACED = (
    "a trace of the virtual GPU has nothing of what an engine runs for requests, only how its models are loaded: write "
    "`with engine.trace() as t:` around the requests"
)


class Engine(Requester):
    """Runs models on one device under a policy. Thread-safe; `close()`, or leaving `with`, drains it."""

    _culprits = ""  # who was on the GPU when it failed

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

        `memory_bytes`: what weights and lanes may take of the GPU's memory; None: most of it, and models that do not
        fit are refused. Given, more models than fit can be loaded: weights come and go by demand. Those that are not on
        the GPU are in the host's memory up to `host_bytes` (None: half of it), beyond in files.

        `quantum_us` is about how long a segment takes; None: 100, and 150 with windows of SMs.

        `max_active`: batches that may share the GPU at once. None: until their measured demand adds up to two to three
        GPUs, and more while a queue persists.

        `sm_windows`: number of windows of SMs, 8 for instance. While many batches share the GPU, each launch is
        confined to one window unless that would slow it much. Kernels of PyTorch's libraries can be
        confined; kernels that paellapy loads itself run on all SMs of a real GPU.

        `segment_shares`: measure, as a model is loaded, what its segments take of the GPU's bandwidth and tensor units;
        None: where the policy reads it. On a virtual GPU it is known anyway.

        `tuning`: numbers of the scheduler for experiments, by name (`paellapy doctor --verbose` lists them); the others
        are those of the GPU.
        """
        policy = find_policy(policy)  # what is wrong is said before anything is made
        self.device = Device.open(device) if isinstance(device, str) else device or Device.current()
        self.tuning = Tuning.for_device(self.device, tuning)
        quantum_us = self.tuning.segment_us(sm_windows) if quantum_us is None else quantum_us
        _check_settings(quantum_us, max_active, memory_bytes, host_bytes, sm_windows)
        self.limits, self.max_active = limits or Limits(), max_active
        self._failure: BaseException | None = None
        self._closed = self._closing = self._elsewhere = self._loop_ended = False
        self._loading = threading.RLock()
        self._backend = _backend(self.device)
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
        self._models: dict[str, LoadedModel] = {}
        self._jobs: dict[str, Job] = {}
        self._by_row: dict[int, LoadedModel] = {}
        self.bell = Bell(self.state.bell, self._backend.sleeps_in_read)
        self._front = FrontEnd(self.state, self.limits, 0, self.bell, self._open_wake_fd())
        self._tap = Tap(self.state) if self.limits.fronts > 1 else None
        self._unwatch: Callable[[], None] = self._check_open  # of the trace that runs
        self._slots: weakref.WeakSet[Slot] = weakref.WeakSet()
        self._since, self._segment_shares = time.monotonic(), segment_shares
        self._start()
        self._turns, self._guests = Turns(self), Guests(self)
        _engines.add(self)

    def _manage_memory(self, host_bytes: int | None) -> Residents:
        """Weights come and go within the budget."""
        host = _half_of_the_host() if host_bytes is None else host_bytes
        budget = self.memory.budget_bytes
        residents = Residents(self._backend, self.state, budget, host, self._between_steps, self._check_open)
        self.memory.weights_on_gpu = lambda: int(self.state.residency["held_bytes"][0])
        self.memory.lanes_held = lambda: residents.berths.held_bytes
        self.memory.account = residents.account
        residents.start(lambda: os.eventfd_write(self.bell.fd, 1))
        return residents

    def _start(self) -> None:
        """The loop, and who is told what it meets."""
        step.attach_loop(self.state)
        self._faults = self._backend.on_fault = Faults(self)
        self._backend.start(self.state, self.bell, self._fail)

    def _open_wake_fd(self) -> int:
        """Closed with the last reference and not by close(): loops of other threads let go of it in their own time."""
        fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        weakref.finalize(self, os.close, fd)
        self.state.wake_fd[0, 0] = fd
        return fd

    # -- models

    def load(self, model: Model) -> None:
        """Compiles, captures, measures and opens a model. Others go on running meanwhile."""
        with self._loading:
            self._check_open()
            if not isinstance(model, Model):
                raise ModelError(f"a {type(model).__name__} is no model: give a pp.Model")
            self._models[model.name] = self._load(model)

    def _load(self, model: Model) -> LoadedModel:
        with self._loading:
            if model.name in self._models or model.name in self._jobs or model.name in self._turns:
                raise ModelError(f"a model or a job named {model.name!r} is loaded already; unload it first")
            free = int(np.count_nonzero(self.state.lane["model"] == codes.NONE))
            wanted = min(self.max_active or self.tuning.default_active, self.limits.lanes_per_model, free)
            if free < (model.lanes or 1) or len(self._by_row) >= len(self.state.model):
                raise ModelError(
                    f"model {model.name!r}: {len(self._by_row)} of {len(self.state.model)} models and all but {free} "
                    f"of {len(self.state.lane)} lanes are in use; unload a model, or give the engine larger limits"
                )
            reads = bool(self._policy.facts & READS_SHARES)
            self._loader.measure_shares = reads if self._segment_shares is None else self._segment_shares
            alone = self._front.waiting == 0 and not self.state.core["live"][0]  # the latter are of other processes too
            times = LoadTimes(model.name)
            with shown(times):
                loaded = self._loader.load(model, wanted, alone, times)
                with times.phase("install"):
                    install(self.state, loaded, self._backend.pool(self.state, model.priority))
                    if self._residents is not None:
                        self._residents.add(loaded)
            loaded.load_s = times.seconds
            self._by_row[loaded.row] = loaded
            self._front.command(codes.OPEN_MODEL, loaded.row)
            return loaded

    def background(
        self,
        step: Callable[..., Any],
        *,
        name: str = "train",
        state: Sequence[Any],
        data: Iterable[Any] | None = None,
        priority: int = -1,
        share: float = 1.0,
        memory_bytes: int | None = None,
        every: int = 100,
        callback: Callable[[Job], object] | None = None,
        params: Mapping[str, float] | None = None,
    ) -> Job:
        """Runs a PyTorch step again and again beside requests: captured, cut and scheduled like any model.

        `state` is everything that the step changes: modules, optimizers, gradient scalers, tensors, generators. The
        first step is made here, as it is; capturing and measuring leave no trace. `step` returns tensors, a loss say,
        which `job.outputs` has, or nothing. With `data` it is given the next batch each time, until there is none.

        `callback(job)` is called after every `every`-th step, outside the capture: for losses, checkpoints, and
        learning rates that are tensors. `share` and `params` are as of a model; `memory_bytes` is the most that the
        state and a step may hold.
        """
        if every < 1:
            raise ModelError(f"job {name!r}: every={every}; a callback comes after every step, or after some more")
        with self._loading:
            self._check_open()
            if name in self._models or name in self._jobs:
                raise ModelError(f"a model or a job named {name!r} is loaded already; stop or unload it first")
            feed = None if data is None else Feed(needs_torch(), name, data)
            return self._start_job(
                Job(self, self, TorchStep(name, step, list(state), None if feed is None else feed.first()), feed,
                    Reports(every, callback)),
                {"priority": priority, "share": share, "params": params}, memory_bytes,
            )  # fmt: skip

    def _start_job(self, job: Job, about: dict[str, Any], memory_bytes: int | None) -> Job:
        try:
            loaded = self._load(job.step.model(1 if job.feed is None else 2, **about))
        except BaseException:
            job.stop()
            raise
        self._jobs[job.name] = job
        try:
            check_memory(job.step, loaded.reservation.total_bytes, memory_bytes)
        except MemoryPlanError:
            job.stop()
            job.adopt(loaded)
            self.unload_job(job)
            raise
        job.start(loaded, computes=isinstance(self.device, VirtualDevice))
        return job

    def turn(self, name: str, *, priority: int = -1, share: float = 1.0, give_back_ms: float = 10.0) -> Turn:
        """`with engine.turn("script"):` around code that was not captured: it runs when the policy grants it.

        `turn.wanted()` says when to give way. Who waits for a turn that is wanted back waits for `give_back_ms` at
        most: then the turn is over, and what its code launches runs beside others.
        """
        self._check_open()
        with self._loading:
            if name in self._models or name in self._jobs:
                raise ModelError(f"a model or a job named {name!r} is loaded already; name the turn otherwise")
            return Turn(self, self._turns, name, priority, share, give_back_ms)

    @property
    def backend(self) -> Backend:
        return self._backend

    def open_turns(self, loaded: LoadedModel) -> None:
        """Turns of one name enter the core."""
        install(self.state, loaded, self._backend.pool(self.state, loaded.model.priority))
        self._by_row[loaded.row] = loaded
        self._front.command(codes.OPEN_MODEL, loaded.row)

    @property
    def jobs(self) -> dict[str, Job]:
        """Background jobs that are not over, by name."""
        return dict(self._jobs)

    def unload_job(self, job: Job) -> None:
        """From the job's own thread, when it is over."""
        with self._loading:
            self._jobs.pop(job.name, None)
            if job.loaded is not None and job.loaded.row in self._by_row and self._failure is None:
                self._close_model(job.loaded)

    def unload(self, name: str) -> None:
        """Finishes the model's requests, refuses new ones, and gives its memory back. Others go on running."""
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
        self._loader.unload(loaded)
        del self._by_row[loaded.row]

    def prefetch(self, name: str) -> None:
        """Brings a model's weights to the GPU although no request waits for them; returns when they are there."""
        self._managed(name).ask(self._find(name).row, True)

    def evict(self, name: str) -> None:
        """Takes a model's weights off the GPU once nothing of it runs. The next request brings them back."""
        self._managed(name).ask(self._find(name).row, False)

    def weights_state(self, name: str) -> str:
        """Where a model's weights are: `resident`, `loading 43 %`, `leaving`, `host` or `disk`."""
        return "resident" if self._residents is None else self._residents.state_of(self._find(name).row)

    def _managed(self, name: str) -> Residents:
        if self._residents is None:
            raise ModelError(f"model {name!r}: this engine keeps all weights on the GPU; give it memory_bytes")
        return self._residents

    def try_batch(self, name: str) -> float:
        """Runs a full batch of requests and notes how long that took (ns): admission begins with it."""
        loaded = self._find(name)
        model, waiter, done = loaded.model, thread_waiter(), itertools.count(1)
        batch = min(model.max_batch, codes.OWN_ROWS // 2)
        inputs = {key: np.full(spec.shape, spec.neutral, spec.dtype) for key, spec in model.inputs.items()}

        def finish(_: Any) -> None:
            if next(done) == batch:
                waiter.set()

        began = time.monotonic_ns()
        for _ in range(batch):
            self._submit(loaded, inputs, None, None, None, finish)
        self._front.wait(waiter)
        took = (time.monotonic_ns() - began) * model.max_batch / batch
        self.state.model["trial_ns"][loaded.row] = took
        return took

    @property
    def models(self) -> dict[str, Model]:
        """The models that are loaded, by name."""
        return {name: loaded.model for name, loaded in self._models.items()}

    def profile(self, name: str) -> list[Any]:
        """How the model was cut and what it takes: one `ProgramProfile` per batch size."""
        return list(self._find(name).profiles)

    def model_profile(self, name: str) -> ModelProfile:
        """What simulations need to know of the model: `pp.simulate([engine.model_profile("mlp")], …)`."""
        loaded = self._find(name)
        return model_profile(loaded.model, loaded.profiles, len(loaded.lanes), self.limits.requests)

    def job_profile(self, name: str) -> ModelProfile:
        """As `model_profile`, of a background job's step."""
        job = self._jobs.get(name)
        if job is None or job.loaded is None:
            raise UnknownModelError(f"no job named {name!r} runs; running: {', '.join(self._jobs) or 'none'}")
        return model_profile(job.loaded.model, job.loaded.profiles, len(job.loaded.lanes), self.limits.requests)

    # -- state

    @property
    def policy(self) -> str:
        """The name of the policy that decides now."""
        return self._policy.name

    @property
    def current_policy(self) -> Policy:
        return self._policy

    def set_policy(self, policy: str | Policy) -> None:
        """Changes the policy; what is on the GPU runs on, what waits is ranked anew."""
        self._check_open()
        found = find_policy(policy)

        def change() -> None:
            self._policy = self._attach(found)

        self._between_steps(change)

    def tenant(self, name: str, share: float = 1.0, limit: float | None = None) -> None:
        """Gives the client of this name a share of the GPU against other tenants, under policies that are fair; and a
        limit, the part of the GPU's time that it may have at most. Called again it changes both.
        """
        self._check_open()
        (tenant,) = checked_tenants({name: {"share": share, "limit": limit}}).values()
        number = self._front.client_number(name)
        if not self._front.is_client(number, name):
            raise ModelError(f"no room for tenant {name!r}: {len(self.state.client) - 1} clients have numbers already")
        self._between_steps(lambda: give_tenant(self.state, number, name, tenant))

    @property
    def tenants(self) -> dict[str, dict[str, Any]]:
        """Tenants by name: share, limit, and what each has had of the GPU."""
        return tenants_stats(self.state)

    def _between_steps(self, change: Callable[[], None]) -> None:
        """Has the loop do it, and waits until it is done."""
        done = threading.Event()
        failed: list[BaseException] = []

        def run() -> None:
            try:
                change()
            except BaseException as e:  # the loop goes on; whoever asked for it is told
                failed.append(e)
            finally:
                done.set()

        if self._loop_ended:
            change()
            return
        self._backend.call(run)
        while not done.wait(0.1):
            if not self._closing:
                self._check_open()  # a loop that has ended changes nothing any more
        if failed:
            raise failed[0]

    def _attach(self, policy: str | Policy) -> Policy:
        found = find_policy(policy)
        attach_policy(self.state, found)
        if found.active is None:
            most = len(self.state.lane)
            self.state.core["max_active"][0] = most if self.max_active is None else min(self.max_active, most)
            self.state.core["demand_limit"][0] = self.tuning.demand_limit if self.max_active is None else math.inf
        return found

    def stats(self) -> dict[str, Any]:
        """Counts and latencies so far, of the engine and of every model."""
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

    def job_stats(self) -> dict[str, dict[str, Any]]:
        """What runs beside requests, by name: background jobs, turns, and other processes."""
        own = {name: job.stats() for name, job in self.jobs.items()}
        return {**self._guests.stats(), **self._turns.stats(), **own}

    def sm_totals(self) -> tuple[float, Any, Any] | None:
        """Until when (ns), and per SM since the start: warp-ns of resident warps, ns with any. None: not known exactly.

        A virtual GPU knows; of a real one only kernels that report tell (`paellapy.instrument.traces.live.counts`).
        """
        return self._backend.sm_totals()

    def watch(self, watcher: Callable[[Any], None]) -> Callable[[], None]:
        """Calls `watcher(entry)` (tables.COMPLETION) for every request that ends; the result stops it.

        In this process's front end that is before its answer; requests of other processes are seen soon after it.
        """
        if self._tap is not None:
            return self._tap.watch(watcher)
        self._front.watchers.append(watcher)
        return lambda: self._front.watchers.remove(watcher)

    @property
    def failure(self) -> BaseException | None:
        """Why the engine takes no more requests; None while it does."""
        return self._failure

    @property
    def closed(self) -> bool:
        """Whether the engine takes no more requests because it is closed or being closed."""
        return self._closing or self._closed

    @property
    def uptime_s(self) -> float:
        """Seconds since the engine was made."""
        return time.monotonic() - self._since

    def trace(self, records_per_sm: int = 1 << 14) -> trace_engine:
        """Context manager: records requests, segments and blocks of everything that runs inside, on one clock."""
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

    def loaded_rows(self) -> dict[int, LoadedModel]:
        """Loaded models by their row in the core."""
        return dict(self._by_row)

    def call_in_loop(self, function: Callable[[], None]) -> None:
        """Between two steps of the core: the function may change what it reads."""
        self._backend.call(function)

    def count(self, counter: Callable[[Any], None]) -> Callable[[], None]:
        """As `watch`, of this process's requests, several at a time (tables.COMPLETION)."""
        self._front.counters.append(counter)
        return lambda: self._front.counters.remove(counter)

    # -- the end

    def close(self) -> None:
        """Refuses new requests, finishes those it has, and gives everything back."""
        if self._closed or self._closing:
            return
        for job in list(self._jobs.values()):
            job.stop()
        for job in list(self._jobs.values()):
            job.join()
        self._turns.end()
        self._guests.end()
        self._closing = True
        for slot in list(self._slots):
            slot.cancel()  # nobody can write to them any more, and their lanes would wait for ever
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
                with contextlib.suppress(*(PaellaError,) if self._failure else ()):  # a lost GPU takes nothing back
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
        """For notebooks: a row for each model."""
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

    def _check_open(self) -> None:
        if self._failure is not None:
            raise self._failed_error()
        if self._elsewhere:
            raise EngineClosedError("the engine is that of the process this one was forked from: make one here")
        if self._closing or self._closed:
            raise EngineClosedError("the engine is closed")

    def _failed_error(self) -> EngineFailedError:
        whose = f" (on the GPU were {self._culprits})" if self._culprits else ""
        error = EngineFailedError(f"the GPU failed and the engine takes no more requests: {self._failure}{whose}")
        error.__cause__ = self._failure
        return error

    def _fail(self, cause: BaseException) -> None:
        """From the loop: the device is lost. Everybody who waits is told why."""
        if self._failure is None:
            self._culprits = self._on_gpu()
            self._failure = cause
            self._front.command(codes.FAIL)

    def _on_gpu(self) -> str:
        """Whose work is launched and not done: a fault of the GPU's is of one of these."""
        lanes = self.state.flight[: int(self.state.core["flight"][0])]
        rows = sorted({int(self.state.lane["model"][lane]) for lane in lanes})
        named = [self._by_row[row].model.name for row in rows if row in self._by_row]
        return ", ".join(f"job {name!r}" if name in self._jobs else repr(name) for name in named)

    def _no_weights(self, row: int, name: str) -> Exception:
        cause = self._residents.mover.errors.get(row) if self._residents is not None else None
        error = WeightsError(f"the weights of model {name!r} could not be brought to the GPU: {cause}")
        error.__cause__ = cause
        return error

    def _row(self, row: int) -> LoadedModel | None:
        return self._by_row.get(row)

    def _failed(self, status: int) -> EngineFailedError:
        if self._failure is None:  # the core has met it before its loop could say so
            self._culprits = self._on_gpu()
            self._failure = self._backend.failure(status)
        return self._failed_error()

    def on_fault(self, told: Callable[[str, BaseException], None]) -> None:
        """Calls `told(model, error)` where a model fails on the values of one request: in the loop's thread."""
        self._faults.told = told

    def _faulted(self, name: str, lane: int, slot: int) -> RequestFailedError:
        cause = self._faults.latest.pop((lane, slot), None)
        error = RequestFailedError(f"model {name!r} failed on the values of this request: {cause}")
        error.__cause__ = cause
        return error

    @property
    def over(self) -> bool:
        return self._closed


class Faults:
    """Why a model failed on the values in a slot, the latest of each; called by the backend."""

    def __init__(self, engine: Engine) -> None:
        self._engine = weakref.proxy(engine)
        self.latest: dict[tuple[int, int], BaseException] = {}
        self.told: Callable[[str, BaseException], None] | None = None

    def __call__(self, lane: int, slot: int, error: BaseException) -> None:
        self.latest[lane, slot] = error
        loaded = self._engine.loaded_rows().get(int(self._engine.state.lane["model"][lane]))
        if self.told is not None and loaded is not None:
            self.told(loaded.model.name, error)


def _forget_all() -> None:
    """In a process that was forked: its engines' loops, and who holds their locks, are in the other one."""
    for engine in list(_engines):
        engine._closing = engine._elsewhere = True


_engines: weakref.WeakSet[Engine] = weakref.WeakSet()
os.register_at_fork(after_in_child=_forget_all)


def _check_settings(
    quantum_us: float, max_active: int | None, memory_bytes: int | None, host_bytes: int | None, sm_windows: int
) -> None:
    if not 1 <= quantum_us < math.inf:
        raise ModelError(f"quantum_us={quantum_us}: a quantum is at least one microsecond")
    if max_active is not None and max_active < 1:
        raise ModelError(f"max_active={max_active}: at least one batch must be able to run")
    if memory_bytes is not None and memory_bytes < 1:
        raise ModelError(f"memory_bytes={memory_bytes}: give the bytes that models may use, or None for most of it")
    if host_bytes is not None and (memory_bytes is None or host_bytes < 0):
        raise ModelError(f"host_bytes={host_bytes}: give 0 or more, and memory_bytes for the GPU with it")
    if sm_windows != 0 and not codes.LEAST_WINDOWS <= sm_windows <= codes.WINDOWS:
        raise ModelError(f"sm_windows={sm_windows}: 0, for none, or {codes.LEAST_WINDOWS} to {codes.WINDOWS}")


def _half_of_the_host() -> int:
    return int(os.sysconf("SC_PHYS_PAGES")) * int(os.sysconf("SC_PAGE_SIZE")) // 2


def _backend(device: Device) -> Backend:
    if isinstance(device, VirtualDevice):
        from paellapy.scheduler.backends.virtual import VirtualBackend

        return VirtualBackend(device)
    assert isinstance(device, CudaDevice)
    from paellapy.scheduler.backends.cuda import CudaBackend

    return CudaBackend(device)


__all__ = ["Engine", "EngineTrace", "Slot"]
