"""Lets Triton use the virtual GPU where it finds no other, from the moment both packages are imported.

Scripts ask `triton.runtime.driver.active` for their device before they define a kernel. So `import paellapy` prepares
Triton's modules, now or when they are imported, and imports neither Triton nor our driver for that.
"""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable
from typing import Any

from paellapy.instrument.env import ImportHook


def prepare_search() -> None:
    """Extends Triton's search for a driver, the launches of its kernels, and its benchmarks."""
    for name, hook in _importing.items():
        if name in sys.modules:
            hook.loaded(importlib.import_module(name))  # waits for a thread that is still importing it
        else:
            hook.add()


def _extend_search(module: Any) -> None:
    _replace(module, "_create_driver", _create_driver)


def _create_driver(search: Callable[[], Any]) -> Any:
    try:
        return search()
    except RuntimeError as error:
        if not str(error).startswith("0 active drivers"):
            raise
    from paellapy.instrument.kernels.triton_driver import VirtualDriver

    return VirtualDriver()


def _extend_launches(module: Any) -> None:
    """Of functions (`jit`), and of tuned functions (`autotuner`)."""
    kind, driver = getattr(module, "Autotuner", None) or module.JITFunction, module.driver

    def run(original: Any, fn: Any, *args: Any, **kwargs: Any) -> Any:
        launch = getattr(driver.active, "launch", None)  # which only the virtual GPU's driver has
        if launch is not None:
            return launch(original, fn, *args, **kwargs)
        kind.run = original  # there is a GPU: launches take Triton's own path from now on
        return original(fn, *args, **kwargs)

    _replace(kind, "run", run)


def _extend_benchmarks(module: Any) -> None:
    def in_its_place(name: str) -> Callable[..., Any]:
        def call(original: Any, *args: Any, **kwargs: Any) -> Any:
            own = getattr(module.runtime.driver.active, name, None)
            return original(*args, **kwargs) if own is None else own(original, *args, **kwargs)

        return call

    _replace(module, "do_bench", in_its_place("do_bench"))
    _replace(module.Mark, "_run", in_its_place("report"))


def _replace(place: Any, name: str, ours: Callable[..., Any]) -> None:
    """Puts a function in the place of another, which becomes its first argument; once."""
    original = getattr(place, name)
    if hasattr(original, "of_paellapy"):
        return

    @functools.wraps(original)
    def replacement(*args: Any, **kwargs: Any) -> Any:
        return ours(original, *args, **kwargs)

    replacement.of_paellapy = True  # type: ignore[attr-defined]
    setattr(place, name, replacement)


_importing = {
    name: ImportHook(name, extend)
    for name, extend in (
        ("triton.runtime.driver", _extend_search),
        ("triton.runtime.jit", _extend_launches),
        ("triton.runtime.autotuner", _extend_launches),
        ("triton.testing", _extend_benchmarks),
    )
}
