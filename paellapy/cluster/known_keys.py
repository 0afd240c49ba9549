"""Keys of clients that an engine has accepted a short time ago.

Engines know the keys and check every request. A router asks them before it reads a long body, so that clients without
a key cannot fill its memory, and it remembers the answer for a while.
"""

from __future__ import annotations

import hashlib
import re
import time

KEPT_S = 60.0
MOST_KEYS = 4096
_KEY = re.compile(rb"\r\n(x-api-key|authorization):[ \t]*([^\r]*)", re.I)


def digest_of(head: bytes) -> bytes:
    """A digest of the key in a request's header.

    >>> digest_of(b"GET / HTTP/1.1\\r\\nX-API-Key: a\\r\\n") == digest_of(b"POST / HTTP/1.1\\r\\nx-api-key: a\\r\\n")
    True
    """
    found: dict[bytes, bytes] = {}
    for name, value in _KEY.findall(head):
        found.setdefault(name.lower(), value.rstrip(b" \t"))  # engines read the first one too
    given = b"\n".join(found.get(name, b"") for name in (b"x-api-key", b"authorization"))
    return hashlib.sha256(given).digest()


class KnownKeys:
    """Digests of keys, and when they were accepted."""

    def __init__(self) -> None:
        self._accepted_at: dict[bytes, float] = {}

    def __contains__(self, digest: bytes) -> bool:
        return time.monotonic() - self._accepted_at.get(digest, float("-inf")) < KEPT_S

    def was_accepted(self, digest: bytes) -> bool:
        """Whether it was accepted at any time."""
        return digest in self._accepted_at

    def add(self, digest: bytes) -> None:
        if len(self._accepted_at) >= MOST_KEYS:
            self._accepted_at.clear()
        self._accepted_at[digest] = time.monotonic()
