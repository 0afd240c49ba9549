"""Loads the models that a server wants at its start, and prepares what the first requests need.

Code is compiled, or read from the cache, before a model is loaded; then a request walks through the HTTP path.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import json
import math
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TypeVar

import numpy as np

from paellapy.instrument.device.driver import library
from paellapy.instrument.errors import PaellaError
from paellapy.scheduler.core import admission
from paellapy.scheduler.core.profiles import ModelProfile, SegmentProfile, install
from paellapy.scheduler.core.state import Limits, new_state
from paellapy.scheduler.core.step import attach_loop
from paellapy.scheduler.core.tables import COMPLETION
from paellapy.scheduler.core.tuning import Tuning
from paellapy.scheduler.engine import ring_calls
from paellapy.scheduler.engine.pipelines import Served
from paellapy.scheduler.policies.policy import Policy, attach_policy
from paellapy.serving.access import CLIENT_HEADER
from paellapy.serving.counters import counter_table, note_items
from paellapy.serving.fast_path.headers import Clock, Heads, answer_head
from paellapy.serving.logs import log
from paellapy.serving.protocol import decode, encode
from paellapy.serving.registry import VERSION, Registry
from paellapy.serving.tensors import datatype

_MODULES = {
    "virtual": ("paellapy.scheduler.backends.virtual", "triton.compiler.code_generator"),
    "cuda": ("paellapy.scheduler.backends.cuda", "cuda.bindings.driver", "triton.compiler.code_generator",
             "triton.backends.nvidia.compiler", "triton.backends.nvidia.driver", "torch"),
}  # fmt: skip


_JSON_VALUES = 1 << 12  # reading more of them takes milliseconds anyway
_WALKS = 8  # from the second on, the JSON is known; after some more, Python has specialised the code


def warm_up(policy: Policy) -> None:
    """Compiles with tables of its own. Forked processes inherit the compiled code and answer at once."""
    state = new_state(Limits(models=1, instances=1, requests=2, clients=2))
    attach_policy(state, policy)
    install(state, ModelProfile("warm-up", {1: [SegmentProfile(1.0)]}, instances=1))
    limits = admission.new_limits([1], Tuning.of_row(state.tuning[0]))
    admission.admit_one(state, limits, np.zeros(1, admission.ADMISSION_REQUEST))
    attach_loop(state)
    ring_calls.warm_up(state)
    note_items(counter_table()[0], np.zeros(1, np.int64), np.zeros(1, np.int64), np.zeros(1, np.int64),
               np.zeros(0, COMPLETION))  # fmt: skip


def walk_http(model: Served) -> None:
    """Reads a request of one item and builds its answer, in binary and in JSON, as for the first client.

    Python, NumPy and msgspec then have made what they make once. Nothing is submitted or counted.
    """
    if model.has_steps:  # most of such a request's time is in them
        return
    inputs = {key: np.full((1, *spec.shape), spec.neutral, spec.dtype) for key, spec in model.inputs.items()}
    outputs = {key: np.zeros((1, *spec.shape), spec.dtype) for key, spec in model.outputs.items()}
    values = sum(math.prod(spec.shape) for spec in model.inputs.values())
    for binary in (True, False) if values <= _JSON_VALUES else (True,):
        tensors: list[dict[str, Any]] = [
            {"name": key, "shape": list(array.shape), "datatype": datatype(array.dtype)}
            | ({"parameters": {"binary_data_size": array.nbytes}} if binary else {"data": array.reshape(-1).tolist()})
            for key, array in inputs.items()
        ]
        text = json.dumps({"inputs": tensors, "parameters": {"binary_data_output": binary}}).encode()
        body = text + b"".join(array.tobytes() for array in inputs.values()) if binary else text
        lines = (
            f"POST /v2/models/{model.name}/infer HTTP/1.1",
            "Host: localhost",
            f"Content-Length: {len(body)}",
            "",
            "",
        )
        Heads(CLIENT_HEADER, len(body)).find("\r\n".join(lines).encode())
        for _ in range(_WALKS):
            request = decode(model, body, str(len(text)) if binary else None, as_bytes=True)
            pieces, json_length = encode(model, VERSION, request, outputs)
            answer_head(200, request.id, sum(map(len, pieces)), Clock().date(), json_length)


def import_device(name: str) -> None:
    """Imports the modules of a device, so that engine processes forked later share them. Opens no device.

    Triton imports PyTorch on a real GPU, if it is installed: the longest part of an engine's start.
    """
    virtual = name.startswith("virtual") or (name == "auto" and not _has_driver())
    for module in _MODULES["virtual" if virtual else "cuda"]:
        with contextlib.suppress(ImportError, OSError):  # OSError: a library that PyTorch needs is missing
            importlib.import_module(module)


def _has_driver() -> bool:
    try:
        library()
    except OSError:
        return False
    return True


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
        if entry.wanted and entry.loaded is None and not stopping():
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
    if failure is not None and not any(entry.loaded for entry in registry.entries.values()):
        raise failure


async def _patiently(work: Callable[[], T], what: Mapping[str, Any]) -> T:
    """Runs the work in a thread and logs a line now and then, so that an operator sees that it continues."""
    began = time.monotonic()
    task = asyncio.create_task(asyncio.to_thread(work))
    while not (await asyncio.wait((task,), timeout=PATIENCE_S))[0]:
        so_far = {**what, "s": round(time.monotonic() - began)}
        log.info("still loading; the first start on a machine compiles kernels", extra={"fields": so_far})
    return task.result()
