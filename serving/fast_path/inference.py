"""An inference on the fast path: its answer is bytes, written to its connection where its completion is read."""

from __future__ import annotations

import asyncio
import threading
import time
from dataclasses import dataclass
from email.utils import formatdate

from paellapy.serving.access import Access
from paellapy.serving.byte_limits import BESIDE_BYTES, IN_THREAD_BYTES, answer_coding, largest_request, pack
from paellapy.serving.errors import ErrorAnswer, RequestError, encode_json, error_answer
from paellapy.serving.fast_path.connection import FastConnection, read_buffer
from paellapy.serving.fast_path.headers import Head, Heads
from paellapy.serving.inference import Inference, Pieces
from paellapy.serving.logs import log_request, request_id
from paellapy.serving.service import Service

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


class FastHandler:
    """State that all connections of a server share."""

    def __init__(self, service: Service, access: Access, client_header: str, access_log: bool) -> None:
        """To be called in the event loop that reads the connections."""
        self.service, self.body_timeout_s = service, service.body_timeout_s
        self.heads = Heads(client_header, service.max_body_bytes)
        self.clock = Clock()
        self.access_log = access_log
        self.loop, self.thread = asyncio.get_running_loop(), threading.get_ident()
        self.buffer = read_buffer()  # shared: each read is used up before the next
        self._access = access

    def begin(self, connection: FastConnection, head: Head, raw: bytes) -> FastInference | None:
        try:
            client = self._access.client_of(head.key, head.client, "infer")
        except RequestError:
            return None
        if head.length > BESIDE_BYTES:
            entry = self.service.registry.entries.get(head.model)
            model = None if entry is None else entry.model
            if model is not None and head.length > largest_request(model):
                return None
        return FastInference(connection, self, head, client)


class FastInference(Inference):
    """One request. Its answer is written to its connection in the thread that reads completions."""

    __slots__ = ("_connection", "_handler", "_held_bytes", "head")

    def __init__(self, connection: FastConnection, handler: FastHandler, head: Head, client: str) -> None:
        super().__init__(handler.service, head.model, head.version, client)
        self._connection, self._handler, self.head = connection, handler, head
        self._held_bytes = 0  # of a body that did not arrive at once

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        return self._handler.loop

    def claim(self, nbytes: int) -> None:
        self.service.held.change(self._held_bytes, nbytes)
        self._held_bytes = nbytes

    def answered(self, pieces: Pieces, json_length: int | None) -> None:
        number, size = request_id(self.head.id), sum(map(len, pieces))
        if self.head.accepts is not None:
            coding = answer_coding(self.head.accepts, size, binary=json_length is not None)
            if coding is not None:
                self._pack(pieces, number, size, json_length, coding)
                return
        close = self.service.draining or self._connection.closing
        parts = [success(number, size, json_length, self._handler.clock.date(), close), *pieces]
        self._send(parts, close, number, 200)

    def refused(self, error: Exception) -> None:
        number = request_id(self.head.id)
        self._write(of_error(error_answer(error, number, self.head.path), number))

    def leave(self) -> None:
        if not self.over and self._handler.access_log:
            self._log(request_id(self.head.id), 499)
        super().leave()

    def release(self) -> None:
        if self._held_bytes:
            self.claim(0)
        self.service.counters.leave()

    def _pack(self, pieces: Pieces, number: str, size: int, json_length: int | None, coding: str) -> None:
        body = b"".join(pieces)
        answer = Answer(number, [], more=b"Content-Encoding: %b\r\n" % coding.encode())
        if json_length is not None:
            answer.kind, answer.more = BINARY, json_header(json_length) + answer.more
        if size < IN_THREAD_BYTES or threading.get_ident() != self._handler.thread:
            answer.pieces = [pack(body, coding)]
            self._write(answer)
            return

        def packed(future: asyncio.Future[bytes]) -> None:
            answer.pieces = [future.result()]
            self._write(answer)

        self.loop.run_in_executor(None, pack, body, coding).add_done_callback(packed)

    def _write(self, answer: Answer) -> None:
        close = self.service.draining or self._connection.closing
        self._send(answer.parts(self._handler.clock.date(), close), close, answer.number, answer.status)

    def _send(self, parts: Pieces, close: bool, number: str, status: int) -> None:
        """Called in the thread that reads completions, usually the event loop's."""
        if threading.get_ident() == self._handler.thread:
            self._connection.send(self, parts, close)
        else:
            whole: Pieces = [b"".join(parts)]
            self.loop.call_soon_threadsafe(self._connection.send, self, whole, close)
        if self._handler.access_log:
            self._log(number, status)

    def _log(self, number: str, status: int) -> None:
        log_request(number, "POST", self.head.path, status, self.started_ns, self.client, self._connection.peer)
