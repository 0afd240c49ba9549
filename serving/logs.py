"""Structured logs: one line per event, as text or JSON, each with the id of its request and the caller's trace."""

from __future__ import annotations

import itertools
import json
import logging
import re
import secrets
import sys
import time
from typing import Any, Literal

import msgspec

log = logging.getLogger("paellapy.serving")

Format = Literal["text", "json"]

_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")
_TRACEPARENT = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
_PLAIN = re.compile(r'[^\s"=\\]+')
_prefix, _numbers = secrets.token_hex(6), itertools.count(1)


def request_id(given: str | None) -> str:
    """The client's own, where it is one; otherwise a new one."""
    if given is not None and _REQUEST_ID.fullmatch(given):
        return given
    return f"{_prefix}-{next(_numbers):x}"


def child_span(traceparent: str | None) -> str | None:
    """W3C trace context: the same trace with a span of ours, or None where none was given that is valid.

    >>> child_span("00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01")[:35]
    '00-4bf92f3577b34da6a3ce929d0e0e4736'
    """
    found = _TRACEPARENT.fullmatch(traceparent or "")
    if found is None:
        return None
    version, trace, parent, flags, rest = found.groups()
    if version == "ff" or set(trace) == {"0"} or set(parent) == {"0"} or (version == "00" and rest):
        return None
    return f"00-{trace}-{secrets.token_hex(8)}-{flags}"


def _escaped(text: str) -> str:
    """Nothing in it moves the cursor, begins another line or hides: such characters are written as JSON does.

    >>> _escaped("a\\nb \\x1b[31m")
    'a\\\\nb \\\\u001b[31m'
    """
    return text if text.isprintable() else "".join(c if c.isprintable() else json.dumps(c)[1:-1] for c in text)


def _quoted(value: object) -> str:
    """As it is where one can see where it ends, otherwise in quotes: clients choose paths and names.

    >>> _quoted("/v2/models/mlp/infer"), _quoted("a b=c")
    ('/v2/models/mlp/infer', '"a b=c"')
    """
    text = str(value)
    if text.isprintable() and _PLAIN.fullmatch(text):
        return text
    return '"' + _escaped(text.replace("\\", "\\\\").replace('"', '\\"')) + '"'


def _readable(value: Any) -> Any:
    """Texts that JSON can have: bytes of a client's that are no UTF-8 are written out.

    >>> _readable({"client": "a\\udcff"})
    {'client': 'a\\\\xff'}
    """
    if isinstance(value, dict):
        return {key: _readable(each) for key, each in value.items()}
    if isinstance(value, str) and not value.isascii():
        return value.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")
    return value


class _Lines(logging.Formatter):
    """`extra={"fields": {…}}` are the line's fields."""

    def __init__(self, style: Format, process: str) -> None:
        super().__init__()
        self._json, self._process = style == "json", {"process": process} if process else {}

    def format(self, record: logging.LogRecord) -> str:
        fields: dict[str, Any] = {**self._process, **getattr(record, "fields", {})}
        moment = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z"
        trouble = self.formatException(record.exc_info) if record.exc_info else None
        if self._json:
            line = {"time": moment, "level": record.levelname.lower(), "message": record.getMessage(), **fields}
            if trouble:
                line["traceback"] = trouble
            return msgspec.json.encode(_readable(line), enc_hook=str).decode()
        said = "".join(f" {key}={_quoted(value)}" for key, value in fields.items())
        # A traceback's lines are indented: none of them, whatever an error says, looks like a line of the log.
        below = "".join(f"\n  {_escaped(each.expandtabs())}" for each in (trouble or "").splitlines())
        return f"{moment} {record.levelname.lower()} {_escaped(record.getMessage())}{said}{below}"


def configure(style: Format = "text", level: str = "info", process: str = "") -> None:
    """Lines of the server go to standard error. Applications that embed it configure logging themselves.

    `process`: which of several it is.
    """
    global _prefix
    _prefix = secrets.token_hex(6)  # a forked process has its parent's
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Lines(style, process))
    log.handlers[:] = [handler]
    log.propagate = False
    log.setLevel(level.upper())
