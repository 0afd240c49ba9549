"""`POST …/infer` through aiohttp: reads the body and sends the answer. `inference.py` does the work in between."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable

from aiohttp import web

from paellapy.serving.access import infers
from paellapy.serving.bodies import read_body
from paellapy.serving.codings import IN_THREAD_BYTES, answer_coding, body_coding, pack, unpacked
from paellapy.serving.connections import Connection
from paellapy.serving.inference import Inference, Pieces
from paellapy.serving.middleware import CLIENT, SERVICE
from paellapy.serving.protocol import largest_request
from paellapy.serving.service import Service

HEADER_LENGTH = "Inference-Header-Content-Length"

Answer = tuple[bytes, int | None]  # the body, and the length of its JSON if binary tensors follow


class _Awaited(Inference):
    """An inference whose handler awaits the answer."""

    __slots__ = ("_loop", "answer", "thread")

    def __init__(self, service: Service, name: str, version: str | None, client: str) -> None:
        super().__init__(service, name, version, client)
        self._loop, self.thread = asyncio.get_running_loop(), threading.get_ident()
        self.answer: asyncio.Future[Answer] = self._loop.create_future()

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        return self._loop

    def answered(self, pieces: Pieces, json_length: int | None) -> None:
        self._tell((b"".join(pieces), json_length))

    def refused(self, error: Exception) -> None:
        self._tell(error)

    def _tell(self, result: Answer | Exception) -> None:
        if threading.get_ident() == self.thread:
            self._set(result)
        elif not self.loop.is_closed():
            self.loop.call_soon_threadsafe(self._set, result)

    def _set(self, result: Answer | Exception) -> None:
        if self.answer.done():  # its handler was cancelled in the meantime
            return
        if isinstance(result, Exception):
            self.answer.set_exception(result)
        else:
            self.answer.set_result(result)


@infers
async def infer(request: web.Request) -> web.StreamResponse:
    service, where = request.app[SERVICE], request.match_info
    work = _Awaited(service, where["model"], where.get("version"), request[CLIENT])
    try:
        with service.held.holding() as claim:
            try:
                body = await read(request, service, largest_request(work.look()), claim)
            except Exception as e:
                work.fail(e)
            else:
                work.start(body, request.headers.get(HEADER_LENGTH))
            answer, json_length = await work.answer
    except asyncio.CancelledError:
        work.leave()
        raise
    finally:
        service.counters.leave()
    binary = json_length is not None
    headers = {"Content-Type": "application/octet-stream" if binary else "application/json"}
    if binary:
        headers[HEADER_LENGTH] = str(json_length)
    coding = answer_coding(request.headers.get("Accept-Encoding"), len(answer), binary)
    if coding is not None:
        headers["Content-Encoding"] = coding
        size = len(answer)
        answer = pack(answer, coding) if size < IN_THREAD_BYTES else await asyncio.to_thread(pack, answer, coding)
    return web.Response(body=answer, headers=headers)


async def read(
    request: web.Request, service: Service, most_bytes: int, claim: Callable[[int], None] = lambda nbytes: None
) -> bytes:
    """The decompressed body: at most `most_bytes` and `max_body_bytes`. `claim` is called with its size as it grows.

    A body whose Content-Length is too large is not read, and a body that arrives too slowly is not waited for. Handlers
    call this function once the key is checked, so that nothing is decompressed for a client without a key.
    """
    most = min(most_bytes, service.max_body_bytes)
    # Inside another application, the outer server has already decompressed the body.
    coding = body_coding(request.headers.get("Content-Encoding")) if isinstance(request.protocol, Connection) else None
    body = bytes(await read_body(request, most, service.body_timeout_s, claim))
    if coding is not None:
        body = await unpacked(body, coding, most)
        claim(len(body))
    return body
