"""Fixtures of all tests; GPU tests are skipped where there is no GPU, and take turns where there is one."""

from __future__ import annotations

import fcntl
import os
import re
import tempfile
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from forked import Forked
from hypothesis import HealthCheck, settings

from paellapy.instrument.device import Device
from paellapy.instrument.errors import NoDeviceError

# On a machine shared with others an example may take any time: that says nothing about the code.
settings.register_profile("explore", deadline=None, suppress_health_check=[HealthCheck.too_slow])
# The same examples for everyone, so that a failure is the change's and not the day's; PAELLAPY_EXPLORE=1 tries others.
settings.register_profile("shared", settings.get_profile("explore"), derandomize=True, database=None)
settings.load_profile("explore" if os.environ.get("PAELLAPY_EXPLORE") else "shared")


def _gpu_or_reason() -> str | None:
    try:
        Device.open("cuda")
    except NoDeviceError as e:
        return str(e)
    return None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if hasattr(config, "workerinput"):  # long work begins early: groups, then files with many tests
        sizes = Counter(item.path for item in items)
        items.sort(key=lambda item: (_group_of(item.path) is None, -sizes[item.path]))
    for item in items:
        if item.get_closest_marker("alone") and not item.get_closest_marker("gpu"):
            raise pytest.UsageError(f"{item.nodeid} is marked `alone`: mark it `gpu` too")
    if not any(item.get_closest_marker("gpu") for item in items):
        return
    if reason := _gpu_or_reason():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.hookimpl(tryfirst=True, optionalhook=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int | None:
    """One more than the cores: tests wait for processes and timers."""
    return None if "PYTEST_XDIST_AUTO_NUM_WORKERS" in os.environ else len(os.sched_getaffinity(0)) + 1


@cache
def _group_of(path: Path) -> str | None:
    """A file names its group in its marks: `pytestmark = pytest.mark.xdist_group("ray")`."""
    found = re.search(r'^pytestmark = .*?xdist_group\("([^"]+)"\)', path.read_text(), re.M | re.S)
    return found[1] if found else None


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """One worker runs a file, in its order, so its servers and engines are started once; and all files of a group.
    A group may be one file whose few tests take long.

    xdist 3.8 looks for the group in a test's id, and pytest 9.2 does not let it write the group there.
    """
    if config.getvalue("dist") != "loadgroup":
        return None
    from xdist.scheduler import LoadScopeScheduling

    config.option.loadscopereorder = False

    class ByFile(LoadScopeScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.partition("::")[0]
            return _group_of(config.rootpath / file) or file

    return ByFile(config, log)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Tests of several processes share the GPU; one that is marked `alone` has it alone.

    Everyone passes the turnstile before the room. Whoever waits to be alone stands in the turnstile meanwhile: nobody
    else enters, so the room gets empty. All this is around fixtures and the time limit: a test that waits for its turn
    has not begun. Locks are undone explicitly: processes that a test forked may keep the files open.
    """
    if not item.get_closest_marker("gpu") or item.get_closest_marker("skip"):
        return (yield)
    kind = fcntl.LOCK_EX if item.get_closest_marker("alone") else fcntl.LOCK_SH
    # Files of one user: in a folder that all may write to, Linux may refuse to open those of others.
    files = (Path(tempfile.gettempdir(), f"paellapy-gpu-{os.getuid()}.{name}") for name in ("room", "turnstile"))
    with next(files).open("a") as room, next(files).open("a") as turnstile:
        fcntl.flock(turnstile, fcntl.LOCK_EX)
        fcntl.flock(room, kind)
        fcntl.flock(turnstile, fcntl.LOCK_UN)
        try:
            return (yield)
        finally:
            fcntl.flock(room, fcntl.LOCK_UN)


@pytest.fixture
def gpu() -> Device:
    """The first real GPU, made current."""
    device = Device.open("cuda")
    with device:
        yield device


@pytest.fixture(scope="session")
def forked() -> Iterator[Forked]:
    """Runs code in fresh processes in which a driver in host memory (fake_cuda.py) is in the real one's place."""
    head = """
        import asyncio, gc, os, sys, threading, time
        import numpy as np
        from fake_cuda import install
        fake = install()
        import paellapy as pp
        from paellapy.scheduler.engine.engine import Engine
        from paellapy.scheduler.core.errors import *
        from paellapy.scheduler.models.model import Model, TensorSpec
        from paellapy.scheduler.policies.policy import PolicyError, find_policy
        from engine_models import random_inputs, scale, scale_model
        ONES = {"x": np.ones(64, np.float32)}

        # Machine code that nearly all cases need is read from disk once.
        from paellapy.scheduler.core import step
        from paellapy.scheduler.core.state import new_state
        from paellapy.scheduler.engine import ring_calls
        unused = new_state()
        step.attach_loop(unused)
        ring_calls.warm_up(unused)
        for name in ("paella", "srpt"):
            find_policy(name)
    """
    with Forked(head) as processes:
        yield processes
