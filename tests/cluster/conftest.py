"""Three Ray nodes on this machine, once for all tests that need them, and only while these run."""

from __future__ import annotations

import os
from contextlib import ExitStack
from typing import Any

import pytest
from cluster_text import KEY
from places import TESTS

from paellapy.cluster.processes import RAY_SETTINGS

_running: list[Any] = []  # the cluster, while there is one
_end = ExitStack()


@pytest.fixture(autouse=True)
def key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAELLAPY_TEST_KEY", KEY)


@pytest.fixture
def nodes() -> Any:
    """Three nodes."""
    if not _running:
        _start()
    return _running[0]


def _start() -> None:
    """The first start may fail while an agent comes up. Nodes without CPUs start no workers in advance."""
    ray = pytest.importorskip("ray")
    from ray.cluster_utils import Cluster

    path = [str(TESTS), str(TESTS.parent), *filter(None, [os.environ.get("PYTHONPATH")])]  # for engines' factories
    settings = {**RAY_SETTINGS, "PYTHONPATH": os.pathsep.join(path)}
    before = {name: os.environ.get(name) for name in settings}
    os.environ.update(settings)
    node = {"num_cpus": 0, "resources": {"virtual_gpu": 2}, "object_store_memory": 80 << 20}
    for attempt in range(3):
        cluster = Cluster()
        try:
            for _ in range(3):
                cluster.add_node(include_dashboard=False, **node)
            ray.init(address=cluster.address, namespace="paellapy", log_to_driver=False, logging_level="error")
            break
        except Exception:
            ray.shutdown()
            cluster.shutdown()
            if attempt == 2:
                raise
    restore(before, "PYTHONPATH")  # the nodes have it; other tests of this process may run beside the nodes
    _running.append(cluster)
    _end.callback(restore, before, *before)
    _end.callback(cluster.shutdown)
    _end.callback(ray.shutdown)
    _end.callback(_running.clear)


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(nextitem: pytest.Item | None) -> None:
    """Idle nodes use some of the CPU: they end with the group that needs them, long before the session."""
    if nextitem is None or not any(mark.args == ("ray",) for mark in nextitem.iter_markers("xdist_group")):
        _end.close()


def pytest_sessionfinish() -> None:
    _end.close()


def restore(before: dict[str, str | None], *names: str) -> None:
    for name in names:
        value = before[name]
        os.environ.pop(name, None) if value is None else os.environ.update({name: value})
