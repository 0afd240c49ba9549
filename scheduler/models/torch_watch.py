"""Sees every operation that PyTorch's dispatcher makes in a run, also those of the backward pass."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

# Makes an operation of PyTorch, given its arguments by place and by name, and returns its result.
See = Callable[[Any, Any, dict[str, Any]], Any]


@contextlib.contextmanager
def watching(see: See) -> Iterator[None]:
    """A context in which `see` makes every operation of this thread, and of the backward passes that it starts.
    Compiled code runs as it was written: its kernels could not be seen.
    """
    from torch.utils._python_dispatch import TorchDispatchMode

    class Watch(TorchDispatchMode):  # type: ignore[misc]
        @classmethod
        def _should_skip_dynamo(cls) -> bool:
            """Avoids the import of PyTorch's compiler (2.5 s), which would only exclude this mode from it."""
            return "torch._dynamo" in sys.modules

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return see(func, args, kwargs or {})

    with _as_written(), Watch():
        yield


def _as_written() -> AbstractContextManager[Any]:
    """A context in which functions that `torch.compile` has made run as they were written. With `fullgraph=True` they
    would otherwise raise an error under a watch.
    """
    compiler = sys.modules.get("torch.compiler")
    stance = getattr(compiler, "set_stance", None) if "torch._dynamo" in sys.modules else None
    made: AbstractContextManager[Any] = contextlib.nullcontext() if stance is None else stance("force_eager")
    return made
