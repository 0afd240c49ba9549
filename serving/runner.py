"""Runs an application on connections of our own kind."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Callable
from typing import Any

from aiohttp import web
from multidict import CIMultiDict

from paellapy.serving.connections import Connection, Manager
from paellapy.serving.errors import short
from paellapy.serving.middleware import SERVICE, json_response
from paellapy.serving.unsent import Unsent


class Connections(Manager):
    """Makes the connections."""

    def __init__(
        self, connection: Callable[..., Connection], *handler: Any, most_unsent_bytes: int, **options: Any
    ) -> None:
        super().__init__(*handler, **options)
        self.unsent = Unsent(most_unsent_bytes)
        self._connection = connection
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
    """An `AppRunner` that takes `header_timeout_s` too and can make another class of connections."""

    __slots__ = ("_connection",)

    def __init__(self, app: web.Application, connection: Callable[..., Connection] = Connection, **more: Any) -> None:
        super().__init__(app, **more)
        self._connection = connection

    async def _make_server(self) -> Connections:
        made = await super()._make_server()
        most_bytes = self.app[SERVICE].max_body_bytes

        async def handle(request: Any) -> web.StreamResponse:
            """Drops `Expect` from too large requests: aiohttp would ask the client to send the body before it is
            refused. Refuses other expectations than 100-continue, which aiohttp would do in plain text.
            """
            expected = request.headers.get("Expect", "100-continue")
            if expected.lower() != "100-continue":
                said = f"the expectation {short(expected)} is not known: send Expect: 100-continue, or none"
                return json_response({"error": said}, 417)
            if (request.content_length or 0) > most_bytes and "Expect" in request.headers:
                kept = CIMultiDict((name, value) for name, value in request.headers.items() if name.lower() != "expect")
                request.protocol._lingering_time = 0.0  # the client has sent no body, and will not
                request = request.clone(headers=kept)
            return await made.request_handler(request)

        return Connections(
            self._connection,
            handle,
            request_factory=made.request_factory,
            handler_cancellation=made.handler_cancellation,
            loop=made._loop,
            most_unsent_bytes=self.app[SERVICE].held.most_bytes,
            **made._kwargs,
        )
