"""Bodies of requests that aiohttp reads: at most as long as allowed, and counted as they arrive."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from aiohttp import web

from paellapy.serving.errors import LateBodyError, TooLargeError


async def read_body(
    request: web.Request, most_bytes: int, within_s: float | None, claim: Callable[[int], None] = lambda nbytes: None
) -> bytearray:
    """The body. `claim` is called before the body takes that much memory, and may refuse it."""
    if (request.content_length or 0) > most_bytes:
        raise too_large(most_bytes)
    body = bytearray()
    try:
        async with asyncio.timeout(within_s):
            async for piece in request.content.iter_any():
                if len(body) + len(piece) > most_bytes:
                    raise too_large(most_bytes)
                claim(len(body) + len(piece))
                body += piece
    except TimeoutError:
        raise LateBodyError from None
    return body


def too_large(most_bytes: int) -> TooLargeError:
    return TooLargeError(f"the body is larger than the {most_bytes:,} bytes allowed at this address")
