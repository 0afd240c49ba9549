"""PyTorch on a real GPU: its libraries loaded ahead, its memory pools, and networks whose sizes are planned at once."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from paellapy.instrument.device.cuda import CudaDevice
from paellapy.instrument.device.driver import relaxed_capture
from paellapy.scheduler.backends.base import Backend, device_lock
from paellapy.scheduler.backends.cuda_size_threads import in_thread_of, side_by_side
from paellapy.scheduler.models.model import Model
from paellapy.scheduler.models.tensors import Arrays, Capturable
from paellapy.scheduler.models.torch_libraries import Step
from paellapy.scheduler.models.torch_module import TorchModule
from paellapy.scheduler.models.torch_pool import TorchPool


def run_steps(device: CudaDevice, steps: Sequence[Step]) -> None:
    """Runs layers of PyTorch's, on its default stream: kernels on a second stream slow all graphs."""
    torch: Any = sys.modules["torch"]
    lock = device_lock(device)
    for step in steps if torch.cuda.is_available() else ():
        if not lock.acquire(blocking=False):
            return  # a model is loaded: its own runs load the rest
        try:
            device.activate()
            with relaxed_capture(), torch.no_grad():  # the user may capture a graph in another thread
                step(torch.device("cuda", device.index))
                torch.cuda.current_stream(device.index).synchronize()
        finally:
            lock.release()


def lane_pool(device: CudaDevice, model: Capturable) -> TorchPool:
    """The pool of a lane. Lanes of a model that changes its weights run one at a time, and share a pool."""
    if not model.stateful:
        return TorchPool(device.index)
    if model.source.pool is None:
        model.source.pool = TorchPool(device.index)
    pool: TorchPool = model.source.pool
    return pool


def has_threads(model: Capturable) -> bool:
    """Whether every batch size of a model runs in a thread of its own."""
    return isinstance(model.source, TorchModule) and model.source.plans_convolutions


def rehearse_in_threads(backend: Backend, model: Model, weights: Arrays, sizes: Sequence[int]) -> int:
    """All sizes run for the first time at once. One by one, in the order of a lane, they then show the memory they
    need. A size that failed beside others is tried again alone, and raises its error then.
    """
    ran = side_by_side(sizes, lambda batch: backend.first_run(model, weights, batch))
    return max(in_thread_of(batch, backend.rehearse, model, weights, batch, ran.get(batch)) for batch in sizes)
