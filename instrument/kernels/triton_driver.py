"""Triton's driver where there is no GPU: it answers Triton's own tools for the virtual GPU.

Triton looks for a driver when its autotuner times a kernel, when `triton.testing` measures, and when a script asks for
the active device or its properties. Where it finds no GPU, driver_search.py lets it find this one. `@triton.jit`
functions that are no pp.kernel then run on the virtual GPU too, so that scripts run there unchanged.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import sys
import warnings
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase
from triton.runtime.autotuner import Autotuner, Heuristics
from triton.runtime.jit import JITFunction

from paellapy.instrument.device.base import Device, Event
from paellapy.instrument.errors import ArgumentError, EstimateWarning, LaunchError
from paellapy.instrument.gpu_model.costs import L2_SHARE, CostModel
from paellapy.instrument.kernels.triton_kernel import TritonKernel

_TIMES = 3  # repetitions: the virtual GPU takes the same time in every run but the first


class VirtualDriver(DriverBase):  # type: ignore[misc]
    """A driver for the device `pp.Device.current()`."""

    def __init__(self) -> None:
        self.utils = _Utils()
        self.estimates = 0  # benchmarks in which PyTorch's own operations ran

    @staticmethod
    def is_active() -> bool:
        return True

    def map_python_to_cpp_type(self, ty: str) -> str:
        raise LaunchError(
            f"the virtual GPU has no C++ launcher, which the argument type {ty} would need", field="argument", given=ty
        )

    def get_current_target(self) -> GPUTarget:
        major, minor = Device.current().capability
        return GPUTarget("cuda", 10 * major + minor, 32)

    def get_active_torch_device(self) -> Any:
        import torch

        _answer_for_the_gpu(torch)
        return torch.device("cpu")

    def get_current_device(self) -> int:
        return 0

    def set_current_device(self, device: int) -> None:
        """Does nothing: there is only one device."""

    def get_device_capability(self, device: int = 0) -> tuple[int, int]:
        return Device.current().capability

    def get_current_stream(self, device: int = 0) -> int:
        """Called by Triton's own launch of a compiled kernel, which cannot run here."""
        caller = sys._getframe(1).f_locals.get("self")  # noqa: SLF001  CPython's own
        name = getattr(caller, "name", getattr(caller, "__name__", "a kernel"))
        raise LaunchError(
            f"there is no GPU on which Triton could launch its compiled kernel {name!r}: launch the @triton.jit "
            "function, which then runs on the virtual GPU", kernel=name
        )

    def launch(self, original: Any, fn: Any, *args: Any, **kwargs: Any) -> Any:
        """A launch of a `@triton.jit` function that is no pp.kernel, and may be tuned.

        Triton itself tunes a pp.kernel, and with a benchmark of the user's own.
        """
        kernel = fn.__dict__.get("of_paellapy")
        if kernel is None:
            if isinstance(fn, Autotuner) and (type(_innermost(fn)) is not JITFunction or fn.__dict__["_do_bench"]):
                return original(fn, *args, **kwargs)
            kernel = fn.__dict__["of_paellapy"] = TritonKernel(fn, None, "auto")
        try:
            return kernel.run(*args, **kwargs)
        finally:
            if kernel.tunes:
                fn.best_config = getattr(kernel, "best_config", None)

    def get_benchmarker(self) -> Callable[..., Any]:
        return _benchmark

    def get_device_interface(self) -> type[_Interface]:
        Device.current().clock_ns()  # raises errors of earlier launches before the measurement begins
        return _Interface

    def get_empty_cache_for_benchmark(self) -> None:
        """Returns nothing to clear: the virtual GPU's L2 is assumed to be warm."""

    def clear_cache(self, cache: None) -> None:
        """Does nothing."""

    def do_bench(
        self,
        original: Any,
        fn: Callable[[], Any],
        warmup: float = 25,
        rep: float = 100,
        grad_to_none: Sequence[Any] | None = None,
        quantiles: Sequence[float] | None = None,
        return_mode: str = "mean",
    ) -> Any:
        """`triton.testing.do_bench`: the second repetition, since all take the same time but the first.

        The virtual GPU does not run PyTorch's own operations: their times are estimates.
        """
        if return_mode not in ("min", "max", "mean", "median", "all"):
            raise ArgumentError(
                f"return_mode={return_mode!r}: do_bench knows min, max, mean, median and all",
                field="return_mode", given=return_mode,
            )
        device, times = Device.current(), []
        device.clock_ns()  # errors of earlier launches belong to them
        with contextlib.nullcontext() if device.session is not None else device.untraced():
            for _attempt in range(2):
                for tensor in grad_to_none or ():
                    tensor.grad = None
                with _torch_operations(device) as operations:
                    kernels = _time_of(fn)
                times.append(kernels + operations.ns / 1e6)
                if not kernels:  # estimates are always the same, and the host takes long for large products
                    break
        if operations.names:
            names = ", ".join(sorted(operations.names))
            text = f"the virtual GPU does not run PyTorch's own {names}: their time is an estimate from their work"
            warnings.warn(EstimateWarning(text, operations=tuple(sorted(operations.names))), stacklevel=4)
            self.estimates += 1
        times = times[1:] or times
        if quantiles is not None:
            found = [float(q) for q in np.quantile(times, quantiles)]
            return found if len(found) > 1 else found[0]
        return times if return_mode == "all" else float(getattr(np, return_mode)(times))

    def report(self, original: Any, mark: Any, bench: Any, *args: Any, **kwargs: Any) -> Any:
        """A table of `triton.testing.perf_report`, in which lines with estimates are called so."""
        marked = copy.copy(bench)
        marked.line_names = list(bench.line_names)
        run, given = mark.fn, [key for key in kwargs if key not in ("diff_col", "save_precision")]
        found: dict[Any, Any] = {}
        points = [x if isinstance(x, (list, tuple)) else [x] * len(bench.x_names) for x in bench.x_vals]
        for number, line in enumerate(bench.line_vals):
            before = self.estimates
            for x in points:
                named = {**dict(zip(bench.x_names, x, strict=False)), bench.line_arg: line}
                found[repr(named)] = run(**named, **bench.args, **{key: kwargs[key] for key in given})
            if self.estimates > before:
                marked.line_names[number] += " (estimate)"
        names = [*bench.x_names, bench.line_arg]
        mark = copy.copy(mark)
        mark.fn = lambda **now: found[repr({name: now[name] for name in names})]
        return original(mark, marked, *args, **kwargs)


class _Utils:
    @staticmethod
    def get_device_properties(device: int = 0) -> dict[str, int]:
        opened: Any = Device.current()
        part = getattr(opened, "part", None)
        return {
            "max_shared_mem": opened.limits.shared_bytes_per_block,
            "max_num_regs": opened.limits.registers,
            "multiprocessor_count": opened.sm_count,
            "warpSize": 32,
            "sm_clock_rate": int(1000 * part.clock_mhz) if part else 0,
            # Triton computes bandwidth as clock × bus width × 2 / 8; only the product is known for a part.
            "mem_clock_rate": int(part.bandwidth_gbps * 1e6 * 8 / 2 / 4096) if part else 0,
            "mem_bus_width": 4096,
        }


class _TimedEvent:
    """`torch.cuda.Event` on the virtual GPU's clock."""

    def __init__(self, enable_timing: bool = False, **_: Any) -> None:
        self._event: Event | None = None

    def record(self, stream: Any = None) -> None:
        self._event = Device.current().record()

    def synchronize(self) -> None:
        if self._event is not None:
            self._event.synchronize()

    def elapsed_time(self, later: _TimedEvent) -> float:
        """Time in milliseconds."""
        if self._event is None or later._event is None:
            raise LaunchError("elapsed_time needs two recorded events: call record() on both first", field="event")
        return later._event.elapsed_ns(self._event) / 1e6


class _Interface:
    """The parts of `torch.cuda` that `triton.testing` uses."""

    Event = _TimedEvent

    @staticmethod
    def synchronize(device: Any = None) -> None:
        Device.current().synchronize()

    @staticmethod
    def current_device() -> int:
        return 0

    @staticmethod
    def get_device_capability(device: Any = None) -> tuple[int, int]:
        return Device.current().capability


def _benchmark(call: Callable[[], Any], quantiles: Sequence[float] | None = None, **_: Any) -> Any:
    """A kernel's time on the virtual GPU, in milliseconds, for Triton's autotuner."""
    with Device.current().untraced():
        times = [_time_of(call) for _attempt in range(_TIMES)][1:]
    return [float(q) for q in np.quantile(times, quantiles)] if quantiles else float(np.mean(times))


def _time_of(call: Callable[[], Any]) -> float:
    start, end = _TimedEvent(), _TimedEvent()
    start.record()
    call()
    end.record()
    return start.elapsed_time(end)


def _innermost(fn: Any) -> Any:
    while isinstance(fn, (Autotuner, Heuristics)):
        fn = fn.fn
    return fn


# --- PyTorch without a GPU: the answers of `torch.cuda` that scripts ask for, and times of its own operations ---------


def _answer_for_the_gpu(torch: Any) -> None:
    """Answers questions about the GPU for the virtual one, where PyTorch has none and raises an error."""
    if not hasattr(torch.cpu, "set_stream"):
        torch.cpu.set_stream = lambda stream: None
    if torch.cuda.is_available():
        return

    def properties(device: Any = None) -> Any:
        opened: Any = Device.current()
        major, minor = opened.capability
        memory = opened.part.memory_bytes if hasattr(opened, "part") else 0
        return SimpleNamespace(
            name=opened.title, major=major, minor=minor, multi_processor_count=opened.sm_count, total_memory=memory,
            warp_size=32, shared_memory_per_block_optin=opened.limits.shared_bytes_per_block,
            L2_cache_size=opened.part.l2_bytes,
        )  # fmt: skip

    torch.cuda.get_device_properties = properties
    torch.cuda.get_device_capability = lambda device=None: Device.current().capability
    torch.cuda.get_device_name = lambda device=None: Device.current().title


class _NoOperations:
    ns, names = 0.0, frozenset[str]()


def _torch_operations(device: Device) -> Any:
    if "torch" not in sys.modules or getattr(device, "part", None) is None:
        return contextlib.nullcontext(_NoOperations())
    return _operations_class()(device)


@functools.cache
def _operations_class() -> Any:
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves
    from torch.utils.flop_counter import flop_registry

    class Operations(TorchDispatchMode):  # type: ignore[misc]
        """Adds up how long the operations inside would take at the rates of the GPU's nearest roof."""

        def __init__(self, device: Any) -> None:
            super().__init__()
            self.ns, self.names = 0.0, set[str]()
            self._part, self._timing = device.part, CostModel.for_part(device.part).timing

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **(kwargs or {}))
            packet = func.overloadpacket
            if func.is_view or packet.__name__ in _FREE:
                return out
            leaves = tree_leaves((args, kwargs, out))
            tensors = [t for t in leaves if isinstance(t, torch.Tensor)]
            moved = sum(t.nbytes for t in tensors)
            count = flop_registry.get(packet)
            flops = count(*args, **(kwargs or {}), out_val=out) if count else 0
            kind = _KINDS.get(str(tensors[0].dtype).removeprefix("torch."), "fma") if tensors else "fma"
            part, timing = self._part, self._timing
            cached = moved <= L2_SHARE * part.l2_bytes  # as of a launch over arrays that are in L2
            bandwidth = part.bandwidth_gbps * timing.bandwidth_efficiency * (timing.l2_speedup if cached else 1)
            rate = part.tensor_tflops(kind) * 1e3 * timing.tensor_efficiency
            begins = timing.kernel_gap_ns if self.names else part.launch_ns + timing.launch_ns
            self.ns += begins + timing.block_overhead_ns + max(moved / bandwidth, flops / rate)
            self.names.add(packet.__name__)
            return out

    return Operations


# They compute nothing.
_FREE = frozenset(
    ("empty", "empty_like", "empty_strided", "new_empty", "detach", "_local_scalar_dense", "set_", "resize_")
)
_KINDS = {"float16": "f16", "bfloat16": "bf16", "float8_e4m3fn": "e4m3", "float8_e5m2": "e5m2", "int8": "s8"}
