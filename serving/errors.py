"""Errors of the front end, and the HTTP status of each of our errors."""

from __future__ import annotations

import math
from dataclasses import dataclass

from paellapy.instrument.errors import PaellaError
from paellapy.scheduler.core.errors import (
    CaptureError,
    DeadlineError,
    EngineAwayError,
    EngineClosedError,
    EngineFailedError,
    InputError,
    MemoryPlanError,
    ModelError,
    QueueFullError,
    RequestFailedError,
    TooManyRequestsError,
    UnknownModelError,
    WeightsError,
)
from paellapy.serving.logs import log


class ConfigError(PaellaError):
    """The configuration is wrong; the message names the file, the line and the allowed values."""


STOPPING = "the server stops, and the body had not arrived: send the request again on a new connection"


class RequestError(PaellaError):
    """A request that is answered with a status other than 200."""

    status = 400

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(message)
        if status is not None:
            self.status = status


class TooLargeError(RequestError):
    """A body that exceeds a size limit."""

    status = 413


class LateBodyError(RequestError):
    """A body that has not arrived in time; its connection is closed."""

    status = 408

    def __init__(self, said: str = "the body did not arrive within the server's body_timeout_s") -> None:
        super().__init__(said)


class RefusedError(RequestError):
    """A request refused at once: it would be late, or there is no room. `reason` is a label in the metrics."""

    status = 503

    def __init__(self, message: str, reason: str, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.reason, self.retry_after_s = reason, retry_after_s


# The first class that matches counts. `reason` is a label in the metrics; None: the client's own mistake.
_STATUSES: tuple[tuple[type[PaellaError], int, str | None], ...] = (
    (UnknownModelError, 404, None),
    (InputError, 400, None),
    (DeadlineError, 503, "deadline"),
    (TooManyRequestsError, 429, "client_full"),
    (QueueFullError, 503, "queue_full"),
    (EngineClosedError, 503, "closing"),
    (EngineFailedError, 503, "device_failed"),
    (EngineAwayError, 503, "engine_away"),
    (WeightsError, 503, "weights"),
    (MemoryPlanError, 400, None),
    (CaptureError, 400, None),
    (ModelError, 400, None),
)


def status_of(error: PaellaError) -> tuple[int, str | None]:
    """The HTTP status of an error and, for a refusal, its label in the metrics.

    >>> status_of(QueueFullError("full"))
    (503, 'queue_full')
    """
    if isinstance(error, RequestError):
        return error.status, getattr(error, "reason", None)
    for kind, status, reason in _STATUSES:
        if isinstance(error, kind):
            return status, reason
    return 500, None


def retry_after_s(error: PaellaError) -> int:
    """Whole seconds for the Retry-After header."""
    return max(1, math.ceil(min(getattr(error, "retry_after_s", 1.0), 3600.0)))


@dataclass(frozen=True, slots=True)
class ErrorAnswer:
    """Status, text and headers of the answer to a failed request."""

    status: int
    said: str
    retry_after_s: int | None = None


def error_answer(error: Exception, number: str, path: str) -> ErrorAnswer:
    """The answer to an error. Internal errors are logged; the client gets only the request's number."""
    status = status_of(error)[0] if isinstance(error, PaellaError) else 500
    if isinstance(error, RequestFailedError):
        log.error("a model failed on a request's values", extra={"fields": {"request": number, "error": str(error)}})
        said = "the model failed on the values of this request and would fail again"
        return ErrorAnswer(500, f"{said}; the server's log has details under request {number}")
    if status == 500:
        log.error("a request failed", exc_info=error, extra={"fields": {"request": number, "path": path}})
        return ErrorAnswer(500, f"internal error; the server's log has details under request {number}")
    assert isinstance(error, PaellaError)
    # The reason may name files and lines of the server, and the failure may be due to another client's request.
    said = "the GPU failed; the server's log says why" if isinstance(error, EngineFailedError) else str(error)
    return ErrorAnswer(status, said, retry_after_s(error) if status in (429, 503) else None)


def short(value: object) -> str:
    """A client's own value, quoted back in an error: one line at most."""
    try:
        text = repr(value)
    except ValueError:  # integers with thousands of digits
        return "a number with too many digits"
    return text if len(text) <= 80 else text[:77] + "…"
