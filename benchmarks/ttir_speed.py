"""How fast kernels run without a GPU: the TTIR evaluator against NumPy written by hand. One thread; medians.

    python benchmarks/ttir_speed.py [--scale 8] [--only gemm]

Every answer is checked. first_launch.py compares with Triton's own interpreter.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable
from typing import Any

for _variable in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(_variable, "1")

import numpy as np  # noqa: E402  (it reads the number of threads when it is imported)
from harness import arguments, save, show  # noqa: E402

SEED = 11
Arrays = dict[str, Any]


def median_us(run: Callable[[], Any], budget_s: float = 0.4, least: int = 3) -> float:
    times: list[float] = []
    end = time.perf_counter() + budget_s
    while len(times) < least or (time.perf_counter() < end and len(times) < 500):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return 1e6 * float(np.median(times))


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


def _layer_norm(a: Arrays) -> None:
    x = a["x"]
    mean, rstd = x.mean(1), 1 / np.sqrt(x.var(1) + np.float32(a["eps"]))
    a["mean"][...], a["rstd"][...] = mean, rstd
    a["out"][...] = (x - mean[:, None]) * rstd[:, None] * a["weight"] + a["bias"]


def _set(name: str, value: Callable[[Arrays], Any]) -> Callable[[Arrays], None]:
    def run(a: Arrays) -> None:
        a[name][...] = value(a)

    return run


NUMPY: dict[str, Callable[[Arrays], None]] = {
    "add": lambda a: np.add(a["x"], a["y"], out=a["out"]),
    "mul_add_relu": _set("out", lambda a: np.maximum(np.float32(a["alpha"]) * a["x"] * a["y"] + a["z"], 0)),
    "silu_bf16": _set("out", lambda a: _wide(a["x"]) / (1 + np.exp(-_wide(a["x"])))),
    "softmax": _set("out", lambda a: _softmax(a["x"][:, : a["columns"]])),
    "layer_norm": _layer_norm,
    **dict.fromkeys(("gemm_fp32", "gemm_tf32", "gemm_fp16", "gemm_bf16", "gemm_fp8", "gemm_descriptors"), _gemm),
    "gemm_bias_relu": _set("c", lambda a: np.maximum(_wide(a["a"]) @ _wide(a["b"]) + _wide(a["bias"]), 0)),
    "batched_gemm": _set("c", lambda a: a["a"] @ a["b"].transpose(0, 2, 1)),
    "conv3x3": _conv3x3,
    **{f"attention_{t}": lambda a: _attention(a, False) for t in ("fp32", "fp16")},
    **{f"attention_{t}_causal": lambda a: _attention(a, True) for t in ("fp32", "fp16")},
    "embedding": _set("out", lambda a: a["table"][a["ids"]]),
    "gather_rows": _set("out", lambda a: np.take_along_axis(a["x"], a["index"], 1)),
    "transposed_copy": _set("out", lambda a: a["x"][:, : a["columns"]].T),
    "histogram_atomics": _set("counts", lambda a: a["counts"] + np.bincount(a["x"], minlength=a["counts"].size)),
}


def measure(case: Any, scale: float) -> dict[str, Any]:
    import triton
    from corpus import ast_source, relative_error
    from triton.backends.compiler import GPUTarget

    from paellapy.instrument.triton_ir import TtirProgram

    call = case.make(np.random.default_rng(SEED), scale)
    target = GPUTarget("cuda", case.min_sm, 32)
    built = triton.compile(ast_source(case.kernel, call), target=target, options=call.options)
    evaluator = TtirProgram.parse(built.asm["ttir"], case.name)
    groups = (v if isinstance(v, tuple) else (v,) for v in call.args.values())
    args = [v for group in groups for v in group if v is not None]
    evaluator.run(args, call.grid, record=False)
    expected = call.reference()
    error = max(relative_error(call.args[name], expected[name]) for name in call.outputs)
    result = {"right": bool(error <= call.tolerance), "us": median_us(lambda: evaluator.run(args, call.grid))}
    if (by_hand := NUMPY.get(case.name)) is not None:
        fresh = case.make(np.random.default_rng(SEED), scale)
        by_hand(fresh.args)
        off = max(relative_error(fresh.args[name], expected[name]) for name in fresh.outputs)
        assert off <= call.tolerance or call.tolerance == 0, f"{case.name} in NumPy is wrong by {off}"
        result["numpy_us"] = median_us(lambda: by_hand(fresh.args))
    return result


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--scale", type=float, default=8.0, help="of the inputs")
    parser.add_argument("--only", default="", help="part of the names of the kernels to measure")
    o = parser.parse_args()
    from corpus import TRITON_CASES

    cases = [case for case in TRITON_CASES if case.evaluable and o.only in case.name]
    found = {case.name: measure(case, o.scale) for case in cases}
    rows = [[name, each["us"], each.get("numpy_us", ""), each["us"] / each["numpy_us"] if "numpy_us" in each else ""]
            for name, each in found.items()]  # fmt: skip
    show("kernels without a GPU", ["kernel", "evaluator, µs", "NumPy, µs", "÷ NumPy"], rows)
    ratios = [each["us"] / each["numpy_us"] for each in found.values() if "numpy_us" in each]
    mean = math.exp(sum(map(math.log, ratios)) / len(ratios)) if ratios else float("nan")
    right = all(each["right"] for each in found.values())
    results = {"scale": o.scale, "all_right": right, "numpy_cases": len(ratios), "evaluator_over_numpy_geomean": mean}
    figures = {"numpy.ratio": f"{mean:.1f}", "numpy.kernels": str(len(ratios))}
    print("all right" if right else "some answers are wrong")
    if not o.only:
        print(save("ttir_speed", results, folder=o.out, figures=figures))


if __name__ == "__main__":
    main()
