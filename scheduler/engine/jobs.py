"""Background jobs: a step that runs again and again beside requests, captured and cut into segments like any model.

    job = engine.background(step, name="train", state=[net, optimizer], priority=-1)
    …
    job.stop()
    job.join()

A job is a model whose requests are submitted by the job's own thread; policies treat it like any other model. It has
two instances that take turns (core: `instance.arena`), so the next step is ready when one ends. An error in the step,
its data or its callback ends only that job.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from paellapy.instrument.device import VirtualDevice
from paellapy.scheduler.backends.base import LoadedModel
from paellapy.scheduler.core.errors import EngineClosedError, MemoryPlanError, ModelError, UnknownModelError
from paellapy.scheduler.core.values import shortened
from paellapy.scheduler.engine.client import Outputs, RequestClient, Slot
from paellapy.scheduler.engine.loaded_models import LoadedModels, model_priority
from paellapy.scheduler.engine.loading import check_quantum
from paellapy.scheduler.engine.ring_client import Waiter
from paellapy.scheduler.models.tensors import TensorSpec
from paellapy.scheduler.models.torch_step import Batch, TorchStep, check_job
from paellapy.scheduler.models.torch_tensors import needs_torch

# Data of a background job: a separate thread fetches the next batch while a step runs.


_LOOK_S = 0.05  # how often a thread that waits for the other checks whether the prefetcher was stopped


class Prefetcher:
    """Batches in order, fetched ahead if the job wants that. `take` raises any error that the data raised.

    `skip_ragged`: batches whose shapes or types differ from the first batch's are left out and counted.
    """

    def __init__(self, torch: Any, name: str, data: Iterable[Any], skip_ragged: bool = False) -> None:
        self._torch, self._name, self._skip_ragged = torch, name, skip_ragged
        self.skipped = 0
        self._specs: dict[str, TensorSpec] | None = None  # of the first batch
        try:
            self._left: Iterator[Any] = iter(data)
        except TypeError:
            raise ModelError(
                f"job {name!r}: data={data!r} is no iterable of batches: give a data loader, a list or a generator",
                model=name, field="data", given=data,
            ) from None  # fmt: skip
        self._ahead: queue.Queue[Batch | BaseException | None] = queue.Queue(1)
        self._stopped, self._fetches_ahead = threading.Event(), True
        self._asked = threading.Semaphore(0)  # batches that `take` asked for and the thread has not begun to fetch
        self._thread = threading.Thread(target=self._fetch, name=f"paellapy-data-{name}", daemon=True)

    def first(self) -> Batch:
        """Fetches the first batch, in this thread."""
        found = self._next()
        if found is None:
            raise ModelError(
                f"job {self._name!r}: `data` yielded no batch; give an iterable with at least one", model=self._name,
                field="data",
            )  # fmt: skip
        self._specs = found.specs
        return found

    def start(self, ahead: bool = True) -> None:
        """Starts the thread that fetches the other batches; without `ahead`, each only when `take` asks for it.

        Call it when the job's step is loaded: loading sets PyTorch's generators back, and batches that were drawn from
        them meanwhile would be drawn a second time.
        """
        self._fetches_ahead = ahead
        self._thread.start()

    def take(self) -> Batch | None:
        """The next batch, or None at the end of the data or after `stop`."""
        self._asked.release()
        while not self._stopped.is_set():
            try:
                found = self._ahead.get(timeout=_LOOK_S)
            except queue.Empty:
                continue
            if isinstance(found, BaseException):
                raise found
            return found
        return None

    def stop(self) -> None:
        self._stopped.set()

    def _next(self) -> Batch | None:
        for given in self._left:
            batch = Batch(self._torch, self._name, given)
            if self._specs is None or not self._skip_ragged or batch.specs == self._specs:
                return batch
            self.skipped += 1
            if self._stopped.is_set():
                break
        return None

    def _fetch(self) -> None:
        found: Batch | BaseException | None = None
        while not self._stopped.is_set():
            if not self._fetches_ahead and not self._asked.acquire(timeout=_LOOK_S):
                continue
            try:
                found = self._next()
            except BaseException as e:  # `take` raises it in the job's thread
                found = e
            while not self._stopped.is_set():
                try:
                    self._ahead.put(found, timeout=_LOOK_S)
                    break
                except queue.Full:
                    continue
            if not isinstance(found, Batch):
                return


_log = logging.getLogger("paellapy.jobs")
_RATE_STEPS = 64  # the rate `steps_per_s` is computed over the latest 64 steps


@dataclass(frozen=True, slots=True)
class JobOptions:
    """The options of `Engine.background`, checked."""

    name: str
    state: Sequence[Any]
    data: Iterable[Any] | None
    priority: int
    share: float
    memory_bytes: int | None
    quantum_us: float | None
    every: int
    callback: Callable[[Job], object] | None
    params: Mapping[str, float] | None
    skip_ragged: bool

    def __post_init__(self) -> None:
        if not isinstance(self.every, int) or self.every < 1:
            raise self._wrong("every", "the number of steps between two callbacks must be an integer of at least 1")
        if self.callback is not None and not callable(self.callback):
            raise self._wrong("callback", "it cannot be called: give a function of the job")
        if self.quantum_us is not None:
            check_quantum(self.quantum_us, f"job {self.name!r}: ")
        memory = self.memory_bytes
        if memory is not None and (not isinstance(memory, int) or memory < 1):
            raise self._wrong("memory_bytes", "give a number of bytes above 0, or None")
        object.__setattr__(self, "priority", model_priority(f"job {self.name!r}", self.priority))
        check_job(self.name, self.share, self.params)  # before the first step, which changes the state
        try:
            object.__setattr__(self, "state", list(self.state))
        except TypeError:
            raise self._wrong(
                "state", "give a list of everything that the step changes, for example state=[net, optimizer]"
            ) from None

    def _wrong(self, field: str, why: str) -> ModelError:
        given = getattr(self, field)
        return ModelError(f"job {self.name!r}: {field}={shortened(given)}; {why}", model=self.name, field=field,
                          given=given)  # fmt: skip

    def is_due(self, step: int) -> bool:
        """Whether the callback is called after this step."""
        return self.callback is not None and step % self.every == 0


@dataclass(frozen=True, slots=True)
class _Begun:
    """A step that was submitted and has not finished."""

    finish: Callable[[], Outputs]
    batch: Batch | None


class Job:
    """A background job. `steps`, `steps_per_s`, `outputs` and `error` may be read at any time."""

    def __init__(self, jobs: Jobs, step: TorchStep, batches: Prefetcher | None, options: JobOptions) -> None:
        self.name = step.name
        self._jobs, self.step, self._batches, self._options = jobs, step, batches, options
        self.loaded: LoadedModel | None = None
        self._computes = False  # True where the host computes the step because there is no GPU
        self._go, self._stopping = threading.Event(), threading.Event()
        self._go.set()
        self._waiting = False  # True while the job's thread waits for the end of a pause
        self._slot: Slot | None = None  # the slot of the next step
        self._ahead = 1  # number of steps submitted at a time
        self._in_order = False  # True: the next batch is fetched after a step, as in a plain loop
        self._waiters: deque[Waiter] = deque()  # one waiter for each submitted step
        self.steps = 1  # the first step already ran when the job was created
        self.outputs: Outputs = step.first
        self.error: BaseException | None = None
        self._broken: BaseException | None = None  # why no further step can begin
        self._times: deque[float] = deque([time.monotonic()], _RATE_STEPS + 1)
        self._since = time.monotonic()
        self._running_s = 0.0  # time from the start to the latest step, without pauses
        self._thread = threading.Thread(target=self._run, name=f"paellapy-job-{self.name}", daemon=True)

    def start(self, computes: bool) -> None:
        """Begins with the second step; its model is loaded."""
        self._computes = computes
        draws = self.step.draws
        # The host computes the step and fetches the data: both may draw from one generator, in the plain loop's order.
        self._in_order = computes and self.step.drew
        # Keep one step queued behind the running one, so that the GPU need not wait for this thread. A step that draws
        # random numbers cannot be queued: the host must write the generator state before each step.
        drawing = self._in_order or (draws is not None and any(draws.drawn))
        self._ahead = 1 if drawing else 2
        if self._batches is not None:
            self._batches.start(ahead=not self._in_order)
        self._thread.start()

    # -- for its owner

    def pause(self) -> None:
        """Lets the running step, and the step queued behind it, finish; starts no further step."""
        self._go.clear()
        if self._stopping.is_set():  # by another thread, which has let the job go on in order to end
            self._go.set()

    def resume(self) -> None:
        self._times.clear()
        self._go.set()

    def stop(self) -> None:
        """Ends the job after the running step and the step queued behind it. `join` waits for the end."""
        self._stopping.set()
        if self._batches is not None:
            self._batches.stop()
        self._go.set()

    def join(self, timeout_s: float | None = None) -> bool:
        """Waits until the job is over: stopped, out of data, or failed. Returns False if `timeout_s` passes first."""
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout_s)
        return not self._thread.is_alive()

    @property
    def state(self) -> str:
        """The job's state: "running", "paused", "failed" or "ended"."""
        if self.error is not None:
            return "failed"
        if not self._thread.is_alive():
            return "ended"
        return "paused" if self._waiting else "running"

    @property
    def steps_per_s(self) -> float:
        """Steps per second over the latest steps; 0 during a pause. For a job that is over: over its life, less
        pauses.
        """
        if self.state in ("ended", "failed"):
            return (self.steps - 1) / self._running_s if self._running_s > 0 else 0.0
        times = list(self._times)
        if len(times) < 2 or self.state != "running":
            return 0.0
        return (len(times) - 1) / max(time.monotonic() - times[0], 1e-9)

    @property
    def skipped(self) -> int:
        """Batches left out because their shapes or types differ from the first batch's."""
        return 0 if self._batches is None else self._batches.skipped

    def stats(self) -> dict[str, Any]:
        model = None if self.loaded is None else self.loaded.model
        return {
            "kind": "background",
            "state": self.state,
            "steps": self.steps,
            "skipped": self.skipped,
            "steps_per_s": self.steps_per_s,
            "priority": 0 if model is None else model.priority,
            "share": 1.0 if model is None else model.share,
            "error": None if self.error is None else f"{type(self.error).__name__}: {self.error}",
        }

    def __repr__(self) -> str:
        return f"<Job {self.name!r}: {self.state}, {self.steps} steps, {self.steps_per_s:.1f}/s>"

    # -- its thread

    def _run(self) -> None:
        try:
            self._report()
            self._train()
        except EngineClosedError as e:
            if not self._stopping.is_set():
                self.error = e
        except BaseException as e:  # the error concerns this job alone; its owner reads it from `error`
            self.error = e
            _log.warning("job %r failed after %d steps: %s: %s", self.name, self.steps, type(e).__name__, e)
        finally:
            if self._batches is not None:
                self._batches.stop()
            self._jobs.unload(self)

    def _train(self) -> None:
        begun: deque[_Begun] = deque()
        self._waiters.extend(Waiter() for _ in range(self._ahead))
        self._since = time.monotonic()
        try:
            batch = self._prepare()
            while begun or (self._slot is not None and not self._stopping.is_set()):
                if self._may_begin(len(begun)):
                    batch = self._begin(begun, batch)
                elif begun:
                    self._end(begun.popleft())
                    if self._in_order:
                        batch = self._prepare()
                else:
                    self._rest(batch)
            if self._broken is not None:
                raise self._broken
        finally:
            if self._slot is not None:
                self._slot.cancel()
            for each in begun:  # after an error in a step: wait, because the GPU may still use this memory
                with contextlib.suppress(Exception):
                    each.finish()

    def _may_begin(self, begun: int) -> bool:
        """Whether another step may be queued behind the submitted ones. None may while a callback is due: the callback
        must see the state as its step left it.
        """
        if self._slot is None or self._stopping.is_set() or not self._go.is_set() or begun >= self._ahead:
            return False
        return begun == 0 or not self._options.is_due(self.steps + begun)

    def _begin(self, begun: deque[_Begun], batch: Batch | None) -> Batch | None:
        """Submits the step whose data are in the slot; returns the batch of the next step, whose slot is reserved too,
        unless steps and data take turns.
        """
        if self.step.draws is not None:
            self.step.draws.next_step()
        slot, self._slot = self._slot, None
        assert slot is not None
        self._waiters.rotate()
        self._waiters[0].clear()
        begun.append(_Begun(slot.begin(self._waiters[0]), batch))
        return None if self._in_order else self._prepare()

    def _prepare(self) -> Batch | None:
        """Fetches the next batch and writes it to a slot. An error is kept until the steps that were begun have ended:
        they are good, and count.
        """
        try:
            batch = self._fetch()
            self._slot = self._reserve(batch)
        except Exception as e:
            self._broken = e
            return None
        return batch

    def _end(self, begun: _Begun) -> None:
        found = begun.finish()
        if self._computes:
            found = self.step.compute_arrays(begun.batch)
        self._done(found)

    def _rest(self, batch: Batch | None) -> None:
        """Waits until the pause is over."""
        assert self._slot is not None
        self._slot.cancel()
        self._waiting, began = True, time.monotonic()
        self._go.wait()
        self._waiting = False
        self._since += time.monotonic() - began
        self._slot = self._reserve(batch)

    def _fetch(self) -> Batch | None:
        return None if self._batches is None else self._batches.take()

    def _reserve(self, batch: Batch | None) -> Slot | None:
        """Reserves a slot for the next step and writes its data; None when there are no more data."""
        if self._batches is not None and batch is None:
            return None
        assert self.loaded is not None
        # Steps must run in order. A step that took a slot in an open instance could overtake the step submitted before
        # it.
        slot = self._jobs.client.reserve(self.loaded, in_turn=True)
        if batch is not None:
            try:
                batch.write(self.name, slot.inputs)
            except BaseException:
                slot.cancel()
                raise
        return slot

    def _done(self, outputs: Outputs) -> None:
        self.steps += 1
        self.outputs = {key: outputs[key].reshape(value.shape) for key, value in self.outputs.items()}
        now = time.monotonic()
        self._times.append(now)
        self._running_s = now - self._since
        self._report()

    def _report(self) -> None:
        if self._options.callback is None or not self._options.is_due(self.steps):
            return
        with self._jobs.core.outside(f"job {self.name!r}"):
            self._options.callback(self)
            if self.step.draws is not None:
                # work launched by the callback must finish before the next step
                self.step.torch.cuda.current_stream().synchronize()
        self.step.check_settings()


class Jobs:
    """The background jobs of one engine that are not over."""

    def __init__(self, client: RequestClient, models: LoadedModels) -> None:
        self.client, self.core, self._models = client, models.core, models
        self.by_name: dict[str, Job] = {}

    def start(self, step: Callable[..., Any], options: JobOptions) -> Job:
        name = options.name
        with self._models.lock:
            self.core.check_open()
            self._models.check_name(name, "stop or unload it first")
            batches = None
            if options.data is not None:
                batches = Prefetcher(needs_torch(), name, options.data, options.skip_ragged)
            with self.core.outside(f"job {name!r}"):
                first = None if batches is None else batches.first()
                job = Job(self, TorchStep(name, step, options.state, first), batches, options)
                self._load(job, options)
                return job

    def _load(self, job: Job, options: JobOptions) -> None:
        about = {key: getattr(options, key) for key in ("priority", "share", "params", "quantum_us")}
        try:
            job.loaded = self._models.load(job.step.model(**about))
            _check_memory(job.step, job.loaded.reservation.total_bytes, options.memory_bytes)
            self.by_name[job.name] = job
            job.start(computes=isinstance(self.core.backend.device, VirtualDevice))
        except BaseException:
            job.stop()
            self.unload(job)
            raise

    def unload(self, job: Job) -> None:
        """Removes a job that is over; called from the job's own thread."""
        with self._models.lock:
            self.by_name.pop(job.name, None)
            if job.loaded is not None:
                self._models.close(job.loaded)

    def find(self, name: str) -> LoadedModel:
        job = self.by_name.get(name)
        if job is None or job.loaded is None:
            running = ", ".join(self.by_name) or "none"
            raise UnknownModelError(f"no job named {name!r} runs; running: {running}", model=name)
        return job.loaded

    def stats(self) -> dict[str, dict[str, Any]]:
        return {name: job.stats() for name, job in self.by_name.copy().items()}

    def end(self) -> None:
        """Stops all jobs, and waits until they are over."""
        jobs = list(self.by_name.values())
        for job in jobs:
            job.stop()
        for job in jobs:
            job.join()


def _check_memory(step: TorchStep, instance_bytes: int, memory_bytes: int | None) -> None:
    """Raises `MemoryPlanError` if the job's state and one step together need more than `memory_bytes`."""
    total = step.state_bytes + instance_bytes
    if memory_bytes is not None and total > memory_bytes:
        raise MemoryPlanError(
            f"job {step.name!r} needs {total:,} bytes ({step.state_bytes:,} state, {instance_bytes:,} for a step)"
            f"; memory_bytes={memory_bytes:,} is too small: raise it or use smaller batches", model=step.name,
            field="memory_bytes", given=memory_bytes, limit=total,
        )  # fmt: skip
