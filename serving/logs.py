"""Structured logs: one line per event, as text or JSON, with the id of its request and the caller's trace."""

from __future__ import annotations

import contextlib
import functools
import io
import itertools
import json
import logging
import os
import re
import secrets
import select
import signal
import sys
import threading
import time
import traceback
from collections.abc import Hashable, Iterator, Mapping
from types import TracebackType
from typing import Any, Literal

import msgspec

from paellapy.instrument.errors import PaellaError

log = logging.getLogger("paellapy.serving")

Format = Literal["text", "json"]

_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")
_TRACEPARENT = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
_PLAIN = re.compile(r'[^\s"=\\]+')
_prefix, _numbers = secrets.token_hex(6), itertools.count(1)


def request_id(given: str | None) -> str:
    """The client's own id if it is valid; otherwise a new one."""
    if given is not None and _REQUEST_ID.fullmatch(given):
        return given
    return f"{_prefix}-{next(_numbers):x}"


def log_request(
    number: str, method: str, path: str, status: int, started_ns: int, client: str, peer: str | None,
    more: Mapping[str, Any],
) -> None:  # fmt: skip
    """A line of the access log. The caller is not looked up, as `log.info` does: that takes longer than the rest."""
    ms = round((time.monotonic_ns() - started_ns) * 1e-6, 3)
    fields: dict[str, Any] = {"request": number, "method": method, "path": path, "status": status, "ms": ms}
    for name, value in (("client", client), ("peer", peer)):
        if value:
            fields[name] = value
    fields |= more
    if log.isEnabledFor(logging.INFO):
        log.handle(log.makeRecord(log.name, logging.INFO, "", 0, "request", (), None, extra={"fields": fields}))


class Seldom:
    """Lets a line of each kind through now and then, with the number of those that it stands for.

    >>> seldom = Seldom(60.0)
    >>> seldom.due("a"), seldom.due("a"), seldom.due("b")
    (1, 0, 1)
    """

    def __init__(self, every_s: float) -> None:
        self._every_s = every_s
        self._said: dict[Hashable, tuple[float, int]] = {}  # when the latest line came, and how many since

    def due(self, kind: Hashable) -> int:
        """The number of events since the latest line, this one included; 0: no line is due. Kinds must be few."""
        at_s, count = self._said.get(kind, (-self._every_s, 0))
        now_s, count = time.monotonic(), count + 1
        if now_s - at_s < self._every_s:
            self._said[kind] = at_s, count
            return 0
        self._said[kind] = now_s, 0
        return count


def child_span(traceparent: str | None) -> str | None:
    """W3C trace context: the same trace with a span of our own, or None without a valid one.

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
    """Escapes control and invisible characters as JSON does, so that no text moves the cursor or begins a new line.

    >>> _escaped("a\\nb \\x1b[31m")
    'a\\\\nb \\\\u001b[31m'
    """
    return text if text.isprintable() else "".join(c if c.isprintable() else json.dumps(c)[1:-1] for c in text)


def _quoted(value: object) -> str:
    """Puts a value in quotes where its end would be unclear: clients choose paths and names.

    >>> _quoted("/v2/models/mlp/infer"), _quoted("a b=c")
    ('/v2/models/mlp/infer', '"a b=c"')
    """
    return str(value) if isinstance(value, int | float) else _quoted_text(str(value))


@functools.lru_cache(1024)  # paths and addresses come again and again
def _quoted_text(text: str) -> str:
    if text.isprintable() and _PLAIN.fullmatch(text):
        return text
    return '"' + _escaped(text.replace("\\", "\\\\").replace('"', '\\"')) + '"'


def _readable(value: Any) -> Any:
    """Makes texts valid JSON: bytes from a client that are not UTF-8 are escaped.

    >>> _readable({"client": "a\\udcff"})
    {'client': 'a\\\\xff'}
    """
    if isinstance(value, dict):
        return {_readable(key): _readable(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_readable(each) for each in value]
    if isinstance(value, str) and not value.isascii():
        try:
            return value.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")
        except UnicodeEncodeError:  # halves of characters, which no bytes stand for
            return value.encode("utf-8", "backslashreplace").decode()
    return value


class _Lines(logging.Formatter):
    """Formats a record as one line; `extra={"fields": {…}}` adds fields to it."""

    def __init__(self, style: Format, process: str) -> None:
        super().__init__()
        self._json, self._process = style == "json", {"process": process} if process else {}
        self._second, self._said = -1, ""  # the last second as text: at high rates most lines are of one second

    def format(self, record: logging.LogRecord) -> str:
        fields: dict[str, Any] = {**self._process, **getattr(record, "fields", {})}
        if (second := int(record.created)) != self._second:
            self._second, self._said = second, time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(second))
        moment = f"{self._said}.{int(record.msecs):03d}Z"
        trouble = self.formatException(record.exc_info) if record.exc_info else record.stack_info
        if self._json:
            line = {"time": moment, "level": record.levelname.lower(), "message": record.getMessage(), **fields}
            if trouble:
                line["traceback"] = trouble
            try:
                return msgspec.json.encode(line, enc_hook=str).decode()
            except UnicodeEncodeError:  # bytes from a client that are not UTF-8
                return msgspec.json.encode(_readable(line), enc_hook=str).decode()
        said = "".join(f" {key}={_quoted(value)}" for key, value in fields.items())
        # A traceback's lines are indented, so that none can be mistaken for a line of the log.
        below = "".join(f"\n  {_escaped(each.expandtabs())}" for each in (trouble or "").splitlines())
        return f"{moment} {record.levelname.lower()} {_escaped(record.getMessage())}{said}{below}"


class Output(logging.StreamHandler[Any]):
    """Writes lines to a file descriptor and never waits: lines that nobody takes are dropped and counted."""

    dropped = 0

    def emit(self, record: logging.LogRecord) -> None:
        line = self.format(record) + "\n"
        try:
            fd = self.stream.fileno()
        except (OSError, ValueError):  # a text in memory, or closed
            super().emit(record)
            return
        if self.dropped and self._write(fd, f"{self.dropped} lines of the log were dropped: nobody read them\n"):
            self.dropped = 0
        if self.dropped or not self._write(fd, line):
            self.dropped += 1

    @staticmethod
    def _write(fd: int, text: str) -> bool:
        """Whether all was written. A pipe that can be written takes PIPE_BUF bytes without waiting."""
        rest = memoryview(text.encode("utf-8", "backslashreplace"))
        ready = select.poll()
        try:
            ready.register(fd, select.POLLOUT)
            while rest:
                if not any(event & select.POLLOUT for _, event in ready.poll(0)):
                    return False
                rest = rest[os.write(fd, rest[: select.PIPE_BUF]) :]
        except OSError:  # the disk is full, or the reader is gone
            return False
        return True


    def reopen(self) -> None:
        """Opens its file again, which another program has moved away."""
        if isinstance(self.stream, io.TextIOWrapper) and self.stream is not sys.stderr:
            old, self.stream = self.stream, open_log(self.stream.name)
            old.close()


def open_streams() -> None:
    """Opens the null device in place of standard streams that are closed. A connection would get their descriptors, and
    a client what libraries print.
    """
    for fd, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(fd)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the least descriptor that is free, which is this one
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(fd, "w" if fd else "r", closefd=False, encoding="utf-8"))


def open_log(file: str) -> io.TextIOWrapper:
    try:
        return open(file, "a", encoding="utf-8")
    except OSError as e:
        said = f"{file} cannot be written ({e.strerror}): choose another file as server.log_file"
        raise PaellaError(said, field="server.log_file", given=file) from e


def configure(style: Format = "text", level: str = "info", process: str = "", file: str | None = None) -> None:
    """Sends the server's log to a file, or to standard error. Applications that embed the server configure logging
    themselves.

    `process` names this process where the server has several.
    """
    global _prefix
    _prefix = secrets.token_hex(6)  # a forked process starts with its parent's
    handler = Output(sys.stderr if file is None else open_log(file))
    handler.setFormatter(_Lines(style, process))
    log.handlers[:] = [handler]
    log.propagate = False
    log.setLevel(level.upper())


# -- a process that is the server's own

LOG_SIGNALS = (signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)
hung_up = threading.Event()  # SIGHUP came before there was a server that reloads


def heed(number: int, frame: object = None) -> None:
    """Handles a signal: SIGQUIT writes what each thread does, SIGUSR1 opens the log's file again. Notes
    SIGHUP for a server that does not listen yet.
    """
    if number == signal.SIGHUP:
        hung_up.set()
    if number == signal.SIGQUIT:
        names = {each.ident: each.name for each in threading.enumerate()}
        for ident, at in sys._current_frames().items():  # noqa: SLF001  it is documented
            stack = "".join(traceback.format_stack(at))
            fields = {"thread": names.get(ident, ident)}
            log.handle(log.makeRecord(log.name, logging.WARNING, "", 0, "a thread's stack", (), None,
                                      extra={"fields": fields}, sinfo=stack))  # fmt: skip
    elif number == signal.SIGUSR1:
        for handler in log.handlers:
            if isinstance(handler, Output):
                try:
                    handler.reopen()
                except PaellaError as e:
                    log.error("the log goes on in its old file", extra={"fields": {"error": str(e)}})


def _tell(kind: type[BaseException], error: BaseException | None, trace: TracebackType | None) -> None:
    log.error("an error that nothing handled", exc_info=None if error is None else (kind, error, trace))


@contextlib.contextmanager
def own_process() -> Iterator[None]:
    """Inside, signals are heeded, and what Python would write to standard error is written to the log."""
    hooks = sys.excepthook, threading.excepthook
    others = [logging.getLogger(name) for name in ("asyncio", "py.warnings")]
    before = {number: signal.signal(number, heed) for number in (*LOG_SIGNALS, signal.SIGHUP)}
    sys.excepthook = _tell
    threading.excepthook = lambda told: _tell(told.exc_type, told.exc_value, told.exc_traceback)
    logging.captureWarnings(True)
    for each in others:
        each.parent, each.propagate = log, True
    try:
        yield
    finally:
        for each in others:
            each.parent = logging.getLogger()
        logging.captureWarnings(False)
        sys.excepthook, threading.excepthook = hooks
        for number, handler in before.items():
            signal.signal(number, handler)
