"""How fast kernels run without a GPU: the TTIR evaluator against hand-written NumPy and Triton's own interpreter.

python benchmarks/ttir_speed.py [--interpreter PYTHON] [--scale 8] writes benchmarks/results/ttir_speed.json.

One thread is used; times are medians, and every answer is checked. The interpreter (TRITON_INTERPRET=1) needs PyTorch
and NumPy < 2.4, so it has its own environment: `pip install torch triton==3.6.0 'numpy<2.4' ml_dtypes`. Without one its
column stays empty.
"""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

for _variable in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(_variable, "1")

import numpy as np  # noqa: E402  (it reads the number of threads when it is imported)

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
SEED = 11
Arrays = dict[str, Any]
Launch = tuple[Any, list[Any], tuple[int, ...]]  # program, arguments, grid


def median_us(run: Callable[[], Any], budget_s: float = 0.4, least: int = 3) -> float:
    times: list[float] = []
    end = time.perf_counter() + budget_s
    while len(times) < least or (time.perf_counter() < end and len(times) < 500):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return 1e6 * float(np.median(times))


# ---- what one would write in NumPy -----------------------------------------------------------------------------------


def _wide(x: Any) -> Any:
    return x.astype(np.float32) if x.dtype.itemsize < 4 else x


def _softmax(x: Any) -> Any:
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def _gemm(a: Arrays) -> None:
    a["c"][...] = _wide(a["a"]) @ _wide(a["b"])


def _attention(a: Arrays, causal: bool) -> None:
    q, k, v = (_wide(a[name]) for name in "qkv")
    scores = q @ k.transpose(0, 2, 1) * np.float32(a["scale"])
    if causal:
        scores = np.where(np.tril(np.ones(scores.shape[1:], bool)), scores, np.float32(-np.inf))
    a["out"][...] = _softmax(scores) @ v


def _conv3x3(a: Arrays) -> None:
    x, weight, out = a["x"], a["weight"], a["out"]
    n, c, h, _ = x.shape
    stride = -(-h // out.shape[2])
    windows = np.lib.stride_tricks.sliding_window_view(np.pad(x, ((0, 0), (0, 0), (1, 1), (1, 1))), (3, 3), (2, 3))
    rows = windows[:, :, ::stride, ::stride].transpose(0, 2, 3, 1, 4, 5).reshape(-1, c * 9)
    y = np.maximum(rows @ weight.reshape(weight.shape[0], -1).T + a["bias"], 0)
    out[...] = y.reshape(n, *out.shape[2:], -1).transpose(0, 3, 1, 2)


def _depthwise(a: Arrays) -> None:
    x, weight = a["x"], a["weight"].reshape(-1, 3, 3)
    planes = x.reshape(-1, *x.shape[-2:])
    padded = np.pad(planes, ((0, 0), (1, 1), (1, 1)))
    h, w = planes.shape[1:]
    total = np.zeros_like(planes)
    for tap in range(9):
        gain = np.resize(weight[:, tap // 3, tap % 3], len(planes))[:, None, None]
        total += gain * padded[:, tap // 3 : tap // 3 + h, tap % 3 : tap % 3 + w]
    a["out"][...] = total.reshape(a["out"].shape)


def _layer_norm(a: Arrays) -> None:
    x = a["x"]
    mean = x.mean(1)
    rstd = 1 / np.sqrt(x.var(1) + np.float32(a["eps"]))
    a["mean"][...], a["rstd"][...] = mean, rstd
    a["out"][...] = (x - mean[:, None]) * rstd[:, None] * a["weight"] + a["bias"]


def _rms_norm(a: Arrays) -> None:
    v = _wide(a["x"])
    a["out"][...] = v / np.sqrt((v * v).mean(1, keepdims=True) + np.float32(a["eps"])) * _wide(a["weight"])


def _gelu_tanh(a: Arrays) -> None:
    v = a["x"]
    inner = np.float32(0.7978845608028654) * (v + np.float32(0.044715) * v * v * v)
    a["out"][...] = np.float32(0.5) * v * (1 + np.tanh(inner))


def _silu(a: Arrays) -> None:
    v = _wide(a["x"])
    a["out"][...] = v / (1 + np.exp(-v))


def _arg_extremes(a: Arrays) -> None:
    x = a["x"]
    a["highest"][...], a["lowest"][...], a["top"][...] = x.argmax(1), x.argmin(1), x.max(1)


def _cumulative(a: Arrays) -> None:
    x = a["x"]
    a["sums"][...] = x.cumsum(1)
    a["reverse"][...] = x[:, ::-1].cumsum(1)[:, ::-1]
    a["products"][...] = (1 + np.float32(0.1) * x).cumprod(1)


def _sort_rows(a: Arrays) -> None:
    a["ascending"][...] = np.sort(a["x"], 1)
    a["descending"][...] = a["ascending"][:, ::-1]


def _pool(a: Arrays) -> None:
    x, out = a["x"], a["out"]
    x = x.reshape(-1, *x.shape[-2:])[:, : 2 * out.shape[-2], : 2 * out.shape[-1]]
    best = np.maximum(np.maximum(x[:, ::2, ::2], x[:, ::2, 1::2]), np.maximum(x[:, 1::2, ::2], x[:, 1::2, 1::2]))
    out[...] = best.reshape(out.shape)


def _row_sum_max(a: Arrays) -> None:
    a["total"][...], a["top"][...] = a["x"].sum(1), a["x"].max(1)


def _welford(a: Arrays) -> None:
    a["mean"][...], a["variance"][...] = a["x"].mean(1), a["x"].var(1)


def _conv1x1(a: Arrays) -> None:
    x, weight, out = _wide(a["x"]), _wide(a["weight"]), a["out"]
    out[...] = (weight @ x.reshape(x.shape[0], x.shape[1], -1)).reshape(out.shape)


def _set(name: str, value: Callable[[Arrays], Any]) -> Callable[[Arrays], None]:
    def run(a: Arrays) -> None:
        a[name][...] = value(a)

    return run


NUMPY: dict[str, Callable[[Arrays], None]] = {
    "add": lambda a: np.add(a["x"], a["y"], out=a["out"]),
    "mul_add_relu": _set("out", lambda a: np.maximum(np.float32(a["alpha"]) * a["x"] * a["y"] + a["z"], 0)),
    "gelu_tanh": _gelu_tanh,
    "silu_bf16": _silu,
    "softmax": _set("out", lambda a: _softmax(a["x"][:, : a["columns"]])),
    "online_softmax": _set("out", lambda a: _softmax(a["x"])),
    "layer_norm": _layer_norm,
    "rms_norm_fp16": _rms_norm,
    "row_sum_max": _row_sum_max,
    "arg_extremes": _arg_extremes,
    "welford": _welford,
    "cumulative": _cumulative,
    "sort_rows": _sort_rows,
    **dict.fromkeys(("gemm_fp32", "gemm_tf32", "gemm_tf32x3", "gemm_fp16", "gemm_bf16", "gemm_fp8"), _gemm),
    **dict.fromkeys(("gemm_two_ctas", "gemm_descriptors", "gemm_block_pointers"), _gemm),
    "gemm_warp_specialized": _set("c", lambda a: _wide(a["a"]) @ _wide(a["b"]).T),
    "gemm_bias_relu": _set("c", lambda a: np.maximum(_wide(a["a"]) @ _wide(a["b"]) + _wide(a["bias"]), 0)),
    "batched_gemm": _set("c", lambda a: a["a"] @ a["b"].transpose(0, 2, 1)),
    "split_k_gemm": _set("c", lambda a: a["c"] + _wide(a["a"]) @ _wide(a["b"])),
    "conv3x3": _conv3x3,
    "conv1x1": _conv1x1,
    "depthwise3x3": _depthwise,
    "max_pool2x2": _pool,
    **{f"attention_{t}": lambda a: _attention(a, False) for t in ("fp32", "fp16")},
    **{f"attention_{t}_causal": lambda a: _attention(a, True) for t in ("fp32", "fp16")},
    "embedding": _set("out", lambda a: a["table"][a["ids"]]),
    "gather_rows": _set("out", lambda a: np.take_along_axis(a["x"], a["index"], 1)),
    "transposed_copy": _set("out", lambda a: a["x"][:, : a["columns"]].T),
    "histogram_atomics": _set("counts", lambda a: a["counts"] + np.bincount(a["x"], minlength=a["counts"].size)),
}


# ---- the interpreter, in a process of its own ------------------------------------------------------------------------


def interpret(scale: float, limit_s: int) -> None:
    """Run by another Python with TRITON_INTERPRET=1; prints one JSON line per case."""
    import torch
    from corpus import TRITON_CASES, relative_error

    views = {"bfloat16": (np.int16, torch.bfloat16), "float8_e4m3fn": (np.uint8, torch.float8_e4m3fn),
             "float8_e5m2": (np.uint8, torch.float8_e5m2)}  # fmt: skip

    def tensor(x: Any) -> Any:
        if isinstance(x, tuple):
            return tuple(tensor(item) for item in x)
        if not isinstance(x, np.ndarray):
            return x
        if x.dtype.name in views:
            raw, kind = views[x.dtype.name]
            return torch.from_numpy(x.view(raw)).view(kind)
        return torch.from_numpy(x)  # shares memory: the kernel writes the array

    def stop(*_: Any) -> None:
        raise TimeoutError(f"over {limit_s} s")

    signal.signal(signal.SIGALRM, stop)
    for case in TRITON_CASES:
        line: dict[str, Any] = {"case": case.name}
        try:
            signal.alarm(limit_s)  # blocks that wait for each other never end there
            times: list[float] = []
            while not times or (sum(times) < min(1.0, limit_s) and len(times) < 5):
                call = case.make(np.random.default_rng(SEED), scale)
                args = [tensor(x) for x in call.args.values()]
                start = time.perf_counter()
                case.kernel[call.grid](*args, **call.constexprs)
                times.append(time.perf_counter() - start)
            expected = call.reference()
            error = max(relative_error(call.args[name], expected[name]) for name in call.outputs)
            line |= {"us": 1e6 * float(np.median(times)), "right": bool(error <= call.tolerance)}
        except Exception as error:
            line["error"] = (
                f"{type(error).__name__}: {str(error).strip().splitlines()[-1] if str(error).strip() else ''}"[:160]
            )
        signal.alarm(0)
        print(json.dumps(line), flush=True)


# ---- the evaluator ---------------------------------------------------------------------------------------------------


def flat(args: Arrays) -> list[Any]:
    spread = [v if isinstance(v, tuple) else (v,) for v in args.values()]
    return [v for group in spread for v in group if v is not None]


def program(kernel: Any, call: Any, sm: int, name: str) -> Any:
    import triton
    from corpus import ast_source
    from triton.backends.compiler import GPUTarget

    from paellapy.instrument.triton_ir import TtirProgram

    built = triton.compile(ast_source(kernel, call), target=GPUTarget("cuda", sm, 32), options=call.options)
    return TtirProgram.parse(built.asm["ttir"], name)


def measure(case: Any, scale: float) -> dict[str, Any]:
    from corpus import relative_error

    call = case.make(np.random.default_rng(SEED), scale)
    evaluator = program(case.kernel, call, case.min_sm, case.name)
    args = flat(call.args)
    evaluator.run(args, call.grid, record=False)
    expected = call.reference()
    error = max(relative_error(call.args[name], expected[name]) for name in call.outputs)
    result: dict[str, Any] = {
        "case": case.name,
        "blocks": int(np.prod(call.grid)),
        "right": bool(error <= call.tolerance),
        "direct_us": median_us(lambda: evaluator.run(args, call.grid, record=False)),
    }
    evaluator.run(args, call.grid)
    start = time.perf_counter()
    evaluator.run(args, call.grid)
    result["record_us"] = 1e6 * (time.perf_counter() - start)
    result["us"] = median_us(lambda: evaluator.run(args, call.grid))
    if (by_hand := NUMPY.get(case.name)) is not None:
        fresh = case.make(np.random.default_rng(SEED), scale)
        by_hand(fresh.args)
        off = max(relative_error(fresh.args[name], expected[name]) for name in fresh.outputs)
        assert off <= call.tolerance or call.tolerance == 0, f"{case.name} in NumPy is wrong by {off}"
        result["numpy_us"] = median_us(lambda: by_hand(fresh.args))
    return result


def networks() -> dict[str, float]:
    """Whole inferences, warm: an MLP 64-256-256-10 and a CNN 1-16-32-64 on 28x28, batch 1, on the corpus' kernels."""
    from corpus.case import Call, options
    from corpus.convolution import conv3x3
    from corpus.matmul import gemm_bias_relu

    rng = np.random.default_rng(SEED)

    def random(*shape: int) -> Any:
        return (rng.standard_normal(shape) / math.sqrt(shape[-1])).astype(np.float32)

    launches: list[Launch] = []
    h = random(1, 64)
    for i, (k, n) in enumerate(((64, 256), (256, 256), (256, 10))):
        out = np.empty((1, n), np.float32)
        args = {"a": h, "b": random(k, n), "bias": random(n), "c": out, "M": 1, "N": n, "K": k}
        constexprs = {"BM": 16, "BN": 64, "BK": 64, "GROUP": 4, "RELU": i < 2}
        grid = (-(-n // 64),)
        built = program(gemm_bias_relu, Call(args, constexprs, grid, (), dict, 0, options()), 80, f"mlp{i}")
        launches.append((built, flat(args), grid))
        h = out
    images: list[Launch] = []
    h = random(1, 1, 28, 28)
    for c, f in ((1, 16), (16, 32), (32, 64)):
        out = np.empty((1, f, 28, 28), np.float32)
        args = {
            "x": h, "weight": random(f, c, 3, 3), "bias": random(f), "out": out, "N": 1, "C": c, "H": 28, "W": 28,
            "F": f, "OH": 28, "OW": 28,
        }  # fmt: skip
        constexprs = {"STRIDE": 1, "PAD": 1, "BM": 64, "BN": 16, "BK": 32}
        grid = (-(-784 // 64), -(-f // 16))
        built = program(conv3x3, Call(args, constexprs, grid, (), dict, 0, options()), 80, f"cnn{f}")
        images.append((built, flat(args), grid))
        h = out

    def infer(steps: list[Launch]) -> Callable[[], None]:
        def run() -> None:
            for built, args, grid in steps:
                built.run(args, grid)

        for _ in range(3):
            run()
        return run

    return {"mlp_us": median_us(infer(launches), 1.0), "cnn_us": median_us(infer(images), 1.0)}


def geometric_mean(values: list[float]) -> float | None:
    return math.exp(sum(map(math.log, values)) / len(values)) if values else None


def run(
    scale: float = 8.0,
    interpreter: Annotated[str, "a Python with torch, triton 3.6 and numpy < 2.4"] = "",
    only: Annotated[str, "part of the names of the kernels to measure; nothing is written then"] = "",
    folder: Path | None = None,
) -> None:
    """Measure, print a table, write JSON."""
    from common import save
    from corpus import TRITON_CASES
    from rich.console import Console
    from rich.progress import Progress
    from rich.table import Table

    console = Console()
    cases = [case for case in TRITON_CASES if case.evaluable and only in case.name]
    results: list[dict[str, Any]] = []
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("evaluator and NumPy", total=len(cases))
        for case in cases:
            results.append(measure(case, scale))
            progress.advance(task)
        if interpreter:
            by_name = {r["case"]: r for r in results}
            task = progress.add_task("Triton's interpreter", total=len(TRITON_CASES))
            environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": ""}
            command = [interpreter, __file__, "--interpret", str(scale)]
            worker = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
            assert worker.stdout is not None
            with worker, worker.stdout:
                for line in worker.stdout:
                    answer = json.loads(line)
                    if answer["case"] in by_name:
                        by_name[answer["case"]]["interpreter"] = {k: v for k, v in answer.items() if k != "case"}
                    progress.advance(task)
    inference = networks() if not only else {}
    faster = [r["interpreter"]["us"] / r["us"] for r in results if "us" in r.get("interpreter", {})]
    against_numpy = [r["us"] / r["numpy_us"] for r in results if "numpy_us" in r]
    summary = {
        "interpreter_over_evaluator_geomean": geometric_mean(faster),
        "interpreter_cases": len(faster),
        "evaluator_over_numpy_geomean": geometric_mean(against_numpy),
        "numpy_cases": len(against_numpy),
        "all_right": all(r["right"] for r in results),
        **inference,
    }
    table = Table(
        "kernel", "blocks", "NumPy µs", "evaluator µs", "direct µs", "interpreter µs", "× NumPy", "interpreter ×"
    )
    for r in results:
        slow = r.get("interpreter", {})
        table.add_row(
            r["case"], str(r["blocks"]), f"{r['numpy_us']:.0f}" if "numpy_us" in r else "", f"{r['us']:.0f}",
            f"{r['direct_us']:.0f}", f"{slow['us']:.0f}" if "us" in slow else slow.get("error", "")[:24],
            f"{r['us'] / r['numpy_us']:.1f}" if "numpy_us" in r else "",
            f"{slow['us'] / r['us']:.0f}" if "us" in slow else "",
        )  # fmt: skip
    console.print(table)
    if not interpreter:
        console.print("No --interpreter given: Triton's own interpreter was not measured.")
    console.print(summary)
    if not only:
        save("ttir_speed", {"scale": scale, "summary": summary, "cases": results}, folder=folder)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--interpret"]:
        interpret(float(sys.argv[2]), 30)
    else:
        import typer

        typer.run(run)
