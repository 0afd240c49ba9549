"""Giving a policy to the core: its compiled functions, and what it says of the jobs at a time."""

from __future__ import annotations

import numpy as np

from paellapy.scheduler.core.state import State
from paellapy.scheduler.policies.policy import Policy


def attach_policy(state: State, policy: Policy) -> None:
    """From the next step on, this policy decides. The caller keeps it alive: the state holds addresses only."""
    state.call["rank"][0], state.call["admit"][0], state.call["order"][0] = policy.addresses
    state.core["max_active"][0] = min(policy.active or int(state.tuning["default_active"][0]), len(state.lane))
    state.core["demand_limit"][0] = np.inf
    state.core["look_ahead"][0] = policy.look_ahead
    state.core["whole_always"][0] = policy.whole
    state.core["timeless"][0] = policy.timeless
    state.core["changed"][0] = 1
