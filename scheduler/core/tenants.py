"""Tenants: clients with a name, a share of the GPU and a limit. Their rows in the core's tables."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from paellapy.instrument.errors import ArgumentError
from paellapy.scheduler.core.codes import TENANT_NAME, UNUSED
from paellapy.scheduler.core.state import State


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
        if not _is_number(self.share) or not 0 < self.share < math.inf:
            raise ArgumentError(f"share={self.share!r}: the weight must be finite and above 0; other clients have 1")
        if self.limit is not None and (not _is_number(self.limit) or not 0 < self.limit <= 1):
            raise ArgumentError(
                f"limit={self.limit!r}: the fraction of the GPU's time must be above 0 and at most 1, or None"
            )


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def checked_tenants(given: Mapping[str, Any]) -> dict[str, Tenant]:
    """Tenants by name; each may also be given as a mapping with `share` and `limit`.

    >>> checked_tenants({"alice": {"share": 3}})
    {'alice': Tenant(share=3, limit=None)}
    """
    found = {}
    for name, each in given.items():
        if not isinstance(name, str) or not 0 < len(name.encode()) <= TENANT_NAME or "\0" in name:
            raise ArgumentError(f"tenant name {name!r}: it must be a string of 1 to {TENANT_NAME} bytes without NUL")
        if not isinstance(each, Tenant | Mapping) or (isinstance(each, Mapping) and set(each) - {"share", "limit"}):
            raise ArgumentError(
                f"tenant {name!r} is {each!r}: it must be a pp.Tenant or a mapping with share and limit, such as "
                "pp.Tenant(share=3)"
            )
        found[name] = each if isinstance(each, Tenant) else Tenant(**each)
    return found


def give_tenant(state: State, number: int, name: str, tenant: Tenant) -> None:
    """Makes the client of this number this tenant from now on. Call between two steps of the core."""
    core, client = state.core[0], state.client[number]
    if not client["tenant"]:
        _leave_the_others(state, number)
    live = state.flow["live"][number] > 0
    before = state.flow["share"][number, live]
    state.flow["share"][number, live] = before / client["share"] * tenant.share
    core["shares"] += (state.flow["share"][number, live] - before).sum()
    if client["live"]:
        core["client_shares"] += tenant.share - client["share"]
    client["share"], client["limit"], client["tenant"] = tenant.share, tenant.limit or 0.0, 1
    if not client["limit"]:
        client["may_ns"] = 0.0
    state.tenant_name[number] = np.frombuffer(name.encode().ljust(TENANT_NAME, b"\0"), np.uint8)
    core["limited"] = (state.client["limit"] > 0.0).sum()
    core["changed"] = 1


def _leave_the_others(state: State, number: int) -> None:
    """Counts the requests of a client that becomes a tenant no longer among those of all other clients."""
    asked = state.request[(state.request["state"] != UNUSED) & (state.request["client"] == number)]
    moved = np.bincount(asked["model"], minlength=len(state.model))
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
    lanes; `gpu_ms`: its part of the GPU's busy time; `alone_ms`: the time of its work alone.
    """
    client = state.client[number]
    return {
        "number": number,
        "share": float(client["share"]),
        "limit": float(client["limit"]) or None,
        "live": int(client["live"]),
        "held_back": int(client["aside"] + state.kept["n"][number].sum()),
        "completed": int(client["completed"]),
        "gpu_ms": float(client["gpu_ns"]) * 1e-6,
        "alone_ms": float(client["used_ns"]) * 1e-6,
    }
