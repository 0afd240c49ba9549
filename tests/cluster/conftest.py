"""Three Ray nodes on this machine, once for all tests that need them."""

from __future__ import annotations

import os

import pytest
from places import TESTS

from paellapy.cluster.lifecycle import RAY_SETTINGS


@pytest.fixture(scope="session")
def nodes():
    """Three nodes. The first start may fail while an agent comes up. Nodes without CPUs start no workers in advance."""
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
    yield cluster
    ray.shutdown()
    cluster.shutdown()
    restore(before, *before)


def restore(before: dict[str, str | None], *names: str) -> None:
    for name in names:
        value = before[name]
        os.environ.pop(name, None) if value is None else os.environ.update({name: value})
