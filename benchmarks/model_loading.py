"""The time of loading models, phase by phase, for this tree and another checkout, in one run.

    git worktree add ../before COMMIT
    python benchmarks/model_loading.py --base ../before
    python benchmarks/model_loading.py --device cuda --base ../before --models mlp,resnet18,vit_b_16

Each tree loads the models in its own process: first with empty caches (Triton's and paellapy's), then with the caches
that the first run has filled. Before that, the core is compiled, and one small model is loaded and asked, so that only
the models' own time remains. PyTorch's libraries are read from disk before that too: otherwise the first tree would
wait for the disk and the second would not. The phases are those of the engine's backend, timed from outside, so that
both trees are measured alike; "rest" is the loader, the memory plan and the core's tables. CPU-seconds are those of the
loading thread. "made_s" is the time of making the model before its load, with imports: `from_torch` may begin to load
PyTorch's libraries then. Results are saved after every process.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import track
from rich.table import Table

HERE = Path(__file__).parents[1]
PHASES = {
    "upload": "upload",
    "warm_up_all": "warm up",
    "instance_memory": "memory",
    "capture": "capture",
    "node_times_ns": "measure",
    "segment_times_ns": "measure",
    "saturated_ns": "measure",
    "cut": "cut",
    "launch_first": "first launches",
}
TORCH = "torch cnn"
DEMOS = {"mlp", "cnn", "transformer"}


def made(name: str) -> Any:
    """A demo model, a small CNN of PyTorch's, or one of torchvision's by its name."""
    import paellapy as pp
    from paellapy import demo

    if name in demo.names():
        return demo.load(name)
    import torch

    if name == TORCH:
        layers: list[Any] = []
        for k in range(6):
            layers += [torch.nn.Conv2d(3 if k == 0 else 16, 16, 3, padding=1), torch.nn.ReLU()]
        net = torch.nn.Sequential(*layers, torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten(), torch.nn.Linear(16, 10))
        return pp.Model.from_torch(net, torch.zeros(1, 3, 32, 32), name=name)
    import torchvision

    net = torchvision.models.get_model(name, weights=None)
    return pp.Model.from_torch(net, torch.zeros(1, 3, 224, 224), name=name, dtype=torch.float16)


class Phases:
    """Seconds of a backend's methods, each without those it calls."""

    def __init__(self, backend: Any) -> None:
        self.seconds: dict[str, list[float]] = {}  # phase → seconds, CPU-seconds of this thread
        self._inside = [0.0, 0.0]
        for method, phase in PHASES.items():
            setattr(backend, method, self._timed(getattr(backend, method), phase))

    def _timed(self, method: Callable[..., Any], phase: str) -> Callable[..., Any]:
        def call(*given: Any, **named: Any) -> Any:
            outside, self._inside = self._inside, [0.0, 0.0]
            began = (time.perf_counter(), time.thread_time())
            try:
                return method(*given, **named)
            finally:
                took = [time.perf_counter() - began[0], time.thread_time() - began[1]]
                total = self.seconds.setdefault(phase, [0.0, 0.0])
                for k in range(2):
                    total[k] += took[k] - self._inside[k]
                    outside[k] += took[k]
                self._inside = outside

        return call


def load(device: str, names: list[str]) -> None:
    """In a process of its own: prints a line of JSON for every model."""
    import paellapy as pp
    from paellapy import demo

    with pp.Engine(device) as engine:
        engine.load(demo.load("mlp", batch=(1,)).changed(name="first"))
        engine.infer_sync("first", {"image": demo.held_out()[0][0]})  # the loop is compiled
        phases = Phases(engine._backend)
        for name in names:
            began_making = time.perf_counter()
            model = made(name)
            made_s = time.perf_counter() - began_making
            phases.seconds = {}
            began = (time.perf_counter(), time.thread_time())
            engine.load(model)
            took = (time.perf_counter() - began[0], time.thread_time() - began[1])
            rest = [took[k] - sum(each[k] for each in phases.seconds.values()) for k in range(2)]
            found = {"model": name, "s": took[0], "cpu_s": took[1], "made_s": made_s,
                     "phases": {**phases.seconds, "rest": rest}}  # fmt: skip
            print(json.dumps(found), flush=True)
            engine.unload(model.name)


def begin(tree: Path, device: str, names: list[str], caches: Path, numba: Path) -> subprocess.Popen[str]:
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, [str(tree), os.environ.get("PYTHONPATH")])),
        "NUMBA_CACHE_DIR": str(numba),
        "TRITON_CACHE_DIR": str(caches / "triton"),
        "PAELLAPY_CACHE_DIR": str(caches / "paellapy"),
        "XDG_CACHE_HOME": str(caches / "cache"),
    }
    command = [sys.executable, __file__, "--child", "--device", device, "--models", ",".join(names)]
    return subprocess.Popen(command, env=environment, cwd=caches, stdout=subprocess.PIPE, text=True)


def end(process: subprocess.Popen[str]) -> list[dict[str, Any]]:
    said, _ = process.communicate()
    if process.returncode:
        raise SystemExit("loading failed")
    return [json.loads(line) for line in said.splitlines() if line.startswith("{")]


def runs(trees: dict[str, Path], device: str, names: list[str], repeats: int) -> Iterator[list[dict[str, Any]]]:
    """What each process measured."""
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        for name in trees:
            (place / name).mkdir()
        # The cores, and Python's byte code: all trees at once, nothing is measured yet.
        first = [TORCH] if set(names) - DEMOS else []
        compiling = [begin(tree, device, first, place / name, place / f"{name}.numba") for name, tree in trees.items()]
        for each in compiling:
            end(each)
        for repeat in range(repeats):
            for name, tree in trees.items():
                with tempfile.TemporaryDirectory() as caches:
                    for kind in ("empty", "filled"):
                        found = end(begin(tree, device, names, Path(caches), place / f"{name}.numba"))
                        yield [{"tree": name, "caches": kind, "repeat": repeat, **each} for each in found]


def medians(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One row per model, caches and tree: seconds, CPU-seconds, and seconds by phase."""
    groups: dict[tuple[str, str, str], list[dict[str, Any]]] = {}
    for each in found:
        groups.setdefault((each["model"], each["caches"], each["tree"]), []).append(each)
    rows = []
    for (model, caches, tree), group in groups.items():
        names = dict.fromkeys(name for each in group for name in each["phases"])
        rows.append(
            {
                "model": model,
                "caches": caches,
                "tree": tree,
                "s": round(statistics.median(each["s"] for each in group), 4),
                "cpu_s": round(statistics.median(each["cpu_s"] for each in group), 4),
                "made_s": round(statistics.median(each["made_s"] for each in group), 4),
                "phases_cpu_s": {
                    name: round(statistics.median(each["phases"].get(name, [0.0, 0.0])[1] for each in group), 4)
                    for name in names
                },
                "phases_s": {
                    name: round(statistics.median(each["phases"].get(name, [0.0, 0.0])[0] for each in group), 4)
                    for name in names
                },
            }
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", type=Path, help="another checkout to compare with")
    parser.add_argument("--before", help="commit of that checkout, where it has no git")
    parser.add_argument("--device", default="virtual:h200")
    parser.add_argument("--models", help="demo models, 'torch cnn', or torchvision's on a GPU, separated by commas")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--write", type=Path, help="folder for the result (default: benchmarks/results)")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    on_gpu = arguments.device.startswith("cuda")
    usual = ["mlp", "cnn", "transformer", *(["resnet18", "densenet121", "vit_b_16"] if on_gpu else [TORCH])]
    names = usual if arguments.models is None else [name for name in arguments.models.split(",") if name]
    if arguments.child:
        load(arguments.device, names)
        return
    from common import commit, save
    from floor_against import commit_of

    trees = {"this": HERE} | ({"base": arguments.base.resolve()} if arguments.base else {})
    console = Console()
    total = arguments.repeats * len(trees) * 2
    measured = runs(trees, arguments.device, names, arguments.repeats)
    results: dict[str, Any] = {"device": arguments.device}
    results["commits"] = {"this": commit()}
    if arguments.base:
        results["commits"]["base"] = commit_of(trees["base"], arguments.before)
    found: list[dict[str, Any]] = []
    for each in track(measured, "loading", total=total, console=console):
        found += each
        results |= {"medians": medians(found), "runs": found}
        saved = save("model_loading" if on_gpu else "model_loading_virtual", results, folder=arguments.write)
    rows = results["medians"]
    table = Table("model", "caches", "tree", "s", "CPU s", "CPU s by phase")
    for row in sorted(rows, key=lambda row: (names.index(row["model"]), row["caches"], row["tree"])):
        phases = ", ".join(f"{k} {v:.2f}" for k, v in row["phases_cpu_s"].items() if v >= 0.005)
        table.add_row(row["model"], row["caches"], row["tree"], f"{row['s']:.2f}", f"{row['cpu_s']:.2f}", phases)
    console.print(table)
    console.print(saved)


if __name__ == "__main__":
    main()
