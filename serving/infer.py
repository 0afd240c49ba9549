"""`POST …/infer`: the way every inference takes."""

from __future__ import annotations

import asyncio
import time

from aiohttp import web

from paellapy.serving.middleware import CLIENT, SERVICE
from paellapy.serving.protocol import decode, encode
from paellapy.serving.registry import VERSION
from paellapy.serving.service import Service

HEADER_LENGTH = "Inference-Header-Content-Length"
COMPRESS_FROM_BYTES = 1024  # below, the headers weigh more than what is saved
COMPRESS_IN_THREAD_BYTES = 1 << 16

_CODINGS = {"gzip": web.ContentCoding.gzip, "deflate": web.ContentCoding.deflate}


async def infer(request: web.Request) -> web.StreamResponse:
    """Decode, run, encode."""
    started_ns = time.monotonic_ns()
    service, where = request.app[SERVICE], request.match_info
    name, version = where["model"], where.get("version")
    service.counters.enter()
    try:
        service.admission.check_room(service.registry.ready(name, version))  # before the body is read: it may be long
        body = await read(request, service)
        model = service.registry.ready(name, version)  # it may have been loaded anew meanwhile
        work = decode(model, body, request.headers.get(HEADER_LENGTH))
        results = await service.infer(model, work, request[CLIENT])
    except asyncio.CancelledError:
        service.note_left(name)
        raise
    except Exception as e:
        service.note_failure(name, e, time.monotonic_ns() - started_ns)
        raise
    finally:
        service.counters.leave()
    pieces, header_length = encode(model, VERSION, work, results)
    response = web.Response(
        body=pieces[0] if len(pieces) == 1 else b"".join(pieces),
        content_type="application/json" if header_length is None else "application/octet-stream",
        zlib_executor_size=COMPRESS_IN_THREAD_BYTES,
    )
    if header_length is not None:
        response.headers[HEADER_LENGTH] = str(header_length)
    if (accepted := request.headers.get("Accept-Encoding")) and sum(map(len, pieces)) >= COMPRESS_FROM_BYTES:
        coding = choose_coding(accepted, binary=header_length is not None)
        if coding is not None:
            response.enable_compression(_CODINGS[coding])
    service.counters.of(name).note_answer(time.monotonic_ns() - started_ns)
    return response


async def read(request: web.Request, service: Service) -> bytes:
    """The body, decompressed. One that says it is too large is not read, nor waited for one that comes drop by drop."""
    if request.client_max_size != service.max_body_bytes:  # as a sub-application, where the outer one sets the limit
        request = request.clone(client_max_size=service.max_body_bytes)
    if (request.content_length or 0) > service.max_body_bytes:
        raise web.HTTPRequestEntityTooLarge(service.max_body_bytes, request.content_length or 0)
    if request.content.is_eof() or service.body_timeout_s is None:
        return await request.read()
    async with asyncio.timeout(service.body_timeout_s):
        return await request.read()


def choose_coding(accepted: str, binary: bool) -> str | None:
    """gzip, deflate or neither, from Accept-Encoding.

    Many HTTP libraries name all codings they know in every request. Tensors hardly shrink and cost milliseconds, so
    they are compressed only for a client that asks for one coding, as inference clients do.

    >>> choose_coding("gzip, deflate, br", binary=True), choose_coding("gzip", binary=True)
    (None, 'gzip')
    """
    wanted = []
    for each in accepted.lower().split(","):
        coding, _, options = each.partition(";")
        weight = options.replace(" ", "")
        refused = weight.startswith("q=0") and not weight.strip("q=0.")
        if coding.strip() in _CODINGS and not refused:
            wanted.append(coding.strip())
    if not wanted or (binary and "," in accepted):
        return None
    return "gzip" if "gzip" in wanted else wanted[0]
