"""`Engine`: loads models onto one GPU, takes requests, returns results.

with pp.Engine("virtual:h200", policy="paella") as engine:
    engine.load(model)
    y = engine.infer_sync("double", {"x": x})["y"]
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import threading
import time
import warnings
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from html import escape
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from paellapy.instrument.device import CudaDevice, Device, VirtualDevice
from paellapy.instrument.errors import PaellaError
from paellapy.scheduler.backends.base import Backend, LoadedModel
from paellapy.scheduler.core import codes
from paellapy.scheduler.core.errors import ModelError
from paellapy.scheduler.core.job import READS_SHARES
from paellapy.scheduler.core.processes import SharedBlock
from paellapy.scheduler.core.profiles import Capacity, ModelProfile, set_capacity
from paellapy.scheduler.core.state import Limits, new_state, state_bytes
from paellapy.scheduler.core.tenants import checked_tenants, set_tenant, tenants_stats
from paellapy.scheduler.core.throttle import attach_held_back
from paellapy.scheduler.core.tuning import Tuning
from paellapy.scheduler.core.values import shortened
from paellapy.scheduler.engine.client import Inputs, Outputs, RequestClient, Slot, pieces_of
from paellapy.scheduler.engine.core_loop import CoreLoop
from paellapy.scheduler.engine.guests import Guests
from paellapy.scheduler.engine.jobs import Job, JobOptions, Jobs
from paellapy.scheduler.engine.lease import Lease, Leases
from paellapy.scheduler.engine.loaded_models import LoadedModels
from paellapy.scheduler.engine.loading import Loader, check_quantum, install_partitions
from paellapy.scheduler.engine.pipelines import LoadedPipeline, Pipeline
from paellapy.scheduler.engine.stats import CompletionLog, GpuUse, core_stats, loaded_stats, occupancy
from paellapy.scheduler.engine.steps import StepPools
from paellapy.scheduler.engine.trace import TracedText, trace_engine
from paellapy.scheduler.engine.weight_cache import WeightCache
from paellapy.scheduler.models.memory import MemoryPlan
from paellapy.scheduler.models.model import Model
from paellapy.scheduler.models.profile import model_profile
from paellapy.scheduler.policies.policy import Policy, attach_policy, find_policy

if TYPE_CHECKING:  # they need packages that only language models need
    from paellapy.scheduler.engine.generation import Generation, Generators
    from paellapy.scheduler.language.model import LanguageModel

_TRACED = (
    "a trace of the virtual GPU does not record the requests of an engine, only how its models are loaded: write "
    "`with engine.trace() as t:` around the requests"
)


class Engine:
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
        _check_settings(quantum_us, max_active, memory_bytes, host_bytes, sm_partitions)
        self.limits, self.max_active = limits or Limits(), max_active
        self._since, self._begins_to_close = time.monotonic(), threading.Lock()
        if self.device.session is not None and isinstance(self.device, VirtualDevice):
            warnings.warn(_TRACED, stacklevel=2)

        shared = self.limits.producers > 1
        self.backend = _open_backend(self.device)
        self.backend.shared_slots = shared
        self.shared_state = SharedBlock(state_bytes(self.limits)) if shared else None
        self.state = new_state(self.limits, None if self.shared_state is None else self.shared_state.array)
        self.state.tuning[:] = self.tuning.row()
        set_capacity(self.state, Capacity.of(self.device.sm_count, self.device.limits))
        install_partitions(self.state, self.backend.open_partitions(sm_partitions, self.tuning.partition_share))
        self.state.core["hold"][0] = 1

        self.core = CoreLoop(self.backend, self.state, self.limits)
        self.steps = StepPools()
        self.client = RequestClient(self.core, self.steps)
        self.memory = MemoryPlan(memory_bytes or self.backend.default_memory_bytes())
        self.weight_cache = None if memory_bytes is None else self._manage_memory(memory_bytes, host_bytes)
        self.loader = Loader(self.backend, self.memory, self.limits, self.tuning, quantum_us * 1e3, self.weight_cache)
        self._segment_shares = segment_shares
        self._attach(policy)
        instances = min(max_active or self.tuning.default_active, self.limits.instances_per_model)
        self.loaded_models = LoadedModels(self.core, self.loader, instances)
        self._jobs = Jobs(self.client, self.loaded_models)
        self._generators: Generators | None = None  # made with the first language model
        self._leases = Leases(self.client, self.loaded_models, self.memory)
        self._completions = CompletionLog(self.core, shared)
        self.core.start()
        self.guests = Guests(self.core)

    def _manage_memory(self, memory_bytes: int, host_bytes: int | None) -> WeightCache:
        """Creates the cache that moves weights to and from the GPU within the budget."""
        cache = WeightCache(self.core, memory_bytes, _half_of_the_host() if host_bytes is None else host_bytes)
        self.memory.weights_on_gpu = lambda: int(self.state.residency["held_bytes"][0]) + cache.budget.claimed_bytes
        self.memory.instances_held = lambda: cache.arenas.held_bytes
        self.memory.account = cache.account
        return cache

    # -- requests

    async def infer(
        self,
        name: str,
        inputs: Inputs,
        deadline_ms: float | None = None,
        priority: int | None = None,
        client: Hashable = None,
    ) -> Outputs:
        """Runs one request: arrays by name, without the batch dimension. Cancelling the task withdraws it.

        `deadline_ms` counts from now; a request that is late ends with `DeadlineError`. `priority`: larger goes first,
        under policies that read it. `client`: the name of the client, for policies that are fair between clients.
        """
        return await self.client.infer(name, inputs, deadline_ms, priority, client)

    def infer_sync(
        self,
        name: str,
        inputs: Inputs,
        deadline_ms: float | None = None,
        priority: int | None = None,
        client: Hashable = None,
    ) -> Outputs:
        """As `infer`; blocks this thread until the answer is there."""
        return self.client.infer_sync(name, inputs, deadline_ms, priority, client)

    def reserve(
        self,
        name: str,
        deadline_ms: float | None = None,
        priority: int | None = None,
        client: Hashable = None,
    ) -> Slot:
        """Reserves memory for one request's inputs, to be written in place: without a copy if an instance is open.

        Write and submit without delay: the batch that the slot belongs to waits for it.
        """
        return self.client.reserve(self.client.find(name), deadline_ms, priority, client)

    def generate(
        self,
        name: str,
        prompt: str | Sequence[int],
        *,
        deadline_ms: float | None = None,
        priority: int | None = None,
        client: Hashable = None,
        **sampling: Any,
    ) -> Generation:
        """A language model goes on with a text, or with the ids of tokens: iterate over the pieces of its answer.

        `deadline_ms`: the answer must begin within this time; if it cannot, a DeadlineError says so as soon as it is
        known. `priority` and `client` are as for `infer`. `sampling`: temperature, top_p, max_tokens, stop, seed and
        the other fields of `Sampling`; what is not given is as the model's folder says.
        """
        return self._language().find(name).generate(prompt, deadline_ms, priority, client, sampling)

    def _language(self) -> Generators:
        if self._generators is None:
            from paellapy.scheduler.engine.generation import Generators

            self._generators = Generators(self.client, self.loaded_models, self.memory)
        return self._generators

    # -- models

    def load(self, model: Model | LanguageModel | Pipeline) -> None:
        """Compiles, captures, measures and opens a model. Loaded models keep running meanwhile."""
        if isinstance(model, Pipeline):
            self._load_pipeline(model)
            return
        if not isinstance(model, Model):
            self._language().add(model)
            return
        if self._generators is not None:
            self._generators.check_name(model.name)
        opened = self.steps.open(model)
        try:
            self.loaded_models.add(model)
        except BaseException:
            if opened:
                self.steps.close(model)
            raise
        self._join_pipelines(model.name)

    def _load_pipeline(self, pipeline: Pipeline) -> None:
        with self.loaded_models.lock:
            if pipeline.name in self.client.pipelines:
                raise ModelError(f"a pipeline named {pipeline.name!r} is loaded already; unload it first", field="name",
                                 given=pipeline.name)  # fmt: skip
            self.loaded_models.check_name(pipeline.name, "unload it first", leases_too=True)
            loaded = LoadedPipeline(pipeline)
            try:
                for each in pipeline.models:
                    if self.models.get(each.name) is not each:
                        self.load(each)
                        loaded.own.append(each)
                self.steps.open(pipeline)
            except BaseException:
                for each in loaded.own:
                    self.unload(each.name)
                raise
            alone = {each.name: float(self.profile(each.name)[0].whole_ns) for each in pipeline.models}
            loaded.alone_ns = [alone.get(stage.name, 0.0) for stage in pipeline.stages]
            loaded.join(self.loaded_models)
            self.client.pipelines[pipeline.name] = loaded

    def _join_pipelines(self, name: str, leaves: bool = False) -> None:
        """A model was loaded, or is about to leave: pipelines that run it together with others change."""
        with self.loaded_models.lock:
            for each in list(self.client.pipelines.values()):
                if name in (stage.name for stage in each.model.stages):
                    each.part(self.loaded_models)
                    if not leaves and self.models.keys() >= {every.name for every in each.model.models}:
                        each.join(self.loaded_models)

    @property
    def pipelines(self) -> dict[str, Pipeline]:
        """The pipelines that are loaded, by name."""
        return {name: each.model for name, each in self.client.pipelines.items()}

    def unload(self, name: str) -> None:
        """Finishes the model's requests, refuses new ones, and frees its memory. Other models keep running.

        A pipeline goes with the models that were loaded with it; its requests in flight that need them fail.
        """
        if (pipeline := self.client.pipelines.pop(name, None)) is not None:
            self.steps.close(pipeline.model)
            pipeline.part(self.loaded_models)
            for each in pipeline.own:
                self.unload(each.name)
            return
        if name in self.language_models:
            self._language().remove(name)
            return
        with self.loaded_models.lock:
            loaded = self.client.find(name)
            self._join_pipelines(name, leaves=True)
            self.loaded_models.remove(loaded)
        self.steps.close(loaded.model)

    @property
    def models(self) -> dict[str, Model]:
        """The models that are loaded, by name."""
        return {name: loaded.model for name, loaded in self.core.models.by_name.items()}

    @property
    def language_models(self) -> dict[str, LanguageModel]:
        """The language models that are loaded, by name."""
        return {} if self._generators is None else self._generators.models

    def loaded_rows(self) -> dict[int, LoadedModel]:
        """Loaded models, jobs and leases by their row in the core."""
        return dict(self.core.models.by_row)

    def profile(self, name: str) -> list[Any]:
        """The model's segments and their measured times: one `ProgramProfile` per captured batch size.

        The programs of a language model are "NAME prefill" and "NAME decode".
        """
        return list(self._profiled(name).profiles)

    def model_profile(self, name: str, length: int | None = None) -> ModelProfile:
        """The facts about a model that simulations need: `pp.simulate([engine.model_profile("mlp")], …)`.

        `length`: a captured size of a model whose inputs vary in length; None: the largest.
        """
        found = self._profiled(name)
        if length is not None:
            if length not in found.by_length:
                raise ModelError(
                    f"model {name!r} is not captured at length {length}; it is at {list(found.by_length) or 'none'}",
                    model=name, field="length", given=length, limit=list(found.by_length),
                )  # fmt: skip
            found = found.by_length[length]
        return self._profile(found)

    def _profiled(self, name: str) -> LoadedModel:
        of_texts = (each for each in self.loaded_rows().values() if each.kind == "language model")
        return next((each for each in of_texts if each.model.name == name), None) or self.client.find(name)

    def job_profile(self, name: str) -> ModelProfile:
        """As `model_profile`, for the step of a background job."""
        return self._profile(self._jobs.find(name))

    def _profile(self, loaded: LoadedModel) -> ModelProfile:
        return model_profile(loaded.model, loaded.profiles, len(loaded.instances), self.limits.requests)

    def try_batch(self, name: str, known_ns: float = 0.0) -> float:
        """Runs a full batch of requests and records its duration (ns), which admission uses as its first estimate.

        `known_ns` is the duration that an earlier engine found: then no batch runs.
        """
        loaded = self.client.find(name)
        if known_ns:
            self.state.model["trial_ns"][loaded.row] = known_ns
            return known_ns
        model: Model = loaded.model
        batch = min(model.max_batch, codes.OWN_ROWS // 2)
        pieces = pieces_of(np.full(spec.shape, spec.neutral, spec.dtype) for spec in model.inputs.values())
        began = time.monotonic_ns()
        self.client.run_all(loaded, [pieces] * batch)
        took = (time.monotonic_ns() - began) * model.max_batch / batch
        self.state.model["trial_ns"][loaded.row] = took
        return took

    def tried_ns(self, name: str) -> float:
        """The duration that `try_batch` recorded last, also of an engine that has failed; 0 if it has not run."""
        loaded = self.core.models.by_name.get(name)
        return 0.0 if loaded is None else float(self.state.model["trial_ns"][loaded.row])

    # -- weights

    def prefetch(self, name: str) -> None:
        """Brings a model's weights to the GPU although no request needs them yet; returns when they are there."""
        self._move_weights(name, wanted=True)

    def evict(self, name: str) -> None:
        """Takes a model's weights off the GPU once none of its requests runs. The next request brings them back."""
        self._move_weights(name, wanted=False)

    def _move_weights(self, name: str, wanted: bool) -> None:
        loaded = self._holder_of(name)
        if self.weight_cache is None:
            raise ModelError(
                f"model {name!r}: this engine keeps all weights on the GPU; create it with memory_bytes to move them",
                model=name, field="memory_bytes", given=None,
            )  # fmt: skip
        self.weight_cache.move(loaded, wanted)

    def weights_state(self, name: str) -> str:
        """Where a model's weights are: `resident`, `loading 43 %`, `leaving`, `host` or `disk`."""
        row = self._holder_of(name).row
        return "resident" if self.weight_cache is None else self.weight_cache.state_of(row)

    def _holder_of(self, name: str) -> LoadedModel:
        """The model of the core that holds these weights."""
        if self._generators is not None and name in self._generators.by_name:
            return self._generators.by_name[name].decode
        return self.loaded_models.find(name)

    # -- policy and tenants, which are changed between two steps of the core

    @property
    def policy(self) -> str:
        """The name of the current policy."""
        return self.core.policy.name

    @property
    def current_policy(self) -> Policy:
        return self.core.policy

    def set_policy(self, policy: str | Policy) -> None:
        """Changes the policy. Work on the GPU keeps running; waiting jobs are ranked anew.

        A policy that this machine has not used before is compiled first. On a real GPU, requests run meanwhile. A
        virtual GPU pauses for some tenths of a second instead: its loop and the compiler would compete for the
        interpreter lock, and compilation would take several times as long.
        """
        self.core.check_open()
        if not self.backend.computes_in_python:
            policy = find_policy(policy)
            if policy.admits_by_client:
                attach_held_back(self.state)
        self.core.run(lambda: self._attach(policy))

    def _attach(self, policy: str | Policy) -> None:
        found = find_policy(policy)
        attach_policy(self.state, found)
        if found.active is None:
            most = len(self.state.instance)
            self.state.core["max_active"][0] = most if self.max_active is None else min(self.max_active, most)
            self.state.core["demand_limit"][0] = self.tuning.demand_limit if self.max_active is None else math.inf
        reads = bool(found.facts & READS_SHARES)
        self.loader.measure_shares = reads if self._segment_shares is None else self._segment_shares
        self.core.policy = found

    def tenant(self, name: str, share: float = 1.0, limit: float | None = None) -> None:
        """Gives the client of this name a share of the GPU relative to other tenants, which fair policies read, and a
        `limit`: the largest fraction of the GPU's time it may use. A later call changes both.
        """
        self.core.check_open()
        (tenant,) = checked_tenants({name: {"share": share, "limit": limit}}).values()
        number = self.core.ring.client_number(name)
        if not self.core.ring.is_client(number, name):
            numbers = len(self.state.client) - 1
            raise ModelError(
                f"no room for tenant {name!r}: all {numbers} client numbers are in use; give the engine larger limits",
                field="name", given=name, limit=numbers,
            )  # fmt: skip
        if limit is not None:
            attach_held_back(self.state)  # compiled before the loop waits for it
        self.core.run(lambda: set_tenant(self.state, number, name, tenant))

    @property
    def tenants(self) -> dict[str, dict[str, Any]]:
        """Tenants by name: share, limit, and the GPU time each has used."""
        return tenants_stats(self.state)

    # -- work beside requests: background jobs, and leases of code that was not captured

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
        options = JobOptions(
            name, state, data, priority, share, memory_bytes, quantum_us, every, callback, params, skip_ragged
        )
        return self._jobs.start(step, options)

    @property
    def jobs(self) -> dict[str, Job]:
        """Background jobs that are not over, by name."""
        return dict(self._jobs.by_name)

    def lease(self, name: str, *, priority: int = -1, share: float = 1.0, give_back_ms: float = 10.0) -> Lease:
        """`with engine.lease("script"):` around code that was not captured: it runs when the policy grants it.

        `lease.wanted()` says when to give way. Other work waits at most `give_back_ms` for a lease that is wanted back.
        After that the lease is over, and the launches of its code run beside others.
        """
        return self._leases.make(name, priority, share, give_back_ms)

    def text_stats(self) -> dict[str, dict[str, Any]]:
        """Counts and latencies of language models, by name."""
        return {} if self._generators is None else self._generators.stats()

    def job_stats(self) -> dict[str, dict[str, Any]]:
        """Statistics of the work beside requests, by name: background jobs, leases, and guests."""
        own = {**self._leases.stats(), **self._jobs.stats()}
        # A script often has the name of a job: `train`.
        guests = {f"{name}-{each['pid']}" if name in own else name: each for name, each in self.guests.stats().items()}
        return {**guests, **own}

    # -- facts about the running engine

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
                if each.kind == "model"
            },
            "language_models": self.text_stats(),
            "jobs": self.job_stats(),
            "tenants": self.tenants,
        }

    @property
    def uptime_s(self) -> float:
        """Seconds since the engine was created."""
        return time.monotonic() - self._since

    def occupancy(self) -> GpuUse:
        """The GPU's occupancy by the engine's launches: each resource, and where the jobs are."""
        return occupancy(self.state)

    def sm_totals(self) -> tuple[float, Any, Any] | None:
        """A time (ns), and per SM up to that time: warp-ns of resident warps, ns with any. None if unknown.

        A virtual GPU knows these totals. On a real GPU only instrumented kernels report them
        (`paellapy.instrument.traces.session.counts`).
        """
        return self.backend.sm_totals()

    def watch(self, watcher: Callable[[Any], None]) -> Callable[[], None]:
        """Calls `watcher(entry)` (tables.COMPLETION) for every request that ends; call the returned function to stop.

        A request of this process is seen before its answer; requests of other processes are seen soon after theirs.
        """
        return self._completions.watch(watcher)

    def count(self, counter: Callable[[Any], None]) -> Callable[[], None]:
        """As `watch`, for the requests of this process only, several completions at a time (tables.COMPLETION)."""
        return self.core.ring.count(counter)

    def trace(self, records_per_sm: int = 1 << 14) -> trace_engine:
        """Context manager: records all requests, segments and blocks that run inside it, on one clock."""
        self.core.check_open()
        return trace_engine(self.core, self.loaded_models.lock, self._completions, records_per_sm, self._texts_since)

    def _texts_since(self, ns: int) -> Sequence[TracedText]:
        """The texts and the requests of pipelines that went on since then."""
        found = [] if self._generators is None else self._generators.texts_since(ns)
        for name, each in list(self.client.pipelines.items()):
            found += [TracedText(name, began, ends, rank) for began, ends, rank in list(each.ended) if ends[-1] >= ns]
        return found

    @property
    def failure(self) -> BaseException | None:
        """The reason why the engine takes no more requests; None while it does."""
        return self.core.failure

    @property
    def failure_text(self) -> str:
        """The failure, and the models, jobs and leases whose work was on the GPU: one of them caused it."""
        return self.core.failure_text

    @property
    def closed(self) -> bool:
        """Whether the engine takes no more requests because it is closed or being closed."""
        return self.core.closing

    def on_fault(self, told: Callable[[str, BaseException], None]) -> None:
        """Calls `told(model, error)` when a model fails on the values of one request, in the loop's thread."""
        self.core.on_fault = told

    # -- the end

    def close(self) -> None:
        """Refuses new requests, finishes the accepted ones, and frees everything."""
        # Only the first call closes. Another one does not wait for it: a signal's handler may have interrupted it, or a
        # job's callback may have made the call, and the first waits for the job.
        core = self.core
        if core.closing or not self._begins_to_close.acquire(blocking=False):
            return
        try:
            self._jobs.end()
            if self._generators is not None:
                self._generators.end()
            self._leases.end()
            self.guests.end()
            self.loaded_models.end_captures()
            core.closing = core.ring.ending = True
        finally:
            self._begins_to_close.release()
        self.client.cancel_slots()
        self.client.pipelines.clear()
        self.steps.close_all()
        with self.loaded_models.lock:
            core.stop()
            self.guests.free()
            if self.weight_cache is not None:
                self.weight_cache.close()
            core.close_ring()  # the weights' mover has rung its bell until now
            # A lost GPU cannot free anything: our calls fail, and PyTorch's raise a RuntimeError.
            unfreed = (PaellaError, RuntimeError) if self.failure else ()
            for loaded in self.loaded_rows().values():
                with contextlib.suppress(*unfreed):
                    self.loaded_models.free(loaded)
            core.models.by_name.clear()
            if self.weight_cache is not None:
                with contextlib.suppress(*unfreed):
                    self.weight_cache.close_store()
            with contextlib.suppress(*unfreed):
                self.backend.close()
            core.over = True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.to_thread(self.close)

    def __repr__(self) -> str:
        what = "failed" if self.failure else "closed" if self.core.over else self.policy
        return f"<Engine on {self.device.name}: {what}, {len(self.models)} models, {self.core.ring.waiting} requests>"

    def _repr_html_(self) -> str:
        """HTML for notebooks, with one row per model."""
        rows = "".join(
            f"<tr><td>{escape(name)}</td><td>{', '.join(map(str, model.batch))}</td>"
            f"<td>{'–' if model.target_ms is None else f'{model.target_ms:g}'}</td></tr>"
            for name, model in self.models.items()
        )
        head = "<tr><th>model</th><th>batch sizes</th><th>target, ms</th></tr>"
        return f"<table><caption>{escape(repr(self))}</caption>{head}{rows}</table>"


# Checks the settings of an engine, and creates the backend of its device.


def _check_settings(
    quantum_us: float, max_active: int | None, memory_bytes: int | None, host_bytes: int | None, sm_partitions: int
) -> None:
    check_quantum(quantum_us)
    if max_active is not None and (not _is_number(max_active) or max_active < 1):
        why = "the number of batches that share the GPU must be at least 1, or None"
        raise _wrong_setting("max_active", max_active, why)
    for name, given in (("memory_bytes", memory_bytes), ("host_bytes", host_bytes)):
        if given is not None and not _is_number(given):
            raise _wrong_setting(name, given, "the number of bytes must be an integer, such as 24 << 30")
    if memory_bytes is not None and memory_bytes < 1:
        why = "the number of bytes must be at least 1, or None for most of the GPU's memory"
        raise _wrong_setting("memory_bytes", memory_bytes, why)
    if host_bytes is not None and (memory_bytes is None or host_bytes < 0):
        why = "the number of bytes must be at least 0, and memory_bytes must be given with it"
        raise _wrong_setting("host_bytes", host_bytes, why)
    least, most = codes.LEAST_PARTITIONS, codes.PARTITIONS
    if not _is_number(sm_partitions) or (sm_partitions != 0 and not least <= sm_partitions <= most):
        raise _wrong_setting("sm_partitions", sm_partitions, f"the number must be 0, for none, or {least} to {most}")


def _wrong_setting(field: str, given: Any, why: str) -> ModelError:
    return ModelError(f"{field}={shortened(given)}: {why}", field=field, given=given)


def _is_number(given: Any) -> bool:
    """Whether it is a whole number that the core's tables can hold; 24e9 is one too."""
    whole = given.is_integer() if isinstance(given, float) else isinstance(given, int | np.integer)
    return bool(whole and not isinstance(given, bool) and abs(given) < codes.NEVER)


def _half_of_the_host() -> int:
    return int(os.sysconf("SC_PHYS_PAGES")) * int(os.sysconf("SC_PAGE_SIZE")) // 2


def _open_backend(device: Device) -> Backend:
    if isinstance(device, VirtualDevice):
        from paellapy.scheduler.backends.virtual import VirtualBackend

        return VirtualBackend(device)
    assert isinstance(device, CudaDevice)
    from paellapy.scheduler.backends.cuda import CudaBackend

    return CudaBackend(device)
