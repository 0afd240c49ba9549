"""Errors of the scheduler: one class per cause. Each message says what is wrong and how to fix it."""

from __future__ import annotations

from paellapy.instrument.errors import PaellaError


class LimitsError(PaellaError, ValueError):
    """A size of the tables is larger than the core can count; `field`, `given`, `limit`."""


class ProfileError(PaellaError, ValueError):
    """A model's profile is incomplete, contradicts itself, or is too large for the core's tables."""


class ModelError(PaellaError):
    """A model is described wrongly, or its name is taken."""


class CaptureError(PaellaError):
    """A model's function did something that cannot be captured; names the model and, where known, the line."""


class UnknownModelError(PaellaError, KeyError):
    """No model of that name is loaded."""

    def __str__(self) -> str:  # KeyError would print the message's repr
        return str(self.args[0])


class InputError(PaellaError, ValueError):
    """A request's inputs, deadline, priority or client have wrong names, shapes or types."""


class DeadlineError(PaellaError, TimeoutError):
    """The deadline has passed: at submission, or before the request could run."""


class QueueFullError(PaellaError):
    """The engine or the model already holds its maximum number of requests."""


class TooManyRequestsError(QueueFullError):
    """The client already has its part of the engine's requests; other clients are served."""


class EngineClosedError(PaellaError):
    """The engine is closed, or closing."""


class EngineFailedError(PaellaError):
    """The GPU failed under the engine; `__cause__` has the cause. On a real GPU, a new process is needed."""


class SuspectError(EngineFailedError):
    """The GPU failed while this request was on it, with `others` beside it. `digests` identify those of its items that
    were there, and `failure` the failure, which is the same for all requests.
    """

    def __init__(self, message: str, digests: tuple[int, ...] = (), others: int = 0, failure: int = 1) -> None:
        super().__init__(message)
        self.digests, self.others, self.failure = digests, others, failure


class RequestFailedError(PaellaError):
    """The model failed on the values of this request only; `__cause__` has the cause, if it is known."""


class StepError(PaellaError):
    """A model's function `before` or `after` failed on one request; `model`, `step`. `__cause__` has the cause."""


class EngineAwayError(PaellaError):
    """The engine's own process has ended, and the next one is not ready yet."""


class MemoryPlanError(PaellaError, MemoryError):
    """A model does not fit the engine's memory; the message gives the figures."""


class WeightsError(PaellaError):
    """A model's weights could not be brought to the GPU: memory is short, or their file is gone."""
