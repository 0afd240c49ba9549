"""Attaches a policy to the core: its compiled functions, its own numbers, and its settings for concurrent jobs."""

from __future__ import annotations

import numpy as np

from paellapy.scheduler.core.job import PER_MODEL
from paellapy.scheduler.core.profiles import want_params
from paellapy.scheduler.core.state import State
from paellapy.scheduler.core.throttle import attach_barred
from paellapy.scheduler.policies.policy import Policy
from paellapy.scheduler.policies.roles import ROLES, PolicyError


def attach_policy(state: State, policy: Policy) -> None:
    """Makes this policy decide from the next step on. The caller keeps it alive: the state holds addresses only."""
    if policy.layout.per_model and len(state.model) > PER_MODEL:
        raise PolicyError(
            f"policy {policy.name} keeps per_model numbers for at most {PER_MODEL} models, and the engine has room for "
            f"{len(state.model)}: give the engine smaller limits"
        )
    if policy.place is not None and not state.core["partitions"][0]:
        raise PolicyError(
            f"policy {policy.name} has a `place`, but there are no SM partitions: ask for some with "
            "Engine(sm_partitions=8), simulate(…, sm_partitions=8) or `paellapy simulate --sm-partitions 8`"
        )
    if policy.admits_by_client:
        attach_barred(state)
    attach_functions(state, policy)
    own = np.frombuffer(policy.layout.new_own().tobytes())
    state.own[...] = 0.0
    state.own[: len(own)] = own
    state.own_first[...] = 0.0
    state.own_first[: len(policy.layout.per_model)] = list(policy.layout.per_model.values())
    want_params(state, policy.layout.params)
    core = state.core[0]
    core["own_at"], core["own_names"] = len(policy.layout.state), len(policy.layout.per_model)
    core["max_active"] = min(policy.active or int(state.tuning["default_active"][0]), len(state.instance))
    core["demand_limit"] = np.inf
    core["max_in_flight"] = policy.max_in_flight
    core["whole_always"], core["top_whole"] = policy.whole, policy.top_whole
    core["timeless"] = policy.timeless
    core["may_idle"], core["by_client"] = policy.may_idle, policy.admits_by_client
    core["tick_ns"], core["tick_at_ns"] = policy.tick_us * 1e3, 0.0
    core["facts"] = policy.facts
    core["changed"] = 1


def attach_functions(state: State, policy: Policy) -> None:
    """Writes the addresses, in this process, of the policy's functions and arguments; the core's numbers stay."""
    where = {
        "job": state.job.ctypes.data,
        "gpu": state.gpu.ctypes.data,
        "segment": state.done_segment.ctypes.data,
        "model": state.owner.ctypes.data,
        "own": state.own.ctypes.data,
    }
    call = state.call[0]
    for role in ROLES:
        function = policy.functions.get(role) or (policy.functions["rank"] if role == "order" else None)
        call[role] = function.address if function else 0
        for k, name in enumerate(function.names if function else (), 1):
            if f"{role}_{k}" in (state.call.dtype.names or ()):  # not for `job`, which the caller passes
                call[f"{role}_{k}"] = where[name]
