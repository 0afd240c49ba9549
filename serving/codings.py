"""Content codings: which one an answer gets, and packing it."""

from __future__ import annotations

import zlib

COMPRESS_FROM_BYTES = 1024  # below, the headers weigh more than what is saved
IN_THREAD_BYTES = 1 << 16  # from here on it takes a millisecond and more: not in the event loop

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
