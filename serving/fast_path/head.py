"""The header of an inference on the fast path: parsed once, since clients repeat it."""

from __future__ import annotations

import re
from dataclasses import dataclass

from paellapy.serving.infer import HEADER_LENGTH

_LINE = re.compile(rb"POST /v2/models/([A-Za-z0-9_.\-]+)(?:/versions/([A-Za-z0-9_.\-]+))?/infer HTTP/1\.1\r\n")
_HEADERS = re.compile(rb"(?:[!#$%&'*+\-.^_`|~0-9A-Za-z]+:[ \t]*[\t\x20-\x7e\x80-\xff]*\r\n)+")
MOST_HEADERS = 100
LONGEST_HEAD = 4096  # aiohttp reads longer headers
REMEMBERED_HEADS = 512

# Headers that the fast path does not support.
_UNUSUAL = frozenset(
    (b"transfer-encoding", b"content-encoding", b"expect", b"upgrade", b"te", b"trailer", b"traceparent", b"tracestate")
)
_HEADER_LENGTH = HEADER_LENGTH.lower().encode()
_SINGLE = frozenset((b"content-length", _HEADER_LENGTH, b"x-request-id", b"host", b"connection", b"accept-encoding"))


@dataclass(frozen=True, slots=True)
class Head:
    """The parsed header of a request."""

    model: str
    version: str | None
    length: int
    json_length: str | None
    client: str
    id: str | None
    accepts: str | None


class Heads:
    """Known headers and their parsed form."""

    def __init__(self, client_header: str, max_body_bytes: int) -> None:
        self._client_header, self._max_body_bytes = client_header.lower().encode(), max_body_bytes
        self._known: dict[bytes, Head | None] = {}

    def find(self, data: bytes) -> Head | None:
        """Parses the bytes up to the empty line; None: aiohttp reads them. Clients repeat headers, so results are
        cached.
        """
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
        if line is None or len(data) > LONGEST_HEAD or not _HEADERS.fullmatch(data, line.end(), len(data) - 2):
            return None
        length = json_length = client = number = accepts = None
        lines = data[line.end() : -4].split(b"\r\n")
        if len(lines) > MOST_HEADERS:
            return None
        seen: set[bytes] = set()
        for each in lines:
            name, _, value = each.partition(b":")
            name, value = name.lower(), value.strip(b" \t")
            if name in _UNUSUAL or (name in seen and name in _SINGLE):
                return None
            if name == b"connection" and value.lower() != b"keep-alive":
                return None
            seen.add(name)
            if name == b"content-length":
                length = value
            elif name == _HEADER_LENGTH:
                json_length = value.decode("latin-1")
            elif name == b"x-request-id":
                number = value.decode("utf-8", "surrogateescape")
            elif name == b"accept-encoding":
                accepts = value.decode("latin-1")
            if name == self._client_header:
                client = value.decode("utf-8", "surrogateescape")
        if b"host" not in seen:  # aiohttp reports the error
            return None
        if length is None or not length.isdigit() or len(length) > 15 or int(length) > self._max_body_bytes:
            return None
        version = None if line[2] is None else line[2].decode()
        return Head(line[1].decode(), version, int(length), json_length, client or "", number, accepts)
