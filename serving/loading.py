"""Loads the models that a server wants at its start, one after another, and logs how that goes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TypeVar

from paellapy.instrument.errors import PaellaError
from paellapy.serving.logs import log
from paellapy.serving.registry import Registry
from paellapy.serving.warm import warm_up

T = TypeVar("T")

PATIENCE_S = 10.0  # between log lines while a model is loading


async def load_models(registry: Registry, stopping: Callable[[], bool], also: Callable[[], None] | None = None) -> None:
    """Compiles what requests run, then loads the models wanted at the start, one after another.

    If a model cannot be loaded, the server runs on but is not ready; if none can be loaded, the error is raised. `also`
    compiles further code.
    """
    failure: PaellaError | None = None
    await _patiently(partial(warm_up, registry.engine.current_policy), {})
    if also is not None and not stopping():
        await _patiently(also, {})
    for entry in list(registry.entries.values()):  # a reload may add models meanwhile
        if entry.wanted and entry.model is None and not stopping():
            began = time.monotonic()
            log.info("loading", extra={"fields": {"model": entry.name, "device": registry.engine.device.name}})
            try:
                alone_ms = await _patiently(partial(registry.load, entry.name), {"model": entry.name})
            except PaellaError as e:
                failure = e
                log.error("a model could not be loaded", extra={"fields": {"model": entry.name, "error": str(e)}})
            else:
                took_s = round(time.monotonic() - began, 2)
                log.info("loaded", extra={"fields": {"model": entry.name, "s": took_s, "alone_ms": alone_ms}})
    if failure is not None and not any(entry.model for entry in registry.entries.values()):
        raise failure


async def _patiently(work: Callable[[], T], what: Mapping[str, Any]) -> T:
    """Runs the work in a thread and logs a line now and then, so that an operator sees that it continues."""
    began = time.monotonic()
    task = asyncio.create_task(asyncio.to_thread(work))
    while not (await asyncio.wait((task,), timeout=PATIENCE_S))[0]:
        so_far = {**what, "s": round(time.monotonic() - began)}
        log.info("still loading; the first start on a machine compiles kernels", extra={"fields": so_far})
    return task.result()
