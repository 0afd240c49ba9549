"""An engine's policy and tenants, which are changed between two steps of the core."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from typing import Any

from paellapy.scheduler.core.barred import attach_barred
from paellapy.scheduler.core.errors import ModelError
from paellapy.scheduler.core.tenants import checked_tenants, give_tenant, tenants_stats
from paellapy.scheduler.core.tuning import Tuning
from paellapy.scheduler.engine.guarded import Guarded
from paellapy.scheduler.policies.attach import attach_policy
from paellapy.scheduler.policies.policy import Policy, find_policy


class Governed(Guarded):
    """An engine whose requests are ranked by a policy and belong to tenants."""

    tuning: Tuning
    max_active: int | None
    _policy: Policy
    _loop_ended: bool

    @property
    def policy(self) -> str:
        """The name of the current policy."""
        return self._policy.name

    @property
    def current_policy(self) -> Policy:
        return self._policy

    def set_policy(self, policy: str | Policy) -> None:
        """Changes the policy. Work on the GPU keeps running; waiting jobs are ranked anew.

        A policy that this machine has not used before is compiled first. On a real GPU, requests run meanwhile. A
        virtual GPU pauses for some tenths of a second instead: its loop and the compiler would compete for the
        interpreter lock, and compilation would take several times as long.
        """
        self._check_open()
        if not self._backend.computes_in_python:
            policy = find_policy(policy)
            if policy.admits_by_client:
                attach_barred(self.state)

        def change() -> None:
            self._policy = self._attach(policy)

        self._between_steps(change)

    def tenant(self, name: str, share: float = 1.0, limit: float | None = None) -> None:
        """Gives the client of this name a share of the GPU relative to other tenants, which fair policies read, and a
        `limit`: the largest fraction of the GPU's time it may use. A later call changes both.
        """
        self._check_open()
        (tenant,) = checked_tenants({name: {"share": share, "limit": limit}}).values()
        number = self._front.client_number(name)
        if not self._front.is_client(number, name):
            raise ModelError(
                f"no room for tenant {name!r}: all {len(self.state.client) - 1} client numbers are in use; give the "
                "engine larger limits"
            )
        self._between_steps(lambda: give_tenant(self.state, number, name, tenant))

    @property
    def tenants(self) -> dict[str, dict[str, Any]]:
        """Tenants by name: share, limit, and the GPU time each has used."""
        return tenants_stats(self.state)

    def _is_idle(self) -> bool:
        """Whether no request is there, of any process."""
        return self._front.waiting == 0 and not self.state.core["live"][0]

    def _between_steps(self, change: Callable[[], None]) -> None:
        """Runs a change in the loop's thread, and waits until it is done."""
        done = threading.Event()
        failed: list[BaseException] = []

        def run() -> None:
            try:
                change()
            except BaseException as e:  # the loop continues; the error goes to the caller of this function
                failed.append(e)
            finally:
                done.set()

        if self._loop_ended:
            change()
            return
        self._backend.call(run)
        while not done.wait(0.1):
            if not self._closing:
                self._check_open()  # a loop that has ended makes no more changes
        if failed:
            raise failed[0]

    def _attach(self, policy: str | Policy) -> Policy:
        found = find_policy(policy)
        attach_policy(self.state, found)
        if found.active is None:
            most = len(self.state.lane)
            self.state.core["max_active"][0] = most if self.max_active is None else min(self.max_active, most)
            self.state.core["demand_limit"][0] = self.tuning.demand_limit if self.max_active is None else math.inf
        return found
