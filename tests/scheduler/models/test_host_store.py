"""Weights off the GPU: full host memory, full disks, and nothing left behind."""

from __future__ import annotations

import errno
import random
import shutil
import tempfile
import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest
from failing import failing
from hypothesis import given, settings
from hypothesis import strategies as st
from waiting import wait_until

from paellapy.scheduler.core.errors import MemoryPlanError
from paellapy.scheduler.models import host_store, weights
from paellapy.scheduler.models.host_store import HostStore
from paellapy.scheduler.models.weights import WeightFileError


class Host:
    """Blocks of host memory, counted. Memory that is freed is overwritten."""

    def __init__(self, limit_bytes=1 << 30):
        self.blocks = self.nbytes = 0
        self.limit_bytes, self.lock = limit_bytes, threading.Lock()

    def allocate(self, nbytes):
        self.count(1, nbytes)
        block = SimpleNamespace(host=np.zeros(nbytes, np.uint8))
        block.free = lambda: self.free(block)
        return block

    def free(self, block):
        self.count(-1, -len(block.host))
        block.host[:] = 0xEE

    def count(self, blocks, nbytes):
        with self.lock:
            self.blocks += blocks
            self.nbytes += nbytes
            assert self.nbytes <= self.limit_bytes


def filled(byte):
    return lambda array: array.fill(byte)


def only(name):
    """The worth of weights where one model is in demand."""
    return lambda each: float(each == name)


def put_on_disk(store, name, nbytes, byte):
    """As if the GPU copied all that is in memory, so that nothing may leave it."""
    store.in_use = lambda each: True
    store.put(name, nbytes, filled(byte))
    store.in_use = lambda each: False


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

    monkeypatch.setattr(weights.os, "replace", fail)


@pytest.mark.parametrize("disk", [full_disk, failing_disk])
@pytest.mark.parametrize("nbytes", [1000, 2000])  # displaces the other model; goes to the disk itself
def test_with_memory_and_disk_full_the_error_names_the_model_and_nothing_is_lost(
    store, host, tmp_path, monkeypatch, disk, nbytes
):
    disk(monkeypatch)
    with pytest.raises((MemoryPlanError, WeightFileError)) as caught:
        store.put("new", nbytes, filled(2))
    written, for_model = ("old", "new") if nbytes == 1000 else ("new", None)
    assert (caught.value.model, caught.value.for_model) == (written, for_model)
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
    with pytest.raises(WeightFileError) as caught:
        store.put("new", 1000, filled(2))
    assert str(caught.value.path).startswith(str(tmp_path))
    assert (host.blocks, store.held_bytes, store.file_bytes) == (1, 1000, 0)
    assert (store.take("old") == 1).all()


def test_a_header_that_is_no_object_is_refused(tmp_path):
    (tmp_path / "list.safetensors").write_bytes((8).to_bytes(8, "little") + b"[1,2,3] ")
    with failing(WeightFileError, path=tmp_path / "list.safetensors"):
        weights.map_weights(tmp_path / "list.safetensors")


def test_weights_in_demand_take_the_memory_of_weights_that_nobody_wants(store, host):
    store.in_use = lambda name: name == "old"
    store.put("new", 1000, filled(2))
    worth = {"old": 1.0, "new": 1.5}
    assert not store.promote("new", worth.__getitem__)  # the other model is being copied to the GPU
    store.in_use = lambda name: False
    assert not store.promote("new", worth.__getitem__)  # not worth the copies
    worth["new"] = 3.0
    assert store.promote("new", worth.__getitem__)
    assert (store.where("old"), store.where("new"), host.blocks) == ("disk", "host", 1)
    assert (store.held_bytes, store.file_bytes, store.promoted, store.displaced) == (1000, 2000, 1, 1)
    assert (store.take("new") == 2).all()
    assert (store.take("old") == 1).all()
    assert not store.promote("new", worth.__getitem__)  # it is there


def test_many_requests_for_few_bytes_do_not_displace_many_bytes(host, tmp_path):
    store = HostStore(1000, host.allocate, tmp_path)
    store.put("large", 1000, filled(1))
    put_on_disk(store, "small", 10, 2)
    assert not store.promote("small", {"large": 1.0, "small": 50.0}.__getitem__)
    assert store.promote("small", {"large": 1.0, "small": 500.0}.__getitem__)


def test_a_file_is_written_once(store, monkeypatch):
    written = []
    write = weights.write_weights
    monkeypatch.setattr(host_store, "write_weights", lambda path, arrays: (written.append(path), write(path, arrays)))
    store.put("new", 1000, filled(2))
    for name in ("old", "new", "old", "new"):
        assert store.promote(name, only(name))
        assert store.where(name) == "host"
    assert len(written) == 2


def test_weights_that_cannot_be_written_stay_in_memory(store, host, monkeypatch):
    put_on_disk(store, "new", 1000, 2)
    full_disk(monkeypatch)
    with failing(MemoryPlanError, model="old", for_model="new"):
        store.promote("new", only("new"))
    assert (store.where("old"), store.where("new"), host.blocks, store.held_bytes) == ("host", "disk", 1, 1000)
    monkeypatch.undo()
    assert store.promote("new", only("new"))


def test_without_memory_the_weights_stay_in_their_file(store, host):
    store.put("new", 900, filled(2))

    def refuse(nbytes):
        raise MemoryPlanError("no pinned memory", needed_bytes=nbytes)

    store.promote("old", only("old"))
    store.allocate = refuse
    with failing(MemoryPlanError, needed_bytes=900):
        store.promote("new", only("new"))
    assert (store.where("old"), store.where("new"), host.blocks, store.held_bytes) == ("disk", "disk", 0, 0)
    store.allocate = host.allocate
    assert (store.take("new") == 2).all()
    assert (store.take("old") == 1).all()


def taken_by_a_new_model(store):
    store.put("third", 400, filled(3))


def copied_to_the_gpu(store):
    store.in_use = lambda name: name == "old"


def dropped(store):
    threading.Thread(target=store.drop, args=("old",)).start()
    time.sleep(0.01)
    assert store.where("old") == "host"  # it waits


@pytest.mark.parametrize("meanwhile", [taken_by_a_new_model, copied_to_the_gpu, dropped])
def test_while_a_file_is_written_anything_may_happen(host, tmp_path, monkeypatch, meanwhile):
    host.limit_bytes = 1000
    store, write = HostStore(1000, host.allocate, tmp_path), weights.write_weights
    store.put("old", 600, filled(1))
    put_on_disk(store, "new", 700, 2)

    def slowly(path, arrays):
        monkeypatch.undo()
        meanwhile(store)
        write(path, arrays)

    monkeypatch.setattr(host_store, "write_weights", slowly)
    done = store.promote("new", only("new"))
    assert done == (meanwhile is dropped)
    assert store.where("new") == ("host" if done else "disk")
    wait_until(lambda: store.where("old") == ("" if done else "host"))
    assert host.nbytes == store.held_bytes == (700 if done else 1000 if "third" in store._kept else 600)
    assert (store.take("new") == 2).all()
    assert done or (store.take("old") == 1).all()


NAMES = st.sampled_from("abcdef")
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("put"), NAMES, st.integers(1, 600)),
        st.tuples(st.just("drop"), NAMES),
        st.tuples(st.just("bring"), NAMES),
        st.tuples(st.just("done"), NAMES),
        st.tuples(st.just("ask"), NAMES, st.integers(1, 5)),
        st.tuples(st.just("promote"), NAMES),
    ),
    max_size=40,
)


class Used:
    """A store and what it should hold: contents by name, demand, and copies to the GPU that are under way."""

    def __init__(self, folder):
        self.host = Host(1000)
        self.demand, self.right, self.coming, self.written = {}, {}, {}, 0
        self.store = HostStore(1000, self.host.allocate, folder, in_use=self.coming.__contains__)

    def put(self, name, nbytes):
        if name not in self.right:
            self.right[name] = np.random.default_rng(nbytes).integers(0, 255, nbytes, np.uint8)
            self.store.put(name, nbytes, lambda array: np.copyto(array, self.right[name]))

    def drop(self, name):
        if name not in self.coming:  # the engine unloads no model that is on its way
            self.right.pop(name, None)
            self.store.drop(name)

    def bring(self, name):
        if name in self.right:
            self.coming[name] = None  # the core marks a model before the mover takes its weights
            self.coming[name] = self.store.take(name)

    def done(self, name):
        source = self.coming.get(name)
        assert source is None or np.array_equal(source, self.right[name])
        self.coming.pop(name, None)  # from now on another thread may free the memory

    def ask(self, name, requests):
        self.demand[name] = self.demand.get(name, 0.0) / 2 + requests

    def promote(self, name):
        before = self.store.where(name)
        if self.store.promote(name, lambda each: self.demand.get(each, 0.0)):
            assert (before, self.store.where(name)) == ("disk", "host")

    def check(self):
        store = self.store
        in_memory = [name for name in self.right if store.where(name) == "host"]
        assert store._kept.keys() == self.right.keys()
        assert store.held_bytes == sum(len(self.right[name]) for name in in_memory) == self.host.nbytes <= 1000
        files = [each.file for each in store._kept.values() if each.file is not None]
        assert store.file_bytes == sum(each.nbytes for each in store._kept.values() if each.file is not None)
        assert sorted(store.folder.iterdir()) == sorted(files)
        for name, source in self.coming.items():
            assert np.array_equal(source, self.right[name])
        for name, right in self.right.items():
            kept = store._kept[name]
            assert np.array_equal(kept.host.host[: kept.nbytes] if kept.host else store._map(kept), right)
            assert kept.host is not None or kept.file is not None


@given(STEPS)
@settings(max_examples=150, deadline=None)
def test_after_any_steps_the_bytes_are_right_and_within_the_budget(tmp_path_factory, steps):
    used = Used(tmp_path_factory.mktemp("weights"))
    for what, *about in steps:
        getattr(used, what)(*about)
        used.check()
    used.coming.clear()
    used.store.close()
    assert (used.host.nbytes, used.store.held_bytes, used.store.file_bytes) == (0, 0, 0)


def test_weights_are_promoted_while_others_are_stored_brought_and_dropped(tmp_path):
    used, over, failed = Used(tmp_path), threading.Event(), []

    def promote():
        pick = random.Random(1)
        try:
            while not over.is_set():
                used.store.promote(pick.choice("abcdef"), lambda each: pick.random())
                time.sleep(0.0002)
        except Exception as e:
            failed.append(e)

    thread = threading.Thread(target=promote)
    thread.start()
    pick = random.Random(0)
    try:
        for _ in range(4000):
            what, name = pick.choice(["put", "put", "bring", "done", "drop"]), pick.choice("abcdef")
            getattr(used, what)(name, *([pick.randrange(1, 600)] if what == "put" else ()))
            for each, source in used.coming.items():
                assert np.array_equal(source, used.right[each])
    finally:
        over.set()
        thread.join()
    assert failed == []
    assert used.store.promoted > 0
    used.check()
