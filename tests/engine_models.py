"""Small models for the engine's tests: three Triton kernels, and the same functions in NumPy."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import contextmanager
from typing import Any

import numpy as np
import triton
import triton.language as tl

import paellapy as pp
from paellapy.scheduler.backends.virtual_loop import Faults
from paellapy.scheduler.models.memory import Instance, plan_instance
from paellapy.scheduler.models.model import Model, TensorSpec


@pp.kernel
@triton.jit
def scale(x, out, factor, n, B: tl.constexpr):
    i = tl.program_id(0) * B + tl.arange(0, B)
    tl.store(out + i, tl.load(x + i, mask=i < n) * factor, mask=i < n)


@pp.kernel
@triton.jit
def gemm(a, b, out, M, N, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    rows = tl.program_id(0) * BM + tl.arange(0, BM)
    columns = tl.program_id(1) * BN + tl.arange(0, BN)
    total = tl.zeros((BM, BN), tl.float32)
    for k in range(0, K, BK):
        depth = k + tl.arange(0, BK)
        left = tl.load(a + rows[:, None] * K + depth[None, :], mask=rows[:, None] < M, other=0.0)
        total += tl.dot(left, tl.load(b + depth[:, None] * N + columns[None, :]), input_precision="ieee")
    tl.store(out + rows[:, None] * N + columns[None, :], total, mask=rows[:, None] < M)


@pp.kernel
@triton.jit
def softmax(x, out, n, B: tl.constexpr):
    row, i = tl.program_id(0), tl.arange(0, B)
    values = tl.load(x + row * n + i, mask=i < n, other=float("-inf"))
    exponents = tl.exp(values - tl.max(values, 0))
    tl.store(out + row * n + i, exponents / tl.sum(exponents, 0), mask=i < n)


@pp.kernel
@triton.jit
def fault_if(x, out, n, B: tl.constexpr):
    i = tl.arange(0, B)
    values = tl.load(x + i)
    far = tl.where(tl.max(values, 0) > 0, 1 << 40, 0)
    tl.store(out + i + far, values)


@pp.kernel
@triton.jit
def look_up(index, table, out, B: tl.constexpr):
    row, i = tl.program_id(0), tl.arange(0, B)
    tl.store(out + row * B + i, tl.load(table + tl.load(index + row) * B + i))


Reference = Callable[[dict[str, np.ndarray]], dict[str, np.ndarray]]

WIDTH, HIDDEN = 64, 128


def scale_model(
    name: str = "scale", factor: float = 2.0, steps: int = 1, n: int = 64, kernel: Any = scale, x: str = "x",
    y: str = "y", **options: Any,
) -> Model:  # fmt: skip
    """y = x · factor^steps, one kernel per step."""

    def fn(weights: Any, inputs: Any, outputs: Any) -> None:
        total = inputs[x].shape[0] * n
        source = inputs[x]
        for k in range(steps):
            target = outputs[y] if k == steps - 1 else pp.empty(source.shape)
            kernel[(triton.cdiv(total, 128),)](source, target, factor, total, B=128)
            source = target

    return Model(name, fn, inputs={x: TensorSpec((n,))}, outputs={y: TensorSpec((n,))}, **options)


def scale_reference(factor: float = 2.0, steps: int = 1) -> Reference:
    return lambda inputs: {"y": inputs["x"] * np.float32(factor) ** steps}


def mlp_weights() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {
        "up": rng.standard_normal((WIDTH, HIDDEN)).astype(np.float32) / 8,
        "down": rng.standard_normal((HIDDEN, WIDTH)).astype(np.float32) / 8,
    }


def mlp_model(name: str = "mlp", layers: int = 2, **options: Any) -> Model:
    """Two products and a softmax, `layers` times over."""

    def fn(weights: Any, inputs: Any, outputs: Any) -> None:
        batch, source = inputs["x"].shape[0], inputs["x"]
        for layer in range(layers):
            hidden, logits = pp.empty((batch, HIDDEN)), pp.empty((batch, WIDTH))
            target = outputs["p"] if layer == layers - 1 else pp.empty((batch, WIDTH))
            rows = triton.cdiv(batch, 16)
            gemm[(rows, HIDDEN // 32)](source, weights["up"], hidden, batch, HIDDEN, WIDTH, BM=16, BN=32, BK=32)
            gemm[(rows, WIDTH // 32)](hidden, weights["down"], logits, batch, WIDTH, HIDDEN, BM=16, BN=32, BK=32)
            softmax[(batch,)](logits, target, WIDTH, B=WIDTH)
            source = target

    options.setdefault("weights", mlp_weights())
    specs = {"inputs": {"x": TensorSpec((WIDTH,))}, "outputs": {"p": TensorSpec((WIDTH,))}}
    return Model(name, fn, **specs, **options)


def mlp_reference(layers: int = 2) -> Reference:
    weights = mlp_weights()

    def run(inputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        x = inputs["x"]
        for _ in range(layers):
            logits = x @ weights["up"] @ weights["down"]
            exponents = np.exp(logits - logits.max())
            x = exponents / exponents.sum()
        return {"p": x}

    return run


def faulty_model(name: str = "faulty", **options: Any) -> Model:
    """Writes far outside its memory when its input starts with a number above zero."""

    def fn(weights: Any, inputs: Any, outputs: Any) -> None:
        fault_if[(1,)](inputs["x"], outputs["y"], 64, B=64)

    options.setdefault("batch", (1,))
    return Model(name, fn, inputs={"x": TensorSpec((64,))}, outputs={"y": TensorSpec((64,))}, **options)


def lookup_model(name: str = "lookup", rows: int = 16, **options: Any) -> Model:
    """Row `i` of a table whose rows are all `i`, without a bounds check, as is usual in kernels. It has two
    segments.
    """

    def fn(weights: Any, inputs: Any, outputs: Any) -> None:
        n = inputs["i"].shape[0]
        found = pp.empty((n, 32))
        look_up[(n,)](inputs["i"], weights["table"], found, B=32)
        scale[(n,)](found, outputs["y"], 1.0, n * 32, B=32)

    table = np.repeat(np.arange(rows, dtype=np.float32)[:, None], 32, axis=1)
    options.setdefault("inputs", {"i": TensorSpec((1,), np.int64)})
    return Model(name, fn, outputs={"y": TensorSpec((32,))}, weights={"table": table}, **options)


def lose_the_gpu_on_faults(monkeypatch: Any = None) -> None:
    """Makes a fault on the virtual GPU end the engine, as on a real GPU."""

    def isolate(self: Faults, k: int, size: int, instance: Any, program: Any, cause: Exception) -> None:
        raise cause

    if monkeypatch is None:
        Faults.isolate = isolate  # type: ignore[method-assign]
    else:
        monkeypatch.setattr(Faults, "isolate", isolate)


def gpu_losing_model(name: str = "faulty") -> Model:
    """For a configuration: a model whose faults end the engine, as on a real GPU."""
    lose_the_gpu_on_faults()
    return faulty_model(name)


def random_inputs(model: Model, rng: np.random.Generator) -> dict[str, np.ndarray]:
    return {k: rng.standard_normal(s.shape).astype(s.dtype) for k, s in model.inputs.items()}


@contextmanager
def asking(engine, gap_s=0.0):
    """Sends requests to `scale` all the time and checks every answer; yields their number, in a list."""
    stop, counts, x = threading.Event(), [0], np.arange(64, dtype=np.float32)

    def ask() -> None:
        while not stop.is_set():
            assert np.array_equal(engine.infer_sync("scale", {"x": x})["y"], 2 * x)
            counts[0] += 1
            time.sleep(gap_s)

    thread = threading.Thread(target=ask)
    thread.start()
    try:
        yield counts
        assert thread.is_alive(), "a request failed"
    finally:
        stop.set()
        thread.join()


def instances_of(backend: Any, model: Model, n: int = 1) -> tuple[Any, list[Instance]]:
    """The weights of a model on a backend, and instances for captures, after a warm-up run."""
    weights = backend.upload(model)
    scratch, _ = backend.warm_up_all(model, weights, model.batch)
    plan = plan_instance(model, scratch, segments=8)
    return weights, [Instance(k, model, plan, backend.instance_memory(plan)) for k in range(n)]
