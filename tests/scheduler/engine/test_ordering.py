"""Weights ordered to come or to leave by hand: whoever waits for an order that another call cancelled is told so."""

from __future__ import annotations

import threading

import pytest
from chain_models import SMALL, ask, chain, room_for
from core_check import check_at_rest

import paellapy as pp
from paellapy.scheduler.core.errors import ModelError, UnknownModelError


@pytest.fixture
def server(device):
    """Two models, of which one is on the GPU."""
    with pp.Engine(device, memory_bytes=room_for(device, 1), quantum_us=2, tuning=SMALL) as server:
        for k, name in enumerate(("one", "two")):
            server.load(chain(name, k)[0])
        server.prefetch("two")
        yield server
        check_at_rest(server.state)


@pytest.mark.parametrize(("name", "wanted", "other"), [("one", True, "leave"), ("two", False, "come")])
def test_an_order_that_another_one_cancels_ends(server, monkeypatch, name, wanted, other):
    loaded = server.client.find(name)

    def cancelled(flag):
        monkeypatch.undo()
        mover.ordered[loaded.row] = not wanted

    mover = server.weight_cache._mover
    monkeypatch.setattr(server.core, "run", cancelled)
    with pytest.raises(ModelError) as raised:
        server.weight_cache.move(loaded, wanted)
    assert raised.value.ordered == other


def test_orders_of_many_threads_all_end(server):
    told = []

    def order(what, name):
        try:
            what(name)
        except (ModelError, UnknownModelError) as e:
            told.append(e)

    for _ in range(5):
        orders = [(what, name) for what in (server.prefetch, server.evict) for name in ("one", "two", "one")]
        threads = [threading.Thread(target=order, args=each) for each in orders]
        for each in threads:
            each.start()
        server.unload("one")
        for each in threads:
            each.join()
        server.load(chain("one", 0)[0])
    for k, name in enumerate(("one", "two")):
        ask(server, name, chain(name, k)[1])
