"""PyTorch under our captures: on our stream, with memory from a pool that belongs to the lane.

What a captured graph writes to must stay where it is, and must not be shared with another lane that may run at the same
time. So every lane has a pool of PyTorch's allocator to itself; its batch sizes share it, since one of them runs at a
time. cuBLAS keeps a workspace per stream: it is forgotten before and after each capture, or all lanes would share one.
"""

from __future__ import annotations

import contextlib
import sys
import warnings
from collections.abc import Iterator
from typing import Any

from paellapy.scheduler.core.errors import CaptureError
from paellapy.scheduler.models.capture import users_line_of


def torch_in_use(wanted: bool) -> bool:
    """Whether a model's function may call PyTorch: it is one of PyTorch's, or somebody has used it on the GPU."""
    torch: Any = sys.modules.get("torch")
    return wanted or (torch is not None and bool(torch.cuda.is_initialized()) and hasattr(torch.cuda, "MemPool"))


class TorchPool:
    """One lane's memory in PyTorch's allocator."""

    def __init__(self, index: int) -> None:
        torch: Any = sys.modules["torch"]
        self.index = index
        with torch.cuda.device(index):  # a pool belongs to the device that is current when it is made
            self._pool: Any = torch.cuda.MemPool()

    @property
    def nbytes(self) -> int:
        """What it holds of the GPU's memory.

        Among all segments, and not by the pool's own `snapshot()`: that gives back references it does not own (to the
        numbers in the pool's id, which Python keeps for ever up to 256), so that the process crashes some pools later.
        """
        torch: Any = sys.modules["torch"]
        mine = tuple(self._pool.id)
        return sum(int(s["total_size"]) for s in torch.cuda.memory_snapshot() if tuple(s["segment_pool_id"]) == mine)

    @property
    def id(self) -> Any:
        """What PyTorch's captures know it by."""
        return self._pool.id

    @contextlib.contextmanager
    def stream_only(self, stream: int) -> Iterator[None]:
        """PyTorch's calls go to the stream; memory comes from here by a capture of PyTorch's own."""
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
        """PyTorch's memory in this thread comes from here, and its calls go to the stream if one is given."""
        torch: Any = sys.modules["torch"]
        cuda, index = torch.cuda, self.index
        torch._C._cuda_clearCublasWorkspaces()
        chosen = cuda.current_stream(index) if stream is None else cuda.ExternalStream(stream, index)
        try:
            with cuda.device(index), cuda.stream(chosen), cuda.use_mem_pool(self._pool, index):
                yield
        finally:
            torch._C._cuda_clearCublasWorkspaces()

    def free(self) -> None:
        self._pool = None
        torch: Any = sys.modules["torch"]
        torch.cuda.empty_cache()


@contextlib.contextmanager
def refusing_to_wait() -> Iterator[None]:
    """What would wait for the GPU raises, and so names its line: inside a capture CUDA only says that it failed."""
    torch: Any = sys.modules["torch"]
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch says once that it does not see every wait
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    except RuntimeError as e:
        if "synchronizing CUDA operation" in str(e):
            raise CaptureError(
                f"waits for the GPU at {users_line_of(e)} (.item(), .cpu(), a condition on data, a tensor made from "
                "Python numbers); a captured module only launches: keep such values on the GPU, or compute them before"
            ) from e
        raise
    finally:
        torch.cuda.set_sync_debug_mode(before)
