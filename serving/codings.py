"""Content codings: which one an answer gets, packing it, and unpacking bodies within bounds."""

from __future__ import annotations

import asyncio
import zlib
from concurrent.futures import ThreadPoolExecutor

from paellapy.serving.errors import RequestError, TooLargeError, short

COMPRESS_FROM_BYTES = 1024  # below, the headers weigh more than what is saved
IN_THREAD_BYTES = 1 << 16  # from here on it takes a millisecond and more: not in the event loop
STEP_BYTES = 1 << 18  # unpacked at once
# A body may grow to FREE_BYTES whatever it is; beyond, to MOST_RATIO times its length. Text of real numbers shrinks
# three to ten times, and deflate at most 1032 times.
FREE_BYTES = 1 << 20
MOST_RATIO = 100

_unpacking = ThreadPoolExecutor(2, thread_name_prefix="unpack")  # threads are started when they are needed
_WBITS = {"gzip": 16 + zlib.MAX_WBITS, "deflate": zlib.MAX_WBITS}


def answer_coding(accepted: str | None, size: int, binary: bool) -> str | None:
    """The coding of an answer of this size to a client that accepts these; None: as it is.

    >>> answer_coding("gzip", 2000, binary=True), answer_coding("gzip", 20, binary=True)
    ('gzip', None)
    """
    return choose_coding(accepted, binary) if accepted is not None and size >= COMPRESS_FROM_BYTES else None


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
    """A body that is not what its Content-Encoding says."""


def body_coding(header: str | None) -> str | None:
    """The coding of a request's body; RequestError 415 where this server does not know it.

    >>> body_coding("X-GZIP"), body_coding("identity"), body_coding(None)
    ('gzip', None, None)
    """
    coding = (header or "identity").strip().lower().removeprefix("x-")
    if coding in ("", "identity"):
        return None
    if coding not in _WBITS:
        said = f"this server does not know the body's Content-Encoding {short(header)}: send gzip, deflate or none"
        raise RequestError(said, 415)
    return coding


def unpack(body: bytes, coding: str, most_bytes: int) -> bytes:
    """The body as it was before it was packed: in steps, and never more than its limits.

    >>> unpack(pack(b"text", "gzip"), "gzip", 100)
    b'text'
    """
    most = min(most_bytes, max(FREE_BYTES, MOST_RATIO * len(body)))
    wbits = _WBITS[coding]
    if coding == "deflate" and body[:1] and body[0] & 0x0F != zlib.DEFLATED:  # some clients leave zlib's frame out
        wbits = -zlib.MAX_WBITS
    unpacker, pieces, size = zlib.decompressobj(wbits), list[bytes](), 0
    try:
        while not unpacker.eof:
            piece = unpacker.decompress(body, STEP_BYTES)
            body = unpacker.unconsumed_tail
            size += len(piece)
            if size > most:
                raise TooLargeError(f"the body unpacks to more than {most:,} bytes")
            pieces.append(piece)
            if not piece and not body and not unpacker.eof:
                raise CodingError(f"the body cannot be decompressed: it is {coding} that ends early")
    except zlib.error as e:
        raise CodingError(f"the body cannot be decompressed: it is no {coding} ({e})") from None
    if unpacker.unused_data:
        raise CodingError(f"the body cannot be decompressed: bytes follow the end of the {coding}")
    return b"".join(pieces)


async def unpacked(body: bytes, coding: str, most_bytes: int) -> bytes:
    """`unpack`, away from the event loop where it may take long; few at a time."""
    if len(body) * MOST_RATIO <= IN_THREAD_BYTES:
        return unpack(body, coding, most_bytes)
    return await asyncio.get_running_loop().run_in_executor(_unpacking, unpack, body, coding, most_bytes)
