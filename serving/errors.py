"""Errors of the server, the HTTP status of each of our errors, and how an error is answered."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
from aiohttp import ClientPayloadError, web
from aiohttp.http_exceptions import HttpProcessingError

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

STOPPING = "the server stops, and the body had not arrived: send the request again on a new connection"
NUMBER = web.RequestKey("number", str)  # the request's id
EVENTS = {"Content-Type": "text/event-stream", "Cache-Control": "no-store", "X-Accel-Buffering": "no"}
SERVER = "paellapy"  # without versions, which help attackers more than clients
LINGER_S = 1.0  # seconds to read on in a refused body: closing at once, its sender would lose the answer

# What aiohttp raises for a body that does not match its headers
MISMATCHES = (ClientPayloadError, web.RequestPayloadError, HttpProcessingError, ConnectionError)

encode_json = msgspec.json.Encoder().encode


class ConfigError(PaellaError):
    """The configuration is wrong; the message names the file, the line and the allowed values. `field` is the setting
    as in `models[0].batch`, `line` its line in the file.
    """

    field: str = ""
    line: int | None = None


class RequestError(PaellaError):
    """A request that is answered with a status other than 200.

    `field` names the part of the request that is wrong, `given` is its value, and `limit` what is allowed.
    """

    status = 400
    field: str | None = None
    limit: Any = None
    given: Any = None


class TooLargeError(RequestError):
    """A body that exceeds a size limit."""

    status = 413
    field = "body"


class LateBodyError(RequestError):
    """A body that has not arrived in time; its connection is closed."""

    status = 408
    field = "body"

    def __init__(self, said: str = "the body did not arrive within the server's body_timeout_s") -> None:
        super().__init__(said)


class RefusedError(RequestError):
    """A request refused at once: it would be late, or there is no room. `reason` is a label in the metrics."""

    status = 503

    def __init__(self, message: str, reason: str, retry_after_s: float = 1.0, **facts: Any) -> None:
        super().__init__(message, reason=reason, retry_after_s=retry_after_s, **facts)


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

    @property
    def headers(self) -> dict[str, str]:
        found = {"WWW-Authenticate": "Bearer"} if self.status == 401 else {}
        if self.retry_after_s is not None:
            found["Retry-After"] = str(self.retry_after_s)
        return found


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


# -- as answers of aiohttp


async def sign(request: web.Request, response: web.StreamResponse) -> None:
    """Puts our name in place of aiohttp's on every answer, streams and aiohttp's own errors included."""
    response.headers["Server"] = SERVER


def json_response(value: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> web.Response:
    known = {"Server": SERVER, **(headers or {})}
    return web.Response(body=encode_json(value), status=status, headers=known, content_type="application/json")


def _plain(status: int, said: str, param: str | None) -> dict[str, Any]:
    return {"error": said}


def error_response(error: Exception, request: web.Request, number: str) -> web.StreamResponse:
    """Answers an error as `{"error": "…"}`, or in the form of the API that the address belongs to. A redirection is
    raised again.
    """
    form = getattr(request.match_info.handler, "error_body", _plain)
    if isinstance(error, web.HTTPException):
        if error.status < 400:
            raise error
        kept = {"Allow": error.headers["Allow"]} if "Allow" in error.headers else None
        return json_response({"error": _http_error(error, request)}, error.status, kept)
    if isinstance(error, MISMATCHES):
        response = json_response(form(400, "the body does not match its headers", "body"), 400)
        response.force_close()  # the start of the next request is unknown
        return response
    found = error_answer(error, number, request.path)
    response = json_response(form(found.status, found.said, getattr(error, "field", None)), found.status, found.headers)
    if isinstance(error, LateBodyError | TooLargeError) and not request.content.is_eof():
        response.force_close()
        if (linger := getattr(request.protocol, "linger", None)) is not None:  # else another application's connection
            linger(LINGER_S if isinstance(error, TooLargeError) else 0.0)
    return response


def _http_error(error: web.HTTPException, request: web.Request) -> str:
    if isinstance(error, web.HTTPMethodNotAllowed):
        return f"{request.method} is not allowed at this address; use {', '.join(sorted(error.allowed_methods))}"
    if isinstance(error, web.HTTPNotFound):
        return f"the address {request.path[:200]!r} does not exist; /docs lists all addresses"
    return error.reason


def short(value: object) -> str:
    """A client's own value, quoted back in an error: one line at most."""
    try:
        text = repr(value)
    except ValueError:  # integers with thousands of digits
        return "a number with too many digits"
    return text if len(text) <= 80 else text[:77] + "…"
