"""Does `pp.rank_configs` know the fastest configuration? Kernels of installed packages, measured and predicted.

    pip install --editable '.[public]'
    python benchmarks/rank_configs.py                          # on a GPU, with nothing beside it
    python benchmarks/rank_configs.py --quick --device virtual:h200      # shows that the script runs

Operators of public packages launch their autotuned kernels on large inputs. For the first launch of each kernel, every
configuration is timed by Triton's `do_bench`, and the model of the GPU ranks them, with arrays full of zeros. None of
these kernels was used to fit the model. Processes compile and predict first; then one process measures.
"""

from __future__ import annotations

import contextlib
import json
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch
import triton
from harness import arguments, finish, need_gpu, run_at_once
from public_kernels import computed, host_code_of_a_gpu
from triton.runtime.autotuner import Autotuner

import paellapy as pp

OPERATORS = (
    "fla.chunk_gla", "fla.chunk_simple_gla", "fla.chunk_delta_rule", "fla.chunk_gated_delta_rule", "fla.chunk_kda",
    "fla.chunk_linear_attn", "fla.parallel_attn", "fla.parallel_forgetting_attn", "fla.parallel_stickbreaking_attn",
    "fla.rms_norm_gated", "fla.causal_conv1d", "fla.l2norm", "fla.fused_recurrent_gla", "fla.fused_recurrent_hgrn",
    "fla.fused_recurrent_delta_rule", "fla.parallel_simple_gla", "fla.swiglu", "fla.parallel_retention",
    "torchao.blockwise_fp8_gemm", "jvp_flash_attention.attention", "cut_cross_entropy.plain",
)  # fmt: skip
LARGE = {
    "fla.l2norm": {"x": (16384, 8, 128)},
    "fla.rms_norm_gated": {"x": (16384, 2048), "g": (16384, 2048), "weight": (2048,)},
    "fla.causal_conv1d": {"x": (2, 4096, 2048), "weight": (2048, 4)},
    "fla.swiglu": {"x": (8192, 4096), "y": (8192, 4096)},
    "jvp_flash_attention.attention": dict.fromkeys("qkv", (2, 8, 2048, 64)),
}
FEWEST, MOST = 4, 10  # configurations of a kernel; of more, MOST are taken evenly
FIRST = 3  # of the model's order: the fastest configuration should be one of these
NOISE = 1.01  # times that differ less count as equal in the lenient figure


class Calls(dict[str, tuple[Any, Any, tuple[Any, ...], dict[str, Any], list[Any]]]):
    """By kernel: the function, the grid, the arguments and the configurations of its first launch."""

    def __init__(self) -> None:
        super().__init__()
        self._run = Autotuner.run
        self._whole: dict[int, list[Any]] = {}

    def __enter__(self) -> Calls:
        calls, run = self, self._run

        def noted(tuner: Any, *args: Any, **kwargs: Any) -> Any:
            configs = calls._whole.setdefault(id(tuner), list(tuner.configs))
            name = tuner.base_fn.__name__
            if name not in calls and len(configs) >= FEWEST:
                rest = {k: v for k, v in kwargs.items() if k not in ("grid", "warmup")}
                tuner.nargs = dict(zip(tuner.arg_names, args, strict=False))
                kept = list(tuner.prune_configs(kwargs)) if tuner.early_config_prune else configs
                if len(kept) >= FEWEST:
                    taken = kept[:: -(-len(kept) // MOST)]
                    calls[name] = tuner.fn, kwargs["grid"], args, rest, taken
            tuner.configs = configs[:1]
            return run(tuner, *args, **kwargs)

        Autotuner.run = noted
        return self

    def __exit__(self, *_: object) -> None:
        Autotuner.run = self._run


def _inputs(name: str, case: Any, quick: bool) -> dict[str, Any]:
    random = torch.Generator().manual_seed(0)
    if quick:
        return case.inputs(random)  # type: ignore[no-any-return]
    if name == "torchao.blockwise_fp8_gemm":
        a, b = (torch.randn(2048, 2048, generator=random).to(torch.float8_e4m3fn) for _ in range(2))
        return {"a": a, "a_scale": torch.ones(2048, 16), "b": b, "b_scale": torch.ones(16, 16)}
    if name == "cut_cross_entropy.plain":
        e, c = (torch.randn(shape, generator=random).bfloat16() for shape in ((2048, 1024), (32000, 1024)))
        return {"e": e, "c": c, "targets": torch.randint(0, 32000, (2048,), generator=random)}
    if name in LARGE:
        return {n: torch.randn(shape, generator=random) for n, shape in LARGE[name].items()}
    return case.inputs(random)  # type: ignore[no-any-return]


def launched(names: list[str], o: Any) -> Calls:
    """What the operators launch."""
    from corpus import public

    public._T, public._H, public._D = (128, 2, 64) if o.quick else (2048, 8, 128)
    on_gpu, cases = o.device == "cuda", public.cases()
    assert triton.runtime.driver.active  # chosen before the host code is told of a GPU
    with Calls() as calls:
        for name in names:
            if (case := cases.get(name)) is None:
                print(f"{name}: its package is not installed", flush=True)
                continue
            given = _inputs(name, case, o.quick)
            given = {n: v.bfloat16() if n in "qkv" else v for n, v in given.items()}
            try:
                if on_gpu:
                    computed(case.operator(), {n: v.cuda() for n, v in given.items()}, case)
                else:
                    with host_code_of_a_gpu():
                        computed(case.operator(), given, case)
            except Exception as e:
                print(f"{name}: {type(e).__name__}: {e}"[:300], flush=True)
    return calls


def predict(calls: Calls, on_gpu: bool, folder: Path) -> None:
    """Writes a file for each kernel that no other process has begun: nanoseconds of each configuration by the model.

    On a GPU, Triton compiles the configurations too, so that measuring need not.
    """
    for name, (fn, grid, args, kwargs, configs) in calls.items():
        try:
            (folder / name).touch(exist_ok=False)
        except FileExistsError:
            continue
        try:
            ranked = pp.rank_configs(pp.kernel(fn, report=None), grid, *args, configs=configs, **kwargs)
            for config in configs if on_gpu else ():
                with contextlib.suppress(Exception):  # too much shared memory, for example
                    fn.run(*args, grid=grid, warmup=True, **{**kwargs, **config.all_kwargs()})
            part = folder / f"{name}.part"
            part.write_text(json.dumps({str(each.config): each.time_ns for each in ranked}))
            part.rename(folder / f"{name}.json")
        except Exception as e:
            print(f"{name}: {type(e).__name__}: {e}"[:300], flush=True)


def measured(calls: Calls, wanted: set[str]) -> dict[str, dict[str, float]]:
    """By kernel and configuration: nanoseconds, the median of Triton's `do_bench`."""
    rows: dict[str, dict[str, float]] = {}
    for name, (fn, grid, args, kwargs, configs) in calls.items():
        if name not in wanted:
            continue
        rows[name] = {}
        for config in configs:
            full = {**kwargs, **config.all_kwargs()}

            def launch(fn: Any = fn, grid: Any = grid, args: Any = args, full: Any = full) -> None:
                fn.run(*args, grid=grid, warmup=False, **full)

            try:
                if config.pre_hook is not None:
                    config.pre_hook({**dict(zip(fn.arg_names, args, strict=False)), **full})
                rows[name][str(config)] = 1e6 * triton.testing.do_bench(launch, warmup=5, rep=30, return_mode="median")
            except Exception as e:  # too much shared memory, for example
                print(f"{name}: {config}: {type(e).__name__}: {e}"[:300], flush=True)
    return rows


def compared(ours: dict[str, float], theirs: dict[str, float]) -> dict[str, Any]:
    """How the model's order of a kernel's configurations did."""
    order = sorted((c for c in ours if c in theirs), key=lambda c: ours[c])
    best = min(order, key=lambda c: theirs[c])
    first = min(theirs[c] for c in order[:FIRST])
    return {
        "configs": len(order), "place_of_best": 1 + order.index(best),
        "first_of_model": theirs[order[0]] / theirs[best], "first_three_of_model": first / theirs[best],
        "slowest": max(theirs[c] for c in order) / theirs[best],
        "predicted_ns": {c: ours[c] for c in order}, "measured_ns": {c: theirs[c] for c in order},
    }  # fmt: skip


def in_processes(o: Any) -> dict[str, dict[str, float]]:
    """The predicted times of each kernel's configurations, from processes that share the operators."""
    with tempfile.TemporaryDirectory() as folder:
        shares = [o.operators[n :: o.parallel] for n in range(min(o.parallel, len(o.operators)))]
        command = [sys.executable, __file__, *sys.argv[1:], "--predict", folder, "--operators"]
        run_at_once([[*command, *share] for share in shares], o.seconds)
        return {file.stem: json.loads(file.read_text()) for file in Path(folder).glob("*.json")}


def main() -> None:
    parser = arguments(__doc__, device="cuda", quick=True, seconds=240.0)
    parser.add_argument("--operators", nargs="+", default=list(OPERATORS))
    parser.add_argument("--parallel", type=int, default=6, help="processes that predict; 16 fill an H200's memory")
    parser.add_argument("--predict", type=Path, help="be such a process: write the times to this folder")
    o = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.compiler.set_stance("force_eager")
    device = need_gpu("times of configurations") if o.device == "cuda" else pp.Device.open(o.device)
    with device:
        if o.predict:
            predict(launched(o.operators, o), o.device == "cuda", o.predict)
            return
        ours = in_processes(o)
        theirs = measured(launched(o.operators, o), set(ours))
    both = {name: (ours[name], theirs[name]) for name in theirs if len(theirs[name].keys() & ours[name]) >= FEWEST}
    if not both:
        raise SystemExit("no kernel was both predicted and measured: install the extra `public`, or raise --seconds")
    rows = {name: compared(*each) for name, each in both.items()}
    within = sum(row["place_of_best"] <= FIRST for row in rows.values())
    nearly = sum(row["first_three_of_model"] <= NOISE for row in rows.values())
    results = {"kernels": len(rows), "best_among_first_three": within, "among_first_three_or_within_1_percent": nearly,
               "configurations": sum(row["configs"] for row in rows.values()), "rows": rows}  # fmt: skip
    head = ["kernel", "configurations", "place of the fastest", "model's first ÷ fastest", "slowest ÷ fastest"]
    lines = [[name, row["configs"], row["place_of_best"], f"{row['first_of_model']:.2f}", f"{row['slowest']:.2f}"]
             for name, row in sorted(rows.items())]  # fmt: skip
    figures = {"ranked.kernels": str(len(rows)), "ranked.within": str(within), "ranked.nearly": str(nearly)}
    finish(o, "rank_configs", results, f"{within} of {len(rows)} among the first three", [head, *lines], device,
           figures=figures)  # fmt: skip


if __name__ == "__main__":
    main()
