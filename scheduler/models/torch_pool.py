"""PyTorch under our captures: on our stream, with memory from a pool that belongs to the lane.

Memory that a captured graph writes to must stay in place, and must not be shared with another lane that may run at the
same time. So every lane has its own pool of PyTorch's allocator; its batch sizes share the pool, since only one of them
runs at a time. cuBLAS keeps a workspace per stream, which is dropped before and after each capture; otherwise all lanes
would share one.
"""

from __future__ import annotations

import contextlib
import gc
import sys
from collections.abc import Iterator
from typing import Any

from paellapy.instrument.device.driver import driver
from paellapy.instrument.errors import PaellaError
from paellapy.scheduler.models.torch_graphs import begin_capture


def torch_in_use(wanted: bool) -> bool:
    """Whether a model's function may call PyTorch: it was made from PyTorch, or PyTorch is already in use on the GPU.
    """
    torch: Any = sys.modules.get("torch")
    return wanted or (torch is not None and bool(torch.cuda.is_initialized()) and hasattr(torch.cuda, "MemPool"))


_in_use: list[Any] = []  # pools that a graph holds, or of a lost GPU: PyTorch ends the process when one is deleted
_NO_CONTEXT = (0, 3, 4, 201)  # the driver's status if nothing failed, or if this thread has no context


class TorchPool:
    """One lane's memory in PyTorch's allocator."""

    def __init__(self, index: int) -> None:
        torch: Any = sys.modules["torch"]
        self.index = index
        with torch.cuda.device(index):  # a pool belongs to the device that is current at its creation
            self._pool: Any = torch.cuda.MemPool()
        self._first: Any = None

    @property
    def nbytes(self) -> int:
        """GPU memory that the pool holds.

        Counted among all segments, because the pool's own `snapshot()` releases references that it does not own (to the
        numbers in the pool's id), so that the process would crash after some pools.
        """
        if self._pool is None:
            return 0
        torch: Any = sys.modules["torch"]
        mine = tuple(self._pool.id)
        return sum(int(s["total_size"]) for s in torch.cuda.memory_snapshot() if tuple(s["segment_pool_id"]) == mine)

    def begin(self, graph: Any) -> None:
        """Begins a capture by PyTorch itself, on the current stream, with memory from the pool.

        PyTorch gives up a pool when the last graph that was captured with it is deleted, and captures with it fail from
        then on. So a first small graph is kept.
        """
        if self._first is None:
            torch: Any = sys.modules["torch"]
            first = torch.cuda.CUDAGraph(keep_graph=True)
            self._begin(first)
            torch.zeros(1, device=f"cuda:{self.index}")
            first.capture_end()
            self._first = first
        self._begin(graph)

    def _begin(self, graph: Any) -> None:
        try:
            begin_capture(graph, pool=self._pool.id)
        except RuntimeError:
            self.stop_recording()
            raise

    def stop_recording(self) -> None:
        """Ends the allocator's recording: PyTorch leaves it on after a failed capture, and would abort later."""
        if self._pool is None:
            return
        torch: Any = sys.modules["torch"]
        with contextlib.suppress(RuntimeError):
            torch._C._cuda_endAllocateToPool(self.index, self._pool.id)

    @contextlib.contextmanager
    def stream_only(self, stream: int) -> Iterator[None]:
        """Sends PyTorch's calls to the stream; memory comes from the pool through a capture by PyTorch itself."""
        torch: Any = sys.modules["torch"]
        cuda = torch.cuda
        torch._C._cuda_clearCublasWorkspaces()
        try:
            with cuda.device(self.index), cuda.stream(cuda.ExternalStream(stream, self.index)):
                yield
        finally:
            torch._C._cuda_clearCublasWorkspaces()

    @contextlib.contextmanager
    def on(self, stream: int | None) -> Iterator[None]:
        """Takes PyTorch's memory in this thread from the pool, and sends its calls to the stream if one is given."""
        torch: Any = sys.modules["torch"]
        cuda, index = torch.cuda, self.index
        torch._C._cuda_clearCublasWorkspaces()
        chosen = cuda.current_stream(index) if stream is None else cuda.ExternalStream(stream, index)
        try:
            with cuda.device(index), cuda.stream(chosen), cuda.use_mem_pool(self._pool, index):
                yield
        finally:
            torch._C._cuda_clearCublasWorkspaces()

    def keep(self) -> None:
        """Keeps the pool for ever: the GPU is lost, and nothing can be freed on it any more."""
        _in_use.append((self._pool, self._first))
        self._pool = self._first = None

    def free(self) -> None:
        if _is_lost():
            self.keep()
            return
        self._first = None
        pool, self._pool = self._pool, None
        if pool is not None and pool.use_count() > 1:
            gc.collect()  # a graph that the traceback of a failed load still holds
            if pool.use_count() > 1:
                _in_use.append(pool)
        del pool
        torch: Any = sys.modules["torch"]
        torch.cuda.empty_cache()


def _is_lost() -> bool:
    """Whether a fault has ended the thread's context: then every call of the driver fails with it."""
    with contextlib.suppress(PaellaError):  # no driver
        return int(driver().cuMemGetInfo()[0]) not in _NO_CONTEXT
    return False
