"""Evictions that fail in an engine: the weights still serve, callers get the error, and nothing waits for ever."""

from __future__ import annotations

import pytest
from chain_models import SMALL, ask, chain, room_for
from core_check import check_at_rest

import paellapy as pp
from paellapy.instrument.errors import PaellaError
from paellapy.scheduler.core.errors import MemoryPlanError, ModelError, WeightsError

DEVICE = "virtual:h200"


@pytest.fixture(scope="module")
def room():
    return room_for(DEVICE, 1)


@pytest.fixture
def server(room):
    """One of its two models is on the GPU."""
    with pp.Engine(DEVICE, memory_bytes=room, quantum_us=2, tuning=SMALL) as server:
        for k, name in enumerate(("one", "two")):
            server.load(chain(name, k)[0])
        ask(server, "one", chain("one", 0)[1])
        yield server


def stick(server, name, monkeypatch):
    """Lets evictions of the model's weights fail."""
    found = server.client.find(name).range

    def fail():
        raise RuntimeError("no unmapping")

    monkeypatch.setattr(found, "evict", fail)
    return found


def test_the_caller_gets_the_error_and_requests_are_answered(server, monkeypatch):
    stick(server, "one", monkeypatch)
    with pytest.raises(WeightsError, match=r"'one'.*no unmapping"):
        server.evict("one")
    assert server.weights_state("one") == "resident"
    ask(server, "one", chain("one", 0)[1])
    with pytest.raises(WeightsError, match=r"'two'.*'one'.*no unmapping"):
        ask(server, "two", chain("two", 1)[1])
    with pytest.raises(PaellaError, match=r"'one'.*no unmapping"):
        server.prefetch("two")
    with pytest.raises(MemoryPlanError, match=r"'three'.*'one'.*no unmapping"):
        server.load(chain("three", 2)[0])
    assert server.memory()["failed"] > 3
    check_at_rest(server.state)
    monkeypatch.undo()
    ask(server, "two", chain("two", 1)[1])  # the next request tries again
    server.evict("two")
    assert server.weights_state("two") == "host"


def test_a_model_whose_weights_cannot_leave_is_unloaded(server, monkeypatch):
    found = stick(server, "one", monkeypatch)
    server.unload("one")
    ask(server, "two", chain("two", 1)[1])
    assert server.models.keys() == {"two"}
    assert not found.there


def test_memory_that_cannot_be_freed_is_named(server, monkeypatch):
    found = server.client.find("one").range

    def fail():
        raise PaellaError("no unmapping")

    monkeypatch.setattr(found, "free", fail)
    with pytest.raises(WeightsError, match=r"'one' is unloaded.*no unmapping"):
        server.unload("one")
    assert server.models.keys() == {"two"}
    assert server.memory()["models"].keys() == {"two"}
    with pytest.raises(MemoryPlanError):  # the memory is still counted
        server.load(chain("one", 0)[0])


def test_requests_are_told_when_others_took_the_memory_and_the_next_one_tries_again(server, monkeypatch):
    def fail(source):
        raise MemoryPlanError("the GPU has only 1.0 MiB free")

    monkeypatch.setattr(server.client.find("two").range, "bring", fail)
    for _ in range(2):
        with pytest.raises(WeightsError, match=r"'two'.*1\.0 MiB"):
            ask(server, "two", chain("two", 1)[1])
    with pytest.raises(MemoryPlanError, match=r"1\.0 MiB"):
        server.prefetch("two")
    ask(server, "one", chain("one", 0)[1])
    monkeypatch.undo()
    server.prefetch("two")
    ask(server, "two", chain("two", 1)[1])
    check_at_rest(server.state)


def test_resident_without_a_budget_is_refused():
    with pp.Engine(DEVICE) as server, pytest.raises(ModelError, match=r"'one'.*memory_bytes"):
        server.load(chain("one", 0, resident=False)[0])
