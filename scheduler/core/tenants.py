"""Tenants: clients with a name, a share of the GPU and a limit. Their rows in the core's tables, and client numbers."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import numpy as np

from paellapy.instrument.errors import ArgumentError
from paellapy.instrument.numba_ext.link import compiled
from paellapy.scheduler.core import codes
from paellapy.scheduler.core.atomics import ZERO, exchange_at, load_at, store_at
from paellapy.scheduler.core.state import State
from paellapy.scheduler.core.tables import Words
from paellapy.scheduler.core.throttle import attach_held_back
from paellapy.scheduler.core.values import is_finite_number, shortened

LEAST_LIMIT = 1e-6  # with less, a request would wait for hours


@dataclass(frozen=True, slots=True)
class Tenant:
    """A client with rights of its own. `share` is its weight against other tenants under fair policies; `limit` is the
    largest fraction of the GPU's time it may use under any policy, counted as time alone.

    >>> Tenant(share=3, limit=0.5)
    Tenant(share=3, limit=0.5)
    """

    share: float = 1.0
    limit: float | None = None

    def __post_init__(self) -> None:
        if not is_finite_number(self.share) or not self.share > 0:
            raise ArgumentError(
                f"share={shortened(self.share)}: the weight must be finite and above 0; other clients have 1",
                field="share",
                given=self.share,
            )
        if self.limit is not None and (not is_finite_number(self.limit) or not LEAST_LIMIT <= self.limit <= 1):
            raise ArgumentError(
                f"limit={shortened(self.limit)}: the fraction of the GPU's time must be at least {LEAST_LIMIT:g} and "
                "at most 1, or None",
                field="limit", given=self.limit,
            )  # fmt: skip


def checked_tenants(given: Mapping[str, Any]) -> dict[str, Tenant]:
    """Tenants by name; each may also be given as a mapping with `share` and `limit`.

    >>> checked_tenants({"alice": {"share": 3}})
    {'alice': Tenant(share=3, limit=None)}
    """
    found = {}
    for name, each in given.items():
        if not isinstance(name, str) or not 0 < len(name.encode()) <= codes.TENANT_NAME or "\0" in name:
            raise ArgumentError(
                f"tenant name {name!r}: it must be a string of 1 to {codes.TENANT_NAME} bytes without NUL",
                field="name", given=name,
            )  # fmt: skip
        if not isinstance(each, Tenant | Mapping) or (isinstance(each, Mapping) and set(each) - {"share", "limit"}):
            raise ArgumentError(
                f"tenant {name!r} is {each!r}: it must be a pp.Tenant or a mapping with share and limit, such as "
                "pp.Tenant(share=3)",
                field="tenant", given=each,
            )  # fmt: skip
        found[name] = each if isinstance(each, Tenant) else Tenant(**each)
    return found


def set_tenant(state: State, number: int, name: str, tenant: Tenant) -> None:
    """Makes the client of this number this tenant from now on. Call between two steps of the core."""
    core, client = state.core[0], state.client[number]
    if not client["tenant"]:
        _separate_flow(state, number)
    live = state.flow["live"][number] > 0
    before = state.flow["share"][number, live]
    state.flow["share"][number, live] = before / client["share"] * tenant.share
    core["shares"] += (state.flow["share"][number, live] - before).sum()
    if client["live"]:
        core["client_shares"] += tenant.share - client["share"]
    client["share"], client["limit"], client["tenant"] = tenant.share, tenant.limit or 0.0, 1
    if not client["limit"]:
        client["resume_ns"] = 0.0
    state.tenant_name[number] = np.frombuffer(name.encode().ljust(codes.TENANT_NAME, b"\0"), np.uint8)
    core["limited"] = (state.client["limit"] > 0.0).sum()
    if tenant.limit:
        attach_held_back(state)
    core["changed"] = 1


def _separate_flow(state: State, number: int) -> None:
    """Counts the requests of a client that becomes a tenant no longer among those of all other clients."""
    asked = state.request[(state.request["state"] != codes.UNUSED) & (state.request["client"] == number)]
    moved = np.bincount(state.model["flow"][asked["model"]], minlength=len(state.model))
    core, common, own = state.core[0], state.flow[0], state.flow[number]
    for m in np.flatnonzero(moved):
        common["live"][m] -= moved[m]
        own["live"][m], own["virtual_ns"][m] = moved[m], core["virtual_ns"]
        own["share"][m] = state.model["share"][m] * state.client["share"][number]
        core["shares"] += own["share"][m] - (common["share"][m] if not common["live"][m] else 0.0)


def tenant_numbers(state: State) -> dict[str, int]:
    """The client numbers of all tenants, by name."""
    numbers = np.flatnonzero(state.client["tenant"])
    return {state.tenant_name[k].tobytes().rstrip(b"\0").decode(): int(k) for k in numbers}


def tenants_stats(state: State) -> dict[str, dict[str, Any]]:
    """Tenants by name, with their shares and counts."""
    return {name: tenant_stats(state, number) for name, number in tenant_numbers(state).items()}


def tenant_stats(state: State, number: int) -> dict[str, Any]:
    """Counts so far. `number`: `job.tenant` in policies; `held_back`: requests that its limit or `admit` keeps out of
    instances; `gpu_ms`: its part of the GPU's busy time; `alone_ms`: the time of its work alone.
    """
    client = state.client[number]
    return {
        "number": number,
        "share": float(client["share"]),
        "limit": float(client["limit"]) or None,
        "live": int(client["live"]),
        "held_back": int(client["held_back"]),
        "completed": int(client["completed"]),
        "gpu_ms": float(client["gpu_ns"]) * 1e-6,
        "alone_ms": float(client["used_ns"]) * 1e-6,
    }


# --- numbers of clients: a number follows from the client's name, so all processes find the same


def client_key(client: Hashable) -> int:
    """A hash of the client's name, never 0."""
    text = client if isinstance(client, str) else repr(client)
    return int.from_bytes(blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "little") >> 1 | 1


def client_numbers(names: Iterable[Hashable], clients: int) -> dict[Hashable, int]:
    """The numbers that an empty table with room for `clients` gives to these names, in this order.

    >>> client_numbers(["alice", "bob"], 256)
    {'alice': 221, 'bob': 13}
    """
    found: dict[Hashable, int] = {}
    taken = set()
    for name in dict.fromkeys(names):
        number = client_key(name) % (clients - 1)
        while number in taken:
            number = (number + 1) % (clients - 1)
        taken.add(number)
        found[name] = 1 + number
    return found


@compiled
def find_client(keys: Words, clients: Any, key: int) -> int:
    """The number of a client, which all producers derive from a hash of its name; 0 stands for no particular client.

    When all numbers are in use, a new client takes the number of a client without requests, or shares a number.
    """
    n = keys.shape[0] - 1
    home = np.int64(np.uint64(key) % np.uint64(n))
    for k in range(n):
        i = 1 + (home + k) % n
        where = keys[i:].ctypes.data
        known = load_at(where)
        if known == np.uint64(key) or (known == ZERO and exchange_at(where, ZERO, np.uint64(key))):
            return int(i)
    for _ in range(n):  # a tenant keeps its number for itself
        if clients[1 + home].tenant == 0:
            break
        home = (home + 1) % n
    if clients[1 + home].live == 0 and clients[1 + home].tenant == 0:
        store_at(keys[1 + home :].ctypes.data, np.uint64(key))
    return int(1 + home)
