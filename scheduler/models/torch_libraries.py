"""PyTorch's libraries on a GPU, loaded in a thread of their own while a model is made.

The first convolution of a process loads cuDNN, and the first product cuBLAS, which takes longer than the other runs of
a small network. `Model.from_torch` runs its example on the CPU meanwhile, so an engine that is open loads them then. A
load that comes before the end waits for one layer at most.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

Step = Callable[[Any], None]  # runs a layer on a device of PyTorch's
Runner = Callable[[Sequence[Step]], None]
_log = logging.getLogger("paellapy.load")
_lock = threading.Lock()
_open: dict[int, tuple[int, Runner, list[threading.Thread]]] = {}  # engines: GPU, how to run steps there, threads
_wanted: dict[Any, list[Step]] = {}  # by models that were made: each kind of layers once
_begun: set[tuple[int, Any]] = set()  # GPU, kind


def opened(engine: int, gpu: int, run: Runner) -> None:
    """An engine is open on a GPU: `run` takes the steps there one by one, as long as no model is loaded."""
    with _lock:
        _open[engine] = (gpu, run, [])
        _begin()


def closed(engine: int) -> None:
    """The engine closes; waits for the steps that were begun for it."""
    with _lock:
        *_, threads = _open.pop(engine, (0, None, []))
    for each in threads:
        each.join()


def want(torch: Any, module: Any, dtype: Any) -> None:
    """A model is made from a module: loads the libraries that its layers need, on every GPU with an open engine."""
    if not isinstance(module, torch.nn.Module):
        return
    kinds = (torch.nn.Conv2d, torch.nn.Linear)
    convolves, multiplies = (any(isinstance(part, kind) for part in module.modules()) for kind in kinds)
    own = dtype or next((p.dtype for p in module.parameters() if p.is_floating_point()), torch.float32)
    with _lock:
        steps = [*(_convolutions(torch, own) if convolves else ()), *(_products(torch, own) if multiplies else ())]
        _wanted.setdefault((own, convolves, multiplies), steps)
        _begin()


def _begin() -> None:
    """Starts the steps that were not begun; the caller holds the lock."""
    for gpu, run, threads in _open.values():
        for kind, steps in _wanted.items():
            if steps and (gpu, kind) not in _begun:
                _begun.add((gpu, kind))
                threads.append(threading.Thread(target=_tried, args=(run, steps), name="paellapy-libraries"))
                threads[-1].start()


def _tried(run: Runner, steps: Sequence[Step]) -> None:
    try:
        run(steps)
    except Exception as e:  # the model itself will fail likewise, and say so to its user
        _log.debug("PyTorch's libraries could not be loaded ahead: %s", e)


def _convolutions(torch: Any, dtype: Any) -> Iterator[Step]:
    """Typical convolutions with the layers around them, on zeros."""
    f = torch.nn.functional

    def layer(channels: int, made: int, extent: int, stride: int, size: int) -> Step:
        def run(device: Any) -> None:
            zeros = partial(torch.zeros, dtype=dtype, device=device)
            x = f.conv2d(
                zeros(1, channels, size, size), zeros(made, channels, extent, extent), None, stride, extent // 2
            )
            x = f.batch_norm(x, zeros(made), zeros(made) + 1, zeros(made), zeros(made)).relu_()
            f.adaptive_avg_pool2d(f.max_pool2d(x + x, 3, 2, 1), 1)

        return run

    yield layer(3, 64, 7, 2, 224)
    yield layer(64, 64, 3, 1, 56)
    yield layer(64, 128, 3, 2, 56)
    yield layer(64, 128, 1, 2, 56)
    yield layer(512, 512, 3, 1, 7)


def _products(torch: Any, dtype: Any) -> Iterator[Step]:
    def run(device: Any) -> None:
        zeros = partial(torch.zeros, dtype=dtype, device=device)
        torch.nn.functional.linear(zeros(1, 512), zeros(1000, 512), zeros(1000))

    yield run
