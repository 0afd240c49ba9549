"""HTTP connections that slow clients cannot exhaust, the sockets that they come from, and a stop that answers clients.

`limits` has the limits. aiohttp keeps that of idle connections, and readers of bodies those of bodies. Between the two
are headers that arrive byte by byte, and answers that nobody reads: their limits are kept here, as are those of TLS
handshakes.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import math
import os
import resource
import socket
import ssl
import sys
import weakref
from collections.abc import Callable, Coroutine
from typing import Any, cast

from aiohttp import StreamReader, web
from aiohttp.http_exceptions import HttpProcessingError, LineTooLong
from multidict import CIMultiDict

from paellapy.instrument.errors import PaellaError
from paellapy.serving.errors import SERVER, STOPPING, LateBodyError, RefusedError, json_response, short
from paellapy.serving.limits import HEADER_COPIES, HEADERS, ConnectionLimits, RequestBudget, ResponseBudget
from paellapy.serving.logs import log

UNFINISHED_S = 3.0  # once the server stops: for requests that have begun to arrive, and for clients that take no bytes
LOOK_S = 0.02
KEPT_DESCRIPTORS = 256  # not for connections
MOST_SEARCHED, MOST_CUTS = 1 << 14, 16  # bytes of input in which a header Upgrade is looked for, and how often


def _refusal(status: str, said: str) -> bytes:
    """An answer to a header that is not complete."""
    body = json.dumps({"error": said}).encode()
    head = f"HTTP/1.1 {status}\r\nContent-Type: application/json\r\nConnection: close\r\nServer: {SERVER}\r\n"
    return b"%sContent-Length: %d\r\n\r\n%s" % (head.encode(), len(body), body)


_END = b"\r\n\r\n"  # of a header
_LATE = _refusal("408 Request Timeout", "the header did not arrive in time")
_LONG = _refusal("431 Request Header Fields Too Large", "the header is longer than this server accepts: send less")
_FULL = _refusal("503 Service Unavailable", "the server holds as many bytes as it may: try again")
_CROWDED_SAID = "the server has as many connections as its limit on open files allows: try again"
_CROWDED = _refusal("503 Service Unavailable", _CROWDED_SAID)
# Messages of aiohttp's parser, which may quote bytes of the request, and the texts sent in their place
_MISTAKES = {
    "Too many headers": "the request has more headers than this server accepts: send fewer",
    "Missing 'Host'": "the Host header is missing: HTTP/1.1 requires it in every request",
    "Duplicate 'Host'": "there are two Host headers: send one",
    "Duplicate Content-Length": "there are two Content-Length headers: send one",
    "Transfer-Encoding can't be present with": "the request has Content-Length and Transfer-Encoding: send one of them",
    "Content-Length can't be present with": "the request has Content-Length and Transfer-Encoding: send one of them",
    "Invalid character in Content-Length": "Content-Length is not a number: send the body's length in bytes",
}
_CLIENTS_MISTAKES = (web.RequestPayloadError, HttpProcessingError, ConnectionError, LateBodyError)


Note = Callable[[int, str, str | None], None]


def unsent_bytes(transport: asyncio.Transport) -> int:
    """Bytes of answers that are not sent yet. A TLS connection that was closed twice, by the server and by its client,
    has none: asyncio raises AttributeError there.
    """
    try:
        return transport.get_write_buffer_size()
    except AttributeError:
        return 0


class Connection(web.RequestHandler):
    """aiohttp's connection with limits on the times of headers and of sending. `log_rejected` also logs input that is
    not HTTP.
    """

    __slots__ = (
        "__weakref__", "_began", "_content", "_header_bytes", "_header_end", "_held", "_limits", "_log_rejected",
        "_most_descriptor", "_note", "_peer", "_rest", "_send_timeout_s", "_send_timer", "_timer", "_to_client",
        "_unread_answers", "_unsent", "fresh",
    )  # fmt: skip

    def __init__(self, manager: Connections, *, log_rejected: bool, **options: Any) -> None:
        super().__init__(manager, **options)
        self._limits, self._unread_answers, self._log_rejected = manager.limits, manager.unsent, log_rejected
        self._note, self._most_descriptor = manager.note, manager.most_descriptor
        self._began = False  # a part of a header has arrived
        self._header_bytes, self._held = 0, manager.held  # of that part
        self._header_end = b""  # its last bytes
        self._send_timeout_s, self._unsent = self._limits.send_timeout_s, 0
        self._timer: asyncio.TimerHandle | None = None
        self._send_timer: asyncio.TimerHandle | None = None
        # Kept until it is closed; aiohttp drops its own reference earlier
        self._to_client: asyncio.Transport | None = None
        self.fresh = True  # no byte has arrived yet
        self._peer: str | None = None
        self._content: StreamReader | None = None  # body of the latest request whose header is complete
        self._rest = 0  # bytes to come of the body of a request with Upgrade

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._to_client = cast(asyncio.Transport, transport)  # uvloop's class only has the methods of one
        accepted = transport.get_extra_info("socket")
        if accepted is not None and accepted.fileno() > self._most_descriptor:
            self._note(503, _CROWDED_SAID, self.peer)
            self._to_client.write(_CROWDED)
            self._to_client.close()
        if transport.get_extra_info("sslcontext") is None:  # uvloop's TLS would never report that it has sent all
            self._to_client.set_write_buffer_limits(high=0)  # reports each answer that is not sent at once
        self._timer = self._loop.call_later(self._limits.header_timeout_s, self._too_late)

    def connection_lost(self, exc: BaseException | None) -> None:
        self._hold_header(0)
        self._disarm()
        if self._send_timer is not None:
            self._send_timer.cancel()
        self._send_timer = self._to_client = None
        self._unread_answers.end(self.abort)
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        """Called when the client has not yet read all of an answer."""
        super().pause_writing()
        if self._to_client is not None:
            unsent = unsent_bytes(self._to_client)
            if self._send_timer is None:
                self._watch_sending(unsent)
            self._unread_answers.begin(self.abort, unsent)

    def linger(self, most_s: float) -> None:
        """Limits the time in which aiohttp reads on in a body that is refused before its end; its default is 10 s."""
        self._lingering_time = min(self._lingering_time, most_s)

    @property
    def peer(self) -> str | None:
        """The client's IP address."""
        if self._peer is None and self._to_client is not None:
            found = self._to_client.get_extra_info("peername")
            self._peer = str(found[0]) if found else None
        return self._peer

    def abort(self) -> None:
        if self._to_client is not None:
            self._to_client.abort()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._unread_answers.end(self.abort)

    def _watch_sending(self, unsent: int) -> None:
        self._unsent = unsent
        self._send_timer = self._loop.call_later(self._send_timeout_s, self._look_at_sending)

    def _look_at_sending(self) -> None:
        self._send_timer = None
        transport = self._to_client
        if transport is None or not (left := unsent_bytes(transport)):
            return
        if left < self._unsent:  # the client is slow, but it reads
            self._watch_sending(left)
            return
        transport.abort()

    def data_received(self, data: bytes) -> None:
        """Cuts the input behind a request with Upgrade: aiohttp's parser drops the rest of what it is given with it."""
        self.fresh = False
        for _ in range(MOST_CUTS):
            end = self._rest
            if not end and b"upgrade:" in data[:MOST_SEARCHED].lower():
                end = data.find(b"\r\n\r\n", 0, MOST_SEARCHED) + 4
            if not (self._rest or end >= 4) or end >= len(data):
                break
            self._parse(data[:end])
            data = data[end:]
        self._parse(data)

    def _parse(self, data: bytes) -> None:
        self._rest = max(0, self._rest - len(data))
        # While requests wait for their turn, aiohttp keeps what follows unparsed, and stops reading soon.
        if not self._reads_body and not self._messages and not self._has_room(data):
            return
        before = self._request_count
        super().data_received(data)
        if self._request_count != before:  # a header is complete
            self._hold_header(0)
            if self._timer is not None:
                self._disarm()
            self._read_on(self._request_count - before, data)
        # No header, and no body is being read. The task that sets the waiter may not have begun.
        elif data and (self._request_count == 0 or (self._waiter is not None and not self._waiter.done())):
            self._began = True
            if self._timer is None:
                self._timer = self._loop.call_later(self._limits.header_timeout_s, self._too_late)

    @property
    def _reads_body(self) -> bool:
        content = self._content
        return content is not None and not content.is_eof() and content.exception() is None

    def _has_room(self, data: bytes) -> bool:
        """Counts the bytes of a header that is not complete. If they are too many, the connection ends."""
        end = data.find(_END)
        if end < 0 and _END in self._header_end + data[:3]:  # it comes in two pieces
            end = 0
        self._header_end = (self._header_end + data[-3:])[-3:]
        size = self._header_bytes + (len(data) if end < 0 else end)
        refusal = _LONG if size > HEADERS * self._limits.max_header_bytes else b""
        try:
            self._hold_header(size if not refusal and end < 0 else 0)
        except RefusedError:
            refusal = _FULL
        if refusal and self.transport is not None:
            self._note(503 if refusal is _FULL else 431, "the header is too long", self.peer)
            self._hold_header(0)
            self.transport.write(refusal)
            self.force_close()
        return not refusal

    def _hold_header(self, nbytes: int) -> None:
        self._held.change(HEADER_COPIES * self._header_bytes, HEADER_COPIES * nbytes)
        self._header_bytes = nbytes

    def _read_on(self, n: int, data: bytes) -> None:
        """Handles `n` new messages from `data`. If the body being read turns out invalid, its reader gets the error.

        aiohttp queues the error as a separate request, and the body's reader would wait forever. The reader may or may
        not have started: header and body may arrive in quick succession.
        """
        for message, content in list(self._messages)[-n:]:
            if hasattr(message, "method"):
                self._content = content
                self._look_at_upgrade(message, content, data)
            elif self._content is not None and not self._content.is_eof():
                self._messages.pop()  # nothing follows an error
                self._content.set_exception(web.RequestPayloadError("the body does not match its headers"))

    def _look_at_upgrade(self, message: Any, content: StreamReader, data: bytes) -> None:
        """Ignores the wish for another protocol. If bytes behind the request may be lost, it is the connection's
        last. They are not if its header ends with `data`, and did not end before.
        """
        if not message.upgrade or message.headers.get("Upgrade", "").lower() == "websocket":  # aiohttp keeps the bytes
            return
        if not message.chunked and data.find(b"\r\n\r\n") == len(data) - 4 and b"\n" not in data[:3]:
            self._rest = int(message.headers.get("Content-Length", 0))
        else:
            self._messages[-1] = (message._replace(should_close=True), content)

    def log_exception(self, *what: Any, **more: Any) -> None:
        """aiohttp's own log: a body that stays unreadable after the answer is the client's mistake and is not
        logged.
        """
        if not isinstance(more.get("exc_info"), _CLIENTS_MISTAKES):
            log.error(what[0] % what[1:], exc_info=more.get("exc_info"))

    def handle_error(
        self, request: web.BaseRequest, status: int = 500, exc: BaseException | None = None, message: str | None = None
    ) -> web.StreamResponse:
        """Answers input that is not HTTP with a JSON error that does not quote the bytes sent."""
        if status >= 500:
            return super().handle_error(request, status, exc, message)
        said = "the request is not valid HTTP/1.1"
        for start, meant in _MISTAKES.items():
            if (message or "").startswith(start):
                said = meant
        if isinstance(exc, LineTooLong):
            said = f"the request line or a header is longer than the {self.max_field_size:,} bytes allowed"
        self._note(status, said, self.peer)
        if self._log_rejected:
            fields = {"status": status, "error": said, **({"peer": self.peer} if self.peer else {})}
            log.info("rejected", extra={"fields": fields})
        response = json_response({"error": said}, status)
        response.force_close()
        return response

    def _disarm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer, self._began = None, False

    def _too_late(self) -> None:
        self._timer = None
        if self._began and self.transport is not None:
            self._note(408, "the header did not arrive in time", self.peer)
            self.transport.write(_LATE)
        self.force_close()

    # -- the server stops

    @property
    def arriving(self) -> bool:
        """Whether a part of a request has arrived, and not all of it."""
        return self.transport is not None and (self._began or self._reads_body)

    def end_arrival(self) -> None:
        """Waits no longer for the rest of a request."""
        if self._began:
            self._too_late()
        elif self._content is not None:
            self._content.set_exception(LateBodyError(STOPPING))

    async def arrive(self, timeout: float | None) -> float | None:
        """Lets a request arrive that has begun to, for a short time. Returns what is left of `timeout`."""
        began = self._loop.time()
        end = began + (UNFINISHED_S if timeout is None else min(UNFINISHED_S, timeout))
        while self.arriving and self._loop.time() < end:
            await asyncio.sleep(LOOK_S)
        if self.arriving:
            self.end_arrival()
        # aiohttp takes 0 as no limit
        return None if timeout is None else max(LOOK_S, timeout - (self._loop.time() - began))

    async def shutdown(self, timeout: float | None = 15.0) -> None:
        self._send_timeout_s = min(self._send_timeout_s, UNFINISHED_S)
        if self._send_timer is not None:
            self._send_timer.cancel()
            self._watch_sending(self._unsent)
        left_s = await self.arrive(timeout)
        end = math.inf if left_s is None else self._loop.time() + left_s
        await super().shutdown(left_s)
        while self._to_client is not None and unsent_bytes(self._to_client) and self._loop.time() < end:
            await asyncio.sleep(LOOK_S)


def most_descriptor() -> int:
    """The largest descriptor that a connection may have. The system gives the least that is free; those above are for
    memory that the engine's process shares, for files, and for the connection to it.
    """
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return sys.maxsize if soft == resource.RLIM_INFINITY else soft - min(soft // 4, KEPT_DESCRIPTORS)


class Connections(web.Server):
    """Makes the connections, and knows the answers that their clients have not taken yet."""

    def __init__(
        self,
        connection: Callable[..., Connection],
        limits: ConnectionLimits,
        *handler: Any,
        held: RequestBudget | None = None,
        unsent: ResponseBudget | None = None,
        note: Note = lambda status, said, peer: None,
        **options: Any,
    ) -> None:
        super().__init__(
            *handler,
            keepalive_timeout=limits.keepalive_s,
            max_line_size=limits.max_header_bytes,
            max_field_size=limits.max_header_bytes,
            **options,
        )
        self.limits, self.unsent = limits, unsent or ResponseBudget(limits.max_held_bytes)
        self.held, self.note = held or RequestBudget(limits.max_held_bytes), note
        self._connection = connection
        self.most_descriptor = most_descriptor()
        # Accepted but not open yet, as in a TLS handshake
        self.accepted: weakref.WeakSet[Connection] = weakref.WeakSet()

    def __call__(self) -> Connection:
        made = self._connection(self, loop=self._loop, **self._kwargs)
        self.accepted.add(made)
        return made

    def connection_made(self, handler: Any, transport: asyncio.Transport) -> None:
        super().connection_made(handler, transport)
        self.accepted.discard(handler)

    def pre_shutdown(self) -> None:
        """Closes idle connections. A closed one would take no more of a request that is still arriving."""
        for each in self.connections:
            if not (isinstance(each, Connection) and each.arriving):
                each.close()


class Runner(web.AppRunner):
    """An `AppRunner` whose connections are within limits, and may be of another class."""

    __slots__ = ("_connection", "_held", "_note", "_unsent", "limits")

    def __init__(
        self,
        app: web.Application,
        connection: Callable[..., Connection],
        limits: ConnectionLimits,
        *,
        drain_s: float,
        held: RequestBudget,
        unsent: ResponseBudget | None = None,
        log_rejected: bool = False,
        note: Note = lambda status, said, peer: None,
    ) -> None:
        """`drain_s`: time for requests in flight to finish once the server stops; `held` bounds headers too, `unsent`
        the answers that clients have not taken; `note` is called with the status, the text and the address of each
        answer to what is no request.
        """
        super().__init__(
            app,
            access_log=None,
            auto_decompress=False,  # inference.read does it, once the key is checked, and within limits
            handler_cancellation=True,
            shutdown_timeout=drain_s,
            log_rejected=log_rejected,
        )
        self._connection, self.limits, self._held, self._note = connection, limits, held, note
        self._unsent = unsent

    async def _make_server(self) -> Connections:
        made = await super()._make_server()

        async def handle(request: Any) -> web.StreamResponse:
            """Drops `Expect` from too large requests: aiohttp would ask the client to send the body before it is
            refused. Refuses other expectations than 100-continue, which aiohttp would do in plain text.
            """
            expected = request.headers.get("Expect", "100-continue")
            if expected.lower() != "100-continue":
                said = f"the expectation {short(expected)} is not known: send Expect: 100-continue, or none"
                return json_response({"error": said}, 417)
            if (request.content_length or 0) > self.limits.max_body_bytes and "Expect" in request.headers:
                kept = CIMultiDict((name, value) for name, value in request.headers.items() if name.lower() != "expect")
                request.protocol.linger(0.0)  # the client has sent no body, and will not
                request = request.clone(headers=kept)
            return await made.request_handler(request)

        return Connections(
            self._connection,
            self.limits,
            handle,
            held=self._held,
            unsent=self._unsent,
            note=self._note,
            request_factory=made.request_factory,
            handler_cancellation=made.handler_cancellation,
            loop=asyncio.get_running_loop(),
            **{name: value for name, value in self._kwargs.items() if name != "handler_cancellation"},
        )


BACKLOG = 1024
TURNS = 4  # of the loop, until the runner knows an accepted connection
FRESH_S = 1.0  # seconds after the last accept in which a silent new connection may still send its request


class Site(web.SockSite):
    """A socket that listens already. A TLS handshake may take as long as a header."""

    __slots__ = ("_handshake_s",)

    def __init__(self, runner: Runner, listening: socket.socket, tls: ssl.SSLContext | None) -> None:
        super().__init__(runner, listening, ssl_context=tls, backlog=BACKLOG)
        self._handshake_s = None if tls is None else runner.limits.header_timeout_s

    async def start(self) -> None:
        await web.BaseSite.start(self)
        server: Any = self._runner.server
        loop = asyncio.get_running_loop()
        create: Any = loop.create_unix_server if self._sock.family == socket.AF_UNIX else loop.create_server
        self._server = await create(
            server,
            sock=self._sock,
            ssl=self._ssl_context,
            backlog=self._backlog,
            ssl_handshake_timeout=self._handshake_s,
        )

    async def stop_accepting(self) -> set[asyncio.Task[Any]]:
        """Closes the socket once nobody waits in its queue; returns the accepted connections that are not open yet."""
        loop = asyncio.get_running_loop()
        ours = [each.fileno() for each in getattr(self._server, "sockets", None) or ()]
        kept = [socket.socket(fileno=os.dup(each)) for each in ours]
        for each in ours:
            with contextlib.suppress(RuntimeError):  # of uvloop, which accepts in one step
                loop.remove_reader(each)
        for _ in range(TURNS):
            await asyncio.sleep(0)
        await self.stop()
        return {each for listening in kept for each in await self._accept_rest(listening)}

    async def _accept_rest(self, listening: socket.socket) -> set[asyncio.Task[Any]]:
        loop, server = asyncio.get_running_loop(), self._runner.server
        assert server is not None
        found: set[asyncio.Task[Any]] = set()
        with listening:
            listening.setblocking(False)
            while True:
                try:
                    came, _ = listening.accept()
                except OSError:  # mostly since nobody waits; or this process has too many files open
                    return found
                made = loop.connect_accepted_socket(
                    server, came, ssl=self._ssl_context, ssl_handshake_timeout=self._handshake_s
                )
                found.add(loop.create_task(_ignored(made)))
                await asyncio.sleep(0)


async def stop_listening(runner: web.AppRunner) -> None:
    """Accepts all connections in the kernel's queue, stops listening, and lets each new connection send one request.

    Closing a connection in the queue would reset it: its client, which has sent its request, would get no answer. So
    the loop stops accepting first. The rest is accepted here, and the socket closed as soon as its queue is empty.
    """
    loop = asyncio.get_running_loop()
    accepted: set[asyncio.Task[Any]] = set()
    for site in runner.sites:
        assert isinstance(site, Site)
        accepted |= await site.stop_accepting()
    end = loop.time() + FRESH_S
    while (_fresh(runner) or accepted) and loop.time() < end:
        accepted = {each for each in accepted if not each.done()}
        await asyncio.sleep(0.01)


async def _ignored(connecting: Coroutine[Any, Any, Any]) -> None:
    with contextlib.suppress(OSError):  # the client left, or its handshake failed
        await connecting


def _fresh(runner: web.AppRunner) -> bool:
    server = runner.server
    if isinstance(server, Connections) and server.accepted:
        return True
    connections = [] if server is None else server.connections
    return any(isinstance(each, Connection) and each.fresh for each in connections)


UNIX = "unix:"  # a host that begins with it is the path of a socket
_FIRST_DESCRIPTOR = 3  # of those that a service manager passes


def listen(host: str, port: int) -> list[socket.socket]:
    """Sockets that listen: those of a service manager, or else on all addresses of a host. PaellaError if the host is
    not this machine or the port is taken.
    """
    found: list[socket.socket] = passed_sockets()
    if found:
        return found
    if host.startswith(UNIX):
        return [_listen_unix(host.removeprefix(UNIX))]
    return _listen_at(host, port)


def listen_admin(host: str, port: int) -> socket.socket:
    """A socket for operators: at a port of the same host, or of this machine alone if the server listens at a file."""
    first, *others = _listen_at("127.0.0.1" if host.startswith(UNIX) else host, port)
    _close_all(others)
    return first


def _listen_at(host: str, port: int) -> list[socket.socket]:
    found: list[socket.socket] = []
    try:
        for family, kind, proto, _, address in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM):
            try:
                found.append(_listen(family, kind, proto, address, shared=False))
            except OSError as e:
                if not found or e.errno != errno.EADDRNOTAVAIL:  # "localhost" may resolve to IPv6 while IPv6 is off
                    raise
            port = port or found[0].getsockname()[1]
        return found
    except OSError as e:
        _close_all(found)
        raise cannot_listen(host, port, e) from None


def passed_sockets() -> list[socket.socket]:
    """The listening sockets that a service manager has opened for this process (systemd's socket activation)."""
    if os.environ.get("LISTEN_PID") != str(os.getpid()):
        return []
    count = int(os.environ.get("LISTEN_FDS", "0"))
    found = [socket.socket(fileno=fd) for fd in range(_FIRST_DESCRIPTOR, _FIRST_DESCRIPTOR + count)]
    for each in found:
        os.set_inheritable(each.fileno(), False)
    return found


def notify(state: str) -> None:
    """Tells the service manager, if it wants to know (systemd's sd_notify)."""
    address = os.environ.get("NOTIFY_SOCKET", "")
    if not address:
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sender:
        try:
            sender.sendto(state.encode(), "\0" + address[1:] if address.startswith("@") else address)
        except OSError as e:
            log.warning("the service manager cannot be told", extra={"fields": {"state": state, "error": str(e)}})


def _listen_unix(path: str) -> socket.socket:
    made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe, contextlib.suppress(FileNotFoundError):
            try:
                probe.connect(path)
            except ConnectionRefusedError:  # of a server that was killed
                os.unlink(path)
        made.bind(path)
        made.listen(BACKLOG)
    except OSError as e:
        made.close()
        said = f"cannot listen on {path}: {e.strerror}; choose another file, or end the server that has it"
        raise PaellaError(said, field="server.host", given=f"{UNIX}{path}") from None
    return made


class Shares:
    """Sockets that share one port (SO_REUSEPORT): the kernel spreads connections over those that listen. A socket of a
    service manager, or of a file, is itself shared.
    """

    def __init__(self, host: str, port: int, number: int, admin_port: int | None = None) -> None:
        """Opens `number` sockets, and one that all share for operators; PaellaError if a port is taken."""
        self.admin = None if admin_port is None else listen_admin(host, admin_port)
        self._sockets: list[socket.socket | None] = []
        self._shared: socket.socket | None = None
        self._address: Any = None
        if os.environ.get("LISTEN_PID") == str(os.getpid()) or host.startswith(UNIX):
            self._shared, *others = listen(host, port)
            _close_all(others)
            self._address = self._shared.getsockname()
            self._sockets = [self._make() for _ in range(number)]
            return
        self._family = 0
        try:
            found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
            self._family, self._address = found[0], found[4]
            if port:  # a sharing socket would not notice other servers that share the port
                with socket.socket(self._family, socket.SOCK_STREAM) as probe:
                    probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                    probe.bind(self._address)
            for _ in range(number):
                self._sockets.append(self._make())
                self._address = self[len(self._sockets) - 1].getsockname()
        except OSError as e:
            self.close()
            raise cannot_listen(host, port, e) from None

    def _make(self) -> socket.socket:
        if self._shared is not None:
            return self._shared.dup()
        return _listen(self._family, socket.SOCK_STREAM, 0, self._address, shared=True)

    def __getitem__(self, k: int) -> socket.socket:
        """The k-th socket; it listens, again if it had left."""
        found = self._sockets[k]
        if found is None:
            found = self._sockets[k] = self._make()
        return found

    @property
    def address(self) -> Any:
        return self._address

    def leave(self, k: int) -> None:
        """Closes the k-th socket for a while: the kernel gives its connections to the others."""
        found, self._sockets[k] = self._sockets[k], None
        if found is not None:
            found.close()

    def descriptors(self) -> set[int]:
        return {each.fileno() for each in (*self._sockets, self._shared, self.admin) if each is not None}

    def descriptors_of(self, k: int) -> set[int]:
        """Those that the k-th process needs; it listens, again if it had left."""
        return {each.fileno() for each in (self[k], self.admin) if each is not None}

    def close(self) -> None:
        _close_all([each for each in (self._shared, self.admin) if each is not None])
        for k in range(len(self._sockets)):
            self.leave(k)


def _listen(family: int, kind: int, proto: int, address: Any, shared: bool) -> socket.socket:
    made = socket.socket(family, kind, proto)
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if shared:
            made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        if family == socket.AF_INET6:
            made.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        made.bind(address)
        made.listen(BACKLOG)
    except OSError:
        made.close()
        raise
    return made


def _close_all(sockets: list[socket.socket]) -> None:
    for each in sockets:
        each.close()


def cannot_listen(host: str, port: int, error: OSError) -> PaellaError:
    taken = error.errno in (errno.EADDRINUSE, errno.EACCES)
    remedy = "another port" if taken else "a host of this machine, such as 127.0.0.1"
    # A host name that does not resolve has no errno.
    said = os.strerror(error.errno) if error.errno and error.errno > 0 else error.strerror
    return PaellaError(f"cannot listen on {host}:{port}: {said}; choose {remedy}")


def url_of(address: Any, tls: bool) -> str:
    """
    >>> url_of(("::1", 8000, 0, 0), tls=False), url_of("/run/paellapy.sock", tls=False)
    ('http://[::1]:8000', 'unix:/run/paellapy.sock')
    """
    if isinstance(address, str):
        return f"{UNIX}{address}"
    host, port = address[:2]
    return f"{'https' if tls else 'http'}://{f'[{host}]' if ':' in host else host}:{port}"
