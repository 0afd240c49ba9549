"""`Watch`: names of the kernels that run while a trace is taken; the trace names the ones that do not report.

Triton's launch hook tells of the kernels that Triton launches. Inductor launches most of its kernels by a launcher of
its own, which calls no hook, so its `run` is replaced while a trace runs: at once, or when Inductor is imported.
"""

from __future__ import annotations

import functools
import importlib.abc
import importlib.util
import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from typing import Any

_INDUCTOR = "torch._inductor.runtime.triton_heuristics"


class Watch:
    """Kernels launched by Triton and Inductor from now until `stop`."""

    def __init__(self) -> None:
        self.names: set[str] = set()
        self._knobs: Any = getattr(sys.modules.get("triton"), "knobs", None)
        if self._knobs is not None:
            self._knobs.runtime.launch_enter_hook.add(self._entered)
        _runs.begin(self.names)

    def _entered(self, launch_metadata: Any) -> None:
        self.names.add(str(launch_metadata.get()["name"]))

    def stop(self) -> None:
        if self._knobs is not None:
            self._knobs.runtime.launch_enter_hook.remove(self._entered)
        _runs.end(self.names)


class _InductorRuns:
    """Inductor's `CachingAutotuner.run`, replaced while at least one trace runs."""

    def __init__(self) -> None:
        self._told: list[set[str]] = []
        self._class: Any = None
        self._plain: Callable[..., Any] | None = None

    def begin(self, names: set[str]) -> None:
        self._told.append(names)
        if _INDUCTOR in sys.modules:
            self.replace()
        elif _importing not in sys.meta_path:
            sys.meta_path.insert(0, _importing)

    def replace(self) -> None:
        found = getattr(sys.modules.get(_INDUCTOR), "CachingAutotuner", None)
        if self._told and self._class is None and found is not None:
            self._class, self._plain = found, found.run
            found.run = self._telling(found.run)

    def end(self, names: set[str]) -> None:
        self._told = [each for each in self._told if each is not names]
        if self._told:
            return
        if _importing in sys.meta_path:
            sys.meta_path.remove(_importing)
        if self._class is not None:
            self._class.run = self._plain
            self._class = None

    def _telling(self, run: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(run)
        def tell(tuner: Any, *args: Any, **kwargs: Any) -> Any:
            name = getattr(getattr(tuner, "fn", None), "__name__", None)
            for names in self._told:
                names.add(str(name or "a kernel of torch.compile"))
            return run(tuner, *args, **kwargs)

        return tell


class _Importing(importlib.abc.MetaPathFinder):
    """Finds nothing itself, but notices that Inductor is imported: the first `torch.compile` may be inside a trace."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name != _INDUCTOR:
            return None
        sys.meta_path.remove(self)  # the others are asked now
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            run = spec.loader.exec_module

            def run_and_replace(module: Any) -> None:
                run(module)
                _runs.replace()

            spec.loader.exec_module = run_and_replace  # type: ignore[method-assign]
        return spec


_runs, _importing = _InductorRuns(), _Importing()
