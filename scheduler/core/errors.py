"""Errors of the scheduler: one class per cause, each message says what is wrong and what to do about it."""

from __future__ import annotations

from paellapy.instrument.errors import PaellaError


class ModelError(PaellaError):
    """A model is described wrongly, or its name is taken."""


class CaptureError(PaellaError):
    """A model's function did something that cannot be captured; names the model and, where known, the line."""


class UnknownModelError(PaellaError, KeyError):
    """No model of that name is loaded."""

    def __str__(self) -> str:  # KeyError would print the message's repr
        return str(self.args[0])


class InputError(PaellaError, ValueError):
    """A request's inputs, deadline, priority or client are not of the names, shapes or types that are taken."""


class DeadlineError(PaellaError, TimeoutError):
    """The deadline is past: at submission, or before the request could be run."""


class QueueFullError(PaellaError):
    """The engine already holds as many requests as it takes."""


class EngineClosedError(PaellaError):
    """The engine is closed, or closing."""


class EngineFailedError(PaellaError):
    """The GPU failed under the engine; its cause is the `__cause__`. A new process is needed on a real GPU."""


class SuspectError(EngineFailedError):
    """The GPU failed while this request was on it, with `others` beside it; `digest` is of its inputs."""

    def __init__(self, message: str, digest: int = 0, others: int = 0) -> None:
        super().__init__(message)
        self.digest, self.others = digest, others


class RequestFailedError(PaellaError):
    """The model failed on the values of this request, and of no other; why is the `__cause__`, where it is known."""


class EngineAwayError(PaellaError):
    """The engine's own process has ended, and the next one is not there yet."""


class MemoryPlanError(PaellaError, MemoryError):
    """A model does not fit the memory the engine was given; the message has the figures."""


class WeightsError(PaellaError):
    """A model's weights could not be brought to the GPU: there is no memory, or their file is gone."""
