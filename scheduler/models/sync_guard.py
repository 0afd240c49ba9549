"""Refuses operations that wait for the GPU while a model is captured, with the line of the user's code that waits.

PyTorch can report these operations on a real GPU, but only in the whole process: errors would also come in threads that
have nothing to do with the model. So PyTorch is asked for warnings, which become errors in this thread and are ignored
in others.

On the virtual GPU the CPU computes, which never waits. So `Waits` checks the calls themselves: those that bring the
model's data to the host, or whose shape depends on the data. Other tensors, which would be on the host beside a GPU
too, may be read.

Libraries ask whether the stream is captured, and avoid such operations if it is. `answering_as_captured` gives runs
outside a capture the same answer.
"""

from __future__ import annotations

import contextlib
import linecache
import math
import re
import sys
import threading
import time
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from paellapy.scheduler.core.errors import CaptureError
from paellapy.scheduler.models.capture import user_location
from paellapy.scheduler.models.torch_tensors import address_of, tensors_in

WAITS = "called a synchronizing CUDA operation"  # PyTorch's words
_TO_HOST = ("cpu", "numpy", "tolist", "__array__")
_DECIDES = (
    "_local_scalar_dense", "allclose", "equal", "nonzero", "masked_select", "_unique", "_unique2", "unique_dim",
    "unique_consecutive", "bincount", "_nested_tensor_from_mask", "_nested_tensor_from_mask_left_aligned",
)  # fmt: skip
_WAITING = "waits for the GPU"
_SIZES = re.compile("size|shape|grid|length")  # in the name of an input: modules read such inputs on the host
_AFTER_S = 10.0  # an operation that began before the end warns when it is over
_lock = threading.Lock()  # guards the following two, and the list of filters against our own threads
_refusing: dict[int, int] = {}  # threads in which waits are errors now, and how often each began
_modes: list[Any] = []  # PyTorch's mode before the first of these threads, once per thread that needs the change


class _Matcher:
    """Stands in a filter of warnings where a pattern usually does: matches in one thread, or in all that may wait."""

    def __init__(self, here: bool) -> None:
        self._thread, self._here, self.until_s = threading.get_ident(), here, math.inf

    def match(self, text: str) -> bool:
        thread = threading.get_ident()
        right = thread == self._thread if self._here else thread != self._thread and thread not in _refusing
        return right and WAITS in text and time.monotonic() < self.until_s


@contextlib.contextmanager
def errors_in_this_thread() -> Iterator[None]:
    """Raises PyTorch's warnings of waits in this thread only. They are ignored in others, also shortly afterwards."""
    mine, others = _Matcher(True), _Matcher(False)
    thread = threading.get_ident()
    with _lock:
        _refusing[thread] = _refusing.get(thread, 0) + 1
        _remove_old()
        warnings.filters[:0] = [  # type: ignore[index]
            ("error", mine, UserWarning, None, 0), ("ignore", others, UserWarning, None, 0)
        ]  # fmt: skip
        _filters_changed()
    try:
        yield
    finally:
        with _lock:
            mine.until_s, others.until_s = 0.0, time.monotonic() + _AFTER_S
            _refusing[thread] -= 1
            if not _refusing[thread]:
                del _refusing[thread]
            _remove_old()


def _remove_old() -> None:
    """Other threads may have copied the list and put it back later, with filters that were removed meanwhile."""
    old = [e for e in warnings.filters if isinstance(e[1], _Matcher) and e[1].until_s < time.monotonic()]
    for each in old:
        with contextlib.suppress(ValueError):
            warnings.filters.remove(each)  # type: ignore[attr-defined]
    _filters_changed()


def _filters_changed() -> None:
    """Lets Python look at its filters again, by adding a filter that matches nothing."""
    warnings.filterwarnings("default", r"(?!)", append=True)


@contextlib.contextmanager
def _warnings_of_waits(cuda: Any) -> Iterator[None]:
    """Makes PyTorch warn of waits. Its mode is of the whole process: the last thread to leave restores it."""
    with _lock:
        _modes.append(_modes[0] if _modes else cuda.get_sync_debug_mode())
        if len(_modes) == 1:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # PyTorch warns once that it does not detect every wait
                cuda.set_sync_debug_mode("warn")
    try:
        yield
    finally:
        with _lock:
            before = _modes.pop()
            if not _modes:
                cuda.set_sync_debug_mode(before)


@contextlib.contextmanager
def refusing_to_wait() -> Iterator[None]:
    """Makes operations that would wait for the GPU raise an error with their line, which CUDA would not report."""
    torch: Any = sys.modules["torch"]
    with errors_in_this_thread(), _warnings_of_waits(torch.cuda):
        try:
            yield
        except (RuntimeError, UserWarning) as e:
            if WAITS in str(e):
                raise _refused(user_location(e), "a tensor made from Python numbers") from e
            raise


def _refused(location: str, example: str) -> CaptureError:
    return CaptureError(
        f"waits for the GPU at {location} (.item(), .cpu(), a condition on data, {example}); a captured module only "
        "launches: keep these values on the GPU, or compute them before", location=location, doing=_WAITING
    )  # fmt: skip


def with_remedy(error: CaptureError, module: Any, dtype: Any, inputs: Iterable[str]) -> CaptureError:
    """The error of a wait with what the module's user can do about it: by the words of the line that waits, by the
    settings that the module has, and by the names of its inputs.
    """
    path, _, number = str(error.__dict__.get("location", "")).rpartition(":")
    if error.__dict__.get("doing") != _WAITING or "remedies" in error.__dict__:
        return error
    line = linecache.getline(path, int(number)) if number.isdigit() else ""
    words = Path(path).name + line
    experts = any(word in words for word in ("moe", "expert", "grouped_mm"))
    found = []
    if line.lstrip().startswith("assert "):
        found.append("python -O, which leaves assertions out")
    if experts and "bfloat16" not in str(dtype):
        found.append("dtype=torch.bfloat16, for which PyTorch has a product of all experts")
    if str(dtype) == "torch.float16" and any(word in line for word in ("float16", "isfinite", "isinf")):
        found.append("dtype=torch.bfloat16, whose range is not checked")
    if experts and hasattr(module, "set_experts_implementation"):
        found.append('set_experts_implementation("batched_mm") on the module')
    if any(getattr(each, "use_nested_tensor", False) for each in getattr(module, "modules", list)()):
        found.append("use_nested_tensor = False on the TransformerEncoder, or enable_nested_tensor=False in its call")
    if hasattr(module, "set_attn_implementation") and any(word in words for word in ("masking", "flash", "sdpa")):
        found.append('set_attn_implementation("eager") on the module')
    found += [f"a function that passes {name} as a constant on the CPU" for name in inputs if _SIZES.search(name)]
    found.append("a model that ends before this line; compute the rest from its outputs")
    found.append("engine.lease(), under which code runs that is not captured")
    return CaptureError(f"{error}. Try: {'; or '.join(found)}", **{**error.__dict__, "remedies": found})


_captured = threading.local()


@contextlib.contextmanager
def answering_as_captured(torch: Any) -> Iterator[None]:
    """Makes PyTorch say in this thread that the stream is captured, as it says in the capture itself."""
    graphs = torch.cuda.graphs
    asked = graphs._cuda_isCurrentStreamCapturing  # noqa: SLF001  PyTorch's own
    if not hasattr(asked, "of_paellapy"):

        def answer() -> bool:
            return getattr(_captured, "depth", 0) > 0 or asked()

        answer.of_paellapy = True  # type: ignore[attr-defined]
        graphs._cuda_isCurrentStreamCapturing = answer  # noqa: SLF001  PyTorch's own
    _captured.depth = getattr(_captured, "depth", 0) + 1
    try:
        yield
    finally:
        _captured.depth -= 1


class Waits:
    """Checks every operation of one run, in order; `memory` has the addresses of inputs and weights."""

    def __init__(self, torch: Any, memory: Iterable[int]) -> None:
        self._torch = torch
        self._device = set(memory)  # addresses of data that would be on a GPU

    def before(self, func: Any, args: Any, kwargs: Any) -> None:
        """Raises if the operation waits for the GPU."""
        if self._waits(func.overloadpacket.__name__, args, kwargs):
            self.refuse(args, kwargs)

    def after(self, args: Any, kwargs: Any, out: Any) -> None:
        """Records results made from the model's data as GPU data; other results may reuse memory of such data."""
        change = self._device.update if self._on_device(args, kwargs) else self._device.difference_update
        change(map(address_of, tensors_in(self._torch, out)))

    def refuse(self, *values: Any) -> None:
        """Raises if one of the values is on the GPU."""
        if self._on_device(*values):
            raise _refused(user_location(), "a shape that depends on data")

    @contextlib.contextmanager
    def refusing_copies(self) -> Iterator[None]:
        """Makes `.cpu()` and similar methods raise. On the CPU they do nothing, so only the call can be detected."""
        from torch.overrides import TorchFunctionMode

        named, refuse = {getattr(self._torch.Tensor, name) for name in _TO_HOST}, self.refuse

        class Watch(TorchFunctionMode):  # type: ignore[misc]
            def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
                if func in named:
                    refuse(args)
                return func(*args, **(kwargs or {}))

        with Watch():
            yield

    def _waits(self, name: str, args: Any, kwargs: Any) -> bool:
        if name in _DECIDES:
            return True
        if name == "_grouped_mm":  # PyTorch's own kernel takes one type; others go through a loop on the host
            return args[0].dtype is not self._torch.bfloat16
        if name == "repeat_interleave":
            return kwargs.get("output_size") is None
        masked = name in ("index", "index_put", "index_put_") and any(
            each is not None and each.dtype in (self._torch.bool, self._torch.uint8) for each in args[1]
        )
        # assigning one value is a masked fill, whose shape does not depend on the data
        return masked and (name == "index" or args[2].numel() != 1)

    def _on_device(self, *values: Any) -> bool:
        return any(address_of(each) in self._device for each in tensors_in(self._torch, values))
