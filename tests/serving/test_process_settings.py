"""Settings of a process that serves."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import weakref

import pytest

from paellapy import demo
from paellapy.scheduler.engine.engine import Engine
from paellapy.serving.config import ServerConfig
from paellapy.serving.preflight import spare_objects, stop_sparing
from paellapy.serving.registry import Entry, Registry, entry_of
from paellapy.serving.server import Server, run


class Ring:
    """An object that refers to itself: only the collector frees it."""

    def __init__(self):
        self.itself = self


@pytest.fixture(autouse=True)
def searched_afterwards():
    yield
    stop_sparing()


def test_a_server_that_has_loaded_its_models_spares_their_objects_until_one_is_unloaded():
    spared = []
    with Engine("virtual:h200") as engine:
        registry = Registry(engine, [entry_of(demo.load("mlp", batch=(1,)))])
        server = Server(registry, ServerConfig(port=0, grace_s=0.0))

        def ready(_):
            spared.append(gc.get_freeze_count())
            registry.unload("mlp")
            spared.append(gc.get_freeze_count())
            os.kill(os.getpid(), signal.SIGTERM)

        asyncio.run(run(server, ready))
    assert spared[0] > 0
    assert spared[1] == 0


def test_objects_of_models_that_are_loaded_later_are_spared_too():
    made = []

    def make():
        made.append(Ring())
        return demo.load("cnn", batch=(1,))

    def is_spared(ring):
        return not any(each is ring for each in gc.get_objects())  # spared objects are in no generation

    with Engine("virtual:h200") as engine:
        mlp, cnn = entry_of(demo.load("mlp", batch=(1,))), Entry("cnn", make, wanted=False)
        registry = Registry(engine, [mlp, cnn])
        server = Server(registry, ServerConfig(port=0, grace_s=0.0))

        def ready(_):
            registry.load("cnn")
            assert is_spared(made[0])
            registry.load("cnn")  # anew: the first one is unloaded, so that all objects are searched
            assert is_spared(made[1])
            os.kill(os.getpid(), signal.SIGTERM)

        asyncio.run(run(server, ready))
    assert gc.get_freeze_count() == 0


def test_a_registry_in_the_process_of_others_spares_nothing():
    with Engine("virtual:h200") as engine:
        Registry(engine, [entry_of(demo.load("mlp", batch=(1,)))]).load("mlp")
    assert gc.get_freeze_count() == 0


def test_garbage_of_the_start_is_freed_and_not_spared():
    lost = weakref.ref(Ring())
    spare_objects()
    assert lost() is None


def test_a_spared_object_is_found_again_once_all_are_searched():
    kept = Ring()
    seen = weakref.ref(kept)
    spare_objects()
    del kept
    gc.collect()
    assert seen() is not None
    gc.unfreeze()
    gc.collect()
    assert seen() is None


def test_a_server_that_has_stopped_lets_the_interpreter_free_all():
    with Engine("virtual:h200") as engine:
        server = Server(Registry(engine, [entry_of(demo.load("mlp", batch=(1,)))]), ServerConfig(port=0, grace_s=0.0))
        asyncio.run(run(server, lambda _: os.kill(os.getpid(), signal.SIGTERM)))
    assert gc.get_freeze_count() == 0
