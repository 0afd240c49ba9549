"""Captures: stand-ins for the device while a model's function runs, with clear errors for forbidden operations.

`Counting` measures the scratch memory of a warm-up run. `Recording` is the virtual GPU's capture: a list of launches.
The captures of a real GPU are in `backends/cuda_capture.py`.
"""

from __future__ import annotations

import contextlib
import os
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.lib.array_utils import byte_bounds

from paellapy.instrument import cache
from paellapy.instrument.device.base import Call, Capture, Device, check_grid
from paellapy.instrument.device.virtual import VirtualArray
from paellapy.instrument.errors import PaellaError
from paellapy.instrument.gpu_model.costs import BlockCost
from paellapy.scheduler.core.errors import CaptureError
from paellapy.scheduler.models.memory import Bump, Instance, aligned
from paellapy.scheduler.models.program import Cuts, Node, Part
from paellapy.scheduler.models.tensors import Arrays, Capturable

REMEDY = "a captured function only launches kernels: pass constants as weights, and read results from the outputs"


@contextlib.contextmanager
def capturing(device: Device, capture: ModelCapture) -> Iterator[None]:
    """Makes `capture` stand in for the device in this thread."""
    device.capture = capture
    try:
        with device:
            yield
    finally:
        device.capture = None


def call_model(model: Capturable, weights: Arrays, inputs: Arrays, outputs: Arrays, batch: int, doing: str) -> None:
    """Runs the model's function; every error it raises names the model."""
    try:
        result = model.fn(weights.copy(), dict(inputs), dict(outputs))
    except CaptureError as e:
        named = str(e) if repr(model.name) in str(e) else f"model {model.name!r} {e}"
        raise CaptureError(named, **{"batch": batch, **e.__dict__, "model": model.name}) from e.__cause__
    except Exception as e:
        where = user_location(e)
        kind = "" if isinstance(e, PaellaError) else f"{type(e).__name__}: "
        raise CaptureError(
            f"model {model.name!r} failed at {where} {doing} at batch {batch}: {kind}{e}", model=model.name,
            batch=batch, location=where,
        ) from e  # fmt: skip
    if result is not None:
        raise CaptureError(
            f"model {model.name!r}: fn returned a {type(result).__name__}; write the results into `outputs` and return "
            "None", model=model.name, field="fn", given=result,
        )  # fmt: skip


class ModelCapture(Capture):
    """A capture on behalf of one model, whose name its errors mention."""

    def __init__(self, model: Capturable) -> None:
        super().__init__()
        self.model = model
        self.launches = 0

    def refuse(self, doing: str) -> None:
        where = user_location()
        raise CaptureError(
            f"model {self.model.name!r} {doing} at {where}; {REMEDY}", model=self.model.name, doing=doing,
            location=where,
        )  # fmt: skip

    @contextlib.contextmanager
    def letting_through(self) -> Iterator[None]:
        """Lets calls inside the context reach the device itself."""
        self.passing = True
        try:
            yield
        finally:
            self.passing = False


class Counting(ModelCapture):
    """Counts the scratch memory that a run asks for: the size of an instance's arena.

    `computes`: launches run at once, for libraries that would notice if they did not.
    """

    def __init__(self, model: Capturable, device: Device, computes: bool = True) -> None:
        super().__init__(model)
        self.device, self.computes = device, computes
        self.scratch_bytes = 0
        self._keep: list[Any] = []

    def empty(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Any:
        with self.letting_through():
            array = self.device.empty(shape, dtype)
        self._keep.append(array)  # the real arena frees nothing before the end either
        self.scratch_bytes += aligned(int(np.prod(shape, dtype=np.int64)) * dtype.itemsize)
        return array

    def launch(self, launcher: Any, call: Call) -> Any:
        self.launches += 1
        if not self.computes:
            return None
        with self.letting_through():
            return launcher(*call)


class InstanceCapture(ModelCapture):
    """A capture into an instance, whose arena provides the scratch memory."""

    def __init__(self, instance: Instance, cuts: Cuts) -> None:
        super().__init__(instance.model)
        self.instance, self.cuts = instance, cuts
        self._bump = Bump(instance.plan.scratch_bytes)

    def empty(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Any:
        try:
            return self.instance.scratch(self._bump, shape, dtype)
        except CaptureError as e:
            where, name = user_location(), self.model.name
            raise CaptureError(f"model {name!r} at {where} {e}", model=name, location=where, **e.__dict__) from None

    def next_parts(self, part: Part | None) -> tuple[int, Sequence[Part | None]]:
        """The number of this launch, and its slices. A launch that the user sliced stays as it is."""
        number, self.launches = self.launches, self.launches + 1
        if part is not None or number not in self.cuts:
            return number, [part]
        return number, self.cuts[number]


@lru_cache(1024)  # a program launches the same few kernels again and again, on every instance
def code_digest(ptx: str) -> str:
    return cache.digest(ptx)[:16]


class GuardedArray(VirtualArray):
    """An array in a captured function. It allows kernels and views only, since nothing has been computed yet."""

    def _refuse(self, doing: str) -> Any:
        where = user_location()
        raise CaptureError(f"{doing} at {where} while its launches are captured; {REMEDY}", doing=doing, location=where)

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **kwargs: Any) -> Any:
        return self._refuse(f"computes numpy.{ufunc.__name__} on the host")

    def __array_function__(self, function: Any, types: Any, args: Any, kwargs: Any) -> Any:
        return self._refuse(f"calls numpy.{function.__name__} on the host")

    def __getitem__(self, key: Any) -> Any:
        found = super().__getitem__(key)
        if not isinstance(found, np.ndarray):
            return self._refuse("reads a number from the GPU")
        return self._view_of(found, "picks elements on the host")

    def reshape(self, *shape: Any, **how: Any) -> Any:
        return self._view_of(super().reshape(*shape, **how), "copies an array on the host")

    def _view_of(self, found: Any, doing: str) -> Any:
        """The result, if it is a view of the same memory. A copy made now would be stale at the next launch."""
        low, high = byte_bounds(self.view(np.ndarray))
        return found if not found.size or low <= found.ctypes.data < high else self._refuse(doing)


# What an array's other methods do, in the words of the error.
_DOING = {
    "numpy": "copies an array to the host", "tolist": "copies an array to the host",
    "set": "copies an array to the GPU", "__setitem__": "writes to an array from the host",
    "item": "reads a number from the GPU", "__float__": "reads a number from the GPU",
    "__int__": "reads a number from the GPU", "__bool__": "branches on data",
    # These do not go through the two NumPy protocols above.
    **{name: f"computes {name}() on the host" for name in (
        "argpartition", "argsort", "astype", "byteswap", "choose", "compress", "copy", "fill", "flatten", "itemset",
        "nonzero", "partition", "put", "ravel", "repeat", "resize", "searchsorted", "sort", "take", "tobytes",
        "tofile", "__copy__", "__deepcopy__",
    )},
}  # fmt: skip


def _refusing(doing: str) -> Callable[..., Any]:
    return lambda self, *_, **__: self._refuse(doing)


for _name, _doing in _DOING.items():
    setattr(GuardedArray, _name, _refusing(_doing))


def without_guard(value: Any) -> Any:
    """A launch argument with its arrays without the guard."""
    if isinstance(value, np.ndarray):
        return value.view(np.ndarray)
    if isinstance(value, tuple):
        items = [without_guard(v) for v in value]
        return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
    return value


# -- programs of the virtual GPU: launches and copies in a list, with the arrays that they work on


@dataclass(frozen=True, slots=True)
class Recorded:
    """One replayable item on the virtual GPU: a launch of some blocks, or a copy."""

    node: Node
    launcher: Any = None
    grid: tuple[int, int, int] = (1, 1, 1)
    values: tuple[Any, ...] = ()
    first: int = 0
    target: Any = None
    source: Any = None
    cost: BlockCost | None = None  # the cost of another library's kernel
    compute: Callable[[], None] | None = None  # a computation on the host that stands in for the kernel

    def run(self) -> Any:
        """Computes the data; returns a launch's cost per block."""
        if self.launcher is not None:
            return self.launcher.evaluate(self.values, self.grid, self.first, self.node.blocks // self.node.cluster)
        if self.compute is not None:
            self.compute()
        elif self.target is not None and not _same_memory(self.target, self.source):
            np.copyto(self.target, self.source)
        return None

    def moved(self, move: Callable[[Any], Any]) -> Recorded:
        """The same item with other arrays, chosen by `move`."""
        return replace(self, values=move(self.values), target=move(self.target), source=move(self.source))

    def prepare(self) -> Callable[[], Any] | None:
        """A prepared `run`, with all work done that needs doing only once. It returns no cost and expects
        floating-point warnings to be off.

        None: the item has nothing to do.
        """
        if self.launcher is not None:
            count = self.node.blocks // self.node.cluster
            prepared: Callable[[], Any] | None = self.launcher.prepare(self.values, self.grid, self.first, count)
            return prepared or self.run
        if self.compute is None and self.target is not None:
            return None if _same_memory(self.target, self.source) else partial(np.copyto, self.target, self.source)
        return self.run

    def block_cost(self) -> BlockCost | None:
        """The cost of a kernel's blocks, measured by running it; None for a copy."""
        counted = self.run()
        return self.cost if self.launcher is None else self.launcher.block_cost(counted, self.values)


def _same_memory(a: Any, b: Any) -> bool:
    return bool(a.__array_interface__["data"][0] == b.__array_interface__["data"][0])


class Recording(InstanceCapture):
    """The virtual GPU's capture, which records launches in a list."""

    def __init__(self, instance: Instance, cuts: Cuts) -> None:
        super().__init__(instance, cuts)
        self.items: list[Recorded] = []

    def empty(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Any:
        return super().empty(shape, dtype).view(GuardedArray)

    def compute(self, kernels: Sequence[tuple[Node, BlockCost]], function: Callable[[], None]) -> None:
        """Records kernels of another library: the host computes their data where the first of them starts."""
        for k, (node, cost) in enumerate(kernels):
            grid = (node.blocks, 1, 1)
            self.items.append(Recorded(node, grid=grid, cost=cost, compute=function if k == 0 else None))
        self.launches += len(kernels)

    def copy(self, kind: Any, target: Any, source: Any) -> None:
        self.items.append(Recorded(Node(kind, nbytes=source.nbytes), target=target, source=source))

    def launch(self, launcher: Any, call: Call) -> None:
        gx, gy, gz = (*call.grid, 1, 1)[:3]
        check_grid(launcher.compiled.name, (gx, gy, gz))
        total = gx * gy * gz
        if total == 0:
            return
        compiled, cluster = launcher.compiled, launcher.compiled.source.cluster
        number, parts = self.next_parts(call.part)
        plain = tuple(without_guard(v) for v in call.values)
        for each in parts:
            first, count = each or (0, total)
            node = Node(
                "kernel", compiled.name, count * cluster, launcher.threads, compiled.registers, compiled.shared_bytes,
                launch=number, part=each, cluster=cluster, digest=code_digest(compiled.ptx),
                divisible=cluster == 1 and not compiled.source.cooperative,
            )  # fmt: skip
            self.items.append(Recorded(node, launcher, (gx, gy, gz), plain, first))


# -- where the user's code is

_ROOT = Path(__file__).parents[2]
_OURS = (
    f"{_ROOT / 'instrument'}{os.sep}",
    f"{_ROOT / 'scheduler'}{os.sep}",
    str(_ROOT / "arrays.py"),  # the other modules of that package are models like any user's
)
_LIBRARIES = tuple(
    f"site-packages{os.sep}{name}{os.sep}" for name in ("numpy", "triton", "cupy", "numba", "cuda", "torch")
)


def user_location(error: BaseException | None = None) -> str:
    """The line of the user's code that runs, or from which an error came: neither ours nor a library's."""
    stack = traceback.extract_stack() if error is None else traceback.extract_tb(error.__traceback__)
    for frame in reversed(stack):
        if not frame.filename.startswith(_OURS) and not any(name in frame.filename for name in _LIBRARIES):
            return f"{frame.filename}:{frame.lineno}"
    return "an unknown line"
