"""Limits on bytes: of one header, one body, all bodies that a process holds, and the answers that clients do not read.

Codings are here too, since a short body may decompress to a long one.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

from aiohttp import web

from paellapy.scheduler.models.model import Model
from paellapy.serving.errors import LateBodyError, RefusedError, RequestError, TooLargeError, short

# -- received bytes; the first four are defaults of [server]

MAX_BODY_BYTES = 64 << 20
MAX_HEADER_BYTES = 8190  # of the request line, and of each header
HELD_BYTES = 1_000_000_000  # of all requests that are not answered yet
BODY_TIMEOUT_S = 30.0

BESIDE_BYTES = 1 << 16  # of a body besides the numbers: names, parameters, an id; the limit where there are no tensors
NUMBER_BYTES = 48  # per number of JSON: up to 24 digits with sign and exponent, a comma, and blanks of a pretty printer

# Of the fast path; aiohttp reads what is longer.
FAST_HEADER_BYTES = 4096
FAST_HEADERS = 100
AHEAD_BYTES = 1 << 16  # kept behind a request that is still being answered
FIRST_BYTES = 1 << 20  # of memory for a body at its start; it grows with what arrives, whatever the Content-Length

RETRY_S = 1.0  # for a request that finds no room

# -- codings

COMPRESS_FROM_BYTES = 1024  # below this size the headers outweigh the saving
IN_THREAD_BYTES = 1 << 16  # larger bodies take a millisecond or more, so they leave the event loop
STEP_BYTES = 1 << 18  # decompressed per step
# Every body may grow to FREE_BYTES; beyond that, to MAX_RATIO times its length. Text of real numbers compresses
# three to ten times; deflate reaches 1032 times at most.
FREE_BYTES = 1 << 20
MAX_RATIO = 100

_unpacking = ThreadPoolExecutor(2, thread_name_prefix="unpack")  # its threads start on demand
_WBITS = {"gzip": 16 + zlib.MAX_WBITS, "deflate": zlib.MAX_WBITS}


def largest_request(model: Model) -> int:
    """Largest size in bytes of a valid request to the model, in JSON or binary."""
    values = sum(math.prod(spec.shape) for spec in model.inputs.values())
    return BESIDE_BYTES + model.max_batch * values * NUMBER_BYTES


class RequestBudget:
    """The bytes of all requests that a process holds: slow clients cannot use up its memory.

    >>> budget = RequestBudget(100)
    >>> budget.change(0, 60), budget.nbytes
    (None, 60)
    >>> budget.change(0, 60)
    Traceback (most recent call last):
    paellapy.serving.errors.RefusedError: 60 of at most 100 bytes of requests are held: try again
    """

    __slots__ = ("full", "max_bytes", "nbytes")

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes, self.nbytes = max_bytes, 0
        self.full = 0  # requests refused for lack of room

    def change(self, before: int, after: int) -> None:
        """A request holds `after` bytes in place of `before`. RefusedError: there is no room for more."""
        more = after - before
        if more > 0 and self.nbytes + more > self.max_bytes:
            self.full += 1
            raise RefusedError(
                f"{self.nbytes:,} of at most {self.max_bytes:,} bytes of requests are held: try again", "overloaded",
                RETRY_S, limit=self.max_bytes, given=self.nbytes + more,
            )  # fmt: skip
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


class ResponseBudget:
    """Bytes of answers that clients have not taken yet. Beyond the limit, the client that waits longest is cut off."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes, self.nbytes = max_bytes, 0
        self._waiting: dict[Callable[[], None], int] = {}  # by the function that cuts the connection off

    def begin(self, abort: Callable[[], None], nbytes: int) -> None:
        """A connection has that many bytes to send. A single one may have more than the limit."""
        self.nbytes += nbytes - self._waiting.get(abort, 0)
        self._waiting[abort] = nbytes
        while self.nbytes > self.max_bytes and len(self._waiting) > 1:
            slowest = next(iter(self._waiting))
            self.end(slowest)
            slowest()

    def end(self, abort: Callable[[], None]) -> None:
        """The connection has sent everything, or is lost."""
        self.nbytes -= self._waiting.pop(abort, 0)


def too_large(max_bytes: int, given: int) -> TooLargeError:
    said = f"the body is larger than the {max_bytes:,} bytes allowed at this address"
    return TooLargeError(said, limit=max_bytes, given=given)


async def read_body(
    request: web.Request, max_bytes: int, within_s: float | None, claim: Callable[[int], None] = lambda nbytes: None
) -> bytearray:
    """The body. `claim` is called before the body takes that much memory, and may refuse it."""
    if (request.content_length or 0) > max_bytes:
        raise too_large(max_bytes, request.content_length or 0)
    body = bytearray()
    try:
        async with asyncio.timeout(within_s):
            async for piece in request.content.iter_any():
                if len(body) + len(piece) > max_bytes:
                    raise too_large(max_bytes, len(body) + len(piece))
                claim(len(body) + len(piece))
                body += piece
    except TimeoutError:
        raise LateBodyError from None
    return body


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
        raise RequestError(said, 415, field="Content-Encoding", given=header)
    return coding


def unpack(body: bytes, coding: str, max_bytes: int) -> bytes:
    """Decompresses a body in steps and stops at its size limit.

    >>> unpack(pack(b"text", "gzip"), "gzip", 100)
    b'text'
    """
    most = min(max_bytes, max(FREE_BYTES, MAX_RATIO * len(body)))
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
                said = f"the body decompresses to more than the {most:,} bytes allowed"
                raise TooLargeError(said, limit=most, given=size)
            pieces.append(piece)
            if not piece and not body and not unpacker.eof:
                raise _not_coded(f"its {coding} data ends early", coding)
    except zlib.error as e:
        raise _not_coded(f"it is not {coding} ({e})", coding) from None
    if unpacker.unused_data:
        raise _not_coded(f"bytes follow the end of its {coding} data", coding)
    return b"".join(pieces)


def _not_coded(why: str, coding: str) -> RequestError:
    return RequestError(f"the body cannot be decompressed: {why}", field="Content-Encoding", given=coding)


async def unpacked(body: bytes, coding: str, max_bytes: int) -> bytes:
    """`unpack`, in one of a few threads where it may take long, so that the event loop goes on."""
    if len(body) * MAX_RATIO <= IN_THREAD_BYTES:
        return unpack(body, coding, max_bytes)
    return await asyncio.get_running_loop().run_in_executor(_unpacking, unpack, body, coding, max_bytes)


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
