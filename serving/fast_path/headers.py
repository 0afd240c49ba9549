"""HTTP headers as bytes: those of an inference request, parsed once since clients repeat them, and those of answers."""

from __future__ import annotations

import functools
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from email.utils import formatdate

from paellapy.serving.access import given_key
from paellapy.serving.errors import ErrorAnswer, encode_json
from paellapy.serving.limits import FAST_HEADER_BYTES, FAST_HEADERS
from paellapy.serving.protocol import HEADER_LENGTH, Pieces

REMEMBERED_HEADS = 512

_LINE = re.compile(rb"POST /v2/models/([A-Za-z0-9_.\-]+)(?:/versions/([A-Za-z0-9_.\-]+))?/infer HTTP/1\.1\r\n")
_HEADERS = re.compile(rb"(?:[!#$%&'*+\-.^_`|~0-9A-Za-z]+:[ \t]*[\t\x20-\x7e\x80-\xff]*\r\n)+")
_LENGTH = b"content-length"
_JSON_LENGTH = HEADER_LENGTH.lower().encode()
# Headers that the fast path does not support, and those that it supports once
_UNUSUAL = frozenset(
    (b"transfer-encoding", b"content-encoding", b"expect", b"upgrade", b"te", b"trailer", b"traceparent", b"tracestate")
)
_SINGLE = frozenset(
    (_LENGTH, _JSON_LENGTH, b"x-request-id", b"host", b"connection", b"accept-encoding", b"x-api-key", b"authorization")
)


@functools.cache
def _pattern(name: bytes) -> re.Pattern[bytes]:
    return re.compile(rb"\r\n" + re.escape(name) + rb":[ \t]*([^\r\n]*?)[ \t]*(?=\r\n)", re.I)


def header_values(head: bytes, name: bytes) -> list[bytes]:
    """All values of a header, in the bytes up to the empty line.

    >>> header_values(b"GET / HTTP/1.1\\r\\nHost: a \\r\\nhost:b\\r\\n\\r\\n", b"host")
    [b'a', b'b']
    """
    return _pattern(name).findall(head)


def header_length(head: bytes, name: bytes = _LENGTH) -> int | None:
    """The first value of a header that is a number of bytes; None: it has none, or the value is no such number."""
    found = header_values(head, name)
    return int(found[0]) if found and found[0].isdigit() and len(found[0]) <= 15 else None


@dataclass(frozen=True, slots=True)
class Head:
    """The parsed header of a request. `client` is the name in the client header, `key` the API key, "" if not given."""

    path: str
    model: str
    version: str | None
    length: int
    json_length: str | None
    client: str
    key: str
    id: str | None
    accepts: str | None


class Heads:
    """Known headers and their parsed form."""

    def __init__(
        self, client_header: str, max_body_bytes: int, admits: Callable[[str], bool] = lambda host: True
    ) -> None:
        """`admits`: whether requests to this host are answered; aiohttp refuses the others."""
        self._admits = admits
        self._client_header, self._max_body_bytes = client_header.lower().encode(), max_body_bytes
        self._known: dict[bytes, Head | None] = {}

    def find(self, data: bytes) -> Head | None:
        """Parses the bytes up to the empty line; None: aiohttp reads them."""
        try:
            return self._known[data]
        except KeyError:
            pass
        if len(self._known) >= REMEMBERED_HEADS:
            self._known.clear()
        found = self._known[data] = self._parse(data)
        return found

    def _parse(self, data: bytes) -> Head | None:
        line = _LINE.match(data)
        if line is None or len(data) > FAST_HEADER_BYTES or not _HEADERS.fullmatch(data, line.end(), len(data) - 2):
            return None
        lines = data[line.end() : -4].split(b"\r\n")
        if len(lines) > FAST_HEADERS:
            return None
        values: dict[bytes, bytes] = {}  # the last of each; only unimportant ones may be repeated
        for each in lines:
            name, _, value = each.partition(b":")
            name = name.lower()
            if name in _UNUSUAL or (name in values and (name in _SINGLE or name == self._client_header)):
                return None
            values[name] = value.strip(b" \t")
        # aiohttp reports a missing Host. It also closes connections.
        if b"host" not in values or values.get(b"connection", b"keep-alive").lower() != b"keep-alive":
            return None
        if not self._admits(values[b"host"].decode("utf-8", "surrogateescape")):
            return None
        length = values.get(_LENGTH, b"")
        if not length.isdigit() or len(length) > 15 or int(length) > self._max_body_bytes:
            return None

        def text(name: bytes) -> str | None:
            return values[name].decode("utf-8", "surrogateescape") if name in values else None

        return Head(
            path=line[0].split(b" ", 2)[1].decode(),
            model=line[1].decode(),
            version=None if line[2] is None else line[2].decode(),
            length=int(length),
            json_length=text(_JSON_LENGTH),
            client=text(self._client_header) or "",
            key=given_key(text(b"x-api-key") or "", text(b"authorization") or ""),
            id=text(b"x-request-id"),
            accepts=text(b"accept-encoding"),
        )


# -- answers

_JSON, _BINARY = b"application/json", b"application/octet-stream"
_REASONS = {200: b"OK", 400: b"Bad Request", 404: b"Not Found", 408: b"Request Timeout",
            429: b"Too Many Requests", 500: b"Internal Server Error", 503: b"Service Unavailable"}  # fmt: skip
_ANSWER = (
    b"HTTP/1.1 %d %b\r\nContent-Type: %b\r\nContent-Length: %d\r\nX-Request-Id: %b\r\nDate: %b\r\nServer: paellapy\r\n"
    b"%b%b"
)


def answer_head(
    status: int, number: str, size: int, date: bytes, json_length: int | None = None, more: bytes = b"",
    close: bool = False,
) -> bytes:  # fmt: skip
    """The header of an answer. `json_length`: of the JSON before binary tensors; `more`: lines with their ends."""
    kind = _JSON
    if json_length is not None:
        kind, more = _BINARY, b"Inference-Header-Content-Length: %d\r\n%b" % (json_length, more)
    end = b"Connection: close\r\n\r\n" if close else b"\r\n"
    reason = _REASONS.get(status, b"Error")
    return _ANSWER % (status, reason, kind, size, number.encode("utf-8", "surrogateescape"), date, more, end)


def error_pieces(error: ErrorAnswer, number: str, date: bytes, close: bool) -> Pieces:
    """The header and the body of an error's answer."""
    body = encode_json({"error": error.said})
    more = b"" if error.retry_after_s is None else b"Retry-After: %d\r\n" % error.retry_after_s
    return [answer_head(error.status, number, len(body), date, more=more, close=close), body]


class Clock:
    """The Date header, formatted once a second."""

    def __init__(self) -> None:
        self._date, self._at = b"", 0

    def date(self) -> bytes:
        now = int(time.time())
        if now != self._at:
            self._date, self._at = formatdate(now, usegmt=True).encode(), now
        return self._date
