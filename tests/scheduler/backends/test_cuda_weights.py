"""Memory of weights on a real GPU, kept for the next model: with a driver that only counts."""

from __future__ import annotations

import random
from types import SimpleNamespace

from paellapy.scheduler.backends import cuda_weights
from paellapy.scheduler.backends.cuda_weights import CudaPages

MIB = 1 << 20


class Driver:
    """Physical memory by handle."""

    CUmemAllocationProp = staticmethod(lambda: SimpleNamespace(location=SimpleNamespace()))
    CUmemAccessDesc = CUmemAllocationProp
    CUmemAllocationType = SimpleNamespace(CU_MEM_ALLOCATION_TYPE_PINNED=1)
    CUmemLocationType = SimpleNamespace(CU_MEM_LOCATION_TYPE_DEVICE=1)
    CUmemAllocationGranularity_flags = SimpleNamespace(CU_MEM_ALLOC_GRANULARITY_MINIMUM=0)
    CUmemAccess_flags = SimpleNamespace(CU_MEM_ACCESS_FLAGS_PROT_READWRITE=3)
    CUresult = SimpleNamespace(CUDA_ERROR_OUT_OF_MEMORY=2)

    def __init__(self):
        self.there, self.created = {}, 0

    def cuMemGetAllocationGranularity(self, about, flags):
        return 0, 2 * MIB

    def cuMemCreate(self, nbytes, about, flags):
        self.created += 1
        self.there[self.created] = nbytes
        return 0, self.created

    def cuMemRelease(self, handle):
        del self.there[handle]
        return (0,)

    def cuMemMap(self, *_):
        return (0,)

    cuMemSetAccess = cuMemMap


def test_a_day_of_models_of_all_sizes_holds_no_more_than_the_limit(monkeypatch):
    driver = Driver()
    monkeypatch.setattr(cuda_weights, "driver", lambda: driver)
    pages = CudaPages(SimpleNamespace(activate=lambda: None, index=0), 1000 * MIB)
    pick, models = random.Random(5), []
    for _ in range(5_000):
        chunks = [64 * MIB] * pick.randrange(4) + [2 * MIB * pick.randrange(1, 32)]
        while sum(map(sum, (sizes for sizes, _ in models))) + sum(chunks) > 1000 * MIB:
            sizes, handles = models.pop(pick.randrange(len(models)))
            for handle, nbytes in zip(handles, sizes, strict=True):
                pages.give(handle, nbytes)
        models.append((chunks, [pages.map(0, nbytes) for nbytes in chunks]))
        assert sum(driver.there.values()) == pages.used_bytes + pages.kept_bytes <= 1000 * MIB
    assert driver.created < 7_500  # of 12,500 chunks: most are used again
    for sizes, handles in models:
        for handle, nbytes in zip(handles, sizes, strict=True):
            pages.give(handle, nbytes)
    pages.trim()
    assert driver.there == {}
