"""Answers of the fast path as bytes: the HTTP header, followed by the pieces of the body."""

from __future__ import annotations

import time
from dataclasses import dataclass
from email.utils import formatdate

from paellapy.serving.errors import ErrorAnswer
from paellapy.serving.inference import Pieces
from paellapy.serving.middleware import encode_json

JSON, BINARY = b"application/json", b"application/octet-stream"
_REASONS = {200: b"OK", 400: b"Bad Request", 404: b"Not Found", 408: b"Request Timeout",
            429: b"Too Many Requests", 500: b"Internal Server Error", 503: b"Service Unavailable"}  # fmt: skip
_CLOSE = b"Connection: close\r\n\r\n"
_HEAD = (
    b"HTTP/1.1 %d %b\r\nContent-Type: %b\r\nContent-Length: %d\r\nX-Request-Id: %b\r\nDate: %b\r\nServer: paellapy\r\n"
    b"%b%b"
)


@dataclass(slots=True)
class Answer:
    """One answer before it is encoded. `more` are further header lines, each with its line end."""

    number: str
    pieces: Pieces
    status: int = 200
    kind: bytes = JSON
    more: bytes = b""

    def parts(self, date: bytes, close: bool) -> Pieces:
        """The header, and the pieces of the body."""
        length = sum(map(len, self.pieces))
        end = _CLOSE if close else b"\r\n"
        reason = _REASONS.get(self.status, b"Error")
        head = _HEAD % (self.status, reason, self.kind, length, _encoded(self.number), date, self.more, end)
        return [head, *self.pieces]


def json_header(length: int) -> bytes:
    """The header line that says how long the JSON before binary tensors is."""
    return b"Inference-Header-Content-Length: %d\r\n" % length


def success(number: str, size: int, json_length: int | None, date: bytes, close: bool) -> bytes:
    """The header of an answer to an inference. Most answers need no more than this."""
    kind, more = (JSON, b"") if json_length is None else (BINARY, json_header(json_length))
    return _HEAD % (200, b"OK", kind, size, _encoded(number), date, more, _CLOSE if close else b"\r\n")


def _encoded(number: str) -> bytes:
    return number.encode("utf-8", "surrogateescape")


def of_error(error: ErrorAnswer, number: str) -> Answer:
    more = b"" if error.retry_after_s is None else b"Retry-After: %d\r\n" % error.retry_after_s
    return Answer(number, [encode_json({"error": error.said})], error.status, more=more)


class Clock:
    """The Date header, formatted once a second."""

    def __init__(self) -> None:
        self._date, self._at = b"", 0

    def date(self) -> bytes:
        now = int(time.time())
        if now != self._at:
            self._date, self._at = formatdate(now, usegmt=True).encode(), now
        return self._date
