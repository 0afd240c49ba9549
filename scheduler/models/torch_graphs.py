"""PyTorch's own captures, begun without a kernel on the stream that is captured.

PyTorch writes the seed and offset of its random generators when a capture begins, by kernels on the stream to be
captured. A few kernels launched individually on a second stream lengthen the gaps between the kernels of all graphs in
the process, for good. Whoever replays our graphs writes these words before (`torch_random.py`), so they are left alone.
"""

from __future__ import annotations

import sys
from typing import Any


def begin_capture(graph: Any, **options: Any) -> None:
    """`graph.capture_begin`, on the current stream, for the calls of this thread."""
    torch: Any = sys.modules["torch"]
    from torch.utils._python_dispatch import TorchDispatchMode

    class LeaveWords(TorchDispatchMode):  # type: ignore[misc]
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return args[0] if func is torch.ops.aten.fill_.Scalar else func(*args, **(kwargs or {}))

    with LeaveWords():
        graph.capture_begin(capture_error_mode="thread_local", **options)
