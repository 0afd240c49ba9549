"""Bodies of requests that aiohttp reads: at most as long as allowed, and counted as they arrive."""

from __future__ import annotations

import asyncio
import contextlib
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

from aiohttp import web

from paellapy.serving.errors import LateBodyError, RefusedError, RequestError, TooLargeError, short


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


# Content codings: choosing one for an answer, compressing it, and decompressing request bodies within limits.


COMPRESS_FROM_BYTES = 1024  # below this size the headers outweigh the saving
IN_THREAD_BYTES = 1 << 16  # larger bodies take a millisecond or more, so they leave the event loop
STEP_BYTES = 1 << 18  # decompressed per step
# Every body may grow to FREE_BYTES; beyond that, to MOST_RATIO times its length. Text of real numbers compresses
# three to ten times; deflate reaches 1032 times at most.
FREE_BYTES = 1 << 20
MOST_RATIO = 100

_unpacking = ThreadPoolExecutor(2, thread_name_prefix="unpack")  # its threads start on demand
_WBITS = {"gzip": 16 + zlib.MAX_WBITS, "deflate": zlib.MAX_WBITS}


def answer_coding(accepted: str | None, size: int, binary: bool) -> str | None:
    """The coding for an answer of this size, given the client's Accept-Encoding; None: send it uncompressed.

    >>> answer_coding("gzip", 2000, binary=True), answer_coding("gzip", 20, binary=True)
    ('gzip', None)
    """
    return choose_coding(accepted, binary) if accepted is not None and size >= COMPRESS_FROM_BYTES else None


def choose_coding(accepted: str, binary: bool) -> str | None:
    """Chooses gzip, deflate or neither from Accept-Encoding.

    Many HTTP libraries list all codings they know in every request. Tensors hardly shrink and cost milliseconds, so
    they are compressed only for a client that lists a single coding, as inference clients do.

    >>> choose_coding("gzip, deflate, br", binary=True), choose_coding("gzip", binary=True)
    (None, 'gzip')
    """
    wanted = []
    for each in accepted.lower().split(","):
        coding, _, options = each.partition(";")
        weight = options.replace(" ", "")
        refused = weight.startswith("q=0") and not weight.strip("q=0.")
        if coding.strip() in _WBITS and not refused:
            wanted.append(coding.strip())
    if not wanted or (binary and "," in accepted):
        return None
    return "gzip" if "gzip" in wanted else wanted[0]


def pack(body: bytes, coding: str) -> bytes:
    """
    >>> zlib.decompress(pack(b"text", "deflate"))
    b'text'
    """
    packer = zlib.compressobj(wbits=_WBITS[coding])
    return packer.compress(body) + packer.flush()


class CodingError(RequestError):
    """A body that does not match its Content-Encoding."""


def body_coding(header: str | None) -> str | None:
    """The coding of a request's body; RequestError 415 where this server does not support it.

    >>> body_coding("X-GZIP"), body_coding("identity"), body_coding(None)
    ('gzip', None, None)
    """
    coding = (header or "identity").strip().lower().removeprefix("x-")
    if coding in ("", "identity"):
        return None
    if coding not in _WBITS:
        said = f"the Content-Encoding {short(header)} is not supported: send the body as gzip, deflate or uncompressed"
        raise RequestError(said, 415)
    return coding


def unpack(body: bytes, coding: str, most_bytes: int) -> bytes:
    """Decompresses a body in steps and stops at its size limit.

    >>> unpack(pack(b"text", "gzip"), "gzip", 100)
    b'text'
    """
    most = min(most_bytes, max(FREE_BYTES, MOST_RATIO * len(body)))
    wbits = _WBITS[coding]
    if coding == "deflate" and body[:1] and body[0] & 0x0F != zlib.DEFLATED:  # some clients omit zlib's frame
        wbits = -zlib.MAX_WBITS
    unpacker, pieces, size = zlib.decompressobj(wbits), list[bytes](), 0
    try:
        while not unpacker.eof:
            piece = unpacker.decompress(body, STEP_BYTES)
            body = unpacker.unconsumed_tail
            size += len(piece)
            if size > most:
                raise TooLargeError(f"the body decompresses to more than the {most:,} bytes allowed")
            pieces.append(piece)
            if not piece and not body and not unpacker.eof:
                raise CodingError(f"the body cannot be decompressed: its {coding} data ends early")
    except zlib.error as e:
        raise CodingError(f"the body cannot be decompressed: it is not {coding} ({e})") from None
    if unpacker.unused_data:
        raise CodingError(f"the body cannot be decompressed: bytes follow the end of its {coding} data")
    return b"".join(pieces)


async def unpacked(body: bytes, coding: str, most_bytes: int) -> bytes:
    """`unpack`, in one of a few threads where it may take long, so that the event loop goes on."""
    if len(body) * MOST_RATIO <= IN_THREAD_BYTES:
        return unpack(body, coding, most_bytes)
    return await asyncio.get_running_loop().run_in_executor(_unpacking, unpack, body, coding, most_bytes)


# Bytes of requests that a process holds: a sum with a limit, so that slow clients cannot use up its memory.


RETRY_S = 1.0


class Held:
    """The sum over all requests.

    >>> held = Held(100)
    >>> held.change(0, 60), held.nbytes
    (None, 60)
    >>> held.change(0, 60)
    Traceback (most recent call last):
    paellapy.serving.errors.RefusedError: 60 of at most 100 bytes of requests are held: try again
    """

    __slots__ = ("full", "most_bytes", "nbytes")

    def __init__(self, most_bytes: int) -> None:
        self.most_bytes, self.nbytes = most_bytes, 0
        self.full = 0  # requests refused for lack of room

    def change(self, before: int, after: int) -> None:
        """A request holds `after` bytes in place of `before`. RefusedError: there is no room for more."""
        more = after - before
        if more > 0 and self.nbytes + more > self.most_bytes:
            self.full += 1
            said = f"{self.nbytes:,} of at most {self.most_bytes:,} bytes of requests are held: try again"
            raise RefusedError(said, "overloaded", RETRY_S)
        self.nbytes += more

    @contextlib.contextmanager
    def holding(self) -> Iterator[Callable[[int], None]]:
        """For one request: yields a function that sets the number of bytes that it holds."""
        held = 0

        def claim(nbytes: int) -> None:
            nonlocal held
            self.change(held, nbytes)
            held = nbytes

        try:
            yield claim
        finally:
            claim(0)


# Answers that clients have not taken yet. Beyond a limit, the client that takes longest is disconnected.


class Slow(Protocol):
    """A connection whose client does not take its answer at once."""

    def abort(self) -> None: ...


class Unsent:
    """Unsent bytes of each connection, the longest waiting one first."""

    def __init__(self, most_bytes: int) -> None:
        self.most_bytes, self.nbytes = most_bytes, 0
        self._waiting: dict[Slow, int] = {}

    def begin(self, connection: Slow, nbytes: int) -> None:
        """The connection waits with that many bytes. A single one may have more than the limit."""
        self.nbytes += nbytes - self._waiting.get(connection, 0)
        self._waiting[connection] = nbytes
        while self.nbytes > self.most_bytes and len(self._waiting) > 1:
            slowest = next(iter(self._waiting))
            self.end(slowest)
            slowest.abort()

    def end(self, connection: Slow) -> None:
        """The connection has sent everything, or is lost."""
        self.nbytes -= self._waiting.pop(connection, 0)
