"""The middleware of every request: its id and trace, its key, and the one place where errors become answers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import msgspec
from aiohttp import ClientPayloadError, web
from aiohttp.http_exceptions import HttpProcessingError

from paellapy.serving.access import Access
from paellapy.serving.errors import LateBodyError, TooLargeError, error_answer
from paellapy.serving.logs import child_span, log, request_id
from paellapy.serving.service import Service

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

SERVICE = web.AppKey("service", Service)
CLIENT = web.RequestKey("client", str)  # name of the client; "": unnamed

LINGER_S = 1.0  # seconds to read on in a refused body: closing at once, its sender would lose the answer

SERVER = "paellapy"  # without versions, which help attackers more than clients

MISMATCHES = (ClientPayloadError, web.RequestPayloadError, HttpProcessingError, ConnectionError)

encode_json = msgspec.json.Encoder().encode


async def sign(request: web.Request, response: web.StreamResponse) -> None:
    """Puts our name in place of aiohttp's on every answer, streams and aiohttp's own errors included."""
    response.headers["Server"] = SERVER


def json_response(value: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> web.Response:
    known = {"Server": SERVER, **(headers or {})}
    return web.Response(body=encode_json(value), status=status, headers=known, content_type="application/json")


def outermost(access: Access, client_header: str, access_log: bool) -> Any:
    """Makes the middleware of an application."""

    @web.middleware
    async def middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
        started_ns = time.monotonic_ns()
        headers = request.headers
        number = request_id(headers.get("X-Request-Id"))
        try:
            request[CLIENT] = access.client(request, client_header)
            response = await handler(request)
        except asyncio.CancelledError:
            if access_log:
                _note(request, number, 499, started_ns)
            raise
        except Exception as e:
            response = answer(e, request, number)
        if not response.prepared:  # a stream that has begun has sent its headers
            response.headers["X-Request-Id"] = number
            response.headers["Server"] = SERVER
        if (given := headers.get("traceparent")) and (span := child_span(given)):
            response.headers["traceparent"] = span
            if state := headers.get("tracestate"):
                response.headers["tracestate"] = state
        if request.app[SERVICE].draining:
            response.force_close()
        if access_log:
            _note(request, number, response.status, started_ns)
        return response

    return middleware


def answer(error: Exception, request: web.Request, number: str) -> web.StreamResponse:
    """Answers an error as `{"error": "…"}`. Internal errors are logged; the client gets only the request's number."""
    if isinstance(error, web.HTTPException):
        if error.status < 400:
            raise error
        kept = {"Allow": error.headers["Allow"]} if "Allow" in error.headers else None
        return json_response({"error": _http_error(error, request)}, error.status, kept)
    if isinstance(error, MISMATCHES):
        return mismatch()
    found = error_answer(error, number, request.path)
    headers = {"WWW-Authenticate": "Bearer"} if found.status == 401 else {}
    if found.retry_after_s is not None:
        headers["Retry-After"] = str(found.retry_after_s)
    return end_early(error, request, json_response({"error": found.said}, found.status, headers))


def mismatch() -> web.Response:
    """The answer to a body that does not match its headers."""
    response = json_response({"error": "the body does not match its headers"}, 400)
    response.force_close()  # the start of the next request is unknown
    return response


def end_early(error: Exception, request: web.Request, response: web.Response) -> web.Response:
    """Closes the connection after an answer that precedes the end of a late or too large body; aiohttp would read on
    for 10 s.
    """
    if isinstance(error, LateBodyError | TooLargeError) and not request.content.is_eof():
        response.force_close()
        linger_s = LINGER_S if isinstance(error, TooLargeError) else 0.0
        request.protocol._lingering_time = min(request.protocol._lingering_time, linger_s)
    return response


def _http_error(error: web.HTTPException, request: web.Request) -> str:
    if isinstance(error, web.HTTPMethodNotAllowed):
        return f"{request.method} is not allowed at this address; use {', '.join(sorted(error.allowed_methods))}"
    if isinstance(error, web.HTTPNotFound):
        return f"the address {request.path[:200]!r} does not exist; /docs lists all addresses"
    return error.reason


def _note(request: web.Request, number: str, status: int, started_ns: int) -> None:
    fields = {
        "request": number,
        "method": request.method,
        "path": request.path,
        "status": status,
        "ms": round((time.monotonic_ns() - started_ns) * 1e-6, 3),
        "client": request.get(CLIENT) or None,
        "peer": request.remote,
    }
    if traceparent := request.headers.get("traceparent"):
        fields["traceparent"] = traceparent
    log.info("request", extra={"fields": {key: value for key, value in fields.items() if value is not None}})
