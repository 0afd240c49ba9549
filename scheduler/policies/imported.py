"""Policies by name for the command line: those of paellapy, and `package.module:function` for a user's own."""

from __future__ import annotations

import importlib
import os
import sys

from paellapy.scheduler.policies.policy import Policy, PolicyError, find_policy


def named_policy(name: str) -> Policy:
    """The policy of that name. A module may also be in the current folder.

    >>> named_policy("paellapy.scheduler.policies.srpt:rank").name
    'srpt'
    """
    module, colon, attribute = name.partition(":")
    if not colon:
        return find_policy(name)
    if (folder := os.getcwd()) not in sys.path:
        sys.path.append(folder)
    try:
        found = importlib.import_module(module)
        for part in attribute.split("."):
            found = getattr(found, part)
    except PolicyError:
        raise
    except Exception as e:
        reason = f"{type(e).__name__}: {e}"
        raise PolicyError(
            f"{name} cannot be imported ({reason}): the name must have the form package.module:function"
        ) from e
    return find_policy(found)  # type: ignore[arg-type]
