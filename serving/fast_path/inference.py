"""An inference on the fast path: its answer is bytes, written to its connection where its completion is read."""

from __future__ import annotations

import asyncio
import threading

from paellapy.serving.access import Access
from paellapy.serving.compression import IN_THREAD_BYTES, answer_coding, pack
from paellapy.serving.errors import RequestError, error_answer
from paellapy.serving.fast_path.connection import FastConnection, Reading
from paellapy.serving.fast_path.headers import Clock, Head, Heads, answer_head, error_pieces
from paellapy.serving.inference import Inference
from paellapy.serving.limits import BESIDE_BYTES, largest_request
from paellapy.serving.logs import log_request, request_id
from paellapy.serving.protocol import Pieces
from paellapy.serving.service import Service


class FastHandler:
    """State that all connections of a server share."""

    def __init__(self, service: Service, access: Access, client_header: str, access_log: bool) -> None:
        """To be called in the event loop that reads the connections."""
        self.service = service
        self.heads = Heads(client_header, service.limits.max_body_bytes, access.admits)
        self.clock = Clock()
        self.access_log = access_log
        self.loop, self.thread = asyncio.get_running_loop(), threading.get_ident()
        self.reading = Reading()
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

    __slots__ = ("_connection", "_handler", "head")

    def __init__(self, connection: FastConnection, handler: FastHandler, head: Head, client: str) -> None:
        super().__init__(handler.service, head.model, head.version, client)
        self._connection, self._handler, self.head = connection, handler, head

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        return self._handler.loop

    @property
    def peer(self) -> str | None:
        return self._connection.peer

    def answered(self, pieces: Pieces, json_length: int | None) -> None:
        number, size = request_id(self.head.id), sum(map(len, pieces))
        if self.head.accepts is not None:
            coding = answer_coding(self.head.accepts, size, binary=json_length is not None)
            if coding is not None:
                self._pack(pieces, number, size, json_length, coding)
                return
        self._succeed(number, pieces, json_length)

    def refused(self, error: Exception) -> None:
        number = request_id(self.head.id)
        found, close = error_answer(error, number, self.head.path), self._closes
        self.service.note_refusal(found.status, error, self.client, self.peer)
        self._send(error_pieces(found, number, self._handler.clock.date(), close), close, number, found.status)

    def leave(self) -> None:
        if not self.over:
            self.service.counters.note_status(499)
            if self._handler.access_log:
                self._log(request_id(self.head.id), 499, 0)
        super().leave()

    def release(self) -> None:
        if self._held_bytes:
            self.claim(0)
        self.service.counters.leave()

    def _pack(self, pieces: Pieces, number: str, size: int, json_length: int | None, coding: str) -> None:
        body, more = b"".join(pieces), b"Content-Encoding: %b\r\n" % coding.encode()
        if size < IN_THREAD_BYTES or threading.get_ident() != self._handler.thread:
            self._succeed(number, [pack(body, coding)], json_length, more)
            return

        def packed(future: asyncio.Future[bytes]) -> None:
            self._succeed(number, [future.result()], json_length, more)

        self.loop.run_in_executor(None, pack, body, coding).add_done_callback(packed)

    @property
    def _closes(self) -> bool:
        """Whether this is the connection's last answer."""
        return self.service.draining or self._connection.closing

    def _succeed(self, number: str, pieces: Pieces, json_length: int | None, more: bytes = b"") -> None:
        close, date = self._closes, self._handler.clock.date()
        if warning := self.warning:
            more += b"Warning: %b\r\n" % warning.encode()
        head = answer_head(200, number, sum(map(len, pieces)), date, json_length, more, close)
        self._send([head, *pieces], close, number, 200)

    def _send(self, parts: Pieces, close: bool, number: str, status: int) -> None:
        """Called in the thread that reads completions, usually the event loop's."""
        self.service.counters.note_status(status)
        if threading.get_ident() == self._handler.thread:
            self._connection.send(self, parts, close)
        else:
            whole: Pieces = [b"".join(parts)]
            self.loop.call_soon_threadsafe(self._connection.send, self, whole, close)
        if self._handler.access_log:
            self._log(number, status, sum(map(len, parts[1:])))

    def _log(self, number: str, status: int, size: int) -> None:
        facts = self.facts(self.head.length, size)
        log_request(number, "POST", self.head.path, status, self.started_ns, self.client, self.peer, facts)
