"""`Kernel`: the object that `pp.kernel` returns. It binds arguments, selects a variant of the kernel, and launches it.

A kernel exists in variants: plain, or reporting at some level, whole or sliced. Outside a trace it runs at its own
level; inside `trace()` it runs at level `trace`. `kernel.preemptible` launches variants that can be preempted.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from operator import index, itemgetter
from typing import Any, Literal, NoReturn, overload

from paellapy.instrument.arguments import Handlers, as_type
from paellapy.instrument.device.base import Device, Launcher, check_grid
from paellapy.instrument.device.occupancy import Occupancy, occupancy
from paellapy.instrument.device.parts import limits_for_capability
from paellapy.instrument.device.preemption import Work
from paellapy.instrument.errors import ArgumentError, InstrumentError
from paellapy.instrument.kernels import cuda_source, triton_arguments, triton_source
from paellapy.instrument.kernels.autotune import Tuner
from paellapy.instrument.kernels.cuda_source import CudaSource
from paellapy.instrument.kernels.preempt import Preemptible, Prepared
from paellapy.instrument.kernels.triton_driver import stand_in
from paellapy.instrument.kernels.triton_options import split_options
from paellapy.instrument.kernels.triton_source import TritonSource
from paellapy.instrument.kernels.turnaround import Wave
from paellapy.instrument.ptx.compiled import Compiled, Draft, Source
from paellapy.instrument.ptx.passes import Exits, PassConfig, Report

Grid = tuple[int, ...] | Callable[[dict[str, Any]], tuple[int, ...]]


class _NoDevice:
    """Stands for a device where only types are known."""

    handlers: Handlers = triton_arguments.TypeHandlers()


class Kernel:
    """A kernel that reports. Launch it as `kernel[grid](…)`, like any Triton kernel."""

    def __init__(self, report: Report | None, exits: Exits) -> None:
        self.report, self.exits = report, exits
        PassConfig(report, exits=exits)  # an unknown level is refused here, not at the first launch
        self._launchers: dict[Any, Launcher] = {}
        self._waves: dict[Any, Wave] = {}  # duration of a wave of each preemptible variant

    name: str
    _launched = "[grid]"  # launch syntax, shown after the kernel's name

    def __call__(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise ArgumentError(
            f"kernel {self.name!r} was called without a grid: launch it as {self.name}{self._launched}(…)"
        )

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name}{self._launched}>"

    @property
    def preemptible(self) -> Preemptible:
        """`kernel.preemptible[grid](…)` launches so that the launch can be preempted and resumed."""
        return Preemptible(self)

    def prepare_preemptible(self, device: Device, configuration: Any, args: Any, kwargs: Any) -> Prepared:
        """A launch that can be preempted, ready to be made."""
        raise NotImplementedError

    def _config(self, device: Device, sliced: bool, preempt: bool = False) -> PassConfig:
        level: Report | None = "trace" if device.session is not None else self.report
        return PassConfig(level, sliced, self.exits, preempt=preempt)

    def _limits(self, target: str) -> Any:
        number = triton_source.target_capability(target)
        return limits_for_capability((number // 10, number % 10))


class TritonKernel(Kernel):
    def __init__(self, fn: Any, report: Report | None, exits: Exits) -> None:
        super().__init__(report, exits)
        self.fn, wrappers = triton_source.unwrap(fn)
        self._source = TritonSource(self.fn)
        self.name = self._source.name
        self.arg_names = self._source.arg_names
        self._tuner = Tuner(wrappers, self.arg_names) if wrappers else None
        if exits == "count-out":
            raise InstrumentError(
                f"exits='count-out' is not possible for Triton kernel {self.name!r}: it needs static shared memory, "
                "which would misalign Triton's own. Leave exits= out: the threads of a Triton block end together."
            )
        self.__doc__, self.__name__, self.__module__ = self.fn.__doc__, self.name, self.fn.__module__
        self.__qualname__ = self.fn.__qualname__
        stand_in()

    def __getattr__(self, name: str) -> Any:
        """Attributes of the decorated function that are not ours: `params`, `src`, `cache_key`, …"""
        if name.startswith("__") or name in ("fn", "_source", "_tuner"):
            raise AttributeError(name)
        if name == "best_config":
            raise AttributeError(f"kernel {self.name!r} has not been tuned: launch it under @triton.autotune first")
        return getattr(self.fn, name)

    # -- the names of a `@triton.jit` function, for wrappers and scripts that do not know paellapy

    def run(self, *args: Any, grid: Grid, warmup: bool = False, **kwargs: Any) -> Any:
        """As `kernel[grid](…)`; with `warmup` the kernel is compiled and not launched."""
        return self.warmup(*args, grid=grid, **kwargs) if warmup else self._run(grid, None, *args, **kwargs)

    def warmup(self, *args: Any, grid: Grid = (1,), **kwargs: Any) -> Any:
        """Compiles for the current device and launches nothing; dtypes stand for arrays.

        Returns the compiled kernel; under `@triton.autotune` a list, with one for each configuration. As in Triton.
        """
        target, config = Device.current().target, PassConfig(self.report, False, self.exits)
        every = self._tuner.every(args, kwargs) if self._tuner else [kwargs]
        types, named = [as_type(a) for a in args], [{n: as_type(v) for n, v in each.items()} for each in every]
        made = [self._source_for(None, target, types, each).build(config) for each in named]
        return made if self._tuner and self._tuner.tunes else made[0]

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
            kwargs = self._tuner.choose(device, args, kwargs, functools.partial(self._trial, device, grid, args))
        return self._launch(device, grid, part, args, kwargs)

    def _trial(self, device: Device, grid: Grid, args: Sequence[Any], tuner: Tuner, kwargs: dict[str, Any]) -> Any:
        """One launch of the whole grid, with the keywords that the tuner chooses."""
        again = functools.partial(self._trial, device, grid, args)
        return self._launch(device, grid, None, args, tuner.choose(device, args, kwargs, again))

    def _launch(
        self, device: Device, grid: Grid, part: tuple[int, int] | None, args: Sequence[Any], kwargs: dict[str, Any]
    ) -> Any:
        values, key, options = self._bind(device, args, kwargs)
        if options:
            key = self._with_options(key, options)
        launcher = self._launchers.get((key, device.session is None, part is None, device))
        if launcher is None:
            launcher = self._prepare(device, values, key, options, part is not None)
        if callable(grid):
            grid = grid(self._source.named(*args, **kwargs))
        grid = _as_grid(grid)
        if part is not None:
            _check_part(self.name, grid, part)
        for hook in self.fn.pre_run_hooks:
            hook(*args, **kwargs)
        returned = launcher(grid, values, part=part)
        return launcher.launched if returned is None else returned

    def prepare_preemptible(self, device: Device, configuration: Any, args: Any, kwargs: Any) -> Prepared:
        if self._tuner is not None:
            trial = functools.partial(self._trial, device, configuration, args)
            kwargs = self._tuner.choose(device, args, kwargs, trial)
        values, key, options = self._bind(device, args, kwargs)
        if options:
            key = self._with_options(key, options)

        def launcher(sliced: bool) -> Launcher:
            known = self._launchers.get((key, device.session is None, not sliced, device, "preempt"))
            return known or self._prepare(device, values, key, options, sliced, preempt=True)

        grid = configuration
        if callable(grid):
            grid = grid(self._source.named(*args, **kwargs))
        work = _work(self.name, _as_grid(grid), values, device)
        held = functools.partial(_blocks_at_once, device, launcher, work)
        return Prepared(self.name, work, launcher, held, self._waves, (key, device), (args, kwargs))

    def _bind(
        self, device: Device | type[_NoDevice], args: Sequence[Any], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], tuple[Any, ...], dict[str, Any]]:
        try:
            return self._source.bind(device.handlers, *args, **kwargs)
        except TypeError:
            raise ArgumentError(self._source.misuse(device.handlers, args, kwargs)) from None

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
        marked = device.session is not None and self._source.has_ranges
        made = make(values, key, options, device.target, marked)
        draft = made if isinstance(made, Draft) else Draft.of(made)
        config = self._config(device, sliced, preempt)
        launcher = device.prepare_draft(draft, config, _picker(draft.metadata, values, device))
        which = (key, device.session is None, not sliced, device)
        self._launchers[(*which, "preempt") if preempt else which] = launcher
        return launcher

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
        return _beside(limits, threads, compiled)


class CudaKernel(Kernel):
    """A CUDA C kernel: launch it as `kernel[grid, block](…)` or `kernel[grid, block, shared_bytes](…)`."""

    _launched = "[grid, block]"

    def __init__(self, source: CudaSource, report: Report | None, exits: Exits) -> None:
        super().__init__(report, exits)
        self._source, self.name = source, source.name

    def __getitem__(self, configuration: Any) -> Callable[..., Any]:
        grid, block, shared = self._configuration(configuration)
        return functools.partial(self._run, grid, block, shared, None)

    def slice(self, configuration: Any, first: int, count: int) -> Callable[..., Any]:
        """Launches blocks `first … first + count - 1` of the logical grid only; `configuration` as in `kernel[…]`."""
        grid, block, shared = self._configuration(configuration)
        return functools.partial(self._run, grid, block, shared, (first, count))

    def _configuration(self, given: Any) -> tuple[tuple[int, ...], tuple[int, ...], int]:
        if not isinstance(given, tuple) or len(given) not in (2, 3):
            raise ArgumentError(
                f"launch CUDA kernel {self.name!r} as {self.name}[grid, block](…): grid and block are both needed"
            )
        grid, block, *rest = given
        return _as_grid(grid), _as_grid(block), int(rest[0]) if rest else 0

    def _run(
        self,
        grid: tuple[int, ...],
        block: tuple[int, ...],
        shared_bytes: int,
        part: tuple[int, int] | None,
        /,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        self._refuse_keywords(kwargs)
        device = Device.current()
        launcher = self._launchers.get((device.session is None, part is None, device))
        source = self._source.source(device.target, marked=device.session is not None)
        if launcher is None:
            launcher = device.prepare(source, self._config(device, part is not None), _everything)
            self._launchers[device.session is None, part is None, device] = launcher
        values = cuda_source.bind_values(self.name, source.metadata["codes"], args, device.handlers)
        if part is not None:
            _check_part(self.name, grid, part)
        return launcher(grid, values, block, shared_bytes, part)

    def prepare_preemptible(self, device: Device, configuration: Any, args: Any, kwargs: Any) -> Prepared:
        self._refuse_keywords(kwargs)
        grid, block, shared_bytes = self._configuration(configuration)
        source = self._source.source(device.target, marked=device.session is not None)

        def launcher(sliced: bool) -> Launcher:
            key = (device.session is None, not sliced, device, "preempt")
            if key not in self._launchers:
                self._launchers[key] = device.prepare(source, self._config(device, sliced, preempt=True), _everything)
            return self._launchers[key]

        values = cuda_source.bind_values(self.name, source.metadata["codes"], args, device.handlers)
        work = replace(_work(self.name, grid, values, device), block=block, shared_bytes=shared_bytes)
        held = functools.partial(_blocks_at_once, device, launcher, work)
        return Prepared(self.name, work, launcher, held, self._waves, (block, shared_bytes, device), args)

    def _refuse_keywords(self, kwargs: dict[str, Any]) -> None:
        if kwargs:
            raise ArgumentError(
                f"CUDA kernel {self.name!r} takes arguments by position only: pass {next(iter(kwargs))} without its "
                "name"
            )

    def compile(
        self, target: str | None = None, report: Report | Literal["own"] | None = "own", sliced: bool = False
    ) -> Compiled:
        """Compiles for any target, without a GPU and without launching; `report=None` gives the plain kernel."""
        source = self._source.source(target or Device.current().target)
        return source.build(PassConfig(self.report if report == "own" else report, sliced, self.exits))

    def theoretical_occupancy(
        self, block: int | tuple[int, ...], shared_bytes: int = 0, target: str | None = None
    ) -> Occupancy:
        """Blocks of this kernel that an SM can hold, and the resource that limits them; as for Triton kernels."""
        limits = self._limits(target) if target else Device.current().limits
        threads = functools.reduce(lambda a, b: a * b, _as_grid(block))
        return _beside(limits, threads, self.compile(target), shared_bytes)


@overload
def kernel(fn: None = None, *, report: Report | None = "count", exits: Exits = "auto") -> Callable[[Any], Kernel]: ...
@overload
def kernel(fn: Any, *, name: str | None = None, report: Report | None = "count", exits: Exits = "auto") -> Kernel: ...
@overload
def kernel(
    *, source: str, name: str, options: Sequence[str] = (), report: Report | None = "count", exits: Exits = "auto"
) -> CudaKernel: ...
def kernel(
    fn: Any = None,
    *,
    source: str | None = None,
    name: str | None = None,
    options: Sequence[str] = (),
    report: Report | None = "count",
    exits: Exits = "auto",
) -> Any:
    """Makes a kernel report which block runs on which SM, and when.

    Use it as a decorator over `@triton.jit` (also over `@triton.autotune`), with or without options; with CUDA source
    in `source=` and `name=`; or with a `cupy.RawKernel` or `cupy.RawModule`. `report` is its level outside a trace:
    "count" (live occupancy), "notify" (its last block has started), or None (nothing). "trace" records need a trace.
    """
    if report == "trace":
        report = None  # records need a trace to go to; inside a trace every kernel reports them
    if source is not None:
        if fn is not None:
            raise ArgumentError("pp.kernel takes a function or source=…, not both")
        if name is None:
            raise ArgumentError("pp.kernel needs the name of a kernel in the source: name=…")
        return CudaKernel(CudaSource(source, name, options), report, exits)
    if options:
        raise ArgumentError("options= are for the compiler of CUDA source: give source=… too")
    if fn is None:
        if name is not None:
            raise ArgumentError(f"name={name!r} picks a kernel from CUDA source: give source=… too")
        return functools.partial(kernel, report=report, exits=exits)
    if isinstance(fn, Kernel):
        raise ArgumentError(f"kernel {fn.name!r} is already a pp.kernel: apply pp.kernel once")
    if type(fn).__module__.partition(".")[0] == "cupy" and hasattr(fn, "code"):
        return CudaKernel(CudaSource.from_cupy(fn, name), report, exits)
    return TritonKernel(fn, report, exits)


def _beside(limits: Any, threads: int, compiled: Compiled, shared_bytes: int = 0) -> Occupancy:
    """Occupancy of the plain kernel, together with that of the reporting one."""
    plain = compiled.source.build(PassConfig())
    found = [
        occupancy(limits, threads, each.registers, each.shared_bytes + shared_bytes, each.source.cluster)
        for each in (plain, compiled)
    ]
    return replace(found[0], reporting=found[1])


def _everything(values: Sequence[Any]) -> Sequence[Any]:
    return values


def _picker(facts: dict[str, Any], values: Sequence[Any], device: Device) -> Callable[[Sequence[Any]], Sequence[Any]]:
    """Selects the values passed to the kernel: by index, which is fast, without tuples and descriptors."""
    signature = facts["signature"]
    if any(isinstance(kind, (tuple, list)) or kind.startswith("tensordesc") for kind in signature.values()):
        return functools.partial(triton_arguments.launch_values, signature, facts["tiles"], device.tile)
    indices = [i for i, kind in enumerate(signature.values()) if kind != "constexpr"]
    if len(indices) == len(values):
        return _everything
    if len(indices) < 2:
        return lambda v: [v[i] for i in indices]
    return itemgetter(*indices)


def _as_grid(grid: Any) -> tuple[int, ...]:
    if grid.__class__ is tuple and 1 <= len(grid) <= 3:  # the usual case, on every launch
        for extent in grid:
            if extent.__class__ is not int:
                break
        else:
            return grid
    try:
        found = tuple(map(index, grid)) if isinstance(grid, (tuple, list)) else (index(grid),)
    except TypeError:
        found = ()
    if not 1 <= len(found) <= 3:
        raise ArgumentError(f"a grid is one to three integers, not {grid!r}")
    return found


def _work(name: str, grid: tuple[int, ...], values: Sequence[Any], device: Device) -> Work:
    x, y, z = (*grid, 1, 1)[:3]
    check_grid(name, (x, y, z))
    return Work((x, y, z), values, device.current_stream())


def _blocks_at_once(device: Device, launcher: Callable[[bool], Launcher], work: Work) -> int:
    """Blocks of a preemptible variant that the GPU holds at once."""
    compiled = launcher(True).compiled
    threads = compiled.source.threads or functools.reduce(lambda a, b: a * b, work.block)
    shared_bytes = compiled.shared_bytes + work.shared_bytes
    return occupancy(device.limits, threads, compiled.registers, shared_bytes).blocks_per_sm * device.sm_count


def _check_part(name: str, grid: Sequence[int], part: tuple[int, int]) -> None:
    first, count = part
    total = functools.reduce(lambda a, b: a * b, grid)
    if first < 0 or count < 1 or first + count > total:
        raise ArgumentError(
            f"kernel {name!r}: blocks {first}…{first + count - 1} are not all in a grid of {total} blocks"
        )
