"""Who may do what: API keys with roles, and what pages of other sites must not reach through a browser.

A browser sends requests to a server on its user's machine for any page that asks it to, though the page does not see
the answer; a page whose name is made to mean 127.0.0.1 sees even that. So what changes the server's state is refused
to pages of other origins, and under names that are not this server's.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import socket
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Literal, TypeVar
from urllib.parse import urlsplit

from aiohttp import web

from paellapy.serving.errors import RequestError, short

Role = Literal["infer", "operate"]
ROLES: tuple[Role, ...] = ("infer", "operate")
Handler = TypeVar("Handler", bound=Callable[..., object])


@dataclass(frozen=True, slots=True, repr=False)
class Key:
    """A secret, and what it opens. It has no `repr`: nothing that is printed holds a key."""

    secret: str
    roles: tuple[Role, ...] = ROLES
    tenant: str | None = None  # whose its requests are; None: the key's own name


def open_to_all(handler: Handler) -> Handler:
    """A handler that needs no key."""
    handler.needs = None  # type: ignore[attr-defined]
    return handler


def infers(handler: Handler) -> Handler:
    """A handler that needs the role `infer`."""
    handler.needs = "infer"  # type: ignore[attr-defined]
    return handler


def operates(handler: Handler) -> Handler:
    """A handler that changes the server's state: it needs the role `operate`, and is not for other sites' pages."""
    handler.needs = "operate"  # type: ignore[attr-defined]
    return handler


class Keys:
    """API keys by name. Only their digests are kept, and all are compared, whatever the first say."""

    def __init__(self, keys: Mapping[str, str | Key]) -> None:
        given = {name: key if isinstance(key, Key) else Key(key) for name, key in keys.items()}
        self._known = [(name, hashlib.sha256(k.secret.encode()).digest(), k) for name, k in given.items()]

    def __bool__(self) -> bool:
        return bool(self._known)

    def client_of(self, request: web.Request, role: Role | None) -> str:
        """Whose the request is, by its key; RequestError 401 without one, 403 where it does not open this."""
        given = request.headers.get("X-API-Key", "")
        scheme, _, token = request.headers.get("Authorization", "").partition(" ")
        if not given and scheme.lower() == "bearer":
            given = token.strip()
        digest = hashlib.sha256(given.encode("utf-8", "surrogateescape")).digest()
        found: tuple[str, Key] | None = None
        for name, known, key in self._known:
            if hmac.compare_digest(digest, known):
                found = name, key
        if found is None:
            raise RequestError("a key is needed: send it as X-API-Key or as Authorization: Bearer …", status=401)
        if role is not None and role not in found[1].roles:
            raise RequestError(f"the key of {found[0]!r} has not the role {role!r}, which this needs", status=403)
        return found[1].tenant or found[0]


class Access:
    """What is asked of every request before its handler: a key, and of those that change things, where they are from.

    `hosts` are names of this server beside its addresses, "localhost" and the machine's own name. `control`: models and
    the policy may be changed over HTTP at all.
    """

    def __init__(self, keys: Mapping[str, str | Key], hosts: Iterable[str] = (), control: bool = True) -> None:
        self._keys, self._control = Keys(keys), control
        self._hosts = {"localhost", socket.gethostname().lower(), *(each.lower() for each in hosts)}

    def set_keys(self, keys: Mapping[str, str | Key]) -> None:
        """Those that open the server from now on. Whether it needs any at all stays as it is."""
        self._keys = Keys(keys)

    def client(self, request: web.Request, client_header: str) -> str:
        """Who asks; "": nobody in particular. RequestError where it must not."""
        # By the handler that was found: a path may be spelled in many ways.
        role: Role | Literal[""] | None = getattr(request.match_info.handler, "needs", "")
        if role == "operate":
            self._check_origin(request)
        if not self._keys or role is None:
            return request.headers.get(client_header, "")
        return self._keys.client_of(request, role or None)

    def _check_origin(self, request: web.Request) -> None:
        if not self._control:
            said = "models and the policy are not changed over HTTP here: set server.model_control = true to allow it"
            raise RequestError(said, status=403)
        if not self._knows(request.host):
            said = f"this server is not known as {short(request.host)}: name it under server.hosts"
            raise RequestError(said, status=403)
        origin = request.headers.get("Origin")
        elsewhere = origin is not None and urlsplit(origin).netloc.lower() != request.host.lower()
        if elsewhere or request.headers.get("Sec-Fetch-Site", "same-origin") not in ("same-origin", "none"):
            raise RequestError("pages of other sites cannot change anything here", status=403)

    def _knows(self, host: str) -> bool:
        """An address, which no page can be made to stand for, or one of its names."""
        name = (urlsplit(f"//{host}").hostname or "").rstrip(".")
        return name in self._hosts or _is_address(name)


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def is_loopback(host: str) -> bool:
    """Only this machine reaches it.

    >>> is_loopback("127.0.0.1"), is_loopback("localhost"), is_loopback("0.0.0.0")
    (True, True, False)
    """
    return host == "localhost" or (_is_address(host) and ipaddress.ip_address(host).is_loopback)
