"""`@triton.autotune` and `@triton.heuristics` without Triton's own driver: timed on the current device.

A GPU runs each configuration a few times. For the virtual GPU its model predicts the times from some blocks of each,
and the choice is kept on disk. `rank_configs` predicts in the same way.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from triton.runtime.autotuner import Autotuner, Heuristics
from triton.runtime.errors import AutotunerError
from triton.runtime.jit import MockTensor

from paellapy.instrument import cache
from paellapy.instrument.device.base import Device, Launcher
from paellapy.instrument.env import versions
from paellapy.instrument.errors import ArgumentError, PaellaError, also
from paellapy.instrument.gpu_model.parts import PARTS

# A launch with these keywords and the keywords that the given tuner adds: its launcher, grid and values.
Ready = Callable[["Tuner", dict[str, Any]], tuple[Launcher, tuple[int, ...], Sequence[Any]]]

_WARMUPS, _REPEATS = 2, 5


class Tuner:
    """Applies the wrappers around a kernel to each call, outermost first."""

    def __init__(self, wrappers: Sequence[Any], arg_names: Sequence[str]) -> None:
        self.wrappers, self.arg_names = tuple(wrappers), tuple(arg_names)
        self._best: dict[Any, Any] = {}
        self.last: Any = None  # the configuration of the last launch

    def choose(self, device: Device, args: Sequence[Any], kwargs: dict[str, Any], ready: Ready) -> dict[str, Any]:
        """The keywords of the best configuration, timed once per key."""
        for i, wrapper in enumerate(self.wrappers):
            if isinstance(wrapper, Heuristics):
                kwargs = self._heuristic(wrapper, args, kwargs)
                continue
            key = (i, device.name, self._key(wrapper, args, kwargs))
            if key not in self._best:
                configs = self._candidates(wrapper, args, kwargs)
                _refuse_conflicts(configs, kwargs)
                if len(configs) == 1:
                    self._best[key] = configs[0]
                else:
                    inner = Tuner(self.wrappers[i + 1 :], self.arg_names)
                    named = {**dict(zip(self.arg_names, args, strict=False)), **kwargs}
                    keep = _Restorer(device, wrapper, named)
                    trials = _Trials(device, configs, named, keep, partial(_with, ready, inner, kwargs))
                    self._best[key] = trials.best(wrapper)
                    keep.ready({**named, **self._best[key].all_kwargs()})
            best = self.last = self._best[key]
            _refuse_conflicts([best], kwargs)
            if best.pre_hook is not None:
                best.pre_hook({**dict(zip(self.arg_names, args, strict=False)), **kwargs, **best.all_kwargs()})
            kwargs = {**kwargs, **_launch_kwargs(best)}
        return kwargs

    @property
    def tunes(self) -> bool:
        return any(isinstance(wrapper, Autotuner) for wrapper in self.wrappers)

    @property
    def configs(self) -> list[Any]:
        """The configurations to choose from, as of Triton's `Autotuner`."""
        return [config for wrapper in self.wrappers if isinstance(wrapper, Autotuner) for config in wrapper.configs]

    @property
    def cache(self) -> dict[Any, Any]:
        """The configurations chosen so far, by the values of the tuner's key, as of Triton's `Autotuner`."""
        return {key: config for (_, _, key), config in self._best.items()}

    def every(self, args: Sequence[Any], kwargs: dict[str, Any]) -> list[dict[str, Any]]:
        """The keywords of each configuration: for compiling without a device to time on."""
        args = [MockTensor.wrap_dtype(a) for a in args]  # which heuristics may ask for a dtype
        found = [kwargs]
        for wrapper in self.wrappers:
            if isinstance(wrapper, Heuristics):
                found = [self._heuristic(wrapper, args, each) for each in found]
            else:
                found = [{**_launch_kwargs(config), **each} for each in found
                         for config in self._candidates(wrapper, args, each)]  # fmt: skip
        return found

    def _heuristic(self, wrapper: Heuristics, args: Sequence[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
        kwargs = dict(kwargs)
        for name, decide in wrapper.values.items():
            kwargs[name] = decide({**dict(zip(self.arg_names, args, strict=False)), **kwargs})
        return kwargs

    def _key(self, wrapper: Autotuner, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[Any, ...]:
        named = {**dict(zip(self.arg_names, args, strict=False)), **kwargs}
        dtypes = tuple(str(a.dtype) for a in named.values() if hasattr(a, "dtype"))
        return (*(named.get(k) for k in wrapper.keys), *dtypes)

    def _candidates(self, wrapper: Autotuner, args: Sequence[Any], kwargs: dict[str, Any]) -> list[Any]:
        if not wrapper.early_config_prune and not wrapper.perf_model:
            return list(wrapper.configs)
        wrapper.nargs = dict(zip(self.arg_names, args, strict=False))
        try:
            pruned = list(wrapper.prune_configs(kwargs))
        except AutotunerError:
            pruned = []
        finally:
            wrapper.nargs = None
        if not pruned:
            raise ArgumentError(
                "the autotuner's early_config_prune left no configuration: it must keep at least one", field="configs"
            )
        return pruned


def in_trial() -> bool:
    """Whether Triton's own autotuner, above a kernel of ours, tries a configuration at this moment."""
    frame = sys._getframe(2)  # noqa: SLF001  CPython's own
    while frame is not None and frame.f_globals.get("__name__") == Autotuner.__module__:
        if frame.f_code.co_name == "kernel_call":
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False


def _refuse_conflicts(configs: Sequence[Any], kwargs: dict[str, Any]) -> None:
    for config in configs:
        if not kwargs.keys().isdisjoint(config.kwargs):
            both = ", ".join(sorted(kwargs.keys() & config.kwargs.keys()))
            text = f"{both} is given at the launch and by the autotuner: leave one of the two out"
            raise also(ArgumentError(text, field=both), ValueError)  # Triton's kind of error


def _with(ready: Ready, inner: Tuner, kwargs: dict[str, Any], more: dict[str, Any]) -> Any:
    return ready(inner, {**kwargs, **more})


@dataclass(frozen=True, slots=True)
class _Trials:
    """The configurations of one tuner for one call."""

    device: Device
    configs: list[Any]
    named: dict[str, Any]  # the arguments
    keep: _Restorer
    ready: Callable[[dict[str, Any]], tuple[Launcher, tuple[int, ...], Sequence[Any]]]

    def best(self, wrapper: Autotuner) -> Any:
        """The configuration that takes the least time on the device."""
        if not self.device.evaluates:
            return self._fastest(self._measured())
        name = getattr(wrapper.base_fn, "__name__", "a kernel")
        key = cache.digest("tuned", self.device.name, repr(versions()), *self._facts(wrapper))
        if (stored := cache.read(key)) is not None and int(stored) < len(self.configs):
            return self.configs[int(stored)]
        found = self._fastest(_predicted(name, self._launches(), self.device))
        cache.write(key, str(self.configs.index(found)).encode())
        return found

    def _fastest(self, found: Iterable[tuple[float, PaellaError | None]]) -> Any:
        times, errors = zip(*found, strict=True)
        if min(times) == float("inf"):
            raise next(error for error in errors if error is not None)
        return self.configs[times.index(min(times))]

    def _facts(self, wrapper: Autotuner) -> Iterator[str]:
        """All that decides about the predicted times."""
        fn = wrapper.fn
        while not hasattr(fn, "cache_key"):
            fn = fn.fn
        yield fn.cache_key
        yield from (repr(config.all_kwargs()) for config in self.configs)
        for name, value in self.named.items():
            if not hasattr(value, "shape"):
                yield f"{name}: {value!r}"
            else:  # a tensor descriptor has the type of its base
                yield f"{name}: {getattr(value, 'dtype', None) or value.base.dtype} {tuple(value.shape)}"

    def _launches(self) -> Iterator[Any]:
        """The launch of each configuration, or the error of one that cannot be launched."""
        for config in self.configs:
            full, failure = {**self.named, **config.all_kwargs()}, None
            self.keep.before(full)
            if config.pre_hook is not None:
                config.pre_hook(full)
            try:
                yield self.ready(_launch_kwargs(config))
            except ArgumentError:
                raise
            except PaellaError as e:
                failure = e
                yield e
            self.keep.after(full, failure)
            self.keep.put_back()

    def _measured(self) -> Iterator[tuple[float, PaellaError | None]]:
        device, keep = self.device, self.keep
        with device.untraced():
            for config in self.configs:
                best, full, failure = float("inf"), {**self.named, **config.all_kwargs()}, None
                try:
                    for attempt in range(_WARMUPS + _REPEATS):
                        if config.pre_hook is not None:
                            config.pre_hook(full)
                        keep.before(full)
                        with device.stream() as stream:
                            start = stream.record()
                            launcher, grid, values = self.ready(_launch_kwargs(config))
                            launcher(grid, values)
                            end = stream.record()
                            stream.synchronize()
                        keep.after(full, None)
                        if attempt >= _WARMUPS:
                            best = min(best, end.elapsed_ns(start))
                except ArgumentError:
                    raise
                except PaellaError as e:  # for example, too much shared memory for this GPU: others may fit
                    failure = e
                    keep.after(full, e)
                keep.put_back()
                yield best, failure


def _predicted(
    name: str, launches: Iterable[Any], device: Device
) -> Iterator[tuple[float, PaellaError | None]]:
    """The time of each launch, by the virtual GPU's model. Kernels are compiled in parallel."""
    with ThreadPoolExecutor(os.cpu_count()) as pool, device.untraced():
        waiting = []
        for each in launches:
            if not isinstance(each, PaellaError):
                launcher, grid, values = each
                each = pool.submit(getattr, launcher, "compiled"), launcher.costs(grid, values), launcher, grid
            waiting.append(each)
        for each in _with_progress(name, waiting):
            try:
                if isinstance(each, PaellaError):
                    raise each
                compiling, costs, launcher, grid = each
                compiling.result()
                yield launcher.predict_ns(grid, *costs), None
            except PaellaError as error:
                yield float("inf"), error


_PATIENCE_S = 2.0  # a shorter search says nothing


def _with_progress(name: str, items: Sequence[Any]) -> Iterator[Any]:
    """The items, with a line on stderr now and then if they take long. PAELLAPY_QUIET=1 turns it off."""
    said = time.monotonic()
    for done, item in enumerate(items):
        yield item
        if time.monotonic() - said > _PATIENCE_S and not os.environ.get("PAELLAPY_QUIET"):
            said = time.monotonic()
            print(f"paellapy: tuning {name}: {done + 1} of {len(items)} configurations", file=sys.stderr, flush=True)


@dataclass(frozen=True, slots=True)
class RankedConfig:
    """A configuration and its predicted time; of one that does not run the time is infinite, and `error` says why."""

    config: Any
    time_ns: float
    error: PaellaError | None = None


def rank_configs(
    kernel: Any, grid: Any, *args: Any, configs: Sequence[Any] | None = None, **kwargs: Any
) -> list[RankedConfig]:
    """Configurations of a kernel, the fastest first, as the virtual GPU's model predicts them. Launches nothing.

    `configs` are those of `triton.autotune`, by default the kernel's own; the arguments are those of a launch. On a
    real GPU, the model of this GPU is asked, and arrays are taken to be full of zeros.
    """
    if configs is None:
        configs = kernel.configs if kernel.tunes else ()
    if not configs:
        raise ArgumentError(
            f"kernel {kernel.name!r} has no configurations to rank: give configs=[triton.Config(…), …]",
            kernel=kernel.name, field="configs",
        )
    device = _modelled(Device.current())
    if not Device.current().evaluates:
        args, kwargs = tuple(map(_zeros_like, args)), {name: _zeros_like(value) for name, value in kwargs.items()}
    inner = kernel.heuristics

    def launches() -> Iterator[Any]:
        for config in configs:
            try:
                yield kernel.ready(device, grid, args, inner, {**kwargs, **_launch_kwargs(config)})
            except ArgumentError:
                raise
            except PaellaError as error:
                yield error

    with device:
        found = _predicted(kernel.name, launches(), device)
        ranked = [RankedConfig(config, *each) for config, each in zip(configs, found, strict=True)]
    return sorted(ranked, key=lambda each: each.time_ns)


def _modelled(device: Device) -> Device:
    """The virtual GPU that stands for a device."""
    if device.evaluates:
        return device
    for name, part in PARTS.items():
        if part.title in device.title or device.title in part.title:
            return Device.open(f"virtual:{name}")  # type: ignore[no-any-return]
    raise ArgumentError(
        f"there is no model of {device.title}: choose one of {', '.join(PARTS)}, as in `with "
        'pp.Device("virtual:h200"): pp.rank_configs(…)`', field="device", given=device.title, limit=tuple(PARTS),
    )


def _zeros_like(value: Any) -> Any:
    """An array of zeros on the host with the layout of an array on the GPU; other values as they are."""
    if not hasattr(value, "shape") or not hasattr(value, "dtype"):
        return value
    if hasattr(value, "untyped_storage"):  # a tensor of PyTorch, with any strides
        size = value.untyped_storage().nbytes() // value.element_size()
        zeros = value.new_zeros(size, device="cpu")
        return zeros.as_strided(value.shape, value.stride(), value.storage_offset())
    return np.zeros(value.shape, value.dtype)


class _Restorer:
    """`reset_to_zero`, `restore_value` and hooks of an autotuner: trials must leave the arguments unchanged.

    A hook of the user's own takes the place of both, as in Triton.
    """

    def __init__(self, device: Device, wrapper: Autotuner, named: dict[str, Any]) -> None:
        self.device = device
        self.first = wrapper.pre_hook if wrapper.user_defined_pre_hook else None
        self.last = wrapper.post_hook if wrapper.user_defined_post_hook else None
        zeroed, saved = ((), ()) if self.first else (wrapper.reset_to_zero, wrapper.restore_value)
        self.zeroed = [named[n] for n in zeroed if named.get(n) is not None]
        self.saved = [(named[n], _snapshot(named[n])) for n in saved if named.get(n) is not None]

    def before(self, named: dict[str, Any]) -> None:
        """Before each trial."""
        self.device.synchronize()
        if self.first:
            self.first(named)
        self._zero()

    def after(self, named: dict[str, Any], failure: Exception | None) -> None:
        """After each trial."""
        if self.last:
            self.last(named, exception=failure)

    def put_back(self) -> None:
        """After the trials of a configuration."""
        self.device.synchronize()
        self._zero()
        for array, copy in self.saved:
            _overwrite(array, copy)

    def ready(self, named: dict[str, Any]) -> None:
        """After all trials, before the launch."""
        if self.first:
            self.first(named, reset_only=True)

    def _zero(self) -> None:
        for array in self.zeroed:
            _overwrite(array, 0)


def _snapshot(array: Any) -> Any:
    return array.clone() if hasattr(array, "clone") else array.numpy() if hasattr(array, "numpy") else array.copy()


def _overwrite(array: Any, value: Any) -> None:
    if hasattr(array, "copy_"):  # a torch tensor
        array.zero_() if isinstance(value, int) else array.copy_(value)
    elif hasattr(array, "set"):  # an array of ours, or of CuPy
        import numpy as np

        array.set(np.zeros(array.shape, array.dtype) if isinstance(value, int) else value)
    else:
        array[...] = value


def _launch_kwargs(config: Any) -> dict[str, Any]:
    """A configuration as keywords of a launch."""
    kwargs = dict(config.kwargs)
    for option in ("num_warps", "num_stages", "num_ctas", "maxnreg", "ir_override"):
        value = getattr(config, option, None)
        if value is not None:
            kwargs[option] = value
    return kwargs
