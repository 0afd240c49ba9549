"""What a server needs of its machine is looked at before it starts; and the settings of its process."""

from __future__ import annotations

import asyncio
import errno
import gc
import logging
import os
import resource
import signal
import subprocess
import sys
import tempfile
import weakref
from pathlib import Path

import pytest

from paellapy import demo
from paellapy.instrument.errors import PaellaError
from paellapy.scheduler.engine.engine import Engine
from paellapy.serving import preflight
from paellapy.serving.config import ServerConfig
from paellapy.serving.preflight import born, check_machine, is_alive, own_folder, spare_objects, stop_sparing
from paellapy.serving.registry import Entry, Registry, entry_of
from paellapy.serving.server import Server, run


def test_too_few_descriptors_are_one_sentence(monkeypatch):
    monkeypatch.setattr(resource, "getrlimit", lambda _: (64, 64))
    with pytest.raises(PaellaError) as caught:
        check_machine()
    assert (caught.value.field, caught.value.given) == ("RLIMIT_NOFILE", 64)


def test_as_many_descriptors_as_there_may_be(monkeypatch):
    asked = []
    monkeypatch.setattr(resource, "getrlimit", lambda _: (64, 4096))
    monkeypatch.setattr(resource, "setrlimit", lambda _, limits: asked.append(limits))
    check_machine()
    assert asked == [(4096, 4096)]


def test_a_folder_that_cannot_be_written_is_named_with_its_variable(tmp_path, monkeypatch, caplog):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "file" / "below"))
    monkeypatch.setattr(preflight.log, "propagate", True)
    with caplog.at_level(logging.WARNING):
        check_machine()
    (said,) = {each.message for each in caplog.records}
    assert "TRITON_CACHE_DIR" in said
    assert "Not a directory" in said


def test_a_full_disk_is_told_at_the_start_and_does_not_prevent_it(tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("PAELLAPY_CACHE_DIR", str(tmp_path / "ours"))
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))
    # A file can be made on a full disk, but not filled.
    monkeypatch.setattr(tempfile, "TemporaryFile", lambda dir: open("/dev/full", "wb"))  # noqa: SIM115
    monkeypatch.setattr(preflight.log, "propagate", True)
    with caplog.at_level(logging.WARNING):
        check_machine()
    for said, variable in zip(sorted(set(caplog.messages)), ("PAELLAPY_CACHE_DIR", "TRITON_CACHE_DIR"), strict=True):
        assert variable in said
        assert os.strerror(errno.ENOSPC) in said


def test_no_room_for_the_servers_folder_is_one_sentence(tmp_path, monkeypatch):
    def full(*_, **__):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(tempfile, "mkdtemp", full)
    with pytest.raises(PaellaError) as caught, own_folder():
        pass
    assert (caught.value.field, caught.value.given) == ("TMPDIR", str(tmp_path))
    assert caught.value.__cause__.errno == errno.ENOSPC


def test_folders_of_killed_processes_go_and_those_of_others_stay(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    code = "from paellapy.serving.preflight import own_folder\nwith own_folder() as f: print(f, flush=True); input()"
    command = [sys.executable, "-c", code]
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    other = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)
    left = Path(other.stdout.readline().strip())
    (tmp_path / "paellapy-strange").mkdir()
    with own_folder() as ours:
        assert left.is_dir()
        other.kill()
        other.communicate()
        assert ours.is_dir()
    assert not ours.exists()
    assert left.is_dir()
    with own_folder():
        assert not left.exists()
    assert (tmp_path / "paellapy-strange").is_dir()
    assert is_alive(os.getpid(), born(os.getpid()))
    assert not is_alive(os.getpid(), "1")


# -- objects that the collector leaves out


class Ring:
    """An object that refers to itself: only the collector frees it."""

    def __init__(self):
        self.itself = self


@pytest.fixture(autouse=True)
def searched_afterwards():
    yield
    stop_sparing()


def test_a_server_spares_objects_of_loaded_models_until_one_is_unloaded_or_it_stops():
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
            assert gc.get_freeze_count() > 0
            registry.load("cnn")
            assert is_spared(made[0])
            registry.load("cnn")  # anew: the first one is unloaded, so that all objects are searched
            assert is_spared(made[1])
            registry.unload("cnn")
            assert gc.get_freeze_count() == 0
            spare_objects()
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
