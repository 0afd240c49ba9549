"""Memory of weights on a real GPU, over a driver that counts and copies in host memory."""

from __future__ import annotations

import ctypes
import random
from types import SimpleNamespace

import numpy as np
import pytest
from failing import failing

import paellapy as pp
from paellapy.instrument.device import driver as device_driver
from paellapy.instrument.device.driver import CudaStream
from paellapy.instrument.errors import LaunchError
from paellapy.scheduler.backends import cuda_memory
from paellapy.scheduler.backends.cuda_memory import CudaPages, CudaWeights
from paellapy.scheduler.core.errors import MemoryPlanError
from paellapy.scheduler.models.weights import Layout

real = pytest.importorskip("cuda.bindings.driver")

MIB = 1 << 20
BASE, LANDING = 1 << 40, 1 << 38


class Driver:
    """Physical memory by handle, mapped addresses, and blocks of pinned memory. Calls named in `failing` fail."""

    cuGetErrorString = staticmethod(lambda code: (0, b""))

    def __getattr__(self, name):
        return getattr(real, name)  # enums and structures

    def __init__(self):
        self.there, self.created = {}, 0
        self.mapped, self.pinned, self.failing = {}, {}, {}  # failing: name of a call → number of calls that succeed
        self.total = 1 << 40
        self.calls = []  # those of a reload, in order
        self.weights = np.zeros(24 * MIB, np.uint8)
        self.landings, self.allocated = {}, 0  # memory that was allocated, by address

    def status(self, name):
        left = self.failing.get(name, 1)
        self.failing.update({name: left - 1} if name in self.failing else {})
        return 0 if left > 0 else 1

    def cuMemGetInfo(self):
        return 0, self.total - sum(self.there.values()), self.total

    def cuMemHostAlloc(self, nbytes, flags):
        block = np.zeros(nbytes, np.uint8)
        self.pinned[block.ctypes.data] = block
        return 0, block.ctypes.data

    def cuMemFreeHost(self, at):
        del self.pinned[at]

    def cuMemAddressReserve(self, *_):
        return self.status("cuMemAddressReserve"), BASE

    def cuMemAddressFree(self, *_):
        return (0,)

    def cuMemcpyHtoDAsync(self, address, host, nbytes, stream):
        self.calls.append(("copy", address - BASE, nbytes))
        self._memory(address, nbytes)[:] = np.frombuffer(ctypes.string_at(host, nbytes), np.uint8)
        return (0,)

    def cuMemcpyDtoDAsync(self, address, source, nbytes, stream):
        self.calls.append(("move", address - BASE, nbytes))
        self._memory(address, nbytes)[:] = self._memory(source, nbytes)
        return (0,)

    def _memory(self, address, nbytes):
        first, memory = max((at, m) for at, m in [(BASE, self.weights), *self.landings.items()] if at <= address)
        assert address + nbytes <= first + len(memory)
        return memory[address - first :][:nbytes]

    def allocate(self, nbytes):
        at = LANDING + self.allocated * 64 * MIB
        self.allocated += 1
        self.landings[at] = np.zeros(nbytes, np.uint8)
        return at

    def free(self, at):
        del self.landings[at]

    def cuStreamWriteValue64(self, stream, word, value, flags):
        self.calls.append(("word", word))
        return (0,)

    def cuMemUnmap(self, address, nbytes):
        status = self.status("cuMemUnmap")
        if status == 0:
            del self.mapped[address]
        return (status,)

    def cuMemGetAllocationGranularity(self, about, flags):
        return 0, 2 * MIB

    def cuMemCreate(self, nbytes, about, flags):
        if sum(self.there.values()) + nbytes > self.total:
            return 2, None
        self.created += 1
        self.there[self.created] = nbytes
        return 0, self.created

    def cuMemRelease(self, handle):
        del self.there[handle]
        return (0,)

    def cuMemMap(self, address, nbytes, offset, handle, flags):
        self.mapped[address] = handle
        self.calls.append(("map", address - BASE, nbytes))
        return (0,)

    def cuMemSetAccess(self, *_):
        return (self.status("cuMemSetAccess"),)


DEVICE = SimpleNamespace(activate=lambda: None, synchronize=lambda: None, index=0)


@pytest.fixture
def cu(monkeypatch):
    driver = Driver()
    for each in (cuda_memory, device_driver):
        monkeypatch.setattr(each, "driver", lambda: driver)
    for name in ("allocate", "free"):
        monkeypatch.setattr(DEVICE, name, getattr(driver, name), raising=False)
    return driver


def weights_of(pages, chunks=3, map_bytes=4 * MIB, chunk_bytes=4 * MIB, nbytes=None):
    stream = SimpleNamespace(handle=0, synchronize=lambda: None)
    return CudaWeights(DEVICE, Layout([nbytes or chunks * chunk_bytes]), (chunk_bytes, map_bytes), pages, stream)


def test_memory_is_mapped_in_blocks_and_each_chunk_of_a_block_is_reported(cu):
    pages = CudaPages(DEVICE, 1000 * MIB)
    weights = weights_of(pages, 5, 7 * MIB)
    assert sorted(cu.mapped) == [BASE, BASE + 8 * MIB, BASE + 16 * MIB]
    weights.evict()
    assert not cu.mapped
    cu.calls.clear()
    weights.bring(np.zeros(20 * MIB, np.uint8))
    word = weights.words.ctypes.data
    chunk = [[("copy", 4 * k * MIB, 4 * MIB), ("word", word + 8 * k)] for k in range(5)]
    block = [[("map", 8 * k * MIB, min(8, 20 - 8 * k) * MIB)] for k in range(3)]
    (landing,) = cu.landings
    landed, chunk[0] = [("copy", landing - BASE, 4 * MIB)], [("move", 0, 4 * MIB), ("word", word)]
    order = [landed, block[0], chunk[0], chunk[1], block[1], chunk[2], chunk[3], block[2], chunk[4]]
    assert cu.calls == [call for part in order for call in part]
    weights.free()
    assert (cu.mapped, pages.used_bytes) == ({}, 0)


@pytest.mark.parametrize("nbytes", [1 * MIB, 4 * MIB, 19 * MIB])
def test_all_bytes_of_weights_come_and_no_others(cu, nbytes):
    weights = weights_of(CudaPages(DEVICE, 1000 * MIB), nbytes=nbytes)
    weights.evict()
    cu.weights[:] = 0
    source = np.random.default_rng(nbytes).integers(0, 256, nbytes, np.uint8)
    weights.bring(source)
    assert np.array_equal(cu.weights[:nbytes], source)
    assert not cu.weights[nbytes:].any()


def test_the_landing_place_is_as_large_as_the_largest_chunk_and_given_back(cu):
    pages = CudaPages(DEVICE, 1000 * MIB)
    for chunk_mib, held_mib in ((4, 4), (2, 4), (8, 8)):
        weights_of(pages, 1, chunk_bytes=chunk_mib * MIB).free()
        assert [len(each) for each in cu.landings.values()] == [held_mib * MIB]
    pages.close()
    assert not cu.landings


def test_an_eviction_that_fails_halfway_leaves_all_weights_where_they_were(cu):
    pages = CudaPages(DEVICE, 1000 * MIB)
    weights = weights_of(pages)
    before = dict(cu.mapped)
    cu.failing["cuMemUnmap"] = 1
    with failing(LaunchError, doing="unmapping weights"):
        weights.evict()
    assert cu.mapped == before
    assert weights.there
    assert (pages.used_bytes, pages.kept_bytes) == (12 * MIB, 0)
    del cu.failing["cuMemUnmap"]
    weights.evict()
    assert (cu.mapped, pages.used_bytes, pages.kept_bytes) == ({}, 0, 12 * MIB)


def test_no_weights_come_where_memory_is_short_for_some(cu, monkeypatch):
    """A segment may run as soon as its weights are reported: they must not be unmapped because others do not fit."""
    pages = CudaPages(DEVICE, 1000 * MIB)
    weights = weights_of(pages, 5)
    weights.evict()
    pages.trim()
    cu.calls.clear()
    cu.total = 12 * MIB
    monkeypatch.setattr(DEVICE, "synchronize", lambda: pytest.fail("nobody uses these weights yet"))
    with failing(MemoryPlanError, limit_bytes=12 * MIB):
        weights.bring(np.zeros(20 * MIB, np.uint8))
    assert {name for name, *_ in cu.calls} == {"copy"}, "only to the landing place"
    assert (cu.mapped, pages.used_bytes, weights.there) == ({}, 0, False)
    cu.total = 20 * MIB
    weights.bring(np.zeros(20 * MIB, np.uint8))
    assert pages.used_bytes == 20 * MIB


def test_memory_that_could_not_be_mapped_is_given_back(cu, monkeypatch):
    pages = CudaPages(DEVICE, 1000 * MIB)
    weights = weights_of(pages, 3)
    weights.evict()
    waited = []
    monkeypatch.setattr(DEVICE, "synchronize", lambda: waited.append(len(cu.mapped)))
    cu.failing["cuMemSetAccess"] = 2
    with failing(LaunchError, doing="opening mapped weights"):
        weights.bring(np.zeros(12 * MIB, np.uint8))
    assert waited == [2]  # for segments that run with weights that have come
    assert (cu.mapped, pages.used_bytes, pages.kept_bytes) == ({}, 0, 12 * MIB)


def test_addresses_are_given_up_when_all_kernels_have_ended(cu, monkeypatch):
    weights, mapped = weights_of(CudaPages(DEVICE, 1000 * MIB)), []
    monkeypatch.setattr(DEVICE, "synchronize", lambda: mapped.append(len(cu.mapped)))
    weights.free()
    assert mapped == [3]
    assert not cu.mapped


def test_memory_that_others_took_is_named_and_nothing_stays_mapped(cu):
    pages = CudaPages(DEVICE, 1000 * MIB)
    weights = weights_of(pages)
    weights.evict()
    pages.trim()
    cu.there["another process"], cu.total = 100 * MIB, 105 * MIB  # room for one chunk
    with pytest.raises(MemoryPlanError) as caught:
        weights.bring(np.zeros(12 * MIB, np.uint8))
    assert caught.value.free_bytes in (1 * MIB, 5 * MIB)
    assert (cu.mapped, pages.used_bytes) == ({}, 0)
    assert not weights.there
    del cu.there["another process"]
    weights.bring(np.zeros(12 * MIB, np.uint8))
    assert weights.there
    assert len(cu.mapped) == 3


def test_memory_kept_in_other_sizes_is_released_before_a_failure(cu):
    pages = CudaPages(DEVICE, 1000 * MIB)
    ((handle, _),) = pages.take_all([2 * MIB])
    pages.give(handle, 2 * MIB)
    cu.total = 4 * MIB
    pages.take_all([4 * MIB])
    assert (pages.used_bytes, pages.kept_bytes) == (4 * MIB, 0)


def test_addresses_that_cannot_be_reserved_leave_no_pinned_memory(cu):
    cu.failing["cuMemAddressReserve"] = 0
    with failing(LaunchError, doing="reserving addresses"):
        weights_of(CudaPages(DEVICE, 1000 * MIB))
    assert cu.pinned == {}


def test_a_day_of_models_of_all_sizes_holds_no_more_than_the_limit(cu):
    driver, pages = cu, CudaPages(DEVICE, 1000 * MIB)
    pick, models = random.Random(5), []
    for _ in range(5_000):
        chunks = [64 * MIB] * pick.randrange(4) + [2 * MIB * pick.randrange(1, 32)]
        while sum(map(sum, (sizes for sizes, _ in models))) + sum(chunks) > 1000 * MIB:
            sizes, handles = models.pop(pick.randrange(len(models)))
            for handle, nbytes in zip(handles, sizes, strict=True):
                pages.give(handle, nbytes)
        models.append((chunks, [handle for handle, _ in pages.take_all(chunks)]))
        assert sum(driver.there.values()) == pages.used_bytes + pages.kept_bytes <= 1000 * MIB
    assert driver.created < 7_500  # of 12,500 chunks: most are used again
    for sizes, handles in models:
        for handle, nbytes in zip(handles, sizes, strict=True):
            pages.give(handle, nbytes)
    pages.trim()
    assert driver.there == {}


@pytest.mark.gpu
def test_on_a_gpu_an_eviction_that_fails_halfway_keeps_every_byte(monkeypatch):
    device = pp.Device("cuda")
    pages = CudaPages(device, 64 * MIB)
    weights = CudaWeights(device, Layout([6 * MIB]), (2 * MIB, 2 * MIB), pages, CudaStream(device, 0))
    source = np.random.default_rng(0).integers(0, 256, 6 * MIB, np.uint8)
    weights.write(source, 0, len(source))
    real, calls = device_driver.driver(), []

    class Failing:
        def __getattr__(self, name):
            return getattr(real, name)

        def cuMemUnmap(self, address, nbytes):
            calls.append(address)
            return (real.CUresult.CUDA_ERROR_INVALID_VALUE,) if len(calls) == 2 else real.cuMemUnmap(address, nbytes)

    monkeypatch.setattr(cuda_memory, "driver", Failing)
    with failing(LaunchError, doing="unmapping weights"):
        weights.evict()
    monkeypatch.undo()
    assert len(calls) == 2
    assert weights.holds(source)
    weights.free()
    assert pages.used_bytes == 0
    pages.trim()
