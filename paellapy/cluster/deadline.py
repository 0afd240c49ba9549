"""The deadline of a request (`parameters.timeout`, µs from when it is sent), read only when it matters."""

from __future__ import annotations

import re

import msgspec

from paellapy.serving.protocol import MOST_TIMEOUT_US

_NUMBERS = re.compile(rb"(\r\n(?:content-length|inference-header-content-length):[ \t]*)([0-9]+)", re.I)
_JSON_LENGTH = re.compile(rb"\r\ninference-header-content-length:[ \t]*([0-9]{1,15})[ \t]*\r\n", re.I)
_PACKED = re.compile(rb"\r\ncontent-encoding:", re.I)


class _Parameters(msgspec.Struct):
    timeout: float | None = None


class _Body(msgspec.Struct):
    parameters: _Parameters = msgspec.field(default_factory=_Parameters)


_timeout = msgspec.json.Decoder(_Body).decode
_fields = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_parameters = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_encode = msgspec.json.Encoder().encode


def _json_end(head: bytes, body: bytes) -> int:
    found = _JSON_LENGTH.search(head)
    return len(body) if found is None else min(int(found[1]), len(body))


def timeout_s(head: bytes, body: bytes) -> float | None:
    """The request's timeout; None: it has none, or it cannot be read, and the engine reports the error.

    >>> timeout_s(b"POST / HTTP/1.1\\r\\n\\r\\n", b'{"inputs": [], "parameters": {"timeout": 5000}}')
    0.005
    """
    if _PACKED.search(head):
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
    parameters = _parameters(fields["parameters"])
    parameters["timeout"] = msgspec.Raw(_encode(max(1, int(left_s * 1e6))))
    fields["parameters"] = msgspec.Raw(_encode(parameters))
    json = _encode(fields)
    body = json + body[end:]
    is_json_length = rb"\r\ninference-header-content-length:"

    def number(found: re.Match[bytes]) -> bytes:
        inner = found[1].lower().strip().startswith(is_json_length[4:])
        return found[1] + b"%d" % (len(json) if inner else len(body))

    return _NUMBERS.sub(number, head), body
