"""An inference on the fast path: its answer is written to its connection where its completion is read."""

from __future__ import annotations

import asyncio
import threading

from paellapy.serving.codings import IN_THREAD_BYTES, answer_coding, pack
from paellapy.serving.errors import error_answer
from paellapy.serving.fast_path.answers import BINARY, Answer, Clock, json_header, of_error, success
from paellapy.serving.fast_path.buffers import read_buffer
from paellapy.serving.fast_path.head import Head, Heads
from paellapy.serving.fast_path.way import Client
from paellapy.serving.inference import Inference, Pieces
from paellapy.serving.logs import request_id
from paellapy.serving.protocol import largest_request
from paellapy.serving.service import Service


class ShortWay:
    """State that all connections of a server share."""

    def __init__(self, service: Service, client_header: str) -> None:
        """To be called in the event loop that reads the connections."""
        self.service, self.body_timeout_s = service, service.body_timeout_s
        self.heads = Heads(client_header, service.max_body_bytes)
        self.clock = Clock()
        self.loop, self.thread = asyncio.get_running_loop(), threading.get_ident()
        self.buffer = read_buffer()  # shared: each read is used up before the next

    def begin(self, client: Client, head: Head, raw: bytes) -> ShortInference:
        return ShortInference(client, self, head)

    def is_doubtful(self, head: Head, raw: bytes) -> bool:
        entry = self.service.registry.entries.get(head.model)
        model = None if entry is None else entry.model
        return model is not None and head.length > largest_request(model)


class ShortInference(Inference):
    __slots__ = ("_client", "_held_bytes", "_way", "head")

    def __init__(self, client: Client, way: ShortWay, head: Head) -> None:
        super().__init__(way.service, head.model, head.version, head.client)
        self._client, self._way, self.head = client, way, head
        self._held_bytes = 0  # of a body that did not arrive at once

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        return self._way.loop

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
        close = self.service.draining or self._client.closing
        self._send([success(number, size, json_length, self._way.clock.date(), close), *pieces], close)

    def refused(self, error: Exception) -> None:
        number = request_id(self.head.id)
        self._write(of_error(error_answer(error, number, f"/v2/models/{self.name}/infer"), number))

    def settle(self) -> None:
        if self._held_bytes:
            self.claim(0)
        self.service.counters.leave()

    def _pack(self, pieces: Pieces, number: str, size: int, json_length: int | None, coding: str) -> None:
        body = b"".join(pieces)
        answer = Answer(number, [], more=b"Content-Encoding: %b\r\n" % coding.encode())
        if json_length is not None:
            answer.kind, answer.more = BINARY, json_header(json_length) + answer.more
        if size < IN_THREAD_BYTES or threading.get_ident() != self._way.thread:
            answer.pieces = [pack(body, coding)]
            self._write(answer)
            return

        def packed(future: asyncio.Future[bytes]) -> None:
            answer.pieces = [future.result()]
            self._write(answer)

        self._way.loop.run_in_executor(None, pack, body, coding).add_done_callback(packed)

    def _write(self, answer: Answer) -> None:
        close = self.service.draining or self._client.closing
        self._send(answer.parts(self._way.clock.date(), close), close)

    def _send(self, parts: Pieces, close: bool) -> None:
        """Called in the thread that reads completions, usually the event loop's."""
        if threading.get_ident() == self._way.thread:
            self._client.send(self, parts, close)
        else:
            whole: Pieces = [b"".join(parts)]
            self._way.loop.call_soon_threadsafe(self._client.send, self, whole, close)
