"""Listening sockets: TLS handshakes with a time limit, ports that workers share, a stop that answers waiting
clients.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import socket
import ssl
from collections.abc import Coroutine
from typing import Any

from aiohttp import web

from paellapy.instrument.errors import PaellaError
from paellapy.serving.connections import Connection
from paellapy.serving.runner import Connections

BACKLOG = 1024
TURNS = 4  # of the loop, until the runner knows an accepted connection
FRESH_S = 1.0  # seconds after the last accept in which a silent new connection may still send its request


class Site(web.SockSite):
    """A socket that listens already. A TLS handshake that takes longer than `handshake_s` is aborted."""

    __slots__ = ("_handshake_s",)

    def __init__(
        self, runner: web.AppRunner, listening: socket.socket, tls: ssl.SSLContext | None, handshake_s: float
    ) -> None:
        super().__init__(runner, listening, ssl_context=tls, backlog=BACKLOG)
        self._handshake_s = handshake_s

    async def start(self) -> None:
        await web.BaseSite.start(self)
        server: Any = self._runner.server
        self._server = await asyncio.get_running_loop().create_server(
            server,
            sock=self._sock,
            ssl=self._ssl_context,
            backlog=self._backlog,
            ssl_handshake_timeout=None if self._ssl_context is None else self._handshake_s,
        )


async def stop_listening(runner: web.AppRunner) -> None:
    """Accepts all connections in the kernel's queue, stops listening, and lets each new connection send one request.

    Closing a connection in the queue would reset it: its client, which has sent its request, would get no answer. So
    the loop stops accepting first. The rest is accepted here, and the socket closed as soon as its queue is empty.
    """
    loop = asyncio.get_running_loop()
    accepted: set[asyncio.Task[Any]] = set()
    for site in runner.sites:
        ours = [each.fileno() for each in getattr(site._server, "sockets", None) or ()]
        kept = [socket.socket(fileno=os.dup(each)) for each in ours]
        for each in ours:
            with contextlib.suppress(RuntimeError):  # of uvloop, which accepts in one step
                loop.remove_reader(each)
        for _ in range(TURNS):
            await asyncio.sleep(0)
        await site.stop()
        for listening in kept:
            accepted |= await _accept_rest(runner, site, listening)
    end = loop.time() + FRESH_S
    while (_fresh(runner) or accepted) and loop.time() < end:
        accepted = {each for each in accepted if not each.done()}
        await asyncio.sleep(0.01)


async def _accept_rest(runner: web.AppRunner, site: Any, listening: socket.socket) -> set[asyncio.Task[Any]]:
    """Accepts until nobody waits, and closes the socket."""
    loop, server = asyncio.get_running_loop(), runner.server
    assert server is not None
    found: set[asyncio.Task[Any]] = set()
    with listening:
        listening.setblocking(False)
        while True:
            try:
                came, _ = listening.accept()
            except OSError:  # mostly since nobody waits; or this process has too many files open
                return found
            limit = None if site._ssl_context is None else site._handshake_s
            made = loop.connect_accepted_socket(server, came, ssl=site._ssl_context, ssl_handshake_timeout=limit)
            found.add(loop.create_task(_ignored(made)))
            await asyncio.sleep(0)


async def _ignored(connecting: Coroutine[Any, Any, Any]) -> None:
    with contextlib.suppress(OSError):  # the client left, or its handshake failed
        await connecting


def _fresh(runner: web.AppRunner) -> bool:
    server = runner.server
    if isinstance(server, Connections) and server.accepted:
        return True
    connections = [] if server is None else server.connections
    return any(isinstance(each, Connection) and each.fresh for each in connections)


def listen(host: str, port: int) -> list[socket.socket]:
    """Sockets that listen on all addresses of a host; PaellaError if the host is not this machine or the port
    is taken.
    """
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


class Shares:
    """Sockets that share one port (SO_REUSEPORT): the kernel spreads connections over those that listen."""

    def __init__(self, host: str, port: int, number: int) -> None:
        """Opens `number` sockets; PaellaError if the port is taken."""
        self._sockets: list[socket.socket | None] = []
        self._family = 0
        self._address: Any = None
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
        return {each.fileno() for each in self._sockets if each is not None}

    def close(self) -> None:
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
    >>> url_of(("::1", 8000, 0, 0), tls=False)
    'http://[::1]:8000'
    """
    host, port = address[:2]
    return f"{'https' if tls else 'http'}://{f'[{host}]' if ':' in host else host}:{port}"
