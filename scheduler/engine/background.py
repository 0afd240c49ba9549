"""Background jobs: a step run again and again beside requests, captured and cut like any model.

    job = engine.background(step, name="train", state=[net, optimizer], priority=-1)
    …
    job.stop()
    job.join()

A job is a model with one request at a time, which the job's own thread hands in when the last one is done: policies see
it as any other. An error in the step, its data or its callback ends the job, and nothing else.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from paellapy.scheduler.backends.launches import LoadedModel
from paellapy.scheduler.core.errors import EngineClosedError, MemoryPlanError
from paellapy.scheduler.engine.feed import Feed
from paellapy.scheduler.engine.requests import Outputs, Requester, Slot
from paellapy.scheduler.models.torch_step import Batch, TorchStep

_RATE_STEPS = 64  # over which steps a second are counted


class Host(Protocol):
    """The engine, as a job knows it."""

    def unload_job(self, job: Job) -> None: ...


@dataclass(frozen=True, slots=True)
class Reports:
    """When a job's callback is called, and what else it is held to."""

    every: int = 100
    callback: Callable[[Job], object] | None = None


class Job:
    """A background job. `steps`, `steps_per_s`, `outputs` and `error` may be read at any time."""

    def __init__(self, engine: Requester, host: Host, step: TorchStep, feed: Feed | None, reports: Reports) -> None:
        self.name = step.name
        self._engine, self._host, self.step, self.feed, self._reports = engine, host, step, feed, reports
        self._loaded: LoadedModel | None = None
        self._computes = False  # the host does, where there is no GPU
        self._go, self._stopping = threading.Event(), threading.Event()
        self._go.set()
        self._waiting = False  # its thread, for the end of a pause
        self._slot: Slot | None = None  # of the next step
        self.steps = 1  # the first was made when the job was
        self.outputs: Outputs = step.first
        self.error: BaseException | None = None
        self._times: deque[float] = deque([time.monotonic()], _RATE_STEPS + 1)
        self._thread = threading.Thread(target=self._run, name=f"paellapy-job-{self.name}", daemon=True)

    def adopt(self, loaded: LoadedModel) -> None:
        self._loaded = loaded

    def start(self, loaded: LoadedModel, computes: bool) -> None:
        self._loaded, self._computes = loaded, computes
        self._thread.start()

    # -- for its owner

    def pause(self) -> None:
        """No further step begins; the one that runs ends."""
        self._go.clear()

    def resume(self) -> None:
        self._times.clear()
        self._go.set()

    def stop(self) -> None:
        """Ends the job after the step that runs. `join` waits for it."""
        self._stopping.set()
        if self.feed is not None:
            self.feed.stop()
        self._go.set()

    def join(self, timeout_s: float | None = None) -> bool:
        """Waits until the job is over: stopped, out of data, or failed. False: it is not, after that time."""
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout_s)
        return not self._thread.is_alive()

    @property
    def state(self) -> str:
        """"running", "paused", "failed" or "ended"."""
        if self.error is not None:
            return "failed"
        if not self._thread.is_alive():
            return "ended"
        return "paused" if self._waiting else "running"

    @property
    def steps_per_s(self) -> float:
        """Of the latest steps; 0 while it is paused or over."""
        times = list(self._times)
        if len(times) < 2 or self.state != "running":
            return 0.0
        return (len(times) - 1) / max(time.monotonic() - times[0], 1e-9)

    @property
    def loaded(self) -> LoadedModel | None:
        return self._loaded

    def stats(self) -> dict[str, Any]:
        model = None if self._loaded is None else self._loaded.model
        return {
            "kind": "background",
            "state": self.state,
            "steps": self.steps,
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
        except BaseException as e:  # it is this job's alone: its owner finds it here
            self.error = e
        finally:
            if self.feed is not None:
                self.feed.stop()
            self._host.unload_job(self)

    def _train(self) -> None:
        batch = self._fetch()
        self._slot = self._reserve(batch)
        try:
            while self._slot is not None and not self._stopping.is_set():
                if self._go.is_set():
                    batch = self._one_step(self._slot, batch)
                else:
                    self._slot.cancel()  # a batch that waits for its turn keeps the core awake
                    self._waiting = True
                    self._go.wait()
                    self._waiting = False
                    self._slot = self._reserve(batch)
        finally:
            if self._slot is not None:
                self._slot.cancel()

    def _one_step(self, slot: Slot, batch: Batch | None) -> Batch | None:
        """Runs the step whose data are in the slot; the next one's batch, which has its slot too."""
        if self.step.draws is not None:
            self.step.draws.next_step()
        self._slot = None
        finish = slot.begin()
        following = None
        try:
            if self.feed is not None:  # while the GPU runs this step, the next one's data go to the other lane
                following = self._fetch()
                self._slot = self._reserve(following)
        finally:
            found = finish()
        if self.feed is None:  # not before: this step may still wait for the only lane
            self._slot = self._reserve(None)
        if self._computes:
            found = {key: t.detach().numpy().copy() for key, t in self.step.compute(batch).items()}
        self._done(found)
        return following

    def _fetch(self) -> Batch | None:
        return None if self.feed is None else self.feed.take()

    def _reserve(self, batch: Batch | None) -> Slot | None:
        """A place for the next step with its data in it; None: there are no more data."""
        if self.feed is not None and batch is None:
            return None
        assert self._loaded is not None
        slot = Slot(self._engine, self._loaded, None, None, None)
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
        self._times.append(time.monotonic())
        self._report()

    def _report(self) -> None:
        if self._reports.callback is None or self.steps % self._reports.every:
            return
        self._reports.callback(self)
        torch = self.step.torch
        if self.step.draws is not None:
            torch.cuda.current_stream().synchronize()  # what it launched comes before the next step
        self.step.check_settings()


def check_memory(step: TorchStep, lane_bytes: int, memory_bytes: int | None) -> None:
    """Whether a job stays within what it was given: its state, and what a step needs beside it."""
    total = step.state_bytes + lane_bytes
    if memory_bytes is not None and total > memory_bytes:
        raise MemoryPlanError(
            f"job {step.name!r} needs {total:,} bytes ({step.state_bytes:,} of state, {lane_bytes:,} for a step), and "
            f"memory_bytes={memory_bytes:,}: give it more, or use smaller batches"
        )
