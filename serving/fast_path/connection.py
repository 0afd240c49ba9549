"""The short way of an inference: from the bytes of a connection into a slot, and from the slot to the connection.

`POST /v2/models/…/infer` as inference clients send it, with its length and without codings, needs no router, no
middleware, no task and no request object. It is read here and answered from where completions are read. Everything else
goes to aiohttp, byte for byte: other addresses, other framings, whatever looks unusual, and so every judgement on what
is no proper HTTP. What a request means, its checks, its errors and its counts are the same on both ways.
"""

from __future__ import annotations

import asyncio
import re
import threading
import time
import zlib
from typing import Any

from paellapy.instrument.errors import PaellaError
from paellapy.scheduler.core.errors import UnknownModelError
from paellapy.scheduler.models.model import Model
from paellapy.serving.connections import Connection
from paellapy.serving.errors import retry_after_s, status_of
from paellapy.serving.fast_path.buffers import AHEAD_BYTES, Body, Reader, write
from paellapy.serving.fast_path.head import LONGEST_HEAD, Head, Lane
from paellapy.serving.fast_path.inference import Item, Work
from paellapy.serving.infer import COMPRESS_FROM_BYTES, COMPRESS_IN_THREAD_BYTES, choose_coding
from paellapy.serving.logs import log, request_id
from paellapy.serving.middleware import encode_json
from paellapy.serving.protocol import Request, decode
from paellapy.serving.service import met_unload

_LENGTH = re.compile(rb"\r\ncontent-length:[ \t]*([0-9]{1,15})[ \t]*(?=\r\n)")
_START = b"POST /v2/models/"

_WBITS = {"gzip": 16 + zlib.MAX_WBITS, "deflate": zlib.MAX_WBITS}


class FastConnection(Connection):
    """A connection whose inferences take the short way, and whose other requests are aiohttp's."""

    __slots__ = ("_body_timer", "_closing", "_drained", "_head", "_held", "_reading_held", "_strange", "_unwanted",
                 "_work", "body", "lane")  # fmt: skip

    def __init__(self, manager: Any, *, lane: Lane, **options: Any) -> None:
        super().__init__(manager, **options)
        self.lane = lane
        self._held = b""  # what has come and belongs to nobody yet
        self._head: Head | None = None  # of the request whose body is being read
        self.body: Body | None = None  # as far as it has come
        self._body_timer: asyncio.TimerHandle | None = None
        self._unwanted = 0  # bytes of a body whose request is answered already
        self._work: Work | None = None  # what the engine has
        self._strange = False  # aiohttp's parser may hold part of a request: it gets all that follows
        self._reading_held = self._closing = False
        self._drained: asyncio.Future[None] | None = None

    # -- in

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        if transport.get_extra_info("sslcontext") is None:
            transport.set_protocol(Reader(self))

    @property
    def idle(self) -> bool:
        """What comes next is looked at when it comes."""
        return self._work is None and not self._paused

    def data_received(self, data: bytes | memoryview) -> None:
        """A view is of memory that is used again after this call."""
        if self._strange or not data:  # nothing: aiohttp to itself
            super().data_received(bytes(data))
        elif self.body is not None:
            self._read_body(data)
        elif self._unwanted:
            n = min(len(data), self._unwanted)
            self._unwanted -= n
            if n < len(data):
                self.data_received(data[n:])
        elif not self.idle:  # the next one when this one is answered, and its answer taken
            self._held += bytes(data)
            if len(self._held) > AHEAD_BYTES and not self._reading_held and self.transport is not None:
                self._reading_held = True
                self.transport.pause_reading()
        else:
            self._take(self._held + bytes(data) if self._held else data)

    def _take(self, data: bytes | memoryview) -> None:
        """At the beginning of a request."""
        self._held = b""
        if self._closing or self._force_close or self._close:
            return
        # After a request of its own, aiohttp waits for the next one: only then its answer is written.
        idle = self._request_count == 0 or (self._waiter is not None and not self._waiter.done())
        start = data if isinstance(data, bytes) else bytes(data[:LONGEST_HEAD])
        if not start.startswith(_START) or not idle or self._messages or not self._keepalive:
            self._give(bytes(data))
            return
        end = start.find(b"\r\n\r\n") + 4
        head = self.lane.head(start[:end]) if end >= 4 else None
        if head is None:
            self._give(bytes(data))
            return
        if self._timer is not None:
            self._disarm()
        body_end = end + head.length
        if len(data) >= body_end:
            self._held = bytes(data[body_end:])
            self._begin(head, memoryview(data)[end:body_end], time.monotonic_ns())
            return
        service = self.lane.service
        try:  # before the body is read: it may be long
            service.admission.check_room(service.registry.ready(head.model, head.version))
        except PaellaError as e:
            self._unwanted = body_end - len(data)
            work = self._work = Work(self, head, time.monotonic_ns())
            service.counters.enter()
            self.failed(work, e)
            return
        self._head, self.body = head, Body(head.length)
        service.counters.enter()
        timeout_s = service.body_timeout_s
        if timeout_s is not None:
            self._body_timer = self._loop.call_later(timeout_s, self._body_is_late)
        self._read_body(memoryview(data)[end:])

    def _give(self, data: bytes) -> None:
        """To aiohttp. Whole requests leave nothing behind in its parser, and the next one may be ours again."""
        end = data.find(b"\r\n\r\n")
        head = data[: max(0, end) + 2].lower()
        lengths = _LENGTH.findall(head)
        self._strange = (
            end < 0
            or len(lengths) > 1
            or end + 4 + (int(lengths[0]) if lengths else 0) != len(data)
            or b"\r\ntransfer-encoding" in head
            or b"\r\nupgrade" in head
        )
        super().data_received(data)

    def _read_body(self, data: bytes | memoryview) -> None:
        body = self.body
        assert body is not None
        n = min(len(data), body.length - body.at)
        body.add(data[:n])
        self._held = bytes(data[n:])
        self.body_received(body, 0)

    def body_received(self, body: Body, nbytes: int) -> None:
        """As many bytes have come into the room that the body had for them."""
        body.at += nbytes
        head = self._head
        if body.at < body.length or head is None or body is not self.body:
            return
        if self._body_timer is not None:
            self._body_timer.cancel()
            self._body_timer = None
        self._head = self.body = None
        self.lane.service.counters.leave()
        self._begin(head, body.all(), time.monotonic_ns())

    def _body_is_late(self) -> None:
        self._body_timer = None
        head, self._head, self.body = self._head, None, None
        self.lane.service.counters.leave()
        if head is not None and self.transport is not None:
            self._closing = True
            body: list[bytes | memoryview] = [encode_json({"error": "the body did not arrive in time"})]
            number = request_id(head.id)
            write(self.transport, self.lane.response(408, body, b"application/json", number, b"", True))
            self.transport.close()

    def _begin(self, head: Head, body: memoryview, started_ns: int) -> None:
        service = self.lane.service
        work = self._work = Work(self, head, started_ns)
        service.counters.enter()
        try:
            model = work.model = service.registry.ready(head.model, head.version)
            service.admission.check_room(model)
            request = work.request = decode(model, body, head.json_length)
            deadline_ms = None if request.timeout_us is None else request.timeout_us * 1e-3
            row = service.registry.entries[head.model].row
            work.ticket = service.admission.enter(model, row, request.priority, deadline_ms)
            try:
                self._submit(work, model, request, deadline_ms)
            except Exception as e:
                if work.over:  # an earlier item has failed meanwhile, and that was the answer
                    return
                work.cancel()
                if isinstance(e, UnknownModelError):
                    raise met_unload(model.name) from e
                raise
        except Exception as e:
            self.failed(work, e)

    def _submit(self, work: Work, model: Model, request: Request, deadline_ms: float | None) -> None:
        engine = self.lane.service.engine
        loaded = engine._find(model.name)
        work.front = engine._front
        work.front.attach(self._loop)
        client = work.head.client or None
        inputs = request.inputs
        if request.items == 1:
            item = {key: inputs[key][0] for key in model.inputs}
            work.pending.append(engine._submit(loaded, item, deadline_ms, request.priority, client, work))
            return
        work.left = request.items
        for k in range(request.items):
            item = {key: inputs[key][k] for key in model.inputs}
            work.pending.append(engine._submit(loaded, item, deadline_ms, request.priority, client, Item(work, k)))
            if work.over:  # an earlier item has failed meanwhile
                work.front.cancel(work.pending[-1])
                break

    # -- out

    def failed(self, work: Work, error: Exception) -> None:
        """As the middleware answers errors."""
        work.over = True
        service = self.lane.service
        service.note_failure(work.head.model, error, time.monotonic_ns() - work.started_ns)
        number, more = request_id(work.head.id), b""
        status = status_of(error)[0] if isinstance(error, PaellaError) else 500
        if status == 500:
            fields = {"request": number, "path": f"/v2/models/{work.head.model}/infer"}
            log.error("a request failed", exc_info=error, extra={"fields": fields})
            said = f"internal error; the server's log has it under request {number}"
        else:
            said = str(error)
            if status == 503:
                assert isinstance(error, PaellaError)
                more = b"Retry-After: %d\r\n" % retry_after_s(error)
        self._write(work, status, [encode_json({"error": said})], b"application/json", number, more)

    def done(self, work: Work, pieces: list[bytes | memoryview], json_length: int | None) -> None:
        service = self.lane.service
        number, more, kind = request_id(work.head.id), b"", b"application/json"
        if json_length is not None:
            more, kind = b"Inference-Header-Content-Length: %d\r\n" % json_length, b"application/octet-stream"
        service.counters.of(work.head.model).note_answer(time.monotonic_ns() - work.started_ns)
        if work.head.accepts is not None and (size := sum(map(len, pieces))) >= COMPRESS_FROM_BYTES:
            coding = choose_coding(work.head.accepts, binary=json_length is not None)
            if coding is not None:
                more += b"Content-Encoding: %b\r\n" % coding.encode()
                self._compress(work, b"".join(pieces), size, coding, kind, number, more)
                return
        self._write(work, 200, pieces, kind, number, more)

    def _compress(
        self, work: Work, body: bytes, size: int, coding: str, kind: bytes, number: str, more: bytes
    ) -> None:
        def pack() -> bytes:
            packer = zlib.compressobj(wbits=_WBITS[coding])
            return packer.compress(body) + packer.flush()

        if size < COMPRESS_IN_THREAD_BYTES or threading.get_ident() != self.lane.thread:
            self._write(work, 200, [pack()], kind, number, more)
            return

        def packed(future: asyncio.Future[bytes]) -> None:
            self._write(work, 200, [future.result()], kind, number, more)

        self._loop.run_in_executor(None, pack).add_done_callback(packed)

    def _write(
        self, work: Work, status: int, pieces: list[bytes | memoryview], kind: bytes, number: str, more: bytes
    ) -> None:
        """From the thread that reads completions: usually the loop's own."""
        close = self.lane.service.draining or self._closing
        response = self.lane.response(status, pieces, kind, number, more, close)
        if threading.get_ident() == self.lane.thread:
            self._send(work, response, close)
        else:
            whole: list[bytes | memoryview] = [b"".join(response)]
            self._loop.call_soon_threadsafe(self._send, work, whole, close)

    def _send(self, work: Work, response: list[bytes | memoryview], close: bool) -> None:
        if self._work is not work:  # the client has left
            return
        self._work = None
        self.lane.service.counters.leave()
        if self._drained is not None and not self._drained.done():
            self._drained.set_result(None)
        if self.transport is None:
            return
        write(self.transport, response)
        self._next_keepalive_close_time = self._loop.time() + self._keepalive_timeout
        if close:
            self._closing = True
            self.transport.close()
            return
        if self._held or self._reading_held:
            # Not from here: a chain of requests that fail at once would be as deep as it is long.
            self._loop.call_soon(self._go_on)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._go_on()

    def _go_on(self) -> None:
        if self._work is not None or self._head is not None or self._paused or self.transport is None:
            return
        if self._reading_held:
            self._reading_held = False
            self.transport.resume_reading()
        if self._held and not self._strange:
            self._take(self._held)

    # -- the end

    def connection_lost(self, exc: BaseException | None) -> None:
        if self._body_timer is not None:
            self._body_timer.cancel()
            self._body_timer = None
        service = self.lane.service
        work, self._work = self._work, None
        if work is not None:
            work.cancel()
            service.counters.leave()
            service.note_left(work.head.model)
        elif self._head is not None:
            service.counters.leave()
            service.note_left(self._head.model)
        self._head, self._held, self.body = None, b"", None
        if self._drained is not None and not self._drained.done():
            self._drained.set_result(None)
        super().connection_lost(exc)

    def close(self) -> None:
        """After the answer that is on its way."""
        if self._work is not None or self._head is not None:
            self._closing = True
        else:
            super().close()

    async def shutdown(self, timeout: float | None = 15.0) -> None:
        if self._work is not None or self._head is not None:
            self._closing = True
            self._drained = self._loop.create_future()
            await asyncio.wait((self._drained,), timeout=timeout)
        await super().shutdown(timeout)

    def _process_keepalive(self) -> None:
        if self._work is not None or self._head is not None:
            self._next_keepalive_close_time = self._loop.time() + self._keepalive_timeout
        super()._process_keepalive()
