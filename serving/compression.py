"""Codings of bodies: which ones a request has and an answer gets, and bounds for short bodies that become long ones."""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from paellapy.serving.errors import RequestError, TooLargeError, short
from paellapy.serving.limits import RequestBudget

COMPRESS_FROM_BYTES = 1024  # below this size the headers outweigh the saving
IN_THREAD_BYTES = 1 << 16  # larger bodies take a millisecond or more, so they leave the event loop
STEP_BYTES = 1 << 18  # decompressed per step
# Every body may grow to FREE_BYTES; beyond that, to MAX_RATIO times its length. Text of real numbers compresses
# three to ten times; deflate reaches 1032 times at most.
FREE_BYTES = 1 << 20
MAX_RATIO = 100

SHORT_BYTES = 1 << 14  # of a packed body: such bodies do not wait behind longer ones, which may be bombs
# Their threads start on demand
_unpacking = ThreadPoolExecutor(2, thread_name_prefix="unpack")
_unpacking_short = ThreadPoolExecutor(1, thread_name_prefix="unpack short")
_WBITS = {"gzip": 16 + zlib.MAX_WBITS, "deflate": zlib.MAX_WBITS}


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
        raise RequestError(said, status=415, field="Content-Encoding", given=header)
    return coding


def unpack(body: bytes, coding: str, max_bytes: int, held: RequestBudget | None = None) -> bytearray:
    """Decompresses a body in steps and stops at its size limit, or where `held` has no room for it.

    >>> bytes(unpack(pack(b"text", "gzip"), "gzip", 100))
    b'text'
    """
    with (held or RequestBudget(max_bytes)).holding() as claim:
        return _unpack(body, coding, max_bytes, claim)


def _unpack(body: bytes, coding: str, max_bytes: int, claim: Callable[[int], None]) -> bytearray:
    most = min(max_bytes, max(FREE_BYTES, MAX_RATIO * len(body)))
    wbits = _WBITS[coding]
    if coding == "deflate" and body[:1] and body[0] & 0x0F != zlib.DEFLATED:  # some clients omit zlib's frame
        wbits = -zlib.MAX_WBITS
    unpacker, found = zlib.decompressobj(wbits), bytearray()
    try:
        while not unpacker.eof:
            piece = unpacker.decompress(body, STEP_BYTES)
            body = unpacker.unconsumed_tail
            if (size := len(found) + len(piece)) > most:
                said = f"the body decompresses to more than the {most:,} bytes allowed"
                raise TooLargeError(said, limit=most, given=size)
            claim(size)
            found += piece
            if not piece and not body and not unpacker.eof:
                raise _not_coded(f"its {coding} data ends early", coding)
    except zlib.error as e:
        raise _not_coded(f"it is not {coding} ({e})", coding) from None
    if unpacker.unused_data:
        raise _not_coded(f"bytes follow the end of its {coding} data", coding)
    return found


def _not_coded(why: str, coding: str) -> RequestError:
    return RequestError(f"the body cannot be decompressed: {why}", field="Content-Encoding", given=coding)


async def unpacked(body: bytes, coding: str, max_bytes: int, held: RequestBudget) -> memoryview:
    """`unpack`, in one of a few threads where it may take long, so that the event loop goes on."""
    if len(body) * MAX_RATIO <= IN_THREAD_BYTES:
        return memoryview(unpack(body, coding, max_bytes, held))
    pool = _unpacking_short if len(body) <= SHORT_BYTES else _unpacking
    found = asyncio.get_running_loop().run_in_executor(pool, unpack, body, coding, max_bytes, held)
    return memoryview(await found)


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
