"""What a router reads in the bytes of a request: its key, its deadline, and whether it may run twice."""

from __future__ import annotations

import hashlib
import re
import time

import msgspec

from paellapy.serving.fast_path.headers import header_length, header_values
from paellapy.serving.protocol import HEADER_LENGTH, MOST_TIMEOUT_US

AT_MOST_ONCE = "X-At-Most-Once"
KEPT_S = 60.0
MOST_KEYS = 4096
_LENGTHS = re.compile(rb"(\r\n(inference-header-)?content-length:[ \t]*)[0-9]+", re.I)


def at_most_once(head: bytes) -> bool:
    found = header_values(head, AT_MOST_ONCE.encode())
    return any(each.lower() not in (b"", b"0", b"false") for each in found)


# -- keys of clients
#
# Engines know the keys and check every request. A router asks them before it reads a long body, so that clients without
# a key cannot fill its memory, and it remembers the answer for a while.


def digest_of(head: bytes) -> bytes:
    """A digest of the key in a request's header.

    >>> digest_of(b"GET / HTTP/1.1\\r\\nX-API-Key: a\\r\\n") == digest_of(b"POST / HTTP/1.1\\r\\nx-api-key: a\\r\\n")
    True
    """
    # Engines read the first one too
    given = [(*header_values(head, name), b"")[0] for name in (b"x-api-key", b"authorization")]
    return hashlib.sha256(b"\n".join(given)).digest()


class KnownKeys:
    def __init__(self) -> None:
        self._accepted_at: dict[bytes, float] = {}

    def __contains__(self, digest: bytes) -> bool:
        return time.monotonic() - self._accepted_at.get(digest, float("-inf")) < KEPT_S

    def was_accepted(self, digest: bytes) -> bool:
        return digest in self._accepted_at

    def add(self, digest: bytes) -> None:
        if len(self._accepted_at) >= MOST_KEYS:
            self._accepted_at.clear()
        self._accepted_at[digest] = time.monotonic()


# -- deadlines: `parameters.timeout`, in µs from when the request is sent; read only when it matters


class _Parameters(msgspec.Struct):
    timeout: float | None = None


class _Body(msgspec.Struct):
    parameters: _Parameters = msgspec.field(default_factory=_Parameters)


_timeout = msgspec.json.Decoder(_Body).decode
_fields = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_encode = msgspec.json.Encoder().encode


def _json_end(head: bytes, body: bytes) -> int:
    length = header_length(head, HEADER_LENGTH.encode())
    return len(body) if length is None else min(length, len(body))


def timeout_s(head: bytes, body: bytes) -> float | None:
    """The request's timeout; None: it has none, or it cannot be read, and the engine reports the error.

    >>> timeout_s(b"POST / HTTP/1.1\\r\\n\\r\\n", b'{"inputs": [], "parameters": {"timeout": 5000}}')
    0.005
    """
    if header_values(head, b"content-encoding"):
        return None
    try:
        found = _timeout(body[: _json_end(head, body)]).parameters.timeout
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    return found * 1e-6 if found is not None and 0 < found <= MOST_TIMEOUT_US else None


def with_timeout(head: bytes, body: bytes, left_s: float) -> tuple[bytes, bytes]:
    """The same request with its remaining time as timeout.

    >>> head = b"POST / HTTP/1.1\\r\\nContent-Length: 31\\r\\n\\r\\n"
    >>> with_timeout(head, b'{"parameters":{"timeout":50000}}', 0.01)
    (b'POST / HTTP/1.1\\r\\nContent-Length: 32\\r\\n\\r\\n', b'{"parameters":{"timeout":10000}}')
    """
    end = _json_end(head, body)
    fields = _fields(body[:end])
    timeout = msgspec.Raw(_encode(max(1, int(left_s * 1e6))))
    fields["parameters"] = msgspec.Raw(_encode({**_fields(fields["parameters"]), "timeout": timeout}))
    json, tail = _encode(fields), body[end:]
    lengths = {True: len(json), False: len(json) + len(tail)}
    return _LENGTHS.sub(lambda found: found[1] + b"%d" % lengths[bool(found[2])], head), json + tail
