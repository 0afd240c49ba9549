"""`TritonKernel`: a `@triton.jit` function that reports. It binds arguments, selects a variant, and launches it."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Sequence
from dataclasses import fields
from operator import itemgetter
from typing import Any

from triton.backends.amd.compiler import HIPOptions
from triton.backends.nvidia.compiler import CUDAOptions
from triton.runtime.autotuner import Heuristics
from triton.runtime.jit import JITFunction

from paellapy.instrument.arguments import Handlers, as_type, bfloat16_bits
from paellapy.instrument.device.base import Device, Launcher, Pick
from paellapy.instrument.errors import ArgumentError, InstrumentError, also
from paellapy.instrument.gpu_model.parts import Occupancy
from paellapy.instrument.kernels.autotune import Tuner, in_trial
from paellapy.instrument.kernels.kernel import (
    Kernel,
    all_values,
    as_grid,
    blocks_at_once,
    check_part,
    occupancy_of,
    work_of,
)
from paellapy.instrument.kernels.preempt import Prepared
from paellapy.instrument.kernels.triton_source import TritonSource, TypeHandlers, launch_values, unwrap
from paellapy.instrument.ptx.compiled import Compiled, Draft, Launched, Source
from paellapy.instrument.ptx.descriptor import Exits, PassConfig, Report

# --- launch options of Triton kernels: known names, their allowed values, and the ones that have an effect ------------

# Launch options and their allowed values: Triton accepts some that no GPU can run, and fails on others far from the
# cause.
_LAUNCH_OPTIONS: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "num_warps": ("a power of 2 from 1 to 32", lambda v: v in (1, 2, 4, 8, 16, 32)),
    "num_stages": ("an integer, 0 or more", lambda v: isinstance(v, int) and v >= 0),
    "num_ctas": ("a power of 2 from 1 to 16", lambda v: v in (1, 2, 4, 8, 16)),
    "maxnreg": ("None or an integer from 1 to 255", lambda v: v is None or (isinstance(v, int) and 1 <= v <= 255)),
    "enable_fp_fusion": ("True or False", lambda v: isinstance(v, bool)),
    "debug": ("True or False", lambda v: isinstance(v, bool)),
    "launch_pdl": ("True or False", lambda v: isinstance(v, bool)),
    "launch_cooperative_grid": ("True or False", lambda v: isinstance(v, bool)),
    # Triton's passes optimise for it; the machine code is still for the device.
    "arch": ("a name such as 'sm90'", lambda v: isinstance(v, str) and re.fullmatch(r"sm\d{2,3}", v) is not None),
    "extern_libs": ("a dictionary of paths", lambda v: v is None or isinstance(v, dict)),
}
# Other options of Triton's compiler for NVIDIA are passed on; options of other vendors' compilers have no meaning here.
_PASSED_ON = frozenset(f.name for f in fields(CUDAOptions)) - {"backend_name", "warp_size"}
_MEANINGLESS = frozenset(f.name for f in fields(HIPOptions)) - _PASSED_ON - {"backend_name", "warp_size"}


def split_options(options: dict[str, Any], name: str, arguments: Sequence[str]) -> dict[str, Any]:
    """Checks the keywords that are left after binding, which must be launch options; returns those that have an effect.
    """
    unknown = [o for o in options if o not in _PASSED_ON | _MEANINGLESS]
    if unknown:
        raise ArgumentError(
            f"kernel {name!r} got unknown keyword {unknown[0]!r}; it takes {', '.join(arguments)} and the launch "
            f"options {', '.join(sorted(_LAUNCH_OPTIONS))}",
            kernel=name, field=unknown[0], given=options[unknown[0]], limit=tuple(arguments),
        )
    for option, value in options.items():
        wanted, is_right = _LAUNCH_OPTIONS.get(option, ("", lambda _: True))
        if not is_right(value):
            said = f"kernel {name!r}: {option} must be {wanted}, not {value!r}"
            ours = ArgumentError(said, kernel=name, field=option, given=value, limit=wanted)
            raise also(ours, AssertionError)  # as Triton itself
    return {option: value for option, value in options.items() if option in _PASSED_ON}


# --- the result of a launch or of `warmup`, as Triton's: a compiled kernel that can be launched, `result[grid](…)` ----

Launch = Callable[[Any, list[Any], dict[str, Any]], Any]  # of a grid, all arguments in order, and options


class Result:
    """A compiled kernel with the constants and options of one launch. All else is of the compiled kernel."""

    def __init__(
        self, made: Any, launch: Launch, names: Sequence[str], constants: dict[int, Any], options: dict[str, Any]
    ) -> None:
        self._made, self._launch, self._names = made, launch, names
        self._constants, self._options = constants, options

    def __getitem__(self, grid: Any) -> Callable[..., Any]:
        return functools.partial(self._run, grid)

    def _run(self, grid: Any, /, *args: Any, stream: Any = None) -> Any:
        """Takes every argument in order. Constants must be given and are ignored, as in Triton: they are compiled in.

        `stream` is ignored too: the launch is on the device's current stream.
        """
        if len(args) != len(self._names):
            raise ArgumentError(
                f"compiled kernel {self._made.name!r} takes all of {', '.join(self._names)}, constants too, in this "
                f"order: {len(self._names)} arguments, not {len(args)}",
                kernel=self._made.name, field="arguments", given=len(args), limit=len(self._names),
            )
        given = [self._constants.get(i, value) for i, value in enumerate(args)]
        return self._launch(grid, given, self._options)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "_made":
            raise AttributeError(name)
        return getattr(self._made, name)

    def __repr__(self) -> str:
        return repr(self._made)


Grid = tuple[int, ...] | Callable[[dict[str, Any]], tuple[int, ...]]


class _NoDevice:
    """Stands for a device where only types are known."""

    handlers: Handlers = TypeHandlers()


class TritonKernel(Kernel):
    def __init__(self, fn: Any, report: Report | None, exits: Exits) -> None:
        super().__init__(report, exits)
        self._decorated = fn
        self._jit, wrappers = unwrap(fn)
        self._source = TritonSource(self._jit)
        self.name = self._source.name
        self.arg_names = self._source.arg_names
        self._tuner = Tuner(wrappers, self.arg_names) if wrappers else None
        if exits == "count-out":
            raise InstrumentError(
                f"exits='count-out' is not possible for Triton kernel {self.name!r}: it needs static shared memory, "
                "which would misalign Triton's own. Leave exits= out: the threads of a Triton block end together.",
                kernel=self.name, field="exits", given=exits,
            )
        self.__doc__, self.__name__, self.__module__ = self._jit.__doc__, self.name, self._jit.__module__
        self.__qualname__ = self._jit.__qualname__

    @property
    def __class__(self) -> Any:
        """The class of the decorated function, for `isinstance` in Triton and PyTorch; `type(kernel)` is ours."""
        return type(self._decorated)

    @__class__.setter
    def __class__(self, value: type) -> None:
        raise TypeError("the class of a kernel cannot be changed")

    @property
    def fn(self) -> Any:
        """As of the decorated function: the Python function in it, or the function that an autotuner tunes."""
        return self._decorated.fn

    @property
    def jit(self) -> JITFunction:
        """The `@triton.jit` function, which does not report."""
        return self._jit

    @property
    def tunes(self) -> bool:
        """Whether it has configurations to choose from."""
        return self._tuner is not None and self._tuner.tunes

    @property
    def heuristics(self) -> Tuner | None:
        """Its wrappers that are no autotuner."""
        wrappers = [w for w in self._tuner.wrappers if isinstance(w, Heuristics)] if self._tuner is not None else []
        return Tuner(wrappers, self.arg_names) if wrappers else None

    @property
    def __globals__(self) -> dict[str, Any]:
        found: dict[str, Any] = self._jit.__globals__
        return found

    def __getattr__(self, name: str) -> Any:
        """Attributes of the decorated function that are not ours: `params`, `src`, `cache_key`, …"""
        if name.startswith("__") or name in ("_decorated", "_jit", "_source", "_tuner"):
            raise AttributeError(name)
        if name == "best_config":
            raise AttributeError(
                f"kernel {self.name!r} has not been tuned: launch it under @triton.autotune first", name=name, obj=self
            )
        if name in ("configs", "cache") and self._tuner is not None and self._tuner.tunes:
            return getattr(self._tuner, name)
        return getattr(self._decorated if hasattr(self._decorated, name) else self._jit, name)

    # -- the names of a `@triton.jit` function, for wrappers and scripts that do not know paellapy

    def run(self, *args: Any, grid: Grid, warmup: bool = False, **kwargs: Any) -> Any:
        """As `kernel[grid](…)`; with `warmup` the kernel is compiled and not launched."""
        if warmup:
            return self.warmup(*args, grid=grid, **kwargs)
        device = Device.current()
        if device.session is None or not in_trial():
            return self._run(grid, None, *args, **kwargs)
        with device.untraced():
            return self._run(grid, None, *args, **kwargs)

    def warmup(self, *args: Any, grid: Grid = (1,), **kwargs: Any) -> Any:
        """Compiles for the current device and launches nothing; dtypes stand for arrays.

        Returns the compiled kernel; under `@triton.autotune` a list, with one for each configuration. As in Triton.
        """
        target, config = Device.current().target, PassConfig(self.report, False, self.exits)
        every = self._tuner.every(args, kwargs) if self._tuner else [kwargs]
        types, named = [as_type(a) for a in args], [{n: as_type(v) for n, v in each.items()} for each in every]
        made = [self._warm(target, config, types, each) for each in named]
        return made if self._tuner and self._tuner.tunes else made[0]

    def _warm(self, target: str, config: PassConfig, types: Sequence[Any], named: dict[str, Any]) -> Result:
        values, _, options = self._bind(_NoDevice, types, named)
        return self._result(self._source_for(None, target, types, named).build(config), values, options)

    @property
    def best_config(self) -> Any:
        """The configuration that the tuner chose for the last launch."""
        if self._tuner is None or self._tuner.last is None:
            raise AttributeError("best_config")
        return self._tuner.last

    def __getitem__(self, grid: Grid) -> Callable[..., Any]:
        return functools.partial(self._run, grid, None)

    def slice(self, grid: Grid, first: int, count: int) -> Callable[..., Any]:
        """Launches blocks `first … first + count - 1` of the logical grid only.

        Blocks are numbered with x fastest. Every block sees the grid and its own place in it as in the whole launch.
        """
        return functools.partial(self._run, grid, (first, count))

    def _run(self, grid: Grid, part: tuple[int, int] | None, /, *args: Any, **kwargs: Any) -> Any:
        device = Device.current()
        if self._tuner is not None:
            kwargs = self._tuner.choose(device, args, kwargs, functools.partial(self.ready, device, grid, args))
        return self._launch(device, grid, part, args, kwargs)

    def ready(
        self, device: Device, grid: Grid, args: Sequence[Any], tuner: Tuner | None, kwargs: dict[str, Any]
    ) -> tuple[Launcher, tuple[int, ...], Sequence[Any]]:
        """A launch of the whole grid with the keywords that the tuner chooses: its launcher, grid and values."""
        if tuner is not None:
            kwargs = tuner.choose(device, args, kwargs, functools.partial(self.ready, device, grid, args))
        return self._ready(device, grid, False, args, kwargs)

    def _ready(
        self, device: Device, grid: Grid, sliced: bool, args: Sequence[Any], kwargs: dict[str, Any]
    ) -> tuple[Launcher, tuple[int, ...], Sequence[Any]]:
        values, key, options = self._bind(device, args, kwargs)
        if options:
            key = self._with_options(key, options)
        launcher = self._launchers.get((key, device.session is None, not sliced, device))
        if launcher is None:
            launcher = self._prepare(device, values, key, options, sliced)
        if callable(grid):
            grid = grid(self._source.named(*args, **kwargs))
        return launcher, as_grid(grid), values

    def _launch(
        self, device: Device, grid: Grid, part: tuple[int, int] | None, args: Sequence[Any], kwargs: dict[str, Any]
    ) -> Any:
        launcher, grid, values = self._ready(device, grid, part is not None, args, kwargs)
        if part is not None:
            check_part(self.name, grid, part)
        for hook in self._jit.pre_run_hooks:
            hook(*args, **kwargs)
        returned = launcher(grid, values, part=part)
        return launcher.result if returned is None else returned

    def prepare_preemptible(self, device: Device, configuration: Any, args: Any, kwargs: Any) -> Prepared:
        if self._tuner is not None:
            ready = functools.partial(self.ready, device, configuration, args)
            kwargs = self._tuner.choose(device, args, kwargs, ready)
        values, key, options = self._bind(device, args, kwargs)
        if options:
            key = self._with_options(key, options)

        def launcher(sliced: bool) -> Launcher:
            known = self._launchers.get((key, device.session is None, not sliced, device, "preempt"))
            return known or self._prepare(device, values, key, options, sliced, preempt=True)

        grid = configuration
        if callable(grid):
            grid = grid(self._source.named(*args, **kwargs))
        work = work_of(self.name, as_grid(grid), values, device)
        held = functools.partial(blocks_at_once, device, launcher, work)
        return Prepared(self.name, work, launcher, held, self._waves, (key, device), (args, kwargs))

    def _bind(
        self, device: Device | type[_NoDevice], args: Sequence[Any], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], tuple[Any, ...], dict[str, Any]]:
        try:
            return self._source.bind(device.handlers, *args, **kwargs)
        except TypeError:
            raise self._source.misuse(device.handlers, args, kwargs) from None

    def _with_options(self, key: tuple[Any, ...], options: dict[str, Any]) -> tuple[Any, ...]:
        key = (*key, *sorted((o, tuple(v.items()) if isinstance(v, dict) else v) for o, v in options.items()))
        try:
            hash(key)
        except TypeError:  # for example a list, which no option takes
            split_options(options, self.name, self.arg_names)
            raise
        return key

    def _prepare(
        self,
        device: Device,
        values: Sequence[Any],
        key: Any,
        options: dict[str, Any],
        sliced: bool,
        preempt: bool = False,
    ) -> Launcher:
        options = split_options(options, self.name, self.arg_names)
        make = self._source.draft if device.evaluates else self._source.source
        marked = device.session is not None and self._source.has_ranges(values)
        made = make(values, key, options, device.target, marked)
        draft = made if isinstance(made, Draft) else Draft.of(made)
        config = self._config(device, sliced, preempt)
        launcher = device.prepare(draft, config, _picker(draft.metadata, values, device))
        launcher.result = self._result(Launched(draft, lambda: launcher.compiled), values, options)
        which = (key, device.session is None, not sliced, device)
        self._launchers[(*which, "preempt") if preempt else which] = launcher
        return launcher

    def _result(self, made: Any, values: Sequence[Any], options: dict[str, Any]) -> Result:
        constants = {i: values[i] for i, param in enumerate(self._jit.params) if param.is_constexpr}
        return Result(made, self._launch_again, self.arg_names, constants, options)

    def _launch_again(self, grid: Grid, args: list[Any], options: dict[str, Any]) -> Any:
        return self._launch(Device.current(), grid, None, args, options)

    def compile(self, *args: Any, **kwargs: Any) -> Compiled:
        """Compiles for any target, without a GPU and without launching.

        Arrays may be given as such, or as their type: "*fp32", "*fp16:16" (16-byte aligned). `target="sm_90"` names the
        target, `report=` the level (default: the kernel's own; None: the plain kernel), and `sliced=True` asks for the
        sliced kernel. If the kernel has a parameter of such a name, append an underscore to ours: `target_="sm_90"`.
        """
        return self._compile_variant(args, kwargs, self._own(kwargs, "report", self.report))

    def _own(self, kwargs: dict[str, Any], name: str, default: Any) -> Any:
        """Takes one of our keywords out of the kernel's."""
        if f"{name}_" in kwargs:
            return kwargs.pop(f"{name}_")
        return default if name in self.arg_names else kwargs.pop(name, default)

    def _compile_variant(self, args: Sequence[Any], kwargs: dict[str, Any], report: Report | None) -> Compiled:
        target, sliced = self._own(kwargs, "target", None), self._own(kwargs, "sliced", False)
        device = None if target else Device.current()
        if self._tuner is not None:
            kwargs = self._tuner.every(args, kwargs)[0]
        typed = any(isinstance(each, str) for each in (*args, *kwargs.values()))
        target = target or (device.target if device else "")
        source = self._source_for(None if typed else device, target, args, kwargs)
        return source.build(PassConfig(report, sliced, self.exits))

    def _source_for(self, device: Device | None, target: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Source:
        values, key, options = self._bind(device or _NoDevice, args, kwargs)
        key = self._with_options(key, options) if options else key
        options = split_options(options, self.name, self.arg_names)
        return self._source.source(values, key, options, target)

    def theoretical_occupancy(self, *args: Any, **kwargs: Any) -> Occupancy:
        """Blocks of this kernel that an SM can hold, and the resource that limits them.

        The result is for the plain kernel; its `.reporting` is for the reporting kernel.
        """
        compiled = self.compile(*args, **kwargs)
        target = self._own(kwargs, "target", None)
        limits = self._limits(target) if target else Device.current().limits
        threads = compiled.source.threads
        assert threads is not None
        return occupancy_of(limits, threads, compiled)


def _picker(facts: dict[str, Any], values: Sequence[Any], device: Device) -> Pick:
    """Selects the values passed to the kernel: by index, which is fast, without tuples, descriptors and bfloat16."""
    signature = facts["signature"]
    if "bf16" in signature.values() and not device.evaluates:
        kinds = list(signature.values())
        bits = {name: "i16" if kind == "bf16" else kind for name, kind in signature.items()}
        pick = _picker({**facts, "signature": bits}, values, device)
        return lambda vs: pick([bfloat16_bits(v) if k == "bf16" else v for k, v in zip(kinds, vs, strict=True)])
    if any(isinstance(kind, (tuple, list)) or kind.startswith("tensordesc") for kind in signature.values()):
        return functools.partial(launch_values, signature, facts["tiles"], device.tile)
    indices = [i for i, kind in enumerate(signature.values()) if kind != "constexpr"]
    if len(indices) == len(values):
        return all_values
    if len(indices) < 2:
        return lambda v: [v[i] for i in indices]
    return itemgetter(*indices)
