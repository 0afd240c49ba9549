"""`@triton.autotune` and `@triton.heuristics` without Triton's own driver: timed on the current device."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from triton.runtime.autotuner import Autotuner, Heuristics
from triton.runtime.errors import AutotunerError
from triton.runtime.jit import MockTensor

from paellapy.instrument.device.base import Device
from paellapy.instrument.errors import ArgumentError, PaellaError, also

# Launches a kernel once with these keywords and the keywords that the given tuner adds.
Trial = Callable[["Tuner", dict[str, Any]], Any]

_WARMUPS, _REPEATS = 2, 5


class Tuner:
    """Applies the wrappers around a kernel to each call, outermost first."""

    def __init__(self, wrappers: Sequence[Any], arg_names: Sequence[str]) -> None:
        self.wrappers, self.arg_names = tuple(wrappers), tuple(arg_names)
        self._best: dict[Any, Any] = {}
        self.last: Any = None  # the configuration of the last launch

    def choose(self, device: Device, args: Sequence[Any], kwargs: dict[str, Any], trial: Trial) -> dict[str, Any]:
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
                    self._best[key] = _fastest(device, configs, named, keep, partial(_once, trial, inner, kwargs))
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


def _once(trial: Trial, inner: Tuner, kwargs: dict[str, Any], more: dict[str, Any]) -> None:
    trial(inner, {**kwargs, **more})


def _fastest(
    device: Device, configs: list[Any], named: dict[str, Any], keep: _Restorer, run: Callable[[dict[str, Any]], Any]
) -> Any:
    """The configuration that takes the least time on the device."""
    times: list[float] = []
    failure: PaellaError | None = None
    with device.untraced():
        for config in configs:
            best, full = float("inf"), {**named, **config.all_kwargs()}
            try:
                for attempt in range(_WARMUPS + _REPEATS):
                    if config.pre_hook is not None:
                        config.pre_hook(full)
                    keep.before(full)
                    with device.stream() as stream:
                        start = stream.record()
                        run(_launch_kwargs(config))
                        end = stream.record()
                        stream.synchronize()
                    keep.after(full, None)
                    if attempt >= _WARMUPS:
                        best = min(best, end.elapsed_ns(start))
            except ArgumentError:
                raise
            except PaellaError as e:  # for example, too much shared memory for this GPU: other configurations may fit
                failure = e
                keep.after(full, e)
            keep.put_back()
            times.append(best)
    if failure is not None and min(times) == float("inf"):
        raise failure
    return configs[times.index(min(times))]


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
