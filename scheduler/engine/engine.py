"""`Engine`: loads models onto one GPU, takes requests, returns results.

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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from html import escape
from typing import Any, Self

import numpy as np

from paellapy.instrument.device import CudaDevice, Device, VirtualDevice
from paellapy.instrument.errors import PaellaError
from paellapy.scheduler.backends.base import Backend, LoadedModel, TracedBlocks
from paellapy.scheduler.core import codes, step
from paellapy.scheduler.core.errors import (
    EngineClosedError,
    EngineFailedError,
    ModelError,
    RequestFailedError,
    UnknownModelError,
    WeightsError,
)
from paellapy.scheduler.core.job import READS_SHARES
from paellapy.scheduler.core.processes import SharedBlock
from paellapy.scheduler.core.profiles import (
    Capacity,
    ModelProfile,
    checked_priority,
    is_finite_number,
    remove,
    set_capacity,
    shortened,
)
from paellapy.scheduler.core.rings import Bell
from paellapy.scheduler.core.state import Limits, new_state, state_bytes
from paellapy.scheduler.core.tenants import checked_tenants, set_tenant, tenants_stats
from paellapy.scheduler.core.throttle import attach_held_back
from paellapy.scheduler.core.tuning import Tuning
from paellapy.scheduler.engine.guests import Guests
from paellapy.scheduler.engine.jobs import Feed, Job, Reports, check_memory
from paellapy.scheduler.engine.lease import Lease, Leases
from paellapy.scheduler.engine.loading import LaterSizes, Loader, LoadTimes, install, install_partitions, shown
from paellapy.scheduler.engine.requests import Requester, Slot, find_model, submit
from paellapy.scheduler.engine.ring_client import ENGINE_CLOSED, RingClient, Waiter, thread_waiter
from paellapy.scheduler.engine.stats import Tap, core_stats, loaded_stats
from paellapy.scheduler.engine.trace import trace_engine
from paellapy.scheduler.engine.weight_cache import Residents
from paellapy.scheduler.models.memory import MemoryPlan
from paellapy.scheduler.models.model import Model
from paellapy.scheduler.models.profile import model_profile
from paellapy.scheduler.models.torch_step import TorchStep, check_job
from paellapy.scheduler.models.torch_tensors import needs_torch
from paellapy.scheduler.policies.policy import Policy, attach_policy, find_policy

# Whether an engine takes requests, and the error that callers get when it does not: closed, failed, or a fault.


class Faults:
    """The latest error for each slot on whose values a model failed; filled by the backend."""

    def __init__(self, engine: Guarded) -> None:
        self._engine = weakref.proxy(engine)
        self.latest: dict[tuple[int, int], BaseException] = {}
        self.told: Callable[[str, BaseException], None] | None = None

    def __call__(self, instance: int, slot: int, error: BaseException) -> None:
        self.latest[instance, slot] = error
        loaded = self._engine.loaded_rows().get(int(self._engine.state.instance["model"][instance]))
        if self.told is not None and loaded is not None:
            self.told(loaded.model.name, error)


class Guarded(Requester):
    """An engine that takes requests until it is closed or its GPU fails."""

    _backend: Backend
    _residents: Residents | None
    _by_row: dict[int, LoadedModel]
    _jobs: dict[str, Job]
    _leases: Leases
    _outside: list[str]  # work on the GPU that the core did not launch: loads, and code of jobs
    _faults: Faults
    _failure: BaseException | None
    _closed: bool
    _closing: bool
    _elsewhere: bool  # the engine belongs to the process from which this one was forked
    _culprits = ""  # the models, jobs and leases on the GPU when it failed

    def loaded_rows(self) -> dict[int, LoadedModel]:
        """Loaded models by their row in the core."""
        return dict(self._by_row)

    @property
    def failure(self) -> BaseException | None:
        """The reason why the engine takes no more requests; None while it does."""
        return self._failure

    @property
    def failure_text(self) -> str:
        """The failure, and the models, jobs and leases whose work was on the GPU: one of them caused it."""
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
            self._producer.command(codes.FAIL)

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
            self.state.core["outside"][0] = len(self._outside) + self._leases.astray

    def _on_gpu(self) -> str:
        """The names of models, jobs and leases whose work is launched and not done: one of them caused the GPU's fault.
        """
        instances = self.state.flight[: int(self.state.core["flight"][0])]
        rows = sorted({int(self.state.instance["model"][instance]) for instance in instances})
        if self.state.core["lost_ns"][0]:  # the core met the failure first, and has ended all flights
            rows = np.flatnonzero(self.state.model["lost"]).tolist()
        flying = [self._named(self._by_row[row].model.name) for row in rows if row in self._by_row]
        return ", ".join(dict.fromkeys((*flying, *map(self._named, self._leases.held), *self._outside)))

    def _named(self, name: str) -> str:
        kind = "job " if name in self._jobs else "lease " if name in self._leases else ""
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

    def _faulted(self, name: str, instance: int, slot: int) -> RequestFailedError:
        cause = self._faults.latest.pop((instance, slot), None)
        error = RequestFailedError(f"model {name!r} failed on the values of this request: {cause}")
        error.__cause__ = cause
        return error


# An engine's policy and tenants, which are changed between two steps of the core.


class Governed(Guarded):
    """An engine whose requests are ranked by a policy and belong to tenants."""

    tuning: Tuning
    max_active: int | None
    _policy: Policy
    _loop_ended: bool

    @property
    def policy(self) -> str:
        """The name of the current policy."""
        return self._policy.name

    @property
    def current_policy(self) -> Policy:
        return self._policy

    def set_policy(self, policy: str | Policy) -> None:
        """Changes the policy. Work on the GPU keeps running; waiting jobs are ranked anew.

        A policy that this machine has not used before is compiled first. On a real GPU, requests run meanwhile. A
        virtual GPU pauses for some tenths of a second instead: its loop and the compiler would compete for the
        interpreter lock, and compilation would take several times as long.
        """
        self._check_open()
        if not self._backend.computes_in_python:
            policy = find_policy(policy)
            if policy.admits_by_client:
                attach_held_back(self.state)

        def change() -> None:
            self._policy = self._attach(policy)

        self._between_steps(change)

    def tenant(self, name: str, share: float = 1.0, limit: float | None = None) -> None:
        """Gives the client of this name a share of the GPU relative to other tenants, which fair policies read, and a
        `limit`: the largest fraction of the GPU's time it may use. A later call changes both.
        """
        self._check_open()
        (tenant,) = checked_tenants({name: {"share": share, "limit": limit}}).values()
        number = self._producer.client_number(name)
        if not self._producer.is_client(number, name):
            raise ModelError(
                f"no room for tenant {name!r}: all {len(self.state.client) - 1} client numbers are in use; give the "
                "engine larger limits"
            )
        if limit is not None:
            attach_held_back(self.state)  # compiled before the loop waits for it
        self._between_steps(lambda: set_tenant(self.state, number, name, tenant))

    @property
    def tenants(self) -> dict[str, dict[str, Any]]:
        """Tenants by name: share, limit, and the GPU time each has used."""
        return tenants_stats(self.state)

    def _is_idle(self) -> bool:
        """Whether no request is there, of any process."""
        return self._producer.waiting == 0 and not self.state.core["live"][0]

    def _between_steps(self, change: Callable[[], None]) -> None:
        """Runs a change in the loop's thread, and waits until it is done."""
        done = threading.Event()
        failed: list[BaseException] = []

        def run() -> None:
            try:
                change()
            except BaseException as e:  # the loop continues; the error goes to the caller of this function
                failed.append(e)
            finally:
                done.set()

        if self._loop_ended:
            change()
            return
        self._backend.call(run)
        while not done.wait(0.1):
            if not self._closing:
                self._check_open()  # a loop that has ended makes no more changes
        if failed:
            raise failed[0]

    def _attach(self, policy: str | Policy) -> Policy:
        found = find_policy(policy)
        attach_policy(self.state, found)
        if found.active is None:
            most = len(self.state.instance)
            self.state.core["max_active"][0] = most if self.max_active is None else min(self.max_active, most)
            self.state.core["demand_limit"][0] = self.tuning.demand_limit if self.max_active is None else math.inf
        return found


# The models of an engine: loaded, unloaded, profiled, and their weights moved to and from the GPU.


class Loading(Governed):
    """An engine that loads models while others run."""

    device: Device
    limits: Limits
    _loading: threading.RLock
    _loader: Loader
    _later: LaterSizes
    _models: dict[str, LoadedModel]
    _segment_shares: bool | None

    def load(self, model: Model) -> None:
        """Compiles, captures, measures and opens a model. Loaded models keep running meanwhile."""
        with self._loading:
            self._check_open()
            if not isinstance(model, Model):
                raise ModelError(f"load() takes a pp.Model, not a {type(model).__name__}", field="model", given=model)
            if model.resident is False and self._residents is None:
                raise ModelError(
                    f"model {model.name!r}: resident=False has no effect where all weights stay on the GPU: "
                    "create the engine with memory_bytes, or leave resident out"
                )
            with self.outside(repr(model.name)):
                self._models[model.name] = self._load(model)

    def _load(self, model: Model) -> LoadedModel:
        with self._loading:
            if model.name in self._models or model.name in self._jobs or model.name in self._leases:
                raise ModelError(f"a model or a job named {model.name!r} is loaded already; unload it first")
            free = int(np.count_nonzero(self.state.instance["model"] == codes.NONE))
            wanted = min(self.max_active or self.tuning.default_active, self.limits.instances_per_model, free)
            if free < (model.instances or 1) or len(self._by_row) >= len(self.state.model):
                raise ModelError(
                    f"no room for model {model.name!r}: {len(self._by_row)} of {len(self.state.model)} models and all "
                    f"but {free} of {len(self.state.instance)} instances are in use; unload a model, or raise the "
                    "engine's limits"
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
            self._producer.command(codes.OPEN_MODEL, loaded.row)
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
        self._producer.on_model_closed(loaded.row, waiter.set)
        self._producer.command(codes.CLOSE_MODEL, loaded.row)
        self._producer.wait(waiter)
        if self._residents is None:
            remove(self.state, loaded.row)
        else:
            self._residents.take_out(loaded)
        self._forget(loaded)

    def _forget(self, loaded: LoadedModel) -> None:
        self._later.forget(loaded)
        del self._by_row[loaded.row]
        self._loader.unload(loaded)

    def prefetch(self, name: str) -> None:
        """Brings a model's weights to the GPU although no request needs them yet; returns when they are there."""
        row = self._find(name).row
        self._managed(name).ask(row, True)

    def evict(self, name: str) -> None:
        """Takes a model's weights off the GPU once none of its requests runs. The next request brings them back."""
        row = self._find(name).row
        self._managed(name).ask(row, False)

    def weights_state(self, name: str) -> str:
        """Where a model's weights are: `resident`, `loading 43 %`, `leaving`, `host` or `disk`."""
        row = self._find(name).row
        return "resident" if self._residents is None else self._residents.state_of(row)

    def _managed(self, name: str) -> Residents:
        if self._residents is None:
            raise ModelError(
                f"model {name!r}: this engine keeps all weights on the GPU; create it with memory_bytes to move them"
            )
        return self._residents

    def try_batch(self, name: str, known_ns: float = 0.0) -> float:
        """Runs a full batch of requests and records its duration (ns), which admission uses as its first estimate.

        `known_ns` is the duration that an earlier engine found: then no batch runs.
        """
        loaded = self._find(name)
        if known_ns:
            self.state.model["trial_ns"][loaded.row] = known_ns
            return known_ns
        model, waiter, done = loaded.model, thread_waiter(), itertools.count(1)
        batch = min(model.max_batch, codes.OWN_ROWS // 2)
        inputs = {key: np.full(spec.shape, spec.neutral, spec.dtype) for key, spec in model.inputs.items()}

        def finish(_: Any) -> None:
            if next(done) == batch:
                waiter.set()

        began = time.monotonic_ns()
        submit(self._producer, loaded, [inputs] * batch, self._terms(loaded, None, None, None), [finish] * batch)
        self._producer.wait(waiter)
        took = (time.monotonic_ns() - began) * model.max_batch / batch
        self.state.model["trial_ns"][loaded.row] = took
        return took

    def tried_ns(self, name: str) -> float:
        """The duration that `try_batch` recorded last, also of an engine that has failed; 0 if it has not run."""
        loaded = self._models.get(name)
        return 0.0 if loaded is None else float(self.state.model["trial_ns"][loaded.row])

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
        return model_profile(loaded.model, loaded.profiles, len(loaded.instances), self.limits.requests)

    def _find(self, name: str) -> LoadedModel:
        self._check_open()
        return find_model(self._models, name)

    def _row(self, row: int) -> LoadedModel | None:
        return self._by_row.get(row)


# Checks the settings of an engine, and creates the backend of its device.


def check_settings(
    quantum_us: float, max_active: int | None, memory_bytes: int | None, host_bytes: int | None, sm_partitions: int
) -> None:
    check_quantum(quantum_us)
    if max_active is not None and (not _is_number(max_active) or max_active < 1):
        raise ModelError(
            f"max_active={shortened(max_active)}: the number of batches that share the GPU must be at least 1, or None"
        )
    for name, given in (("memory_bytes", memory_bytes), ("host_bytes", host_bytes)):
        if given is not None and not _is_number(given):
            raise ModelError(f"{name}={shortened(given)}: the number of bytes must be an integer, such as 24 << 30")
    if memory_bytes is not None and memory_bytes < 1:
        raise ModelError(
            f"memory_bytes={memory_bytes}: the number of bytes must be at least 1, or None for most of the GPU's memory"
        )
    if host_bytes is not None and (memory_bytes is None or host_bytes < 0):
        raise ModelError(
            f"host_bytes={host_bytes}: the number of bytes must be at least 0, and memory_bytes must be given with it"
        )
    if not _is_number(sm_partitions) or (
        sm_partitions != 0 and not codes.LEAST_PARTITIONS <= sm_partitions <= codes.PARTITIONS
    ):
        raise ModelError(
            f"sm_partitions={shortened(sm_partitions)}: the number must be 0, for none, or {codes.LEAST_PARTITIONS} to "
            f"{codes.PARTITIONS}"
        )


def check_quantum(quantum_us: float, whose: str = "") -> None:
    if not is_finite_number(quantum_us) or quantum_us < 1:
        raise ModelError(
            f"{whose}quantum_us={shortened(quantum_us)}: the duration of a segment must be a number of at least 1 µs"
        )


def _is_number(given: Any) -> bool:
    """Whether it is a whole number that the core's tables can hold; 24e9 is one too."""
    whole = given.is_integer() if isinstance(given, float) else isinstance(given, int | np.integer)
    return bool(whole and not isinstance(given, bool) and abs(given) < codes.NEVER)


def half_of_the_host() -> int:
    return int(os.sysconf("SC_PHYS_PAGES")) * int(os.sysconf("SC_PAGE_SIZE")) // 2


def open_backend(device: Device) -> Backend:
    if isinstance(device, VirtualDevice):
        from paellapy.scheduler.backends.virtual import VirtualBackend

        return VirtualBackend(device)
    assert isinstance(device, CudaDevice)
    from paellapy.scheduler.backends.cuda import CudaBackend

    return CudaBackend(device)


# Work that an engine runs beside requests: background jobs, and leases of code that was not captured.


def _rank(what: str, priority: int) -> int:
    try:
        return checked_priority(priority)
    except ValueError as e:
        raise ModelError(f"{what}: {e}") from None


class Hosting(Loading):
    """An engine whose background jobs and leases share the GPU with requests."""

    guests: Guests

    def background(  # noqa: PLR0913  the options of an engine
        self,
        step: Callable[..., Any],
        *,
        name: str = "train",
        state: Sequence[Any],
        data: Iterable[Any] | None = None,
        priority: int = -1,
        share: float = 1.0,
        memory_bytes: int | None = None,
        quantum_us: float | None = None,
        every: int = 100,
        callback: Callable[[Job], object] | None = None,
        params: Mapping[str, float] | None = None,
        skip_ragged: bool = False,
    ) -> Job:
        """Runs a PyTorch step again and again beside requests: captured, cut and scheduled like any model.

        `state` is everything that the step changes: modules, optimizers, gradient scalers, tensors, generators. This
        call runs the first step as it is; capturing and measuring do not change the state. `step` returns nothing, or
        tensors such as a loss, which `job.outputs` holds. With `data`, each step is given the next batch, until the
        data end. A batch whose shapes or types differ from the first batch's ends the job with an error;
        `skip_ragged=True` leaves such batches out.

        `callback(job)` is called after every `every`-th step, outside the capture: for losses, checkpoints, and
        learning rates that are tensors. `share` and `params` have the same meaning as for a model; `memory_bytes` is
        the most memory that the state and a step may use. `quantum_us` is the approximate duration of a segment of the
        step, if it should differ from the engine's: work of higher priority waits for at most one segment, and each
        segment costs a launch.
        """
        if not isinstance(every, int) or every < 1:
            raise ModelError(
                f"job {name!r}: every={every!r}; the number of steps between two callbacks must be an integer of at "
                "least 1"
            )
        if callback is not None and not callable(callback):
            raise ModelError(f"job {name!r}: callback={callback!r} cannot be called: give a function of the job")
        if quantum_us is not None:
            check_quantum(quantum_us, f"job {name!r}: ")
        if memory_bytes is not None and (not isinstance(memory_bytes, int) or memory_bytes < 1):
            raise ModelError(f"job {name!r}: memory_bytes={memory_bytes!r}; give a number of bytes above 0, or None")
        rank = _rank(f"job {name!r}", priority)
        check_job(name, share, params)  # before the first step, which changes the state
        try:
            held = list(state)
        except TypeError:
            raise ModelError(
                f"job {name!r}: state is a {type(state).__name__}: give a list of everything that the step changes, "
                "for example state=[net, optimizer]"
            ) from None
        with self._loading:
            self._check_open()
            if name in self._models or name in self._jobs:
                raise ModelError(f"a model or a job named {name!r} is loaded already; stop or unload it first")
            feed = None if data is None else Feed(needs_torch(), name, data, skip_ragged)
            about = {"priority": rank, "share": share, "params": params, "quantum_us": quantum_us}
            with self.outside(f"job {name!r}"):
                made = TorchStep(name, step, held, None if feed is None else feed.first())
                return self._start_job(Job(self, self, made, feed, Reports(every, callback)), about, memory_bytes)

    def _start_job(self, job: Job, about: dict[str, Any], memory_bytes: int | None) -> Job:
        try:
            loaded = self._load(job.step.model(**about))
        except BaseException:
            job.stop()
            raise
        self._jobs[job.name] = job
        try:
            check_memory(job.step, loaded.reservation.total_bytes, memory_bytes)
        except BaseException:
            job.stop()
            job.adopt(loaded)
            self.unload_job(job)
            raise
        job.start(loaded, computes=isinstance(self.device, VirtualDevice))
        return job

    def lease(self, name: str, *, priority: int = -1, share: float = 1.0, give_back_ms: float = 10.0) -> Lease:
        """`with engine.lease("script"):` around code that was not captured: it runs when the policy grants it.

        `lease.wanted()` says when to give way. Other work waits at most `give_back_ms` for a lease that is wanted back.
        After that the lease is over, and the launches of its code run beside others.
        """
        self._check_open()
        rank = _rank(f"lease {name!r}", priority)
        with self._loading:
            if name in self._models or name in self._jobs:
                raise ModelError(f"a model or a job named {name!r} is loaded already; give the lease another name")
            if name not in self._leases and len(self._by_row) >= len(self.state.model):
                raise ModelError(
                    f"no room for leases named {name!r}: models, jobs and the names of leases take all "
                    f"{len(self.state.model)} places, and a name keeps its place: give leases an earlier name, unload "
                    "a model, or raise the engine's limits"
                )
            return Lease(self, self._leases, name, rank, share, give_back_ms)

    @property
    def backend(self) -> Backend:
        return self._backend

    def open_leases(self, loaded: LoadedModel) -> None:
        """Opens the leases of one name in the core."""
        install(self.state, loaded, self._backend.pool(self.state, loaded.model.priority))
        self._by_row[loaded.row] = loaded
        self._producer.command(codes.OPEN_MODEL, loaded.row)

    @property
    def jobs(self) -> dict[str, Job]:
        """Background jobs that are not over, by name."""
        return dict(self._jobs)

    def unload_job(self, job: Job) -> None:
        """Removes a job that is over; called from the job's own thread."""
        with self._loading:
            self._jobs.pop(job.name, None)
            if job.loaded is not None and job.loaded.row in self._by_row and self._failure is None:
                self._close_model(job.loaded)

    def job_profile(self, name: str) -> ModelProfile:
        """As `model_profile`, for the step of a background job."""
        job = self._jobs.get(name)
        if job is None or job.loaded is None:
            raise UnknownModelError(f"no job named {name!r} runs; running: {', '.join(self._jobs) or 'none'}")
        return model_profile(job.loaded.model, job.loaded.profiles, len(job.loaded.instances), self.limits.requests)

    def job_stats(self) -> dict[str, dict[str, Any]]:
        """Statistics of the work beside requests, by name: background jobs, leases, and guests."""
        own = {**self._leases.stats(), **{name: job.stats() for name, job in self.jobs.items()}}
        # A script often has the name of a job: `train`.
        guests = {f"{name}-{each['pid']}" if name in own else name: each for name, each in self.guests.stats().items()}
        return {**guests, **own}


# Facts about a running engine: its statistics, the requests that end, and traces.


class Observed(Hosting):
    """An engine that can be watched."""

    memory: MemoryPlan
    _tap: Tap | None
    _unwatch: Callable[[], None]  # stops the running trace from watching
    _since: float

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
                if not each.model.stateful and each.model.name not in self._leases
            },
            "jobs": self.job_stats(),
            "tenants": self.tenants,
        }

    def sm_totals(self) -> tuple[float, Any, Any] | None:
        """A time (ns), and per SM up to that time: warp-ns of resident warps, ns with any. None if unknown.

        A virtual GPU knows these totals. On a real GPU only instrumented kernels report them
        (`paellapy.instrument.traces.session.counts`).
        """
        return self._backend.sm_totals()

    def watch(self, watcher: Callable[[Any], None]) -> Callable[[], None]:
        """Calls `watcher(entry)` (tables.COMPLETION) for every request that ends; call the returned function to stop.

        A request of this process is seen before its answer; requests of other processes are seen soon after theirs.
        """
        if self._tap is not None:
            return self._tap.watch(watcher)
        self._producer.watchers.append(watcher)
        return lambda: self._producer.watchers.remove(watcher)

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
            self._producer.drain()
            if self._tap is not None:
                self._tap.look()
            self._unwatch()
        return recorded, self._backend.to_trace_ns

    def call_in_loop(self, function: Callable[[], None]) -> None:
        """Calls the function between two steps of the core, when it may change tables that the core reads."""
        self._backend.call(function)

    def count(self, counter: Callable[[Any], None]) -> Callable[[], None]:
        """As `watch`, for the requests of this process only, several completions at a time (tables.COMPLETION)."""
        self._producer.counters.append(counter)
        return lambda: self._producer.counters.remove(counter)


_TRACED = (
    "a trace of the virtual GPU does not record the requests of an engine, only how its models are loaded: write "
    "`with engine.trace() as t:` around the requests"
)


class Engine(Observed):
    """Runs models on one device under a policy. Thread-safe; `close()`, or leaving `with`, finishes requests first."""

    def __init__(  # noqa: PLR0913  the options of a job
        self,
        device: str | Device | None = None,
        policy: str | Policy = "paella",
        memory_bytes: int | None = None,
        quantum_us: float | None = None,
        max_active: int | None = None,
        *,
        host_bytes: int | None = None,
        sm_partitions: int = 0,
        segment_shares: bool | None = None,
        limits: Limits | None = None,
        tuning: Tuning | Mapping[str, float] | None = None,
    ) -> None:
        """Without a device: the current one, as for kernels (`with pp.Device(…):`, else the GPU if there is one).

        `memory_bytes`: GPU memory that weights and instances may use. None: most of the GPU's memory, and a model that
        does not fit is refused. With a number, more models can be loaded than fit: weights are moved to and from the
        GPU on demand. Weights that are not on the GPU are kept in host memory up to `host_bytes` (None: half of host
        memory), and in files beyond that.

        `quantum_us`: approximate duration of a segment; None: 100, or 150 with SM partitions.

        `max_active`: number of batches that may share the GPU at once. None: batches are added until their measured
        demand reaches two to three GPUs, and more are added while a queue persists.

        `sm_partitions`: number of SM partitions, 8 for instance. While many batches share the GPU, each launch is
        confined to one partition unless that would slow it much. Kernels of PyTorch's libraries can be
        confined; kernels that paellapy loads itself run on all SMs of a real GPU.

        `segment_shares`: measure, when a model is loaded, the share of the GPU's bandwidth and tensor units that each
        of its segments uses. None: measure if the policy reads these shares. A virtual GPU always knows them.

        `tuning`: the scheduler's tuning numbers by name, for experiments (`paellapy doctor --verbose` lists them);
        numbers that are not given keep the GPU's values.
        """
        policy = find_policy(policy)  # a wrong name is reported before anything is created
        self.device = Device.open(device) if isinstance(device, str) else device or Device.current()
        self.tuning = Tuning.for_device(self.device, tuning)
        quantum_us = self.tuning.segment_us(sm_partitions) if quantum_us is None else quantum_us
        check_settings(quantum_us, max_active, memory_bytes, host_bytes, sm_partitions)
        self.limits, self.max_active = limits or Limits(), max_active
        self._failure: BaseException | None = None
        self._closed = self._closing = self._elsewhere = self._loop_ended = False
        self._loading, self._begins_to_close = threading.RLock(), threading.Lock()
        self._backend = open_backend(self.device)
        if self.device.session is not None and isinstance(self.device, VirtualDevice):
            warnings.warn(_TRACED, stacklevel=2)
        self._backend.shared_slots = self.limits.producers > 1
        self.shared_state = SharedBlock(state_bytes(self.limits)) if self.limits.producers > 1 else None
        self.state = new_state(self.limits, None if self.shared_state is None else self.shared_state.array)
        self.state.tuning[:] = self.tuning.row()
        set_capacity(self.state, Capacity.of(self.device.sm_count, self.device.limits))
        install_partitions(self.state, self._backend.open_partitions(sm_partitions, self.tuning.partition_share))
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
        self._producer = RingClient(self.state, self.limits, 0, self.bell, self._open_wake_fd())
        self._tap = Tap(self.state) if self.limits.producers > 1 else None
        self._unwatch, self._leases, self._outside = self._check_open, Leases(self), list[str]()
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
        self.memory.instances_held = lambda: residents.arenas.held_bytes
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
            self._closing = self._producer.ending = True
        finally:
            self._begins_to_close.release()
        for slot in list(self._slots):
            slot.cancel()  # these slots cannot be written any more, and their instances would wait for ever
        with self._loading:
            if self._failure is None:
                self._producer.command(codes.DRAIN)
            waiter = Waiter()
            while self._producer.waiting:
                self._producer.wait(waiter, 0.05)
            self._backend.stop()
            self._loop_ended = True
            self.guests.free()
            if self._residents is not None:
                self._residents.close()
            self.bell.close()  # the mover has rung it until now
            self._producer.detach_all()
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
        self._leases.end()
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
        return f"<Engine on {self.device.name}: {what}, {len(self._models)} models, {self._producer.waiting} requests>"

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
