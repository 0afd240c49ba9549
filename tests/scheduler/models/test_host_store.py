"""Weights off the GPU: full host memory, full disks, and nothing left behind."""

from __future__ import annotations

import errno
import shutil
import tempfile
from types import SimpleNamespace

import numpy as np
import pytest

from paellapy.scheduler.core.errors import MemoryPlanError
from paellapy.scheduler.models import weight_files
from paellapy.scheduler.models.host_store import HostStore
from paellapy.scheduler.models.weight_files import WeightFileError


class Host:
    """Blocks of host memory, counted."""

    def __init__(self):
        self.blocks = 0

    def allocate(self, nbytes):
        self.blocks += 1
        return SimpleNamespace(host=np.zeros(nbytes, np.uint8), free=self.free)

    def free(self):
        self.blocks -= 1


def filled(byte):
    def fill(array):
        array[:] = byte

    return fill


@pytest.fixture
def host():
    return Host()


@pytest.fixture
def store(host, tmp_path):
    """Room for one model of 1000 bytes, which is there."""
    found = HostStore(1000, host.allocate, tmp_path)
    found.put("old", 1000, filled(1))
    return found


def full_disk(monkeypatch):
    """A disk that is full before a write, by its own account."""
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=10))


def failing_disk(monkeypatch):
    """A disk that fills up during a write."""

    def fail(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(weight_files.os, "replace", fail)


@pytest.mark.parametrize("disk", [full_disk, failing_disk])
@pytest.mark.parametrize("nbytes", [1000, 2000])  # displaces the other model; goes to the disk itself
def test_with_host_memory_and_disk_full_the_error_names_the_new_model_and_the_old_one_stays(
    store, host, tmp_path, monkeypatch, disk, nbytes
):
    disk(monkeypatch)
    with pytest.raises((MemoryPlanError, WeightFileError), match="'new'") as caught:
        store.put("new", nbytes, filled(2))
    assert "host_bytes" in str(caught.value)
    assert ("'old'" in str(caught.value)) == (nbytes == 1000)
    assert (host.blocks, store.held_bytes, store.file_bytes) == (1, 1000, 0)
    assert list(tmp_path.iterdir()) == []
    assert (store.take("old") == 1).all()
    monkeypatch.undo()
    store.put("new", nbytes, filled(2))
    assert (store.take("new") == 2).all()
    assert (store.take("old") == 1).all()
    store.close()
    assert (host.blocks, store.held_bytes, store.file_bytes) == (0, 0, 0)
    assert list(tmp_path.iterdir()) == []


def test_memory_that_the_gpu_copies_from_is_not_freed_for_a_new_model(store, host):
    store.in_use = lambda name: name == "old"
    source = store.take("old")
    store.put("new", 1000, filled(2))
    assert (store.where("old"), store.where("new")) == ("host", "disk")
    assert (source == 1).all()
    assert (store.take("new") == 2).all()
    store.in_use = lambda name: False
    store.put("newer", 1000, filled(3))  # now it makes room
    assert (store.where("old"), store.where("newer"), host.blocks) == ("disk", "host", 1)
    store.close()
    assert (host.blocks, store.held_bytes, store.file_bytes) == (0, 0, 0)


def gone(monkeypatch, store, tmp_path):
    store.folder = tmp_path / "gone"


def no_folder(monkeypatch, store, tmp_path):
    def fail(**_):
        raise PermissionError(errno.EACCES, "Permission denied", str(tmp_path))

    store.folder = None
    monkeypatch.setattr(tempfile, "mkdtemp", fail)


@pytest.mark.parametrize("broken", [gone, no_folder])
def test_a_folder_that_cannot_be_used_is_named_and_nothing_is_lost(store, host, tmp_path, monkeypatch, broken):
    broken(monkeypatch, store, tmp_path)
    with pytest.raises(WeightFileError, match=rf"{tmp_path}.*TMPDIR"):
        store.put("new", 1000, filled(2))
    assert (host.blocks, store.held_bytes, store.file_bytes) == (1, 1000, 0)
    assert (store.take("old") == 1).all()


def test_a_header_that_is_no_object_is_refused(tmp_path):
    (tmp_path / "list.safetensors").write_bytes((8).to_bytes(8, "little") + b"[1,2,3] ")
    with pytest.raises(WeightFileError, match=r"list\.safetensors"):
        weight_files.map_weights(tmp_path / "list.safetensors")
