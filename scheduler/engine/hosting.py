"""Work that an engine runs beside requests: background jobs, and turns of code that was not captured."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from paellapy.instrument.device import VirtualDevice
from paellapy.scheduler.backends.base import Backend
from paellapy.scheduler.backends.launches import LoadedModel
from paellapy.scheduler.core import codes
from paellapy.scheduler.core.errors import ModelError, UnknownModelError
from paellapy.scheduler.core.priorities import checked_priority
from paellapy.scheduler.core.profiles import ModelProfile
from paellapy.scheduler.engine.background import Job, Reports, check_memory
from paellapy.scheduler.engine.feed import Feed
from paellapy.scheduler.engine.guests import Guests
from paellapy.scheduler.engine.install import install
from paellapy.scheduler.engine.loading import Loading
from paellapy.scheduler.engine.settings import check_quantum
from paellapy.scheduler.engine.turn import Turn
from paellapy.scheduler.models.profile import model_profile
from paellapy.scheduler.models.torch_step import TorchStep, check_job
from paellapy.scheduler.models.torch_tensors import needs_torch


def _rank(what: str, priority: int) -> int:
    try:
        return checked_priority(priority)
    except ValueError as e:
        raise ModelError(f"{what}: {e}") from None


class Hosting(Loading):
    """An engine whose background jobs and turns share the GPU with requests."""

    guests: Guests

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

    def turn(self, name: str, *, priority: int = -1, share: float = 1.0, give_back_ms: float = 10.0) -> Turn:
        """`with engine.turn("script"):` around code that was not captured: it runs when the policy grants it.

        `turn.wanted()` says when to give way. Other work waits at most `give_back_ms` for a turn that is wanted back.
        After that the turn is over, and the launches of its code run beside others.
        """
        self._check_open()
        rank = _rank(f"turn {name!r}", priority)
        with self._loading:
            if name in self._models or name in self._jobs:
                raise ModelError(f"a model or a job named {name!r} is loaded already; give the turn another name")
            if name not in self._turns and len(self._by_row) >= len(self.state.model):
                raise ModelError(
                    f"no room for turns named {name!r}: models, jobs and the names of turns take all "
                    f"{len(self.state.model)} places, and a name keeps its place: give turns an earlier name, unload a "
                    "model, or raise the engine's limits"
                )
            return Turn(self, self._turns, name, rank, share, give_back_ms)

    @property
    def backend(self) -> Backend:
        return self._backend

    def open_turns(self, loaded: LoadedModel) -> None:
        """Opens the turns of one name in the core."""
        install(self.state, loaded, self._backend.pool(self.state, loaded.model.priority))
        self._by_row[loaded.row] = loaded
        self._front.command(codes.OPEN_MODEL, loaded.row)

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
        return model_profile(job.loaded.model, job.loaded.profiles, len(job.loaded.lanes), self.limits.requests)

    def job_stats(self) -> dict[str, dict[str, Any]]:
        """Statistics of the work beside requests, by name: background jobs, turns, and guests."""
        own = {**self._turns.stats(), **{name: job.stats() for name, job in self.jobs.items()}}
        # A script often has the name of a job: `train`.
        guests = {f"{name}-{each['pid']}" if name in own else name: each for name, each in self.guests.stats().items()}
        return {**guests, **own}
