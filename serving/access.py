"""Access control: API keys with roles, and protection against requests that other sites' pages send via a browser.

Any web page can make its visitor's browser send requests to a server on the visitor's machine. The page does not see
the answer, unless its host name has been made to resolve to 127.0.0.1. Requests that change the server's state are
therefore refused when they come from a page of another origin, or name a host that is not this server's.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import socket
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Literal, TypeVar
from urllib.parse import SplitResult, urlsplit

from aiohttp import web

from paellapy.serving.errors import RequestError, short

Role = Literal["infer", "operate"]
ROLES: tuple[Role, ...] = ("infer", "operate")
CLIENT = web.RequestKey("client", str)  # name of the client; "": unnamed
CLIENT_HEADER = "X-Client-Id"  # the default of [server]
Handler = TypeVar("Handler", bound=Callable[..., object])


@dataclass(frozen=True, slots=True, repr=False)
class Key:
    """A secret and the roles it grants. It has no `repr`, so that no secret is ever printed."""

    secret: str
    roles: tuple[Role, ...] = ROLES
    tenant: str | None = None  # owner of the key's requests; None: the key's own name


def open_to_all(handler: Handler) -> Handler:
    """Marks a handler that needs no key."""
    handler.needs = None  # type: ignore[attr-defined]
    return handler


def infers(handler: Handler) -> Handler:
    """Marks a handler that needs the role `infer`."""
    handler.needs = "infer"  # type: ignore[attr-defined]
    return handler


def operates(handler: Handler) -> Handler:
    """Marks a handler that changes the server's state: it needs the role `operate` and refuses other sites' pages."""
    handler.needs = "operate"  # type: ignore[attr-defined]
    return for_operators(handler)


def for_operators(handler: Handler) -> Handler:
    """Marks a handler that is reached at the server's `admin_port` only, if it has one."""
    handler.for_operators = True  # type: ignore[attr-defined]
    return handler


class Keys:
    """API keys by name. Only digests are kept, and a given key is compared with all of them, in constant time."""

    def __init__(self, keys: Mapping[str, str | Key]) -> None:
        given = {name: key if isinstance(key, Key) else Key(key) for name, key in keys.items()}
        self._known = [(name, hashlib.sha256(k.secret.encode()).digest(), k) for name, k in given.items()]

    def __bool__(self) -> bool:
        return bool(self._known)

    def client_of(self, given: str, role: Role | None) -> str:
        """Tenant or name of a key. RequestError 401: no known key; 403: the key lacks the role."""
        digest = hashlib.sha256(given.encode("utf-8", "surrogateescape")).digest()
        found: tuple[str, Key] | None = None
        for name, known, key in self._known:
            if hmac.compare_digest(digest, known):
                found = name, key
        if found is None:
            said = "this server needs an API key: send one it knows as X-API-Key: … or as Authorization: Bearer …"
            raise RequestError(said, status=401, field="X-API-Key")
        if role is not None and role not in found[1].roles:
            said = f"the key of {found[0]!r} lacks the role {role!r}, which this address needs: use a key that has it"
            raise RequestError(said, status=403, field="X-API-Key", limit=role, given=found[1].roles)
        return found[1].tenant or found[0]


def clients_of(keys: Mapping[str, str | Key]) -> set[str]:
    """The clients that these keys name.

    >>> sorted(clients_of({"alice": "a", "robot": Key("r", tenant="alice"), "bob": "b"}))
    ['alice', 'bob']
    """
    return {(key.tenant if isinstance(key, Key) else None) or name for name, key in keys.items()}


def given_key(api_key: str, authorization: str) -> str:
    """The key in the headers X-API-Key and Authorization; "": there is none.

    >>> given_key("a", "Bearer b"), given_key("", "Bearer b"), given_key("", "Basic c")
    ('a', 'b', '')
    """
    scheme, _, token = authorization.partition(" ")
    return token.strip() if not api_key and scheme.lower() == "bearer" else api_key


class Access:
    """The checks every request passes before its handler runs: its key, and its origin where it changes the server.

    `hosts` are names of this server in addition to its addresses, "localhost" and the machine's own name. `control`
    says whether models and the policy may be changed over HTTP at all. `local`: only this machine reaches the server.
    If it has no keys either, a page could use it under a host name of its own that resolves to 127.0.0.1. So requests
    to unknown hosts are refused, but for those without a dot, which no other site has.
    """

    def __init__(
        self, keys: Mapping[str, str | Key], hosts: Iterable[str] = (), control: bool = True, local: bool = False
    ) -> None:
        self._keys, self._control, self._local = Keys(keys), control, local and not keys
        self.admin_port: int | None = None  # once the server listens there
        self._hosts = {"localhost", socket.gethostname().lower(), *(each.lower() for each in hosts)}

    @property
    def has_keys(self) -> bool:
        return bool(self._keys)

    def set_keys(self, keys: Mapping[str, str | Key]) -> None:
        """Replaces the keys. Whether the server requires keys at all does not change."""
        self._keys = Keys(keys)

    def client(self, request: web.Request, client_header: str) -> str:
        """Name of the client; "": unnamed. RequestError where the request is not allowed."""
        # The handler decides, not the path: one path can be spelled in many ways.
        role: Role | Literal[""] | None = getattr(request.match_info.handler, "needs", "")
        if self.admin_port is not None and getattr(request.match_info.handler, "for_operators", False):
            self._check_port(request)
        if role == "operate":
            self._check_origin(request)
        named = request.headers.get(client_header, "")
        if role is None:
            return named
        if not self.admits(request.host):
            raise _unknown(request.host)
        key = given_key(request.headers.get("X-API-Key", ""), request.headers.get("Authorization", ""))
        return self.client_of(key, named, role or None)

    def _check_port(self, request: web.Request) -> None:
        address = None if request.transport is None else request.transport.get_extra_info("sockname")
        port = address[1] if isinstance(address, tuple) else None  # else a file
        if port != self.admin_port:
            said = "this address is answered at the server's admin port"
            raise RequestError(said, status=404, field="server.admin_port", given=port)

    def client_of(self, key: str, named: str, role: Role | None) -> str:
        """The client with this key; if the server has no keys, the one named by the client header."""
        return self._keys.client_of(key, role) if self._keys else named

    def _check_origin(self, request: web.Request) -> None:
        if not self._control:
            said = "this server does not let models or the policy be changed over HTTP: set server.model_control = true"
            raise RequestError(said, status=403, field="server.model_control", given=False)
        if not self._knows(request.host):
            raise _unknown(request.host)
        origin = request.headers.get("Origin")
        elsewhere = origin is not None and _place(origin).netloc.lower() != request.host.lower()
        if elsewhere or request.headers.get("Sec-Fetch-Site", "same-origin") not in ("same-origin", "none"):
            said = "a page of another site may not change this server: use the server's own dashboard, or a program"
            raise RequestError(said, status=403, field="Origin", given=origin)

    def admits(self, host: str) -> bool:
        """Whether requests to this host are answered that change nothing."""
        return not self._local or "." not in host or self._knows(host)

    def _knows(self, host: str) -> bool:
        """Whether `host` is an IP address, which no other site can claim, or one of the server's names."""
        name = (_place(f"//{host}").hostname or "").rstrip(".")
        return name in self._hosts or _is_address(name)


def _unknown(host: str) -> RequestError:
    said = f"this server does not know the host name {short(host)}: add it to server.hosts"
    return RequestError(said, status=403, field="Host", given=host)


def _place(url: str) -> SplitResult:
    """The parts of an address; empty ones where it has none, for example "//[::1" without its bracket."""
    try:
        return urlsplit(url)
    except ValueError:
        return SplitResult("", "", "", "", "")


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach the host.

    >>> is_loopback("127.0.0.1"), is_loopback("unix:/run/paellapy.sock"), is_loopback("0.0.0.0")
    (True, True, False)
    """
    named = host == "localhost" or host.startswith("unix:")
    return named or (_is_address(host) and ipaddress.ip_address(host).is_loopback)
