"""What bounds a connection: times and sizes of its requests and answers, and the bytes of all of them together.

`compression` bounds what compressed bodies become, `preflight` checks how many connections a process may open.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from aiohttp import web

from paellapy.scheduler.core.errors import TooManyRequestsError
from paellapy.scheduler.engine.pipelines import Served
from paellapy.scheduler.engine.ring_client import PER_FREE
from paellapy.serving.errors import LateBodyError, RefusedError, TooLargeError

BODY_TIMEOUT_S = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionLimits:
    """Limits that a user can set; the defaults are those of `[server]`."""

    header_timeout_s: float = 20.0  # from opening the connection, or a request's first byte, to its header's end
    body_timeout_s: float | None = BODY_TIMEOUT_S
    send_timeout_s: float = 30.0  # closes a connection whose client reads nothing for this long
    keepalive_s: float = 75.0  # closes a connection without a request after this time
    max_header_bytes: int = 8190  # of the request line, and of each header
    max_body_bytes: int = 64 << 20
    # Of all requests of a process that are not answered yet, and of all answers that clients have not taken yet
    max_held_bytes: int = 1_000_000_000


DEFAULTS = ConnectionLimits()

BESIDE_BYTES = 1 << 16  # of a body besides the numbers: names, parameters, an id; the limit where there are no tensors
TEXT_BYTES = 1 << 20  # of JSON with texts, which is read at once: that holds the interpreter for about a millisecond
NUMBER_BYTES = 48  # per number of JSON: up to 24 digits with sign and exponent, a comma, and blanks of a pretty printer

# Of the fast path; aiohttp reads longer ones.
FAST_HEADER_BYTES = 4096
FAST_HEADERS = 100
AHEAD_BYTES = 1 << 16  # kept behind a request that is still being answered
MAPPED_BYTES = 1 << 20  # longer bodies have memory of their own, which the system gives page by page as bytes arrive
HEADERS = 4  # the header of a request is at most this many times as long as its longest line
HEADER_COPIES = 3  # in memory, of a header that is not complete
JSON_COPIES = 2  # of JSON, while its numbers are read: its arrays, and pieces

MOST_ADDRESSES = 4096  # remembered
RECENT_S = 60.0  # an address that asked within this time may ask again

RETRY_S = 1.0  # for a request that finds no room


def largest_request(model: Served) -> int:
    """Largest size in bytes of a valid request to the model, in JSON or binary."""
    if any(spec.is_text for spec in model.takes.values()):
        return sys.maxsize  # texts and files have any length; the server's own limit holds
    values = sum(math.prod(spec.shape) for spec in model.takes.values())
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

    __slots__ = ("_lock", "full", "max_bytes", "nbytes")

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes, self.nbytes = max_bytes, 0
        self._lock = threading.Lock()  # threads that decompress and read JSON claim memory too
        self.full = 0  # requests refused for lack of room

    def change(self, before: int, after: int) -> None:
        """A request holds `after` bytes in place of `before`. RefusedError: there is no room for more."""
        with self._lock:
            more, held = after - before, self.nbytes
            if more <= 0 or held + more <= self.max_bytes:
                self.nbytes += more
                return
            self.full += 1
        raise RefusedError(
            f"{held:,} of at most {self.max_bytes:,} bytes of requests are held: try again", "overloaded",
            RETRY_S, limit=self.max_bytes, given=held + more,
        )  # fmt: skip

    @contextlib.contextmanager
    def holding(self) -> Iterator[Callable[[int], None]]:
        """Yields a function that sets the number of bytes that are held until the end of the block."""
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


class AddressPlaces:
    """Items in flight by the address of their senders. While several addresses ask, none may hold more than
    PER_FREE times as many places as would be left: whoever invents names of clients cannot fill the queue.

    >>> places = AddressPlaces()
    >>> places.take("10.0.0.1", 90, free=100)
    >>> places.take("10.0.0.2", 1, free=10)
    >>> places.take("10.0.0.1", 1, free=9)
    Traceback (most recent call last):
    paellapy.scheduler.core.errors.TooManyRequestsError: 10.0.0.1 has 90 requests in flight, and the 9 places that are \
left are kept for others: wait for answers before you send more
    """

    def __init__(self) -> None:
        self._held: dict[str, int] = {}
        self._seen_s: dict[str, float] = {}  # when an address asked last

    def take(self, address: str, items: int, free: int) -> None:
        """TooManyRequestsError: the address has its part of all places, of which `free` are left."""
        held, now_s = self._held.get(address, 0), time.monotonic()
        if held and held >= PER_FREE * (free - items) and self._others_ask(address, now_s):
            said = f"{address} has {held} requests in flight, and the {free} places that are left are kept for others"
            raise TooManyRequestsError(f"{said}: wait for answers before you send more", given=held, limit=free)
        if len(self._seen_s) >= MOST_ADDRESSES:
            self._seen_s.clear()
        self._held[address], self._seen_s[address] = held + items, now_s

    @property
    def held(self) -> int:
        """Places that all addresses have together."""
        return sum(self._held.values())

    def give(self, address: str, items: int) -> None:
        self._held[address] -= items
        if not self._held[address]:
            del self._held[address]

    def _others_ask(self, address: str, now_s: float) -> bool:
        return any(now_s - at_s < RECENT_S for other, at_s in self._seen_s.items() if other != address)


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
